"""Reading of Minari data sets episode by episode, and their download."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike

from lrl.envs.minari_storage import (
    ADVISED,
    ADVISED_ACTION,
    CONTEXT,
    HAS_ADVISOR,
    RANDOM_STEPS,
    Columns,
    checked_leaves,
    clip_columns,
    columns_of_infos,
    columns_size,
    dataset_path,
    invalid_values,
    sample_at,
    spaces_match,
    suppress_output,
    to_minari_space,
    values_out_of_bounds,
)


class StoredEpisode:
    """Holds the native observations, actions and rewards of one episode as columns.

    Args:
        observation_space: space of the observations as stored by Minari.
        observations: one observation per step, or one more.
        action_space: space of the actions as stored by Minari.
        actions: one action per step.
        length: number of steps.
        context: context of the codec as JSON values, whose lists become tuples; None if none was stored.
        rewards: one reward per step, ``(step,)``.
        terminated: whether the episode terminated.
        advised: actions of the advisor, one per step or one more; None without an advisor.

    Raises:
        ValueError: If the number of rewards is not the number of steps.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        observations: Columns,
        action_space: gym.Space,
        actions: Columns,
        length: int,
        context: Any,
        rewards: ArrayLike,
        terminated: bool,
        advised: Columns | None = None,
    ) -> None:
        self._observations, self._actions = (observation_space, observations), (action_space, actions)
        self._advised = None if advised is None else (action_space, advised)
        self._length, self.context, self.terminated = length, _lists_to_tuples(context), terminated
        self.rewards = np.asarray(rewards, dtype=np.float64)
        if len(self.rewards) != length:
            raise ValueError(f"{length} steps, but {len(self.rewards)} rewards")
        if length:
            self.observation(length - 1)  # raises early if a column is too short
            self.action(length - 1)
            if self._advised is not None:
                sample_at(*self._advised, length - 1)

    @cached_property
    def observations(self) -> list[Any]:
        """Native observations before each step."""
        return list(map(self.observation, range(self._length)))

    @cached_property
    def actions(self) -> list[Any]:
        """Native actions of each step."""
        return list(map(self.action, range(self._length)))

    @property
    def advised_actions(self) -> dict[int, Any]:
        """Step to native action of the advisor; empty without an advisor."""
        if self._advised is None:
            return {}
        return {step: sample_at(*self._advised, step) for step in range(self._length)}

    def observation(self, step: int) -> Any:
        """Return the native observation before a step."""
        return sample_at(*self._observations, step)

    def action(self, step: int) -> Any:
        """Return the native action of a step."""
        return sample_at(*self._actions, step)

    @property
    def bytes(self) -> int:
        """Size of the columns in memory."""
        columns = [part[1] for part in (self._observations, self._actions, self._advised) if part is not None]
        return sum(map(columns_size, columns)) + self.rewards.nbytes


def _lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples, which contexts consist of and JSON does not support."""
    if isinstance(value, dict):
        return {key: _lists_to_tuples(part) for key, part in value.items()}
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value


_CHECKED_STEPS = 2**15
"""Minimum number of steps that are checked together."""
_CHECKED: set[str] = set()
"""Files and spaces that this process has already checked."""


class DatasetReader:
    """Reads a local data set, one episode at a time.

    Every observation, action and advised action is checked against its space when the data set is opened. Finite
    numbers of an action beyond the bounds of a Box are clipped when they are read, as they are before an environment
    receives them; how many there are is logged.

    Args:
        dataset_id: name of the data set.

    Raises:
        ValueError: If the data set is missing, empty or damaged, or a value is not an element of its space.

    Attributes:
        lengths: number of steps of each episode, int64 ``(episode,)``.
    """

    def __init__(self, dataset_id: str) -> None:
        from minari import MinariDataset
        from minari.storage import get_dataset_path

        self.dataset_id, path = dataset_id, dataset_path(dataset_id)
        if not path.exists():
            raise ValueError(
                f"dataset_id is {dataset_id!r}, which is not in {get_dataset_path()} and could not be downloaded; "
                "collect it with lrl collect, or set MINARI_DATASETS_PATH to its folder."
            )
        with self._readable_errors(), suppress_output():
            dataset = MinariDataset(path)
            self._storage = dataset.storage
            self.observation_space, self.action_space = dataset.observation_space, dataset.action_space
            episodes = list(self._storage.get_episode_metadata(range(dataset.total_episodes)))
            self.lengths = np.array([episode["total_steps"] for episode in episodes], dtype=np.int64)
            self._random: list[list[int]] = [json.loads(episode.get(RANDOM_STEPS, "[]")) for episode in episodes]
            self._has_advisor = np.array([bool(episode.get(HAS_ADVISOR)) for episode in episodes], dtype=bool)
            self._advised: list[list[str | None]] = [json.loads(episode.get(ADVISED, "[]")) for episode in episodes]
            self._known_returns: list[float | None] = [episode.get("rewards_sum") for episode in episodes]
        if not self.lengths.sum():
            raise ValueError(f"dataset_id is {dataset_id!r}, which contains no steps; it must contain at least one.")
        self._action_bounds = self.action_space
        self._check_values(self.observation_space, self.action_space)

    @cached_property
    def returns(self) -> np.ndarray:
        """Undiscounted return of each episode, float64 ``(episode,)``.

        Raises:
            ValueError: If a return is not finite.
        """
        returns = np.array([np.nan if known is None else known for known in self._known_returns], dtype=np.float64)
        unknown = [index for index, known in enumerate(self._known_returns) if known is None]  # they are optional
        with self._readable_errors():
            returns[unknown] = [np.sum(rewards) for rewards in self._columns(("rewards",), unknown)]
        if not np.isfinite(returns).all():
            index = int(np.flatnonzero(~np.isfinite(returns))[0])
            raise ValueError(
                f"dataset_id is {self.dataset_id!r}, whose episode {index} has the return {returns[index]}; all "
                "rewards must be finite."
            )
        return returns

    def check_spaces(self, observation_space: gym.Space, action_space: gym.Space, key: str) -> None:
        """Check that the spaces are those of an environment and contain all values.

        Args:
            observation_space: native observation space of the environment.
            action_space: native action space, to whose bounds actions are clipped from now on.
            key: configuration key of the data set, for error messages.

        Raises:
            ValueError: If a space differs, or a value is not an element of its space.
        """
        stored = self.observation_space, self.action_space
        for name, own, expected in zip(("observation", "action"), stored, (observation_space, action_space)):
            if not spaces_match(own, expected):
                raise ValueError(
                    f"{key} is {self.dataset_id!r}, whose {name} space is {own}; it must be that of the environment, "
                    f"{expected}."
                )
        native = to_minari_space(observation_space), to_minari_space(action_space)
        if native != stored:
            self._action_bounds = native[1]
            self._check_values(*native)

    def _check_values(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Raise if a stored value is not an element of its space; log how many numbers are out of bounds."""
        about = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        key = repr((about, observation_space, action_space))
        if key in _CHECKED:
            return
        roles = {"observation": ("observations", observation_space), "action": ("actions", action_space)}
        for role, (group, space) in roles.items():
            for path, leaf in checked_leaves(space):
                name = ".".join([role, *(part.removeprefix("_index_") for part in path)])
                self._check_leaf(name, leaf, (group, *path), range(len(self.lengths)))
        for path, leaf in checked_leaves(action_space) if self.has_advisor else ():
            name = ".".join(["advised action", *(part.removeprefix("_index_") for part in path)])
            advised = np.flatnonzero(self._has_advisor).tolist()
            self._check_leaf(name, leaf, ("infos", ADVISED_ACTION, *path), advised)
        _CHECKED.add(key)

    def _check_leaf(self, name: str, space: gym.Space, path: tuple[str, ...], episodes: Sequence[int]) -> None:
        """Check the values of one leaf in some episodes, many steps at a time.

        Args:
            name: name of the leaf, for messages.
            space: space of the leaf.
            path: path of its column in an episode.
            episodes: indices of the episodes.
        """
        num_outside, first = 0, ""
        for chunk, column in self._chunks(space, path, episodes):
            wrong = invalid_values(space, column)
            if wrong.any():
                expected = f"it must be an element of {space}"
                if isinstance(space, gym.spaces.Box):
                    whole = np.issubdtype(space.dtype, np.integer)
                    expected = f"numbers of {space} must be finite{' integers' * whole}"
                raise ValueError(
                    f"dataset_id is {self.dataset_id!r}, whose {self._describe(chunk, column, wrong, name)}; "
                    f"{expected}."
                )
            outside = values_out_of_bounds(space, column)
            if outside.any():
                first = first or self._describe(chunk, column, outside, name)
                num_outside += int(outside.reshape(len(column), -1).any(1).sum())
        if num_outside:
            logging.getLogger("lrl").warning(
                "dataset_id is %r: %s in %d of %d steps is out of the bounds of %s and is %s; %s.",
                *(self.dataset_id, name, num_outside, int(self.lengths[list(episodes)].sum()), space),
                "used as it is" if name.startswith("observation") else "clipped",
                first,
            )

    def _chunks(
        self, space: gym.Space, path: tuple[str, ...], episodes: Sequence[int]
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the indices of some episodes at a time, with the concatenated columns of one leaf.

        Args:
            space: space of the leaf.
            path: path of its column in an episode.
            episodes: indices of the episodes.
        """
        chunk: list[int] = []
        columns: list[np.ndarray] = []
        steps = 0
        with self._readable_errors():
            for index, column in zip(episodes, self._columns(path, episodes)):
                length = int(self.lengths[index])
                if len(column) < length:
                    raise ValueError(f"{length} steps, but {len(column)} of {'/'.join(path)} in episode {index}")
                columns.append(np.asarray(column[:length]).reshape(length, *(space.shape or ())))
                chunk.append(index)
                steps += length
                if steps >= _CHECKED_STEPS:
                    yield chunk, np.concatenate(columns)
                    chunk, columns, steps = [], [], 0
            if columns:
                yield chunk, np.concatenate(columns)

    def _columns(self, path: tuple[str, ...], episodes: Sequence[int]) -> Iterator[Any]:
        """Yield the stored column of one leaf of each episode; from HDF5, no other columns are read."""
        if self._storage.FORMAT == "hdf5":
            import h5py

            with h5py.File(self._storage.data_path / "main_data.hdf5", "r") as stored:
                for index in episodes:  # the low-level interface takes half the time for short episodes
                    dataset = h5py.h5d.open(stored.id, "/".join([f"episode_{index}", *path]).encode())
                    column = np.empty(dataset.shape, dataset.dtype)
                    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, column)
                    yield column
            return
        for episode in self._storage.get_episodes(episodes):
            column: Any = episode
            for part in path:
                column = column[int(part.removeprefix("_index_"))] if isinstance(column, tuple) else column[part]
            yield column

    def _describe(self, chunk: Sequence[int], column: np.ndarray, wrong: np.ndarray, name: str) -> str:
        """Describe the first wrong value in the columns of some episodes, with its episode and step."""
        row = int(np.flatnonzero(wrong.reshape(len(column), -1).any(1))[0])
        ends = np.cumsum(self.lengths[list(chunk)])
        number = int(np.searchsorted(ends, row, side="right"))
        step = row - (int(ends[number - 1]) if number else 0)
        value = column[row][wrong[row]].ravel()[0] if column.ndim > 1 else column[row]
        in_name = f"in the {name}" if column.ndim > 1 else f"as the {name}"
        return f"episode {chunk[number]} has {value} {in_name} of step {step}"

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the data set as a whole."""
        return self._storage.metadata

    @property
    def files(self) -> list[Path]:
        """Files of the data set, by name."""
        return sorted(path for path in dataset_path(self.dataset_id).iterdir() if path.is_file())

    @property
    def has_advisor(self) -> bool:
        """Return whether some episodes contain an advisor's action for every step."""
        return bool(self._has_advisor.any())

    @property
    def has_advice(self) -> bool:
        """Return whether the data set contains advised actions."""
        return self.has_advisor or any(map(self.advised_actions, range(len(self.lengths))))

    def demonstrated_steps(self, index: int, advised: bool = False) -> np.ndarray:
        """Return the steps of an episode that are demonstrations, int64 ``(step,)``.

        Without an advisor these are the steps whose actions the policy chose. With an advisor there are none, unless
        ``advised`` is true.

        Args:
            index: index of the episode.
            advised: whether to include the steps with an advised action, which are all steps with an advisor.
        """
        if self._has_advisor[index]:
            return np.arange(self.lengths[index] if advised else 0)
        included = self.advised_actions(index) if advised else ()
        excluded = [step for step in self._random[index] if step not in included]
        return np.setdiff1d(np.arange(self.lengths[index]), excluded)

    def advised_actions(self, index: int) -> dict[int, str]:
        """Return, for steps with a random action, the text of the action that the policy would have chosen."""
        pairs = zip(self._random[index], self._advised[index])  # data sets may contain no advice
        return {step: text for step, text in pairs if text is not None}

    def check_own_actions(self, key: str) -> None:
        """Check that the data set was collected without an advisor, whose actions should be imitated instead.

        Args:
            key: configuration key of the data set, for error messages.

        Raises:
            ValueError: If an episode was collected with an advisor.
        """
        if self.has_advisor:
            raise ValueError(
                f"{key} is {self.dataset_id!r}, which was collected with an advisor, so that its actions are not the "
                "expert's; it must be a data set of episodes that the expert played."
            )

    def num_demonstrated(self, advised: bool = False) -> np.ndarray:
        """Return the number of :meth:`demonstrated_steps` of each episode, int64 ``(episode,)``."""
        episodes = range(len(self.lengths))
        return np.array([len(self.demonstrated_steps(index, advised)) for index in episodes], dtype=np.int64)

    def episode(self, index: int) -> StoredEpisode:
        """Read one episode.

        Raises:
            ValueError: If the episode is damaged.
        """
        with self._readable_errors():
            (stored,) = self._storage.get_episodes([index])
            (metadata,) = self._storage.get_episode_metadata([index])
            context = json.loads(metadata[CONTEXT]) if CONTEXT in metadata else None
            actions: Columns = clip_columns(self._action_bounds, stored["actions"])
            columns = self.observation_space, stored["observations"], self.action_space, actions
            advised = None
            if self._has_advisor[index]:
                advised = columns_of_infos(self.action_space, stored["infos"][ADVISED_ACTION])
                advised = clip_columns(self._action_bounds, advised)
            terminated = bool(np.any(stored["terminations"]))
            return StoredEpisode(*columns, int(self.lengths[index]), context, stored["rewards"], terminated, advised)

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # HDF5, JSON, Gymnasium and Minari raise many kinds for a damaged file
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"dataset_id is {self.dataset_id!r}, which cannot be read ({reason}); delete "
                f"{dataset_path(self.dataset_id).parent} and collect or download it again."
            ) from error


def download(dataset_id: str) -> None:
    """Download a data set from Minari's server if it is not local.

    Failures are not raised here, because :class:`DatasetReader` raises on every rank.

    Raises:
        ValueError: If the name is malformed.
    """
    if dataset_path(dataset_id).exists():
        return
    import minari

    with suppress_output(), redirect_stderr(StringIO()):  # progress bars
        try:
            _check_hub()
            minari.download_dataset(dataset_id)
        except Exception as error:  # the client raises many kinds without network
            logging.getLogger("lrl.trace").debug("%s was not downloaded: %s", dataset_id, error)


def _check_hub() -> None:
    """Raise at once if there is no network, because Minari's client would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if os.environ.get("MINARI_REMOTE", "hf").startswith("hf"):
        get_session().head(constants.ENDPOINT, timeout=10)

"""Reading of Minari data sets episode by episode, and their download."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from lrl.codecs.space_formats import flatten
from lrl.envs.minari_storage import (
    ADVISED_ACTION,
    ADVISED_STEPS,
    CONTEXT,
    HAS_ADVISOR,
    RANDOM_STEPS,
    check_column,
    clip_columns,
    columns_of_infos,
    dataset_path,
    samples_of,
    spaces_match,
    suppress_output,
    to_minari_space,
)


@dataclass(frozen=True, kw_only=True)
class StoredEpisode:
    """Holds what was recorded in one episode."""

    observations: list[Any]
    """Native observation before each step."""
    actions: list[Any]
    """Native action of each step."""
    rewards: np.ndarray
    """Reward of each step, float64 ``(step,)``."""
    terminated: bool
    """Whether the episode terminated."""
    context: Any
    """Context of the codec; None if none was stored."""
    advised_actions: dict[int, Any]
    """Native action by step: that of an advisor, or the policy's own at steps with a random action."""


def _lists_to_tuples(value: Any) -> Any:
    """Convert lists back to tuples: contexts contain tuples, which JSON stores as lists."""
    if isinstance(value, dict):
        return {key: _lists_to_tuples(part) for key, part in value.items()}
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value


_CHECKED: set[str] = set()
"""Keys of the files and spaces that this process has already checked."""


class DatasetReader:
    """Reads a local data set, one episode at a time.

    Every observation, action and advised action is checked against its space when the data set is opened. The numbers
    of an action are clipped to the bounds of a Box when they are read, as before an environment receives them; the
    number of steps with clipped numbers is logged.

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
            self._contexts: list[str] = [episode.get(CONTEXT, "null") for episode in episodes]
            self._random: list[list[int]] = [json.loads(episode.get(RANDOM_STEPS, "[]")) for episode in episodes]
            self._advised: list[list[int]] = [json.loads(episode.get(ADVISED_STEPS, "[]")) for episode in episodes]
            self._has_advisor = [bool(episode.get(HAS_ADVISOR)) for episode in episodes]
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
        known = enumerate(self._known_returns)  # data sets that lrl did not collect may not contain returns
        returns = np.array([self.episode(index).rewards.sum() if one is None else one for index, one in known])
        if not np.isfinite(returns).all():
            index = int(np.flatnonzero(~np.isfinite(returns))[0])
            raise ValueError(
                f"dataset_id is {self.dataset_id!r}, whose episode {index} has the return {returns[index]}; all "
                "rewards must be finite."
            )
        return returns

    def check_spaces(self, observation_space: gym.Space, action_space: gym.Space, key: str) -> None:
        """Check that the spaces match those of an environment or another data set, and that they contain all values.

        Args:
            observation_space: native observation space.
            action_space: native action space; from this call on, actions are clipped to its bounds.
            key: configuration key of the data set, for error messages.

        Raises:
            ValueError: If a space does not match, or a stored value is not an element of the space.
        """
        stored = self.observation_space, self.action_space
        for name, own, expected in zip(("observation", "action"), stored, (observation_space, action_space)):
            if not spaces_match(own, expected):
                raise ValueError(
                    f"{key} is {self.dataset_id!r}, whose {name} space is {own}; it must be {expected}, that of the "
                    "environment."
                )
        native = to_minari_space(observation_space), to_minari_space(action_space)
        if native != stored:
            self._action_bounds = native[1]
            self._check_values(*native)

    def _check_values(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Raise an error if a value is not an element of its space; log the number of steps that are out of bounds."""
        about = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        key = repr((about, observation_space, action_space))
        if key in _CHECKED:
            return
        # Number of steps out of bounds, and a description of the first one, by the name and the space of a leaf.
        outside: dict[tuple[str, str], tuple[int, str]] = {}
        stored = iter(self._storage.get_episodes(range(len(self.lengths))))
        for index in range(len(self.lengths)):
            with self._readable_errors():
                episode = next(stored)
                roles = [("observation", observation_space, episode["observations"])]
                roles.append(("action", action_space, episode["actions"]))
                if self._advised[index]:
                    advised = columns_of_infos(self.action_space, episode["infos"][ADVISED_ACTION])
                    roles.append(("advised action", action_space, advised))
            for role, space, columns in roles:
                columns = dict(flatten(space, columns))
                for path, leaf in flatten(space, space):
                    if not isinstance(leaf, gym.spaces.Text):
                        name = f"{role}.{path}" if path else role
                        count, first = outside.get((name, str(leaf)), (0, ""))
                        further, described = self._check_leaf(index, name, leaf, columns[path])
                        outside[name, str(leaf)] = count + further, first or described
        for (name, space), (count, first) in outside.items():
            if count:
                logging.getLogger("lrl").warning(
                    "dataset_id is %r: %s in %d of %d steps is out of the bounds of %s and is %s; %s.",
                    *(self.dataset_id, name, count, int(self.lengths.sum()), space),
                    "used as it is" if name.startswith("observation") else "clipped",
                    first,
                )
        _CHECKED.add(key)

    def _check_leaf(self, index: int, name: str, space: gym.Space, column: np.ndarray) -> tuple[int, str]:
        """Check the values of one leaf in one episode.

        Args:
            index: index of the episode.
            name: name of the leaf, for messages.
            space: space of the leaf.
            column: values of the leaf, ``(step, ...)``; observations also have one after the last step.

        Returns:
            The number of steps with a number that is out of bounds, and a description of the first.

        Raises:
            ValueError: If a value is invalid, or steps are missing.
        """
        with self._readable_errors():
            length = int(self.lengths[index])
            column = np.asarray(column)[:length].reshape(length, *(space.shape or ()))
        invalid, outside = check_column(space, column)
        if invalid.any():
            expected = f"it must be an element of {space}"
            if isinstance(space, gym.spaces.Box):
                whole = np.issubdtype(space.dtype, np.integer)
                expected = f"numbers of {space} must be finite{' integers' * whole}"
            raise ValueError(
                f"dataset_id is {self.dataset_id!r}, whose {_describe(index, name, column, invalid)[1]}; {expected}."
            )
        return _describe(index, name, column, outside)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the data set, not of its episodes."""
        return self._storage.metadata

    @property
    def files(self) -> list[Path]:
        """Files of the data set, sorted by name."""
        return sorted(path for path in dataset_path(self.dataset_id).iterdir() if path.is_file())

    @property
    def has_advisor(self) -> bool:
        """True if some episodes were collected with an advisor, whose action is stored for each of their steps."""
        return any(self._has_advisor)

    @property
    def has_advice(self) -> bool:
        """True if an advised action is stored for at least one step."""
        return any(self._advised)

    def demonstrated_steps(self, index: int, advised: bool = False) -> np.ndarray:
        """Return the steps of an episode that are demonstrations, int64 ``(step,)``.

        In an episode without an advisor these are the steps at which the policy chose the action, and not a random one.
        An episode with an advisor has no such steps, because its actions are not the expert's.

        Args:
            index: index of the episode.
            advised: whether to also return the steps with an advised action, which in an episode with an advisor are
                all steps.
        """
        if self._has_advisor[index]:
            return np.arange(self.lengths[index] if advised else 0)
        excluded = set(self._random[index]) - set(self._advised[index] if advised else ())
        return np.setdiff1d(np.arange(self.lengths[index]), list(excluded))

    def check_own_actions(self, key: str) -> None:
        """Check that no episode was collected with an advisor, because its actions should not be imitated.

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
            length, actions = int(self.lengths[index]), clip_columns(self._action_bounds, stored["actions"])
            rewards = np.asarray(stored["rewards"], dtype=np.float64)
            if len(rewards) != length:
                raise ValueError(f"{length} steps, but {len(rewards)} rewards")
            advised: dict[int, Any] = {}
            if self._advised[index]:
                columns = columns_of_infos(self.action_space, stored["infos"][ADVISED_ACTION])
                samples = samples_of(self._action_bounds, clip_columns(self._action_bounds, columns), length)
                advised = {step: samples[step] for step in self._advised[index]}
            return StoredEpisode(
                observations=samples_of(self.observation_space, stored["observations"], length),
                actions=samples_of(self._action_bounds, actions, length),
                rewards=rewards,
                terminated=bool(np.any(stored["terminations"])),
                context=_lists_to_tuples(json.loads(self._contexts[index])),
                advised_actions=advised,
            )

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


def _describe(index: int, name: str, column: np.ndarray, wrong: np.ndarray) -> tuple[int, str]:
    """Return the number of steps with a marked value, and a description of the first such value.

    Args:
        index: index of the episode.
        name: name of the leaf.
        column: values of the leaf, ``(step, ...)``.
        wrong: marks the values to count, such as invalid ones, bool ``(step, ...)``.
    """
    steps = np.flatnonzero(wrong.reshape(len(column), -1).any(1)).tolist()
    if not steps:
        return 0, ""
    value, place = column[steps[0]][wrong[steps[0]]].ravel()[0], "in" if column.ndim > 1 else "as"
    return len(steps), f"episode {index} has {value} {place} the {name} of step {steps[0]}"


def download(dataset_id: str) -> None:
    """Download a data set from Minari's server if it is not local.

    A failed download raises no error here: one rank per node downloads, but each rank creates a
    :class:`DatasetReader`, which raises.

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
    """Raise an error at once if there is no network; Minari's client would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if os.environ.get("MINARI_REMOTE", "hf").startswith("hf"):
        get_session().head(constants.ENDPOINT, timeout=10)

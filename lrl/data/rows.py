"""Rows of Minari data sets and JSON Lines files; each row is a recorded state with the action taken in it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lrl.codecs.codec import TextCodec, clip_to_space
from lrl.data.jsonl import JsonlLines, parse_action, parse_observation
from lrl.data.minari import EpisodeSelection, Split
from lrl.envs.factory import EnvFactory
from lrl.envs.minari_reader import DatasetReader, StoredEpisode, download
from lrl.envs.prompt_env import EnvRows, EpisodeRows
from lrl.functional.random import permutation
from lrl.lm.fixed_batches import LRUCache
from lrl.ranges import HalfOpenUnitInterval, PositiveInt, check_arguments
from lrl.registry import register
from lrl.rewards.reward import Row

_CACHED_BYTES = 2**29
"""Maximum size of the cached episodes in bytes, enough for more than a million steps of HalfCheetah."""


@register
class MinariRows(EnvRows):
    """Reads each step of a Minari data set as a row. Rewards compare the policy's response with the row's action.

    The prompt of a row is the one that the environment would show: the codec writes the native observation as text, and
    the history contains the previous steps of the recorded episode. Rows are read on demand. Steps at which a random
    action was inserted during collection (``lrl collect --random_share``) are not rows, but are part of the history.

    Args:
        dataset_id: Minari's name of the data set, which is downloaded if it is not local.
        env: the environment of the data set, whose codec writes the texts.
        split: ``train`` and ``validation`` have no episode in common; ``all`` uses both. Demonstrations with the same
            settings use the same episodes.
        validation_share: fraction of episodes in the validation split; if it is positive and there are two or more
            episodes, the split has at least one.
        num_episodes: number of episodes of the split to use; null uses all. A larger number selects the same episodes
            and further ones.
        num_rows: number of steps of the split to use; only the last of the selected episodes may be incomplete. null
            uses all.
        min_return: lowest undiscounted return of the episodes to use; null uses all.
        shuffle_actions: whether each row has the action of another row. This is a control experiment, because such an
            action does not depend on the row's state. Reading a row then reads two episodes.
        seed: seed of the split, the selection and the shuffled actions.
    """

    def __init__(
        self,
        dataset_id: str,
        env: EnvFactory,
        split: Split = "train",
        validation_share: HalfOpenUnitInterval = 0.1,
        num_episodes: PositiveInt | None = None,
        num_rows: PositiveInt | None = None,
        min_return: float | None = None,
        shuffle_actions: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(MinariRows.__init__, locals(), "env.rows")
        self.dataset_id, self.env, self.shuffle_actions, self.seed = dataset_id, env, shuffle_actions, seed
        self.selection = EpisodeSelection(
            key="env.rows",
            split=split,
            validation_share=validation_share,
            num_episodes=num_episodes,
            num_rows=num_rows,
            min_return=min_return,
            seed=seed,
        )

    def prepare_data(self) -> None:
        """Download the data set if it is not local."""
        download(self.dataset_id)

    def rows(self) -> MinariRowSequence:
        """Return the selected steps as a lazy sequence.

        Raises:
            ValueError: If the data set is missing, empty, damaged or of another environment, has too few steps, or
                cannot be written as text by the codec.
        """
        reader = DatasetReader(self.dataset_id)
        reader.check_spaces(*self.env.spaces, "env.rows.dataset_id")
        reader.check_own_actions("env.rows.dataset_id")
        rows = MinariRowSequence(reader, self.codec, *self.selection.select(reader, reader.num_demonstrated()))
        if self.shuffle_actions:
            order = permutation(len(rows), "shuffled actions", self.seed)
            rows.action_of = np.empty_like(order)
            rows.action_of[order] = np.roll(order, 1)  # a cycle of all rows, so none keeps its own action
        rows[0]  # Reports errors that all rows have.
        return rows


class MinariRowSequence(EpisodeRows):
    """Lazy sequence of steps of some episodes, which are read on demand and cached as native values, not as texts.

    Args:
        reader: the data set.
        codec: codec of the environment.
        episodes: indices of the episodes, int64 ``(episode,)``.
        steps: number of rows of each episode, int64 ``(episode,)``.

    Attributes:
        action_of: index of the row whose action each row has, int64 ``(row,)``; None if rows have their own actions.
    """

    def __init__(self, reader: DatasetReader, codec: TextCodec, episodes: np.ndarray, steps: np.ndarray) -> None:
        self.reader, self.episodes = reader, episodes
        self._codec, self._starts = codec, np.concatenate([[0], np.cumsum(steps)])
        self.action_of: np.ndarray | None = None
        self._cache: LRUCache[tuple[StoredEpisode, np.ndarray]] = LRUCache(_CACHED_BYTES)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def item(self, index: int) -> Row:
        """Return one row."""
        number, step = self._place(index)
        stored, _ = self._episode(number)
        observation, action = stored.observations[step], self._action(index)
        with self._readable_errors(number):
            text = self._codec.observation_to_text(observation, stored.context)
        action, _ = clip_to_space(self.reader.action_space, action)
        return Row(observation=text, action=_native(action), native_observation=_native(observation))

    def _action(self, index: int) -> Any:
        """Return the native action of a row."""
        number, step = self._place(index if self.action_of is None else int(self.action_of[index]))
        return self._episode(number)[0].actions[step]

    def past_turns(self, index: int, length: int) -> tuple[tuple[str, str], ...]:
        """Return the texts of the turns before a row; see :meth:`~lrl.envs.prompt_env.EpisodeRows.past_turns`."""
        number, step = self._place(index)
        stored, _ = self._episode(number)
        to_text, action_to_text = self._codec.observation_to_text, self._codec.action_to_text
        with self._readable_errors(number):
            return tuple(
                (to_text(stored.observations[past], stored.context), action_to_text(stored.actions[past]))
                for past in range(max(0, step - length), step)
            )

    def _place(self, index: int) -> tuple[int, int]:
        """Return the index of a row's episode in the data set, and the index of its step in the episode."""
        position = int(np.searchsorted(self._starts, index, side="right")) - 1
        number = int(self.episodes[position])
        return number, int(self._episode(number)[1][index - self._starts[position]])

    @contextmanager
    def _readable_errors(self, number: int) -> Iterator[None]:
        """Convert errors of a codec to ``ValueError`` with the name of the data set."""
        try:
            yield
        except (ValueError, LookupError, TypeError) as error:  # raised by codecs for unknown data
            raise ValueError(
                f"env.rows.dataset_id is {self.reader.dataset_id!r}, whose episode {number} cannot be written as text "
                f"by {type(self._codec).__name__}: {error}"
            ) from error

    def _episode(self, number: int) -> tuple[StoredEpisode, np.ndarray]:
        """Return an episode, and the indices of its steps that are rows, int64 ``(row,)``."""
        found = self._cache.get(number)
        if found is None:
            stored, steps = self.reader.episode(number), self.reader.demonstrated_steps(number)
            found = stored, steps
            self._cache.put(number, found, len(pickle.dumps(found)))
        return found


def _native(sample: Any) -> Any:
    """Return a stored sample; a NumPy integer, as stored for a Discrete space, is converted to an ``int``."""
    return int(sample) if isinstance(sample, np.integer) else sample


@register
class JsonlRows(EnvRows):
    """Reads each line of a file as a row, such as ``{"observation": "<observation>..", "action": "<action>.."}``.

    The tags are optional, and an action that the codec writes as a word may also be given by its index, so that the
    files of the original experiment can be read. All lines are checked at the start and read on demand. If the codec
    can parse observations, texts are rewritten in the environment's format, and policies that act natively can use the
    parsed observations; both are at most as precise as the numbers in the file. Lines do not state to which episode
    they belong, so prompts have no history.

    Args:
        path: path of the file.
        env: the environment of the observations, whose codec parses and writes the texts.
        num_rows: number of lines to use; null uses all. A larger number selects the same lines and further ones.
        seed: seed of the selection.
    """

    def __init__(self, path: str, env: EnvFactory, num_rows: PositiveInt | None = None, seed: int = 0) -> None:
        check_arguments(JsonlRows.__init__, locals(), "env.rows")
        self.path, self.env, self.num_rows, self.seed = path, env, num_rows, seed

    def rows(self) -> JsonlLines[Row]:
        """Return the selected lines as a lazy sequence, in the order of the file.

        Raises:
            ValueError: If the file is missing, empty or has too few lines, or a selected line is not a JSON object with
                the keys ``observation`` and ``action``, or an observation or action does not fit the environment.
        """
        rows = JsonlLines(self.path, "env.rows", self._parse, self.num_rows, self.seed)
        rows.check(self.codec, self.spaces[1])
        return rows

    def _parse(self, record: dict[str, Any]) -> Row:
        """Return the row of a line's object."""
        observations, actions = self.spaces
        text, observation = parse_observation(self.codec, record, observations)
        action, _ = parse_action(self.codec, record, actions)
        return Row(observation=text, action=action, native_observation=observation)

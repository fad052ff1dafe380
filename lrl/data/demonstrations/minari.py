"""Demonstrations from Minari data sets, written as text by the codec of the environment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, overload

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.augmentation import Symmetry
from lrl.data.demonstrations.sources import Demonstrations, LazyDemonstrations, Reasoning
from lrl.data.episode_selection import EpisodeSelection, Split, check_dataset_spaces
from lrl.envs.factory import EnvFactory
from lrl.envs.minari_storage import DatasetReader, download
from lrl.functional.random import counter_hash, permutation
from lrl.policies.policy import Policy
from lrl.ranges import HalfOpenUnitInterval, PositiveInt, check_arguments
from lrl.types import Demonstration, PastTurn

_BLOCK = 2**15
"""Number of demonstrations that are shuffled together; about twice as many are kept in memory."""


class MinariDemonstrations(Demonstrations):
    """Demonstrates the actions of a Minari data set, each with the prompt that the environment would have shown.

    A data set holds native observations and actions; the environment's codec writes them as text, and the prompt's
    history is that of the episode. Episodes are read lazily. Random actions that were inserted while collecting
    (``collect.py --random_share``) are not demonstrated but are part of the history. With ``advised`` the action that
    the policy would have chosen instead is demonstrated, which covers states that mistakes lead to (as in DAgger,
    arXiv:1011.0686).

    Args:
        dataset_id: Minari's name of the data set, which is downloaded if it is not local.
        split: ``train`` and ``validation`` have no episode in common; ``all`` uses both.
        validation_share: fraction of episodes in the validation split, at least one of two or more.
        num_episodes: number of episodes of the split to use; null uses all. A larger number adds to the same episodes.
        num_rows: number of steps of the split to use, of whole episodes except the last; null uses all.
        min_return: lowest undiscounted return of the episodes to use; null uses all.
        reasoning: templates of the text before the action, for response formats that ask for one; one is sampled per
            response, ``{seen}`` is replaced by the codec's summary of the observation, ``{action}`` by the action.
        copies: number of copies of each episode; the first is unchanged, ``symmetry`` transforms the others.
        symmetry: augmentation of the other copies; null if ``copies`` is 1.
        advised: whether to demonstrate also the actions that were advised where a random action was taken.
        seed: seed of the split, the selection, the reasoning and the augmentation.
    """

    def __init__(
        self,
        dataset_id: str,
        split: Split = "train",
        validation_share: HalfOpenUnitInterval = 0.1,
        num_episodes: PositiveInt | None = None,
        num_rows: PositiveInt | None = None,
        min_return: float | None = None,
        reasoning: Sequence[str] = ("I see {seen}, I choose",),
        copies: PositiveInt = 1,
        symmetry: Symmetry | None = None,
        advised: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(MinariDemonstrations.__init__, locals(), "demonstrations")
        if (symmetry is None) != (copies == 1):
            given = "null" if symmetry is None else type(symmetry).__name__
            raise ValueError(
                f"demonstrations.copies is {copies} and symmetry {given}; several copies need a symmetry, one null."
            )
        self.dataset_id, self.seed, self.reasoning = dataset_id, seed, Reasoning(reasoning)
        self.selection = EpisodeSelection(
            key="demonstrations",
            split=split,
            validation_share=validation_share,
            num_episodes=num_episodes,
            num_rows=num_rows,
            min_return=min_return,
            seed=seed,
        )
        self.copies, self.symmetry, self.advised = copies, symmetry, advised
        self._reader: DatasetReader | None = None

    def prepare_data(self) -> None:
        """Download the data set if it is not local."""
        download(self.dataset_id)

    @property
    def reader(self) -> DatasetReader:
        """The data set, opened once.

        Raises:
            ValueError: the data set is missing, empty or damaged.
        """
        if self._reader is None:
            self._reader = DatasetReader(self.dataset_id)
        return self._reader

    def validate(self, env: EnvFactory) -> None:
        """Raise if the observation or action space differs from that of the environment.

        Raises:
            ValueError: a space differs, or the data set is missing, empty or damaged.
        """
        check_dataset_spaces(self.reader, env, "demonstrations")

    def load(self, codec: TextCodec, policy: Policy) -> MinariTurns:
        """Return the selected steps as a lazy sequence.

        Raises:
            ValueError: the data set is missing, empty, damaged or too small, or the codec cannot write it as text.
        """
        turns = MinariTurns(self, codec, policy, *self._select())
        turns[0]  # reports errors that all episodes have
        return turns

    def _select(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected episodes and their numbers of steps, each int64 ``(episode,)``."""
        counts = self.reader.num_demonstrated(self.advised)
        if self.advised and not any(self.reader.advised_actions(index) for index in range(len(counts))):
            raise ValueError(
                f"demonstrations.advised is true, but {self.dataset_id!r} holds no advice; it must be false, or the "
                "data set collected with --random_share."
            )
        return self.selection.select(self.reader, counts)


class _EpisodeText(NamedTuple):
    """Holds an episode as text."""

    turns: tuple[PastTurn, ...]
    """The turns as they were taken."""
    advised: dict[int, str]
    """The advised responses by step."""
    steps: list[int]
    """The steps that are demonstrated."""


class MinariTurns(LazyDemonstrations):
    """Sequence of the steps of some episodes, which are read from disk when they are needed and cached for a while.

    Args:
        source: the data set, its reasoning and its augmentation.
        codec: codec of the environment.
        policy: formats responses and gives the length of the history.
        episodes: indices of the episodes, int64 ``(episode,)``.
        steps: number of steps of each, int64 ``(episode,)``.
    """

    def __init__(
        self, source: MinariDemonstrations, codec: TextCodec, policy: Policy, episodes: np.ndarray, steps: np.ndarray
    ) -> None:
        self._source, self._codec, self._policy = source, codec, policy
        self._num_originals = len(episodes)
        self.episodes = np.tile(episodes, source.copies)
        self._starts = np.concatenate([[0], np.cumsum(np.tile(steps, source.copies))])
        self._firsts: list[int] = self._starts.tolist()
        self._cache: dict[int, _EpisodeText] = {}
        self._num_cached = 0

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, index: int) -> Demonstration: ...

    @overload
    def __getitem__(self, index: slice) -> list[Demonstration]: ...

    def __getitem__(self, index: int | slice) -> Demonstration | list[Demonstration]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        index = range(self._firsts[-1])[index]
        number = bisect_right(self._firsts, index) - 1
        turns, advised, steps = self._episode_text(number)
        step = steps[index - self._firsts[number]]
        assert self._policy.prompt is not None
        history = turns[max(0, step - self._policy.prompt.history) : step]
        return Demonstration(turns[step].observation, advised.get(step, turns[step].response), history)

    def _episode_text(self, number: int) -> _EpisodeText:
        """Return an episode as text, from a cache that drops the least recently used episode."""
        text = self._cache.pop(number, None)
        if text is None:
            text = self._read(int(self.episodes[number]), number // self._num_originals)
            self._num_cached += len(text.turns)
        self._cache[number] = text
        while self._num_cached > 2 * _BLOCK and len(self._cache) > 1:
            self._num_cached -= len(self._cache.pop(next(iter(self._cache))).turns)
        return text

    def _read(self, episode: int, copy: int) -> _EpisodeText:
        """Read one episode, transform it if ``copy`` is not 0, and write it as text."""
        source, codec = self._source, self._codec
        stored = source.reader.episode(episode)
        key = (source.seed, episode, copy) if copy else (source.seed, episode)
        random_bits = counter_hash("demonstration", *key, np.arange(len(stored.actions))).tolist()
        try:
            advice = source.reader.advised_actions(episode) if source.advised else {}
            observations, num_steps = stored.observations, len(stored.actions)
            actions = [*stored.actions, *map(codec.text_to_action, advice.values())]
            if copy and source.symmetry is not None:
                rng = np.random.default_rng([source.seed, episode, copy])
                observations, actions = source.symmetry.augment(observations, actions, rng)
            texts = codec.observations_to_texts(observations, stored.context)
            action_texts = codec.actions_to_texts(actions)
            write = partial(source.reasoning.write_response, self._policy, codec)
            turns = tuple(
                PastTurn(text, write(text, action_text, bits))
                for text, action_text, bits in zip(texts, action_texts[:num_steps], random_bits, strict=True)
            )
            responses = {
                step: write(texts[step], action_text, random_bits[step])
                for step, action_text in zip(advice, action_texts[num_steps:], strict=True)
            }
        except (ValueError, LookupError, TypeError) as error:  # raised by a codec for data that it does not know
            raise ValueError(
                f"demonstrations.dataset_id is {source.dataset_id!r}, whose episode {episode} cannot be written as "
                f"text by {type(codec).__name__}: {error}"
            ) from error
        return _EpisodeText(turns, responses, source.reader.demonstrated_steps(episode, source.advised).tolist())

    @property
    def fingerprint(self) -> str:
        """State of the data set's files, and which of its steps are demonstrated in which words."""
        source = self._source
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.reader.files]
        selected = [self.episodes.tolist(), self._starts.tolist(), source.seed, source.copies, source.advised]
        symmetry = source.symmetry and (type(source.symmetry).__name__, vars(source.symmetry))
        return repr((source.dataset_id, files, selected, source.reasoning.texts, symmetry))

    def shuffled_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Return every index once, int64 ``(turn,)``: episodes are shuffled, then steps within blocks of episodes."""
        order = permutation(len(self.episodes), "episodes", seed, epoch)
        block_of = (np.cumsum(np.diff(self._starts)[order]) - 1) // _BLOCK
        blocks = []
        for number in np.unique(block_of).tolist():
            rows = np.concatenate([np.arange(*self._starts[e : e + 2]) for e in order[block_of == number]])
            blocks.append(rows[permutation(len(rows), "demonstrations", seed, epoch, number)])
        return np.concatenate(blocks)

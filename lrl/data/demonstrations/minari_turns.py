"""The steps of a Minari data set as lazy sequences of demonstrations: native, or written as text."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from lrl.codecs.clipping import clip_to_space
from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.sources import LazyDemonstrations
from lrl.envs.stored_episode import StoredEpisode
from lrl.functional.random import counter_hash, permutation
from lrl.policies.policy import Policy
from lrl.types import Demonstration, NativeTurn, PastTurn

if TYPE_CHECKING:
    from lrl.data.demonstrations.minari import MinariDemonstrations

_BLOCK = 2**15
"""Number of demonstrations that are shuffled together; about twice as many are kept in memory."""


class _Episode(NamedTuple):
    """Holds an episode as it is demonstrated, after a transformation if it is a copy."""

    observations: Sequence[Any]
    actions: Sequence[Any]
    """As they were taken, one per observation."""
    advised: dict[int, Any]
    """Advised actions by step."""
    context: Any
    """Context of the codec."""


class MinariTurns(LazyDemonstrations):
    """Abstract sequence of the steps of some episodes, which are read from disk when needed and cached for a while.

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
        self._bounds: list[int] = self._starts.tolist()  # a list is faster to search for one index
        self._cache: dict[int, Sequence[Demonstration]] = {}
        self._num_cached = 0

    @abstractmethod
    def _demonstrate(self, episode: _Episode, steps: list[int], key: tuple[int, ...]) -> Sequence[Demonstration]:
        """Return the demonstrations of some steps of an episode.

        Args:
            episode: all its steps.
            steps: those that are demonstrated.
            key: of the random choices for this episode.
        """

    def __len__(self) -> int:
        return self._bounds[-1]

    def demonstration(self, index: int) -> Demonstration:
        """Return one demonstration, reading its episode if it is not cached."""
        number = bisect_right(self._bounds, index) - 1
        return self._demonstrations(number)[index - self._bounds[number]]

    def _demonstrations(self, number: int) -> Sequence[Demonstration]:
        """Return those of an episode, from a cache that drops the least recently used episode."""
        found = self._cache.pop(number, None)
        if found is None:
            found = self._read(int(self.episodes[number]), number // self._num_originals)
            self._num_cached += len(found)
        self._cache[number] = found
        while self._num_cached > 2 * _BLOCK and len(self._cache) > 1:
            self._num_cached -= len(self._cache.pop(next(iter(self._cache))))
        return found

    def _read(self, index: int, copy: int) -> Sequence[Demonstration]:
        """Read one episode, and transform it if ``copy`` is not 0."""
        source, codec = self._source, self._codec
        stored = source.reader.episode(index)
        steps = source.reader.demonstrated_steps(index, source.advised).tolist()
        try:
            advice = self._advice(index, stored) if source.advised else {}
            observations, num_steps = stored.observations, len(stored.actions)
            actions = [*stored.actions, *advice.values()]
            if copy and source.augmentation is not None:
                rng = np.random.default_rng([source.seed, index, copy])
                observations, actions = source.augmentation.augment(observations, actions, rng)
            advised = dict(zip(advice, actions[num_steps:], strict=True))
            episode = _Episode(observations, actions[:num_steps], advised, stored.context)
            return self._demonstrate(episode, steps, (source.seed, index, copy) if copy else (source.seed, index))
        except (ValueError, LookupError, TypeError) as error:  # raised by a codec for data that it does not know
            raise ValueError(
                f"demonstrations.dataset_id is {source.dataset_id!r}, whose episode {index} cannot be written as "
                f"text by {type(codec).__name__}: {error}"
            ) from error

    def _advice(self, index: int, stored: StoredEpisode) -> dict[int, Any]:
        """Return the native actions that were advised, by step."""
        texts = self._source.reader.advised_actions(index)
        space = self._source.reader.action_space
        advised = {step: clip_to_space(space, self._codec.text_to_action(text))[0] for step, text in texts.items()}
        return advised | stored.advised_actions

    @property
    def fingerprint(self) -> str:
        """State of the data set's files, and which of its steps are demonstrated in which words."""
        source = self._source
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.reader.files]
        selected = [self.episodes.tolist(), self._starts.tolist(), source.seed, source.copies, source.advised]
        augmentation = source.augmentation and (type(source.augmentation).__name__, vars(source.augmentation))
        return repr((source.dataset_id, files, selected, source.reasoning.texts, augmentation))

    def shuffled_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Return every index once, int64 ``(turn,)``: episodes are shuffled, then steps within blocks of episodes."""
        order = permutation(len(self.episodes), "episodes", seed, epoch)
        block_of = (np.cumsum(np.diff(self._starts)[order]) - 1) // _BLOCK
        blocks = []
        for number in np.unique(block_of).tolist():
            rows = np.concatenate([np.arange(*self._starts[e : e + 2]) for e in order[block_of == number]])
            blocks.append(rows[permutation(len(rows), "demonstrations", seed, epoch, number)])
        return np.concatenate(blocks)


@final
class TextTurns(MinariTurns):
    """Demonstrates the steps as text: the observation, the response in the policy's format, and the turns before."""

    def _demonstrate(self, episode: _Episode, steps: list[int], key: tuple[int, ...]) -> list[Demonstration]:
        codec, policy, num_steps = self._codec, self._policy, len(episode.actions)
        assert policy.prompt is not None
        history = policy.prompt.history
        random_bits = counter_hash("demonstration", *key, np.arange(num_steps)).tolist()
        texts = codec.observations_to_texts(episode.observations, episode.context)
        action_texts = codec.actions_to_texts([*episode.actions, *episode.advised.values()])
        write = partial(self._source.reasoning.write_response, policy, codec)
        rows = zip(texts, action_texts[:num_steps], random_bits, strict=True)
        turns = [PastTurn(text, write(text, action_text, bits)) for text, action_text, bits in rows]
        advised = {
            step: write(texts[step], action_text, random_bits[step])
            for step, action_text in zip(episode.advised, action_texts[num_steps:], strict=True)
        }
        return [
            Demonstration(
                turns[step].observation,
                advised.get(step, turns[step].response),
                tuple(turns[max(0, step - history) : step]),
            )
            for step in steps
        ]


@final
class NativeTurns(MinariTurns):
    """Demonstrates the steps as native observations and actions; no text is written."""

    def _demonstrate(self, episode: _Episode, steps: list[int], key: tuple[int, ...]) -> list[Demonstration]:
        turns = (
            NativeTurn(episode.observations[step], episode.advised.get(step, episode.actions[step])) for step in steps
        )
        return [Demonstration(native=turn) for turn in turns]

"""Demonstrations from Minari data sets: selection of episodes, and their steps as lazy sequences."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, final

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.data.sources import Augmentation, Demonstrations, LazyDemonstrations, Reasoning
from lrl.envs.factory import EnvFactory
from lrl.envs.minari_reader import DatasetReader, StoredEpisode, download
from lrl.functional.random import counter_hash, permutation
from lrl.lm.fixed_batches import LRUCache
from lrl.policies.policy import Policy
from lrl.ranges import HalfOpenUnitInterval, PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import Demonstration, NativeTurn, PastTurn

_BLOCK = 2**15
"""Number of demonstrations that are shuffled together; about twice as many are cached."""


class MinariTurns(LazyDemonstrations):
    """Abstract sequence of the steps of some episodes, which are read on demand and cached.

    Args:
        source: the data set, its reasoning and its augmentation.
        codec: codec of the environment.
        policy: policy that formats responses and determines the length of the history.
        episodes: indices of the episodes, int64 ``(episode,)``.
        steps: number of demonstrated steps of each episode, int64 ``(episode,)``.
    """

    def __init__(
        self, source: MinariDemonstrations, codec: TextCodec, policy: Policy, episodes: np.ndarray, steps: np.ndarray
    ) -> None:
        self._source, self._codec, self._policy = source, codec, policy
        self._num_originals = len(episodes)
        self.episodes = np.tile(episodes, source.copies)
        self._starts = np.concatenate([[0], np.cumsum(np.tile(steps, source.copies))])
        self._bounds: list[int] = self._starts.tolist()  # bisecting a list is faster than searching an array
        self._cache: LRUCache[Sequence[Demonstration]] = LRUCache(max(2 * _BLOCK, int(steps.max())))

    @abstractmethod
    def _demonstrate(self, episode: StoredEpisode, steps: list[int], key: tuple[int, ...]) -> Sequence[Demonstration]:
        """Return the demonstrations of some steps of an episode.

        Args:
            episode: the episode with all of its steps.
            steps: indices of the demonstrated steps.
            key: integers that determine the random choices for this episode.
        """

    def __len__(self) -> int:
        return self._bounds[-1]

    def item(self, index: int) -> Demonstration:
        """Return one demonstration, reading its episode if it is not cached."""
        number = bisect_right(self._bounds, index) - 1
        return self._demonstrations(number)[index - self._bounds[number]]

    def _demonstrations(self, number: int) -> Sequence[Demonstration]:
        """Return the demonstrations of an episode, from a cache if they were used recently."""
        found = self._cache.get(number)
        if found is None:
            found = self._read(int(self.episodes[number]), number // self._num_originals)
            self._cache.put(number, found, len(found))
        return found

    def _read(self, index: int, copy: int) -> Sequence[Demonstration]:
        """Read one episode, and transform it if ``copy`` is not 0."""
        source, codec = self._source, self._codec
        stored = source.reader.episode(index)
        steps = source.reader.demonstrated_steps(index, source.advised).tolist()
        try:
            # Advised actions are appended to the others, so that one call of the augmentation transforms all of them.
            advice = stored.advised_actions if source.advised else {}
            observations, num_steps = stored.observations, len(stored.actions)
            actions = [*stored.actions, *advice.values()]
            if copy and source.augmentation is not None:
                rng = np.random.default_rng([source.seed, index, copy])
                observations, actions = source.augmentation.augment(observations, actions, rng)
            advised = dict(zip(advice, actions[num_steps:], strict=True))
            changes = {"observations": observations, "actions": actions[:num_steps], "advised_actions": advised}
            return self._demonstrate(
                replace(stored, **changes), steps, (source.seed, index, copy) if copy else (source.seed, index)
            )
        except (ValueError, LookupError, TypeError) as error:  # raised by codecs for unknown data
            raise ValueError(
                f"demonstrations.dataset_id is {source.dataset_id!r}, whose episode {index} cannot be written as "
                f"text by {type(codec).__name__}: {error}"
            ) from error

    @property
    def fingerprint(self) -> str:
        """Text with the size and time of the data set's files, the selected steps, and the settings of their texts."""
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
    """Demonstrates steps as text: the observation, the response in the policy's format, and the history."""

    def _demonstrate(self, episode: StoredEpisode, steps: list[int], key: tuple[int, ...]) -> list[Demonstration]:
        codec, policy, num_steps = self._codec, self._policy, len(episode.actions)
        assert policy.prompt is not None
        random_bits = counter_hash("demonstration", *key, np.arange(num_steps)).tolist()
        texts = [codec.observation_to_text(observation, episode.context) for observation in episode.observations]
        action_texts = [
            codec.action_to_text(action) for action in (*episode.actions, *episode.advised_actions.values())
        ]
        write = partial(self._source.reasoning.write_response, policy, codec)
        rows = zip(texts, action_texts[:num_steps], random_bits, strict=True)
        turns = [PastTurn(text, write(text, action_text, bits)) for text, action_text, bits in rows]
        advised = {
            step: write(texts[step], action_text, random_bits[step])
            for step, action_text in zip(episode.advised_actions, action_texts[num_steps:], strict=True)
        }
        return [
            Demonstration(
                turns[step].observation,
                advised.get(step, turns[step].response),
                tuple(policy.prompt.truncate_history(tuple(turns[:step]))),
            )
            for step in steps
        ]


@final
class NativeTurns(MinariTurns):
    """Demonstrates steps as native observations and actions."""

    def _demonstrate(self, episode: StoredEpisode, steps: list[int], key: tuple[int, ...]) -> list[Demonstration]:
        turns = (
            NativeTurn(episode.observations[step], episode.advised_actions.get(step, episode.actions[step]))
            for step in steps
        )
        return [Demonstration(native=turn) for turn in turns]


Split = Literal["train", "validation", "all"]
"""``train`` and ``validation`` have no episode in common; ``all`` uses both."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSelection:
    """Selects a part of a data set; demonstrations and rows with equal settings use the same episodes."""

    key: str
    """Configuration key of the data set, for error messages."""
    split: Split = "train"
    validation_share: float = 0.1
    """Fraction of episodes in the validation split, which has at least one if this is positive and there are two."""
    num_episodes: int | None = None
    """Number of episodes of the split; None selects all. A larger number selects the same episodes and further ones."""
    num_rows: int | None = None
    """Number of steps of the split; only the last of the selected episodes may be incomplete. None selects all."""
    min_return: float | None = None
    """Lowest undiscounted return of an episode of the split; None selects all."""
    seed: int = 0
    """Seed of the split and the selection."""

    def __post_init__(self) -> None:
        if self.num_episodes is not None and self.num_rows is not None:
            raise ValueError(f"{self.key}.num_episodes and {self.key}.num_rows are both set; one must be null.")

    def select(self, reader: DatasetReader, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected episodes and their numbers of steps, each int64 ``(episode,)``.

        Args:
            reader: the data set.
            steps: number of steps of each episode that can be used, int64 ``(episode,)``.

        Raises:
            ValueError: If the split has fewer episodes or steps than are requested, or none with ``min_return``.
        """
        episodes = self._with_min_return(reader, self._split(len(steps)))
        episodes = episodes[steps[episodes] > 0]
        steps = steps[episodes]
        self._check_size(reader.dataset_id, steps)
        if self.num_rows is None:
            return episodes[: self.num_episodes], steps[: self.num_episodes]
        steps = np.clip(self.num_rows - (np.cumsum(steps) - steps), 0, steps)
        return episodes[steps > 0], steps[steps > 0]

    def _with_min_return(self, reader: DatasetReader, episodes: np.ndarray) -> np.ndarray:
        """Return the episodes, int64 ``(episode,)``, whose return is at least ``min_return``."""
        if self.min_return is None or not len(episodes):
            return episodes
        returns = reader.returns[episodes]
        if returns.max() < self.min_return:
            raise ValueError(
                f"{self.key}.min_return is {self.min_return:g}, but the returns in the {self.split} split of "
                f"{reader.dataset_id!r} are {returns.min():.6g} to {returns.max():.6g}; it must not exceed "
                "the largest of these."
            )
        return episodes[returns >= self.min_return]

    def _check_size(self, dataset_id: str, steps: np.ndarray) -> None:
        """Raise if more episodes or rows are requested than there are, given their ``steps``, int64 ``(episode,)``."""
        available = {"num_episodes": len(steps), "num_rows": int(steps.sum())}
        above = "" if self.min_return is None else f" with a return of {self.min_return:g} or more"
        for name, count in available.items():
            if (getattr(self, name) or 1) > count:
                raise ValueError(
                    f"{self.key}.{name} is {getattr(self, name)}, but the {self.split} split of {dataset_id!r} has "
                    f"{count}{above}; it must be at most that."
                )

    def _split(self, num_episodes: int) -> np.ndarray:
        """Return the episodes of the split in the order in which they are selected, int64 ``(episode,)``."""
        order = permutation(num_episodes, "split", self.seed)
        held_out = max(round(self.validation_share * num_episodes), int(self.validation_share > 0 and num_episodes > 1))
        return {"all": order, "validation": order[:held_out], "train": order[held_out:]}[self.split]


@register
class MinariDemonstrations(Demonstrations):
    """Demonstrates the actions of a Minari data set, with the prompts of the environment.

    A data set contains native observations and actions, from which a policy that acts natively learns. For a policy
    that responds in text, the environment's codec writes them as text, and the history contains the previous steps of
    the episode. Episodes are read on demand.

    Random actions that were inserted during collection (``lrl collect --random_share``) are not demonstrated, but are
    part of the history. With ``advised``, the actions that the policy would have chosen instead are demonstrated as
    well, which covers states after mistakes. In a data set with an advisor (``lrl collect --advisor``) only the advised
    actions are demonstrated (DAgger, arXiv:1011.0686).

    Args:
        dataset_id: Minari's name of the data set, which is downloaded if it is not local.
        split: ``train`` and ``validation`` have no episode in common; ``all`` uses both.
        validation_share: fraction of episodes in the validation split; if it is positive and there are two or more
            episodes, the split has at least one.
        num_episodes: number of episodes of the split to use; null uses all. A larger number selects the same episodes
            and further ones.
        num_rows: number of steps of the split to use; only the last of the selected episodes may be incomplete. null
            uses all.
        min_return: lowest undiscounted return of the episodes to use; null uses all.
        reasoning: templates of the text before the action, for response formats with reasoning; see
            :class:`~lrl.data.sources.Reasoning`.
        copies: number of copies of each episode; the first is unchanged, ``augmentation`` transforms the others.
        augmentation: transformation of the other copies; null if ``copies`` is 1.
        advised: whether to demonstrate advised actions.
        seed: seed of the split, the selection, the reasoning and the augmentation.
    """

    has_native_turns = True

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
        augmentation: Augmentation | None = None,
        advised: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(MinariDemonstrations.__init__, locals(), "demonstrations")
        if (augmentation is None) != (copies == 1):
            given = "null" if augmentation is None else type(augmentation).__name__
            raise ValueError(
                f"demonstrations.copies is {copies} and demonstrations.augmentation {given}; augmentation must be set "
                "if copies is above 1, and null otherwise."
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
        self.copies, self.augmentation, self.advised = copies, augmentation, advised
        self._reader: DatasetReader | None = None

    def prepare_data(self) -> None:
        """Download the data set if it is not local."""
        download(self.dataset_id)

    @property
    def reader(self) -> DatasetReader:
        """The data set, which is opened on first use.

        Raises:
            ValueError: If the data set is missing, empty or damaged.
        """
        if self._reader is None:
            self._reader = DatasetReader(self.dataset_id)
        return self._reader

    def validate(self, env: EnvFactory) -> None:
        """Check that the data set has the spaces of the environment.

        Raises:
            ValueError: If a space differs, the augmentation does not support the actions, or the data set is missing,
                empty or damaged.
        """
        self.reader.check_spaces(*env.spaces, "demonstrations.dataset_id")
        if self.augmentation is not None:
            self.augmentation.connect(env.spaces[1])

    def load(self, codec: TextCodec, policy: Policy) -> MinariTurns:
        """Return one demonstration per selected step as a lazy sequence.

        Demonstrations contain native observations and actions if the policy acts natively, otherwise texts.

        Raises:
            ValueError: If the data set is missing, empty or damaged, has too few steps, or cannot be written as text.
        """
        kind = NativeTurns if policy.response_format is None else TextTurns
        turns = kind(self, codec, policy, *self._select())
        turns[0]  # reports errors that all episodes have
        return turns

    def check_held_out(self, training: Demonstrations) -> None:
        """Check that the training demonstrations include none of these episodes.

        Raises:
            ValueError: If the training demonstrations include an episode of these demonstrations.
        """
        for source in training.sources:
            if not (isinstance(source, MinariDemonstrations) and source.dataset_id == self.dataset_id):
                continue
            shared = np.intersect1d(self._select()[0], source._select()[0])
            if len(shared):
                raise ValueError(
                    f"data.validation_demonstrations have {len(shared)} episodes of {self.dataset_id!r} in common with "
                    "data.demonstrations; their splits must be validation and train, with one seed and one "
                    "validation_share."
                )

    def _select(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected episodes and their numbers of steps, each int64 ``(episode,)``."""
        reader = self.reader
        if self.advised and not reader.has_advice:
            raise ValueError(
                f"demonstrations.advised is true, but {self.dataset_id!r} contains no advised actions; it must be "
                "false, or the data set collected with an advisor or a random_share."
            )
        counts = reader.num_demonstrated(self.advised)
        if not self.advised and reader.has_advisor:
            raise ValueError(
                f"demonstrations.advised is false, but {self.dataset_id!r} was collected with an advisor, so that only "
                "its advised actions are demonstrations; it must be true."
            )
        return self.selection.select(reader, counts)

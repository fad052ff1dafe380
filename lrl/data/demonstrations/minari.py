"""Demonstrations out of Minari's data sets, put into words as the environment would have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.augmentation import Symmetry
from lrl.data.demonstrations.sources import Demonstrations, Reasoning, StreamedTurns
from lrl.data.minari_spaces import mismatch
from lrl.data.minari_storage import DatasetReader, download
from lrl.envs.factory import EnvFactory
from lrl.functional.random import counter_hash, permutation
from lrl.policies.text import TextPolicy
from lrl.types import Demonstration, PastTurn

_BLOCK = 2**15
"""Rows that are shuffled among each other; twice as many are in memory."""


class MinariDemonstrations(Demonstrations):
    """The actions of a Minari data set, each with the prompt that the environment would have shown.

    A data set is of native observations and actions; the environment's codec puts them into words, and the prompt's
    history is that of the episode. Episodes are read when they are needed. Random actions that were put in
    (``collect.py --random_share``) are no demonstrations; they stand in the history. What the policy would have done
    there can be learned from instead: demonstrations of states that its mistakes lead to (DAgger, arXiv:1011.0686).

    Args:
        dataset_id: Minari's name, local or to be downloaded.
        split: ``train`` and ``validation`` share no episode; ``all`` takes both.
        validation_share: of the episodes, at least one where there are two.
        num_episodes: how many of the split to take; null takes all. A larger number takes the same ones and more.
        num_rows: how many steps of the split to take, of whole episodes but the last; null takes all.
        reasoning: written before the action where the format asks for it, one drawn per answer; ``{seen}`` stands for
            the codec's gist of the observation, ``{action}`` for the action.
        copies: of each episode, the first as it is, the others changed by ``symmetry``.
        symmetry: what may be changed; null with one copy only.
        advised: learn also what would have been done where a random action was put in.
        seed: of the split, of what is taken, and of the draws.
    """

    def __init__(
        self,
        dataset_id: str,
        split: Literal["train", "validation", "all"] = "train",
        validation_share: float = 0.1,
        num_episodes: int | None = None,
        num_rows: int | None = None,
        reasoning: Sequence[str] = ("I see {seen}, I choose",),
        copies: int = 1,
        symmetry: Symmetry | None = None,
        advised: bool = False,
        seed: int = 0,
    ) -> None:
        if (symmetry is None) != (copies == 1):
            given = "null" if symmetry is None else type(symmetry).__name__
            raise ValueError(
                f"demonstrations.copies is {copies} and symmetry {given}; several copies need a symmetry, one has none."
            )
        if split not in ("train", "validation", "all"):
            raise ValueError(f"demonstrations.split is {split!r}; it must be train, validation or all.")
        if not 0 <= validation_share < 1:
            raise ValueError(f"demonstrations.validation_share is {validation_share}; it must be in [0, 1).")
        if num_episodes is not None and num_rows is not None:
            raise ValueError("demonstrations.num_episodes and demonstrations.num_rows are both set; one must be null.")
        for name, value in {"num_episodes": num_episodes, "num_rows": num_rows, "copies": copies}.items():
            if value is not None and value < 1:
                raise ValueError(f"demonstrations.{name} is {value}; it must be at least 1, or null.")
        self.dataset_id, self.validation_share, self.seed = dataset_id, validation_share, seed
        self.split: Literal["train", "validation", "all"] = split
        self.num_episodes, self.num_rows, self.reasoning = num_episodes, num_rows, Reasoning(reasoning)
        self.copies, self.symmetry, self.advised = copies, symmetry, advised
        self._reader: DatasetReader | None = None

    def prepare(self) -> None:
        """Download the data set if it is not here."""
        download(self.dataset_id)

    @property
    def reader(self) -> DatasetReader:
        """The data set, opened once.

        Raises:
            ValueError: it is missing, empty or damaged.
        """
        if self._reader is None:
            self._reader = DatasetReader(self.dataset_id)
        return self._reader

    def check(self, env: EnvFactory) -> None:
        """Compare the spaces.

        Raises:
            ValueError: they differ.
        """
        native: Any = env.make(1, None)
        native.close()
        for name in ("observation", "action"):
            kept, wanted = getattr(self.reader, f"{name}_space"), getattr(native, f"single_{name}_space")
            if mismatch(kept, wanted):
                raise ValueError(
                    f"demonstrations.dataset_id is {self.dataset_id!r}, whose {name} space is {kept}; it must be that "
                    f"of the environment, {wanted}."
                )

    def turns(self, codec: TextCodec, policy: TextPolicy) -> EpisodeTurns:
        """The steps that are asked for, in a lazy sequence.

        Raises:
            ValueError: the data set is missing, empty or damaged, or holds less than is asked for, or the codec cannot
                put it into words.
        """
        turns = EpisodeTurns(self, codec, policy, *self._take())
        turns[0]  # what is wrong with all episodes is said now
        return turns

    def _take(self) -> tuple[np.ndarray, np.ndarray]:
        """Episodes and how many of their steps, each int64 ``(episode,)``."""
        counts = self.reader.counts(self.advised)
        if self.advised and not any(self.reader.advised(index) for index in range(len(counts))):
            raise ValueError(
                f"demonstrations.advised is true, but {self.dataset_id!r} keeps no advice; it must be false, or the "
                "data set collected with --random_share."
            )
        episodes = self._split(len(counts))
        episodes = episodes[counts[episodes] > 0]
        steps = counts[episodes]
        available = {"num_episodes": len(steps), "num_rows": int(steps.sum())}
        for name, there in available.items():
            asked = getattr(self, name) or 1
            if asked > there:
                raise ValueError(
                    f"demonstrations.{name} is {getattr(self, name)}, but the {self.split} split of "
                    f"{self.dataset_id!r} holds {there}; it must be at most that."
                )
        if self.num_rows is not None:
            steps = np.clip(self.num_rows - (np.cumsum(steps) - steps), 0, steps)
        taken = slice(self.num_episodes) if self.num_rows is None else steps > 0
        return episodes[taken], steps[taken]

    def _split(self, episodes: int) -> np.ndarray:
        """The episodes of the split in the order in which they are taken, int64 ``(episode,)``."""
        order = permutation(episodes, "split", self.seed)
        held_out = max(round(self.validation_share * episodes), int(self.validation_share > 0 and episodes > 1))
        return {"all": order, "validation": order[:held_out], "train": order[held_out:]}[self.split]


Told = tuple[tuple[PastTurn, ...], dict[int, str]]
"""An episode's turns as they were taken, and by step the answers that were advised instead."""


class EpisodeTurns(StreamedTurns):
    """The steps of some episodes; an episode is read when one of its steps is asked for, and forgotten later.

    Args:
        source: names the data set and what is thought.
        codec: of the environment.
        policy: writes answers, and says how long a history is.
        episodes: int64 ``(episode,)``.
        steps: how many of each, int64 ``(episode,)``.
    """

    def __init__(
        self,
        source: MinariDemonstrations,
        codec: TextCodec,
        policy: TextPolicy,
        episodes: np.ndarray,
        steps: np.ndarray,
    ) -> None:
        self._source, self._codec, self._policy = source, codec, policy
        self._originals = len(episodes)
        self.episodes = np.tile(episodes, source.copies)
        self._starts = np.concatenate([[0], np.cumsum(np.tile(steps, source.copies))])
        self._cache: dict[int, Told] = {}
        self._cached = 0

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, place: int) -> Demonstration: ...

    @overload
    def __getitem__(self, place: slice) -> list[Demonstration]: ...

    def __getitem__(self, place: int | slice) -> Demonstration | list[Demonstration]:
        if isinstance(place, slice):
            return [self[index] for index in range(len(self))[place]]
        place = range(len(self))[place]
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        source, (turns, advised) = self._source, self._turns(number)
        steps = source.reader.demonstrated(int(self.episodes[number]), source.advised)
        step = int(steps[place - self._starts[number]])
        history = turns[max(0, step - self._policy.prompt.history) : step]
        return Demonstration(turns[step].observation, advised.get(step, turns[step].response), history)

    def _turns(self, number: int) -> Told:
        """An episode in words; the one that was asked for longest ago goes where there are too many."""
        turns = self._cache.pop(number, None)
        if turns is None:
            turns = self._read(int(self.episodes[number]), number // self._originals)
            self._cached += len(turns[0])
        self._cache[number] = turns
        while self._cached > 2 * _BLOCK and len(self._cache) > 1:
            self._cached -= len(self._cache.pop(next(iter(self._cache)))[0])
        return turns

    def _read(self, episode: int, copy: int) -> Told:
        source, codec = self._source, self._codec
        stored = source.reader.episode(episode)
        key = (source.seed, episode, copy) if copy else (source.seed, episode)
        draws = counter_hash("demonstration", *key, np.arange(len(stored.actions))).tolist()
        turns, answers = [], {}
        try:
            advice = source.reader.advised(episode) if source.advised else {}
            observations, taken = stored.observations, len(stored.actions)
            actions = [*stored.actions, *map(codec.text_to_action, advice.values())]
            if copy and source.symmetry is not None:
                rng = np.random.default_rng([source.seed, episode, copy])
                observations, actions = source.symmetry.change(observations, actions, rng)
            advised = dict(zip(advice, actions[taken:], strict=True))
            for step, (seen, action, draw) in enumerate(zip(observations, actions[:taken], draws, strict=True)):
                text = codec.observation_to_text(seen, stored.context)
                write = partial(source.reasoning.answer, self._policy, codec, text)
                turns.append(PastTurn(text, write(codec.action_to_text(action), draw)))
                if step in advised:
                    answers[step] = write(codec.action_to_text(advised[step]), draw)
        except (ValueError, LookupError, TypeError) as error:  # a codec meets what it does not speak of
            raise ValueError(
                f"demonstrations.dataset_id is {source.dataset_id!r}, whose episode {episode} cannot be put into words "
                f"by {type(codec).__name__}: {error}"
            ) from error
        return tuple(turns), answers

    def shuffled(self, seed: int, epoch: int) -> np.ndarray:
        """Every step once, int64 ``(turn,)``: episodes shuffled, then steps inside blocks of them."""
        order = permutation(len(self.episodes), "episodes", seed, epoch)
        return np.concatenate(list(self._blocks(order, seed, epoch)))

    def _blocks(self, order: np.ndarray, seed: int, epoch: int) -> Iterator[np.ndarray]:
        steps = np.diff(self._starts)[order]
        block = (np.cumsum(steps) - 1) // _BLOCK
        for number in np.unique(block).tolist():
            rows = np.concatenate([np.arange(*self._starts[e : e + 2]) for e in order[block == number]])
            yield rows[permutation(len(rows), "demonstrations", seed, epoch, number)]


def write_jsonl(dataset_id: str, env: EnvFactory, path: str | Path) -> int:
    """Write a data set as ``{"observation": "<observation>..</observation>", "action": "<action>..</action>"}`` lines.

    This is the original experiment's format, which :class:`~lrl.data.demonstrations.sources.JsonlDemonstrations`
    reads back.

    Args:
        dataset_id: Minari's name.
        env: the environment that it is of; its codec puts it into words.
        path: the file; folders are created.

    Returns:
        How many lines there are.

    Raises:
        ValueError: the data set is missing, empty or damaged, or is not of this environment.
    """
    source = MinariDemonstrations(dataset_id, split="all")
    source.prepare()
    source.check(env)
    reader, codec, lines = source.reader, env.codec, 0
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for index in range(len(reader.lengths)):
            episode = reader.episode(index)
            for seen, action in zip(episode.observations, episode.actions, strict=True):
                texts = {"observation": codec.observation_to_text(seen, episode.context)}
                texts["action"] = codec.action_to_text(action)
                file.write(json.dumps({tag: tagged(tag, text) for tag, text in texts.items()}) + "\n")
                lines += 1
    return lines


def tagged(tag: str, text: str) -> str:
    """A text inside ``<tag></tag>``, in which some codecs write theirs already."""
    return text if text.startswith(f"<{tag}>") else f"<{tag}>{text}</{tag}>"

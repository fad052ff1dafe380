"""Sources of demonstrations: the interface, and demonstrations by an expert policy with known Q-values."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import final, overload

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.envs.factory import EnvFactory
from lrl.envs.prompt_env import RowSource
from lrl.functional.random import counter_hash, permutation
from lrl.policies.policy import Policy
from lrl.ranges import PositiveInt, check_arguments
from lrl.types import Demonstration


class Demonstrations(ABC):
    """Abstract source of demonstrations."""

    has_native_turns: bool = False
    """Whether :meth:`load` gives native observations and actions to a policy that acts natively."""

    @property
    def sources(self) -> Sequence[Demonstrations]:
        """The sources that these demonstrations consist of; by default only this one."""
        return (self,)

    def prepare_data(self) -> None:  # noqa: B027 (most sources have nothing to download)
        """Download the data set if needed. Called once per machine, before all else; :meth:`load` reports failures."""

    def validate(self, env: EnvFactory) -> None:  # noqa: B027 (most sources have nothing to compare)
        """Raise if the demonstrations cannot be of this environment. Called before :meth:`load`.

        Raises:
            ValueError: observations or actions do not fit the environment.
        """

    def check_held_out(self, training: Demonstrations) -> None:  # noqa: B027 (most sources cannot tell)
        """Raise if some of these demonstrations, which are held out, are training demonstrations. Called at loading.

        Raises:
            ValueError: they are.
        """

    @abstractmethod
    def load(self, codec: TextCodec, policy: Policy) -> Sequence[Demonstration]:
        """Return observations with the responses that should be given to them.

        Args:
            codec: codec of the environment that the demonstrations are of.
            policy: formats responses; its model need not be loaded yet.
        """


class LazyDemonstrations(Sequence[Demonstration]):
    """Abstract sequence of demonstrations that are not all in memory."""

    @abstractmethod
    def demonstration(self, index: int) -> Demonstration:
        """Return one demonstration.

        Args:
            index: from 0 to one less than their number.
        """

    @overload
    def __getitem__(self, index: int) -> Demonstration: ...

    @overload
    def __getitem__(self, index: slice) -> list[Demonstration]: ...

    def __getitem__(self, index: int | slice) -> Demonstration | list[Demonstration]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        return self.demonstration(range(len(self))[index])

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Text that differs between different demonstrations, for the cache of their tokens."""

    @abstractmethod
    def shuffled_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Return a permutation of all indices, int64 ``(turn,)``, that reads each stored episode once per epoch."""


class Reasoning:
    """Writes the reasoning of a demonstrated response, for response formats that ask for one.

    Args:
        texts: templates, one of which is sampled per response; ``{seen}`` is replaced by the codec's summary of the
            observation, ``{ahead}`` by what stands directly ahead (BabyAI only), ``{action}`` by the action.

    Raises:
        ValueError: ``texts`` is empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not texts:
            raise ValueError('demonstrations.reasoning is []; it must hold at least one text, [""] for no reasoning.')
        self.texts = tuple(texts)

    def write_response(
        self, policy: Policy, codec: TextCodec, observation: str, action_text: str, random_bits: int
    ) -> str:
        """Return a response in the format of ``policy``, with the template that ``random_bits`` select."""
        template = self.texts[random_bits % len(self.texts)].replace("{action}", action_text)
        template = template.replace("{seen}", codec.summary(observation))
        if "{ahead}" in template:
            template = template.replace("{ahead}", codec.ahead(observation))
        return policy.write(action_text, template)


class ExpertDemonstrations(Demonstrations):
    """Demonstrates an action with the highest Q-value in every row, or the row's action if there are no Q-values.

    Ties are broken at random.

    Args:
        rows: states with the actions of an expert.
        reasoning: templates of the text before the action, for response formats that ask for one; one is sampled per
            response, ``{seen}`` is replaced by the codec's summary of the observation, ``{ahead}`` by what stands
            directly ahead (BabyAI only), ``{action}`` by the action.
        repeat: number of demonstrations per row, each with its own random choices.
        seed: seed of the random choices.
    """

    def __init__(
        self,
        rows: RowSource,
        reasoning: Sequence[str] = ("I see {seen}, I choose",),
        repeat: PositiveInt = 1,
        seed: int = 0,
    ) -> None:
        check_arguments(ExpertDemonstrations.__init__, locals(), "demonstrations")
        self.rows, self.reasoning, self.repeat, self.seed = rows, Reasoning(reasoning), repeat, seed

    def load(self, codec: TextCodec, policy: Policy) -> list[Demonstration]:
        """Return one demonstration per row and repetition."""
        rows = self.rows.rows()
        random_bits = counter_hash("demonstration", self.seed, np.arange(len(rows) * self.repeat))
        demonstrations = []
        for index, bits in enumerate(random_bits.tolist()):
            row = rows[index % len(rows)]
            actions = row.best_actions or (row.action,)
            action_text = codec.action_to_text(actions[bits % len(actions)])
            response = self.reasoning.write_response(policy, codec, row.observation, action_text, bits >> 32)
            demonstrations.append(Demonstration(row.observation, response))
        return demonstrations


# Demonstrations of several sources as one, such as an expert's own episodes and its advice in those of a clone.


@final
class ConcatDemonstrations(Demonstrations):
    """Demonstrates what each of several sources does; a pass shuffles them together.

    Args:
        sources: what is demonstrated; all sources must be of one environment.

    Raises:
        ValueError: the list is empty.
    """

    def __init__(self, sources: list[Demonstrations]) -> None:
        check_arguments(ConcatDemonstrations.__init__, locals(), "demonstrations")
        if not sources:
            raise ValueError("demonstrations.sources is []; it must hold at least one.")
        self._sources = tuple(sources)
        self.has_native_turns = all(source.has_native_turns for source in sources)

    @property
    def sources(self) -> Sequence[Demonstrations]:
        """All sources; a source that consists of several is replaced by these."""
        return [part for source in self._sources for part in source.sources]

    def prepare_data(self) -> None:
        """Download what is needed."""
        for source in self._sources:
            source.prepare_data()

    def validate(self, env: EnvFactory) -> None:
        """Raise if some demonstrations cannot be of this environment."""
        for source in self._sources:
            source.validate(env)

    def check_held_out(self, training: Demonstrations) -> None:
        """Raise if some of these demonstrations, which are held out, are training demonstrations."""
        for source in self._sources:
            source.check_held_out(training)

    def load(self, codec: TextCodec, policy: Policy) -> LazyDemonstrations:
        """Return the demonstrations of all sources, one source after another."""
        return _Concatenated([source.load(codec, policy) for source in self._sources])


@final
class _Concatenated(LazyDemonstrations):
    """Holds several sequences of demonstrations as one."""

    def __init__(self, parts: Sequence[Sequence[Demonstration]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def demonstration(self, index: int) -> Demonstration:
        """Return one demonstration, of the part that it is in."""
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]

    @property
    def fingerprint(self) -> str:
        """The fingerprints of all parts."""
        return repr([_fingerprint(part) for part in self._parts])

    def shuffled_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Return every index once, int64 ``(turn,)``: each part in its own shuffled order, the parts mixed evenly."""
        part_of = np.repeat(np.arange(len(self._parts)), list(map(len, self._parts)))
        part_of = part_of[permutation(len(self), "parts", seed, epoch)]
        shuffled = np.empty(len(self), dtype=np.int64)
        for number, part in enumerate(self._parts):
            shuffled[part_of == number] = self._starts[number] + _order(part, seed, epoch)
        return shuffled


def _order(part: Sequence[Demonstration], seed: int, epoch: int) -> np.ndarray:
    if isinstance(part, LazyDemonstrations):
        return part.shuffled_indices(seed, epoch)
    return permutation(len(part), "demonstrations", seed, epoch)


def _fingerprint(part: Sequence[Demonstration]) -> str:
    if isinstance(part, LazyDemonstrations):
        return part.fingerprint
    return hashlib.sha256(repr(list(part)).encode()).hexdigest()

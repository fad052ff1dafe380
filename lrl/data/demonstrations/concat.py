"""Demonstrations of several sources as one, such as an expert's own episodes and its advice in those of a clone."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import final

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.sources import Demonstrations, LazyDemonstrations
from lrl.envs.factory import EnvFactory
from lrl.functional.random import permutation
from lrl.policies.policy import Policy
from lrl.ranges import check_arguments
from lrl.types import Demonstration


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

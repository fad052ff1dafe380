"""Demonstrations of searching: histories of synthetic functions with the proposals of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.sources import Demonstrations
from lrl.policies.policy import Policy
from lrl.ranges import NonNegativeInt, PositiveInt, check_arguments
from lrl.search.teaching import TeacherConfig, demonstrated, demonstrations
from lrl.types import Demonstration


@final
class SyntheticHistories(Demonstrations):
    """Generates the demonstrations of :mod:`lrl.search.teaching`, about 14 for each function and 1 ms each.

    For several runs with the same ones, ``lrl synthetic_search --write`` writes them to a file for
    ``JsonlDemonstrations``.

    Args:
        num_functions: number of functions.
        generations: how many generations the teacher is ahead of a history.
        held_out: whether the functions are others, for the loss of validation; searchers are compared on yet others.
        seed: of the functions and histories.
    """

    def __init__(
        self,
        num_functions: PositiveInt = 20_000,
        generations: NonNegativeInt = TeacherConfig.generations,
        held_out: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(SyntheticHistories.__init__, locals(), "demonstrations")
        self.num_functions, self.held_out, self.seed = num_functions, held_out, seed
        self.teacher = TeacherConfig(generations=generations)

    def load(self, codec: TextCodec, policy: Policy) -> Sequence[Demonstration]:
        """Generate all demonstrations."""
        functions = demonstrated(self.num_functions, self.held_out)
        rows = demonstrations(self.seed, functions, self.teacher, self.held_out)
        return [Demonstration(row["prompt"], row["response"]) for row in rows]

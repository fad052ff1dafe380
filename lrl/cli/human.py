"""The actor of ``lrl watch --human``."""

from __future__ import annotations

from collections.abc import Sequence

from lrl.policies.baselines.fixed import FixedActor
from lrl.types import RandomKeys


class HumanActor(FixedActor):
    """An actor that asks the user at the keyboard for every action."""

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[str]:
        """Print the observation and read the action.

        Raises:
            EOFError: the line is empty.
        """
        print(f"\n{observations[0]}")
        response = input("> ").strip()
        if not response:
            raise EOFError
        return [response]

    @property
    def probability(self) -> float:
        """Probability of each action; a human's is unknown and counts as 1."""
        return 1.0

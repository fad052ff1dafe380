"""Experts: one that reads the same text as a language model, and one that the environment provides."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, final

from lrl.codecs.codec import TextCodec
from lrl.codecs.grid import Desc, FrozenLakeCodec
from lrl.envs.frozen_lake.maps import transition_table
from lrl.envs.tabular import optimal_q
from lrl.envs.text import AdvisedObservation

_CELL = re.compile(r"row (\d+) column (\d+)")


Expert = Callable[[Any], int]
"""From an observation to the index of the best action."""


def expert_for(codec: TextCodec) -> Expert:
    """Return the expert for environments with this codec.

    Raises:
        ValueError: there is none.
    """
    if isinstance(codec, FrozenLakeCodec):
        return FrozenLakeExpert(codec.is_slippery)
    if codec.has_expert:
        return EnvironmentExpert()
    raise ValueError(f"policy is 'expert', but none is known for {type(codec).__name__}; give one as policy.expert.")


@final
class EnvironmentExpert:
    """The expert inside an environment, which sees more than the text; its action comes with the observation.

    ``ExpertActor.prepare`` makes the environments add it: see :class:`~lrl.envs.text.AdvisedObservation`.
    """

    def __call__(self, observation: AdvisedObservation) -> int:
        """Return the advised action.

        Raises:
            ValueError: the observation has none.
        """
        if not isinstance(observation, AdvisedObservation):
            raise ValueError("policy is 'expert', which needs its environment's advice; call prepare(envs) first.")
        return int(observation.expert_action)


@final
class FrozenLakeExpert:
    """Solves the map in the observation by value iteration; ties go to the first action.

    Args:
        is_slippery: whether moves can slip to the sides.
        gamma: discount per step.
    """

    def __init__(self, is_slippery: bool = True, gamma: float = 0.99) -> None:
        self.is_slippery, self.gamma = is_slippery, gamma
        self._solved: dict[Desc, list[int]] = {}

    def __call__(self, observation: str) -> int:
        """Return the best action in the state that the observation shows."""
        state, desc = read_drawing(observation)
        if desc not in self._solved:
            table = transition_table(desc, self.is_slippery)
            self._solved[desc] = optimal_q([table], self.gamma)[0].argmax(-1).tolist()
        return self._solved[desc][state]


def read_drawing(observation: str) -> tuple[int, Desc]:
    """Return state and map of a FrozenLake observation; the inverse of :func:`lrl.codecs.grid.render_map`.

    The cell under the agent is not shown: it is the start, if no other cell is, else ice.

    Raises:
        ValueError: the observation shows no map.
    """
    match = _CELL.search(observation)
    if match is None:
        raise ValueError(f"observation is {observation!r}; the expert needs a line 'row R column C' and a map.")
    drawn = [line.replace(" ", "") for line in observation[match.end() :].strip().splitlines()]
    under = "F" if any("S" in line for line in drawn) else "S"
    row, column = int(match[1]), int(match[2])
    return row * len(drawn[0]) + column, tuple(line.replace("A", under) for line in drawn)

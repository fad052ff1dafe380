"""Misère Nim against a perfect opponent, as in ProPS (arXiv:2511.21928) but without its illegal action 0."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from lrl.envs.batched.dynamics import DynamicsEnv, DynamicsVectorEnv
from lrl.envs.batched.tables import TableDynamics
from lrl.envs.tabular import TransitionTable

STICKS = 10
"""Number of sticks at the start."""


@lru_cache(maxsize=1)
def nim() -> TableDynamics:
    """Return the game: who takes the last of ten sticks loses, and the agent begins.

    The observation is the number of sticks left at the agent's turn, and an action is how many it takes: 1, 2 or 3.
    Reward 1 if the opponent takes the last stick, -1 if the agent does or takes more than are left. With ``n`` sticks
    left, the opponent takes ``(n + 3) mod 4``, and where that is 0 a random legal number.
    """
    outcomes = {
        sticks: {taken - 1: list(_outcomes(sticks, taken)) for taken in (1, 2, 3)} for sticks in range(STICKS + 1)
    }
    return TableDynamics(TransitionTable.from_gymnasium(outcomes), np.eye(STICKS + 1)[STICKS], first_action=1)


def _outcomes(sticks: int, taken: int) -> Iterator[tuple[float, int, float, bool]]:
    """Yield probability, sticks left at the agent's next turn, reward and end of each reply of the opponent."""
    left = sticks - taken
    if left <= 0:
        yield 1.0, 0, -1.0, True
        return
    best = (left + 3) % 4
    replies = [best] if best else range(1, min(3, left) + 1)
    for reply in replies:
        rest = left - reply
        yield 1 / len(replies), rest, float(rest == 0), rest == 0


class NimEnv(DynamicsEnv):
    """Misère Nim, registered as ``lrl/Nim-v0``."""

    def __init__(self) -> None:
        super().__init__(nim())


class NimVectorEnv(DynamicsVectorEnv):
    """Many games of Nim.

    Args:
        num_envs: Number of games.
        max_episode_steps: Number of the agent's moves after which a game is truncated; none takes more than 5.
    """

    def __init__(self, num_envs: int = 1, max_episode_steps: int | None = None) -> None:
        super().__init__(nim(), num_envs, max_episode_steps)

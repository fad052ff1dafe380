"""The maze of 3 x 3 cells of ProPS (arXiv:2511.21928)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lrl.envs.batched.dynamics import DynamicsEnv, DynamicsVectorEnv
from lrl.envs.batched.tables import TableDynamics
from lrl.envs.tabular import TransitionTable

OPEN = ((0, 1), (1, 2), (2, 5), (4, 5), (0, 3), (3, 6), (6, 7), (7, 8))
"""Pairs of neighbouring cells without a wall between them; a cell is ``3 * row + column``."""
GOAL = 8
_MOVES = (-3, 3, 1, -1)
_STEP_REWARD = -0.1 / 9


@lru_cache(maxsize=1)
def maze() -> TableDynamics:
    """Return the maze: from cell 0 to cell 8 by actions 0 up, 1 down, 2 right and 3 left.

    Reward 1 on arrival, which ends the episode, else -0.1/9. A move into a wall leaves the state unchanged. The cells
    form a tree, in which the only way is down, down, right, right.
    """
    cells, moves = np.arange(9)[:, None], np.array(_MOVES)
    passages = {frozenset(pair) for pair in OPEN}
    is_open = np.array([[frozenset((cell, cell + move)) in passages for move in _MOVES] for cell in range(9)])
    following = np.where(is_open, cells + moves, cells)[..., None]
    arrives = is_open[..., None] & (following == GOAL)
    table = TransitionTable(
        next_state=following.astype(np.int64),
        probability=np.ones(following.shape),
        reward=np.where(arrives, 1.0, _STEP_REWARD),
        terminated=arrives,
    )
    return TableDynamics(table, np.eye(9)[0])


class MazeEnv(DynamicsEnv):
    """The maze, registered as ``lrl/Maze3x3-v0``."""

    def __init__(self) -> None:
        super().__init__(maze())


class MazeVectorEnv(DynamicsVectorEnv):
    """Many copies of the maze.

    Args:
        num_envs: Number of copies.
        max_episode_steps: Number of steps after which an episode is truncated.
    """

    def __init__(self, num_envs: int = 1, max_episode_steps: int | None = None) -> None:
        super().__init__(maze(), num_envs, max_episode_steps)

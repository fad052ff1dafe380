"""Where agent and objects stand in a room: drawn until everything can be walked up to.

A room of ``size`` x ``size`` cells, the outermost being walls, is one integer with bit ``y * size + x`` for each cell.
MiniGrid builds a world for each draw; with 16 objects in a room of 8 x 8 only one of a thousand will do.
"""

from __future__ import annotations

import functools

import numpy as np

from lrl.envs.babyai.view import FORWARD


def draw_agent_first(rng: np.random.Generator, size: int, number: int) -> tuple[int, list[int]]:
    """The agent's cell, and cells of objects none of which is beside it."""
    inside = _inside(size)
    while True:
        agent = int(inside[rng.integers(len(inside))])
        spots = rng.permutation(_away(size, agent))[:number].tolist()
        if reachable(size, agent, spots):
            return agent, spots


def draw_agent_last(
    rng: np.random.Generator, size: int, number: int, door: int, shunned: int | None
) -> tuple[int, int, list[int]]:
    """The agent's cell and direction, with nothing but wall or floor ahead, and the cells of objects.

    Args:
        rng: moves on.
        size: cells per side.
        number: of objects.
        door: a cell in the wall that must be reachable as well.
        shunned: a cell that no object stands on or beside.
    """
    inside = _inside(size)
    while True:
        spots = rng.permutation(inside if shunned is None else _away(size, shunned))[:number].tolist()
        things = {door, *spots}
        agent, direction = int(inside[rng.integers(len(inside))]), int(rng.integers(4))
        while agent in things or agent + FORWARD[direction][0] + size * FORWARD[direction][1] in things:
            agent, direction = int(inside[rng.integers(len(inside))]), int(rng.integers(4))
        if reachable(size, agent, [door, *spots]):
            return agent, direction, spots


def reachable(size: int, agent: int, things: list[int]) -> bool:
    """Whether the agent can walk up to each of some cells, none of which it can walk over."""
    taken = sum(1 << cell for cell in things)
    free = _floor(size) & ~taken
    reached, more = 0, 1 << agent
    while more != reached:
        reached = more
        more = (reached | _beside(reached, size)) & free
    return not taken & ~_beside(reached, size)


def _beside(cells: int, size: int) -> int:
    return cells << 1 | cells >> 1 | cells << size | cells >> size


@functools.cache
def _inside(size: int) -> np.ndarray:
    """The cells that are no wall, int64 ``(cell,)``."""
    return np.array([y * size + x for y in range(1, size - 1) for x in range(1, size - 1)])


@functools.cache
def _floor(size: int) -> int:
    """The same as one integer."""
    return sum(1 << cell for cell in _inside(size).tolist())


@functools.cache
def _away(size: int, cell: int) -> np.ndarray:
    """The cells that are neither ``cell`` nor beside it, int64 ``(cell,)``."""
    inside = _inside(size)
    distance = abs(inside // size - cell // size) + abs(inside % size - cell % size)
    return inside[distance > 1]

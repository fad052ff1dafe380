"""Placement of the agent and objects in a room, by sampling until the agent can reach all objects.

In a room of ``size`` x ``size`` cells, including the outer walls, a cell is the integer ``y * size + x``, and a set of
cells is an integer with one bit per cell. MiniGrid instead builds a grid of objects for each attempt, and with 16
objects in a room of 8 x 8 only one attempt in a thousand succeeds.
"""

from __future__ import annotations

import functools

import numpy as np

from lrl.envs.babyai.view import FORWARD


def place_agent_first(rng: np.random.Generator, size: int, num_objects: int) -> tuple[int, list[int]]:
    """Sample the agent's cell, then cells of objects that are not next to it.

    Args:
        rng: Random number generator.
        size: Side length of the room in cells.
        num_objects: Number of objects.

    Returns:
        The agent's cell and the cells of the objects.
    """
    floor = _floor(size)
    while True:
        agent = int(floor[rng.integers(len(floor))])
        objects = rng.permutation(_distant_floor(size, agent))[:num_objects].tolist()
        if all_reachable(size, agent, objects):
            return agent, objects


def place_agent_last(
    rng: np.random.Generator, size: int, num_objects: int, door: int, avoided: int | None
) -> tuple[int, int, list[int]]:
    """Sample cells of objects, then the agent's cell and direction such that no object is in front of it.

    Args:
        rng: Random number generator.
        size: Side length of the room in cells.
        num_objects: Number of objects.
        door: Cell of a door in the wall that must be reachable.
        avoided: Cell that has no object on it or next to it; None for no such cell.

    Returns:
        The agent's cell, its direction and the cells of the objects.
    """
    floor = _floor(size)
    while True:
        candidates = floor if avoided is None else _distant_floor(size, avoided)
        objects = rng.permutation(candidates)[:num_objects].tolist()
        occupied = {door, *objects}
        agent, direction = int(floor[rng.integers(len(floor))]), int(rng.integers(4))
        while agent in occupied or agent + FORWARD[direction][0] + size * FORWARD[direction][1] in occupied:
            agent, direction = int(floor[rng.integers(len(floor))]), int(rng.integers(4))
        if all_reachable(size, agent, [door, *objects]):
            return agent, direction, objects


def all_reachable(size: int, agent: int, objects: list[int]) -> bool:
    """Return whether the agent can move next to all objects, without moving over any of them.

    Args:
        size: Side length of the room in cells.
        agent: The agent's cell.
        objects: The cells of the objects.
    """
    occupied = sum(1 << cell for cell in objects)
    free = _floor_bits(size) & ~occupied
    reached, extended = 0, 1 << agent
    while extended != reached:
        reached = extended
        extended = (reached | _neighbours(reached, size)) & free
    return not occupied & ~_neighbours(reached, size)


def _neighbours(cells: int, size: int) -> int:
    return cells << 1 | cells >> 1 | cells << size | cells >> size


@functools.cache
def _floor(size: int) -> np.ndarray:
    """Return the cells that are not walls, int64 ``(cell,)``."""
    return np.array([y * size + x for y in range(1, size - 1) for x in range(1, size - 1)])


@functools.cache
def _floor_bits(size: int) -> int:
    return sum(1 << cell for cell in _floor(size).tolist())


@functools.cache
def _distant_floor(size: int, cell: int) -> np.ndarray:
    """Return the floor cells that are neither ``cell`` nor next to it, int64 ``(cell,)``."""
    floor = _floor(size)
    distance = abs(floor // size - cell // size) + abs(floor % size - cell % size)
    return floor[distance > 1]

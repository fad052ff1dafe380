"""What an agent of MiniGrid sees, straight from the grid.

``MiniGridEnv.gen_obs`` cuts a grid of objects out of the world, turns it up to four times and looks at each cell
several times. Looking each cell up once gives the same image in a quarter of the time, and halves that of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lrl.codecs.babyai import VIEW_SIZE

FORWARD = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Where directions 0 to 3 lead, in columns and rows."""

_EMPTY, _WALL = bytes((1, 0, 0)), bytes((2, 5, 0))
_MIDDLE, _LAST = VIEW_SIZE // 2, VIEW_SIZE - 1
_ALL = (1 << VIEW_SIZE) - 1


def _offsets(forward: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """World offsets of the cells of each row, near to far; a row runs from left to right."""
    (fx, fy), (rx, ry) = forward, (-forward[1], forward[0])
    sides = range(-_MIDDLE, VIEW_SIZE - _MIDDLE)
    return [[(ahead * fx + side * rx, ahead * fy + side * ry) for side in sides] for ahead in range(VIEW_SIZE)]


_OFFSETS = [_offsets(forward) for forward in FORWARD]
"""By the agent's direction."""


def view(env: Any) -> np.ndarray:
    """``obs["image"]`` of a MiniGrid environment with 7 cells to see and opaque walls, uint8 ``(7, 7, 3)``."""
    grid, x, y = env.grid, int(env.agent_pos[0]), int(env.agent_pos[1])
    width, height, things = grid.width, grid.height, grid.grid
    image = bytearray(VIEW_SIZE * VIEW_SIZE * 3)
    seen = 1 << _MIDDLE
    for ahead, offsets in enumerate(_OFFSETS[env.agent_dir]):
        row = [
            things[(y + dy) * width + x + dx] if 0 <= x + dx < width and 0 <= y + dy < height else _WALL
            for dx, dy in offsets
        ]
        seen, through = _look_along(row, seen)
        for side, thing in enumerate(row):
            if seen >> side & 1:
                start = 3 * (side * VIEW_SIZE + _LAST - ahead)
                image[start : start + 3] = _encoded(thing)
        seen = (through | through << 1 | through >> 1) & _ALL
    held = 3 * (_MIDDLE * VIEW_SIZE + _LAST)
    image[held : held + 3] = _encoded(env.carrying)
    return np.frombuffer(image, dtype=np.uint8).reshape(VIEW_SIZE, VIEW_SIZE, 3)


def _look_along(row: list[Any], seen: int) -> tuple[int, int]:
    """Spread sight to both sides of a row, up to what is opaque.

    Args:
        row: things of a row from left to right.
        seen: bit ``i`` says whether cell ``i`` is seen from the row before.

    Returns:
        the cells that are seen, and those of them that one can see through.
    """
    clear = sum(1 << side for side, thing in enumerate(row) if thing is None or _is_clear(thing))
    while True:
        through = seen & clear
        more = (seen | through << 1 | through >> 1) & _ALL
        if more == seen:
            return seen, through
        seen = more


def _is_clear(thing: Any) -> bool:
    return thing is not _WALL and thing.see_behind()


def _encoded(thing: Any) -> bytes:
    if thing is None:
        return _EMPTY
    return thing if thing is _WALL else bytes(thing.encode())

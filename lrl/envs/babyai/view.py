"""Fast computation of the partial view of a MiniGrid agent.

``MiniGridEnv.gen_obs`` copies a grid of objects, rotates it up to four times and visits each cell several times.
Visiting each cell once gives the same image in a quarter of the time, which halves the time of a step.
"""

from __future__ import annotations

import numpy as np
from minigrid.core.world_object import WorldObj
from minigrid.minigrid_env import MiniGridEnv

from lrl.codecs.babyai import VIEW_SIZE

FORWARD = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Step forward in directions 0 to 3, as ``(column, row)``."""

_EMPTY, _WALL = bytes((1, 0, 0)), bytes((2, 5, 0))
_MIDDLE, _LAST = VIEW_SIZE // 2, VIEW_SIZE - 1
_ALL = (1 << VIEW_SIZE) - 1

Cell = WorldObj | bytes | None
"""An object, None for an empty cell, or :data:`_WALL` for a cell outside of the grid."""


def _offsets(forward: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Return the grid offsets of the visible cells, one list per row from near to far, each from left to right."""
    (fx, fy), (rx, ry) = forward, (-forward[1], forward[0])
    sides = range(-_MIDDLE, VIEW_SIZE - _MIDDLE)
    return [[(ahead * fx + side * rx, ahead * fy + side * ry) for side in sides] for ahead in range(VIEW_SIZE)]


_OFFSETS = [_offsets(forward) for forward in FORWARD]
"""Grid offsets of the visible cells by the agent's direction."""


def agent_view(env: MiniGridEnv) -> np.ndarray:
    """Compute the image of a MiniGrid environment with view size 7 and opaque walls.

    Returns:
        Object, colour and state of each visible cell, uint8 ``(column, row, 3)``, as ``observation["image"]``.
    """
    grid, x, y = env.grid, int(env.agent_pos[0]), int(env.agent_pos[1])
    width, height, cells = grid.width, grid.height, grid.grid
    image = bytearray(VIEW_SIZE * VIEW_SIZE * 3)
    visible = 1 << _MIDDLE  # bit i: whether cell i of the current row is visible
    for ahead, offsets in enumerate(_OFFSETS[env.agent_dir]):
        row: list[Cell] = [
            cells[(y + dy) * width + x + dx] if 0 <= x + dx < width and 0 <= y + dy < height else _WALL
            for dx, dy in offsets
        ]
        visible, transparent = _spread_sideways(row, visible)
        for side, cell in enumerate(row):
            if visible >> side & 1:
                start = 3 * (side * VIEW_SIZE + _LAST - ahead)
                image[start : start + 3] = _encode(cell)
        visible = (transparent | transparent << 1 | transparent >> 1) & _ALL
    carried = 3 * (_MIDDLE * VIEW_SIZE + _LAST)
    image[carried : carried + 3] = _encode(env.carrying)
    return np.frombuffer(image, dtype=np.uint8).reshape(VIEW_SIZE, VIEW_SIZE, 3)


def _spread_sideways(row: list[Cell], visible: int) -> tuple[int, int]:
    """Extend the visible cells of a row to both sides, up to opaque cells.

    Args:
        row: Cells of a row from left to right.
        visible: Bit ``i`` is whether cell ``i`` is visible from the previous row.

    Returns:
        Bits of all visible cells, and of the visible cells that are transparent.
    """
    clear = sum(1 << side for side, cell in enumerate(row) if _is_transparent(cell))
    while True:
        transparent = visible & clear
        extended = (visible | transparent << 1 | transparent >> 1) & _ALL
        if extended == visible:
            return visible, transparent
        visible = extended


def _is_transparent(cell: Cell) -> bool:
    return cell is None or (not isinstance(cell, bytes) and cell.see_behind())


def _encode(cell: Cell) -> bytes:
    if cell is None:
        return _EMPTY
    return cell if isinstance(cell, bytes) else bytes(cell.encode())

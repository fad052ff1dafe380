"""Actions whose numbers lie outside the action space: rounded, clipped, then cast, and counted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces


def clip_to_space(space: Any, action: Any) -> tuple[Any, int | None]:
    """Clip every Box of an action, also inside a Dict or Tuple.

    Args:
        space: of the action.
        action: an element of the space, but for numbers of its Boxes, which may lie outside.

    Returns:
        The nearest element of the space, and how many numbers were clipped; None where the space has no Box.
    """
    if isinstance(space, spaces.Box):
        return clip_to_box(space, action)
    if isinstance(space, spaces.Dict):
        clipped = {key: clip_to_space(part, action[key]) for key, part in space.spaces.items()}
        return {key: inside for key, (inside, _) in clipped.items()}, _total([count for _, count in clipped.values()])
    if isinstance(space, spaces.Tuple):
        pairs = [clip_to_space(part, value) for part, value in zip(space.spaces, action, strict=True)]
        return tuple(inside for inside, _ in pairs), _total([count for _, count in pairs])
    return action, None


def clip_to_box(space: spaces.Box, values: Any) -> tuple[np.ndarray, int]:
    """Clip an array to a Box.

    Args:
        space: the Box; numbers for an integer one are rounded first, half to even.
        values: of its shape. Integers beyond 64 bits are an array of Python's.

    Returns:
        The array in the space's dtype, and how many numbers were clipped.
    """
    values = np.asarray(values).reshape(space.shape)
    if np.issubdtype(space.dtype, np.integer):
        return _clip_integers(space, values)
    with np.errstate(over="ignore"):  # infinity is clipped like any other number
        cast = values.astype(space.dtype)
    inside = np.clip(cast, space.low, space.high)
    return inside, int((inside != cast).sum())


def _clip_integers(space: spaces.Box, values: np.ndarray) -> tuple[np.ndarray, int]:
    """Clip with Python's integers: float64 holds neither bound of 64 bits, and a cast from outside wraps around."""
    rounded = [round(value) if math.isfinite(value) else value for value in values.ravel().tolist()]
    bounds = zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True)
    inside = [min(max(value, low), high) for value, (low, high) in zip(rounded, bounds, strict=True)]
    clipped = sum(value != nearest for value, nearest in zip(rounded, inside, strict=True))
    return np.array(inside, dtype=space.dtype).reshape(space.shape), clipped


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None

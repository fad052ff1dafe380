"""Clipping of actions to the action space, including rounding and casting to its dtype."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike


def clip_to_space(space: gym.Space, action: Any) -> tuple[Any, int | None]:
    """Clip all Box values of an action, including those nested in a Dict or Tuple.

    Args:
        space: The action space.
        action: An element of ``space``, except that Box values may be out of bounds.

    Returns:
        The nearest element of ``space``, and the number of clipped values; None if ``space`` contains no Box.
    """
    if isinstance(space, spaces.Box):
        return clip_to_box(space, action)
    if isinstance(space, spaces.Dict):
        clipped = {key: clip_to_space(subspace, action[key]) for key, subspace in space.spaces.items()}
        return {key: value for key, (value, _) in clipped.items()}, _total([count for _, count in clipped.values()])
    if isinstance(space, spaces.Tuple):
        pairs = [clip_to_space(subspace, value) for subspace, value in zip(space.spaces, action, strict=True)]
        return tuple(value for value, _ in pairs), _total([count for _, count in pairs])
    return action, None


def clip_to_box(space: spaces.Box, values: ArrayLike) -> tuple[np.ndarray, int]:
    """Clip an array to the bounds of a Box.

    Args:
        space: The Box. For an integer dtype, values are first rounded half to even.
        values: An array of shape ``space.shape``. Integers that do not fit into 64 bits require dtype object.

    Returns:
        The clipped array of shape ``space.shape`` and dtype ``space.dtype``, and the number of clipped values.
    """
    values = np.asarray(values).reshape(space.shape)
    if np.issubdtype(space.dtype, np.integer):
        return _clip_integers(space, values)
    with np.errstate(over="ignore"):  # Infinity is clipped like any other value.
        cast = values.astype(space.dtype)
    clipped = np.clip(cast, space.low, space.high)
    return clipped, int((clipped != cast).sum())


def _clip_integers(space: spaces.Box, values: np.ndarray) -> tuple[np.ndarray, int]:
    """Clip with Python integers: float64 cannot represent the 64-bit bounds, and casting out of bounds overflows."""
    rounded = [round(value) if math.isfinite(value) else value for value in values.ravel().tolist()]
    bounds = zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True)
    clipped = [min(max(value, low), high) for value, (low, high) in zip(rounded, bounds, strict=True)]
    count = sum(value != nearest for value, nearest in zip(rounded, clipped, strict=True))
    return np.array(clipped, dtype=space.dtype).reshape(space.shape), count


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None

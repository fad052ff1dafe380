"""Gymnasium's spaces as Minari keeps their samples: in columns, one per leaf, with a leading step axis."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def storable(space: gym.Space) -> gym.Space:
    """The space as Minari can write it: texts of whatever kind, MiniGrid's missions too, become ``Text``."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: storable(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([storable(part) for part in space.spaces])
    if space.dtype is not None and space.dtype.kind == "U":
        return spaces.Text(4096, min_length=0, charset=string.printable)
    return space


def columns(space: gym.Space, values: Sequence[Any]) -> Any:
    """Samples of a space as Minari keeps them: one array or list per leaf, with a leading step axis."""
    if isinstance(space, spaces.Dict):
        return {name: columns(part, [value[name] for value in values]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(columns(part, [value[place] for value in values]) for place, part in enumerate(space.spaces))
    return [str(value) for value in values] if isinstance(space, spaces.Text) else np.stack(values)


def row(space: gym.Space, kept: Any, step: int) -> Any:
    """One sample out of :func:`columns`."""
    if isinstance(space, spaces.Dict):
        return {name: row(part, kept[name], step) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(row(part, kept[place], step) for place, part in enumerate(space.spaces))
    return kept[step]


def mismatch(kept: gym.Space, native: gym.Space) -> bool:
    """Whether samples of one space cannot be read as samples of the other.

    Bounds must agree where both are finite: libraries differ in how they write infinity.
    """
    kept, native = storable(kept), storable(native)
    if isinstance(native, spaces.Dict) and isinstance(kept, spaces.Dict):
        return any(name not in kept.spaces or mismatch(kept[name], part) for name, part in native.spaces.items())
    if isinstance(native, spaces.Tuple) and isinstance(kept, spaces.Tuple):
        return len(kept) != len(native) or any(map(mismatch, kept, native))
    if isinstance(native, spaces.Text) and isinstance(kept, spaces.Text):
        return False
    if isinstance(native, spaces.Box) and isinstance(kept, spaces.Box):
        return kept.shape != native.shape or not (_agree(kept.low, native.low) and _agree(kept.high, native.high))
    return type(kept) is not type(native) or kept != native


def _agree(ours: np.ndarray, theirs: np.ndarray) -> bool:
    largest = np.finfo(np.float32).max
    both = (np.abs(ours) < largest) & (np.abs(theirs) < largest)
    return bool(np.allclose(ours[both], theirs[both]))

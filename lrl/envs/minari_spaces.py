"""Samples of Gymnasium spaces in Minari's storage format: one column per leaf, with a leading step axis."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Columns = dict[str, "Columns"] | tuple["Columns", ...] | list[str] | np.ndarray
"""Samples of a space: an array ``(step, ...)`` or a list of texts for each leaf."""


def to_minari_space(space: gym.Space) -> gym.Space:
    """Return the space as Minari can store it: every kind of text, such as MiniGrid's missions, becomes ``Text``."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: to_minari_space(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([to_minari_space(part) for part in space.spaces])
    if space.dtype is not None and space.dtype.kind == "U":
        return spaces.Text(4096, min_length=0, charset=string.printable)
    return space


def stack_samples(space: gym.Space, samples: Sequence[Any]) -> Columns:
    """Convert one sample per step to columns."""
    if isinstance(space, spaces.Dict):
        return {name: stack_samples(part, [sample[name] for sample in samples]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(stack_samples(part, [sample[index] for sample in samples]) for index, part in parts)
    return [str(sample) for sample in samples] if isinstance(space, spaces.Text) else np.stack(samples)


def sample_at(space: gym.Space, columns: Columns, step: int) -> Any:
    """Return the sample of one step from columns; the inverse of :func:`stack_samples`."""
    if isinstance(space, spaces.Dict):
        assert isinstance(columns, dict)
        return {name: sample_at(part, columns[name], step) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        assert isinstance(columns, tuple)
        return tuple(sample_at(part, columns[index], step) for index, part in enumerate(space.spaces))
    assert not isinstance(columns, dict)
    return columns[step]


def columns_of_infos(space: gym.Space, stored: Any) -> Columns:
    """Return the columns of a space that were stored as infos, which Minari reads without a space.

    Args:
        space: as Minari stores it.
        stored: a dictionary for each Dict or Tuple, an array of numbers or of encoded texts for each leaf.
    """
    if isinstance(space, spaces.Dict):
        return {name: columns_of_infos(part, stored[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(columns_of_infos(part, stored[f"_index_{index}"]) for index, part in enumerate(space.spaces))
    return [text.decode() for text in stored] if isinstance(space, spaces.Text) else stored


def columns_size(columns: Columns) -> int:
    """Return the size of columns in bytes, of texts without what Python adds to each."""
    if isinstance(columns, np.ndarray):
        return columns.nbytes
    parts = columns.values() if isinstance(columns, dict) else columns
    return sum(len(part) if isinstance(part, str) else columns_size(part) for part in parts)


def spaces_match(stored: gym.Space, native: gym.Space) -> bool:
    """Return whether samples of the stored space can be read as samples of the native space.

    Bounds need to agree only where both are finite: libraries differ in how they write infinity.
    """
    stored, native = to_minari_space(stored), to_minari_space(native)
    if isinstance(native, spaces.Dict) and isinstance(stored, spaces.Dict):
        parts = native.spaces.items()
        return all(name in stored.spaces and spaces_match(stored[name], part) for name, part in parts)
    if isinstance(native, spaces.Tuple) and isinstance(stored, spaces.Tuple):
        return len(stored) == len(native) and all(map(spaces_match, stored, native))
    if isinstance(native, spaces.Text) and isinstance(stored, spaces.Text):
        return True
    if isinstance(native, spaces.Box) and isinstance(stored, spaces.Box):
        if stored.shape != native.shape:
            return False
        return _bounds_agree(stored.low, native.low) and _bounds_agree(stored.high, native.high)
    return type(stored) is type(native) and stored == native


def _bounds_agree(stored: np.ndarray, native: np.ndarray) -> bool:
    largest = np.finfo(np.float32).max
    finite = (np.abs(stored) < largest) & (np.abs(native) < largest)
    return bool(np.allclose(stored[finite], native[finite]))

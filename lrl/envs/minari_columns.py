"""Samples of Gymnasium spaces in Minari's storage format: one column per leaf, with a leading step axis."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
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


def checked_leaves(space: gym.Space, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], gym.Space]]:
    """Yield each leaf whose stored values may lie outside of it, after its path in Minari's storage.

    Texts are not restricted when they are read, and an array of bytes cannot hold a number that a Box of all bytes
    does not.
    """
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from checked_leaves(part, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from checked_leaves(part, (*path, f"_index_{index}"))
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield path, space
    elif isinstance(space, spaces.Box):
        is_image = space.dtype == np.uint8 and bool((space.low == 0).all() and (space.high == 255).all())
        if not is_image:
            yield path, space


def invalid_values(space: gym.Space, column: np.ndarray) -> np.ndarray:
    """Return where a column holds what is no value of a leaf, bool ``(step, ...)``.

    These are numbers outside of a space of integers, and numbers that are not finite. Finite numbers beyond the bounds
    of a Box are left to :func:`values_out_of_bounds`.

    Args:
        space: one of :func:`checked_leaves`.
        column: ``(step, ...)``.
    """
    if column.dtype.kind not in "biuf":
        return np.ones(column.shape, dtype=bool)
    wrong = ~np.isfinite(column) if column.dtype.kind == "f" else np.zeros(column.shape, dtype=bool)
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.integer) and column.dtype.kind == "f":
            wrong |= column != np.rint(column)
        return wrong
    low, high = _bounds(space)
    wrong |= (column < low) | (column > high)
    return wrong | (column != np.rint(column)) if column.dtype.kind == "f" else wrong


def values_out_of_bounds(space: gym.Space, column: np.ndarray) -> np.ndarray:
    """Return where a column of a Box holds numbers beyond its bounds, bool ``(step, ...)``; all False for other leaves.

    Args:
        space: one of :func:`checked_leaves`.
        column: without :func:`invalid_values`, ``(step, ...)``.
    """
    if not isinstance(space, spaces.Box):
        return np.zeros(column.shape, dtype=bool)
    if column.dtype.kind == "f" and np.issubdtype(space.dtype, np.floating):
        with np.errstate(over="ignore"):  # a number that overflows is out of bounds
            column = column.astype(space.dtype, copy=False)  # 1 + 1e-12 is no more than the float32 bound 1
    return (column < space.low) | (column > space.high)


def clip_columns(space: gym.Space, columns: Columns) -> Columns:
    """Return columns whose numbers beyond the bounds of a Box are clipped to it."""
    if isinstance(space, spaces.Dict):
        assert isinstance(columns, dict)
        return columns | {name: clip_columns(part, columns[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        assert isinstance(columns, tuple)
        return tuple(clip_columns(part, column) for part, column in zip(space.spaces, columns, strict=True))
    if not (isinstance(space, spaces.Box) and isinstance(columns, np.ndarray)):
        return columns
    outside = values_out_of_bounds(space, columns)
    return np.where(outside, np.clip(columns, space.low, space.high), columns) if outside.any() else columns


def _bounds(space: gym.Space) -> tuple[Any, Any]:
    """Return the least and the greatest integers of a Discrete, MultiDiscrete or MultiBinary space."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


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

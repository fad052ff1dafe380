"""Ranges of the numbers in a data set, which integers in observation texts are scaled to."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from lrl.codecs.numbers import Range, Ranges
from lrl.codecs.space_formats import flatten
from lrl.data.minari_storage import DatasetReader


def observation_ranges(dataset_id: str) -> Ranges:
    """Return the least and the greatest value of every observed number, for ``env.numbers.ranges``.

    A configuration saves them with the policy, so that training and evaluation scale numbers in the same way.

    Args:
        dataset_id: Minari's name of a local data set.

    Returns:
        One ``(low, high)`` per dimension of a Box; a number that never changes gets a margin of 0.5. For a Dict or
        Tuple a list of these for each Box, by its key.

    Raises:
        ValueError: the data set is missing, empty or damaged, or its observations hold no Box.
    """
    reader = DatasetReader(dataset_id)
    space = reader.observation_space
    boxes = {path: leaf for path, leaf in flatten(space, space) if isinstance(leaf, spaces.Box)}
    if not boxes:
        raise ValueError(f"dataset_id is {dataset_id!r}, observed as {space}; it must be a Box, or hold one.")
    bounds = {path: np.full((2, int(np.prod(box.shape))), np.inf) for path, box in boxes.items()}
    for index in range(len(reader.lengths)):
        steps = [dict(flatten(space, observation)) for observation in reader.episode(index).observations]
        for path, (low, negated_high) in bounds.items():
            values = np.reshape([step[path] for step in steps], (len(steps), -1))
            np.minimum(low, values.min(0), out=low)
            np.minimum(negated_high, -values.max(0).astype(np.float64), out=negated_high)
    ranges = {path: _with_margin(low, -negated_high) for path, (low, negated_high) in bounds.items()}
    return ranges[""] if isinstance(space, spaces.Box) else ranges


def _with_margin(low: np.ndarray, high: np.ndarray) -> list[Range]:
    """Return ``(low, high)`` per dimension, with a margin of 0.5 where both are equal; arrays are ``(dimension,)``."""
    constant = low == high
    return [*zip((low - 0.5 * constant).tolist(), (high + 0.5 * constant).tolist(), strict=True)]

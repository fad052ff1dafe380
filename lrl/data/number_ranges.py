"""What the numbers of a data set span, so that integers can stand for no more than that."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from lrl.codecs.numbers import Range, Ranges
from lrl.codecs.space_formats import flatten
from lrl.data.minari_storage import DatasetReader


def observation_ranges(dataset_id: str) -> Ranges:
    """Least and greatest of every observed number, for ``env.numbers.ranges``.

    The configuration saves them with the policy: training and evaluation read the same numbers.

    Args:
        dataset_id: Minari's name, local.

    Returns:
        One ``(low, high)`` per dimension; 0.5 to both sides of a number that never changes. Of a Dict or Tuple a list
        of these for each Box, by its key.

    Raises:
        ValueError: the data set is missing, empty or damaged, or nothing that is observed is a Box.
    """
    reader = DatasetReader(dataset_id)
    space = reader.observation_space
    boxes = {path: leaf for path, leaf in flatten(space, space) if isinstance(leaf, spaces.Box)}
    if not boxes:
        raise ValueError(f"dataset_id is {dataset_id!r}, observed as {space}; it must be a Box, or hold one.")
    ends = {path: np.full((2, int(np.prod(box.shape))), np.inf) for path, box in boxes.items()}
    for index in range(len(reader.lengths)):
        steps = [dict(flatten(space, seen)) for seen in reader.episode(index).observations]
        for path, (low, negated) in ends.items():
            seen = np.reshape([step[path] for step in steps], (len(steps), -1))
            np.minimum(low, seen.min(0), out=low)
            np.minimum(negated, -seen.max(0).astype(np.float64), out=negated)
    ranges = {path: _ranges(low, -negated) for path, (low, negated) in ends.items()}
    return ranges[""] if isinstance(space, spaces.Box) else ranges


def _ranges(low: np.ndarray, high: np.ndarray) -> list[Range]:
    constant = low == high
    return [*zip((low - 0.5 * constant).tolist(), (high + 0.5 * constant).tolist(), strict=True)]

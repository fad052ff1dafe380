"""What the numbers of a data set span, so that integers can stand for no more than that."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from lrl.codecs.numbers import Range
from lrl.data.minari_storage import DatasetReader


def observation_ranges(dataset_id: str) -> list[Range]:
    """Least and greatest of every observed number, for ``env.numbers.ranges``.

    The configuration saves them with the policy: training and evaluation read the same numbers.

    Args:
        dataset_id: Minari's name, local.

    Returns:
        One ``(low, high)`` per dimension; 0.5 to both sides of a number that never changes.

    Raises:
        ValueError: the data set is missing, empty or damaged, or its observations are no vectors.
    """
    reader = DatasetReader(dataset_id)
    if not isinstance(reader.observation_space, spaces.Box):
        raise ValueError(f"dataset_id is {dataset_id!r}, observed as {reader.observation_space}; it must be a Box.")
    low = np.full(int(np.prod(reader.observation_space.shape)), np.inf)
    high = -low
    for index in range(len(reader.lengths)):
        seen = np.reshape(reader.episode(index).observations, (-1, len(low)))
        low, high = np.minimum(low, seen.min(0)), np.maximum(high, seen.max(0))
    constant = low == high
    return [*zip((low - 0.5 * constant).tolist(), (high + 0.5 * constant).tolist(), strict=True)]

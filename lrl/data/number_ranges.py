"""Ranges and statistics of the numbers in a data set, which observation texts are scaled or normalised by."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gymnasium import spaces

from lrl.codecs.number_codecs import Range
from lrl.codecs.numbers import Ranges
from lrl.codecs.space_formats import flatten
from lrl.envs.minari_reader import DatasetReader


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
    bounds: dict[str, np.ndarray] = {}
    for path, values in _observed_numbers(dataset_id):
        low, negated_high = bounds.setdefault(path, np.full((2, values.shape[1]), np.inf))
        np.minimum(low, values.min(0), out=low)
        np.minimum(negated_high, -values.max(0).astype(np.float64), out=negated_high)
    return _by_key({path: _with_margin(low, -negated_high) for path, (low, negated_high) in bounds.items()})


def observation_statistics(dataset_id: str) -> Ranges:
    """Return mean and standard deviation of every observed number, for ``env.numbers.statistics``.

    Args:
        dataset_id: Minari's name of a local data set; one of random actions takes the place of a warm-up.

    Returns:
        One ``(mean, deviation)`` per dimension of a Box; the deviation of a number that never changes is 1. For a Dict
        or Tuple a list of these for each Box, by its key.

    Raises:
        ValueError: the data set is missing, empty or damaged, or its observations hold no Box.
    """
    merged: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}
    for path, values in _observed_numbers(dataset_id):
        values = values.astype(np.float64)
        count, mean, squares = merged.get(path, (0, np.zeros(values.shape[1]), np.zeros(values.shape[1])))
        own_mean, total = values.mean(0), count + len(values)
        shift = own_mean - mean  # Chan et al., 1979
        squares = squares + ((values - own_mean) ** 2).sum(0) + shift**2 * count * len(values) / total
        merged[path] = (total, mean + shift * len(values) / total, squares)
    return _by_key({path: _with_deviation(*one) for path, one in merged.items()})


_CONSTANT = 1e-9
"""Standard deviation, as a share of the mean, up to which a number never changes: rounding leaves some."""


def _observed_numbers(dataset_id: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the observed numbers of each episode and Box, by its path, ``(step, dimension)``."""
    reader = DatasetReader(dataset_id)
    space = reader.observation_space
    boxes = [path for path, leaf in flatten(space, space) if isinstance(leaf, spaces.Box)]
    if not boxes:
        raise ValueError(f"dataset_id is {dataset_id!r}, observed as {space}; it must be a Box, or hold one.")
    for index in range(len(reader.lengths)):
        steps = [dict(flatten(space, observation)) for observation in reader.episode(index).observations]
        for path in boxes:
            yield path, np.reshape([step[path] for step in steps], (len(steps), -1))


def _by_key(pairs: dict[str, list[Range]]) -> Ranges:
    """Return the pairs of a Box, whose path is empty, without a key."""
    return pairs.get("", pairs)


def _with_margin(low: np.ndarray, high: np.ndarray) -> list[Range]:
    """Return ``(low, high)`` per dimension, with a margin of 0.5 where both are equal; arrays are ``(dimension,)``."""
    constant = low == high
    return [*zip((low - 0.5 * constant).tolist(), (high + 0.5 * constant).tolist(), strict=True)]


def _with_deviation(count: int, mean: np.ndarray, squares: np.ndarray) -> list[Range]:
    """Return ``(mean, deviation)`` per dimension from a sum of squared deviations; arrays are ``(dimension,)``."""
    deviation = np.sqrt(squares / count)
    return [*zip(mean.tolist(), np.where(deviation > _CONSTANT * np.abs(mean), deviation, 1.0).tolist(), strict=True)]

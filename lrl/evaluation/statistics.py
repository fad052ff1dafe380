"""Confidence intervals of means, rates and interquartile means, computed by scipy.

``scipy.stats`` takes a second to import, so it is imported inside functions: training does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

Interval = tuple[float, float]
"""Lower and upper bound; nan if there is no interval."""

_RESAMPLES = 10_000
_BATCH = 2_000_000
"""Number of values that the bootstrap keeps in memory at a time."""


def t_interval(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return Student's t interval of a mean, for unbounded values; ``(nan, nan)`` for fewer than two values.

    Args:
        values: ``(n,)``.
        confidence: confidence level.
    """
    from scipy.stats import sem, t

    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return math.nan, math.nan
    if np.ptp(numbers) == 0:  # scipy returns nan
        return float(numbers[0]), float(numbers[0])
    lower, upper = t.interval(confidence, len(numbers) - 1, loc=numbers.mean(), scale=sem(numbers))
    return float(lower), float(upper)


def bootstrap_interval(values: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return a percentile bootstrap interval of a mean; ``(nan, nan)`` for fewer than two values.

    It lies within the range of the values.

    Args:
        values: ``(n,)``.
        confidence: confidence level.
        seed: seed of the resampling.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return math.nan, math.nan
    lower, upper = bootstrap_bounds((numbers,), _mean, confidence, seed=seed)
    return float(lower), float(upper)


def ratio_interval(numerators: ArrayLike, denominators: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return a percentile bootstrap interval of ``sum(numerators) / sum(denominators)``, resampling pairs.

    For rates of turns: the turns of one episode are correlated, so episodes are resampled and not turns. A single pair
    has an interval of width 0.

    Args:
        numerators: ``(n,)``.
        denominators: ``(n,)``.
        confidence: confidence level.
        seed: seed of the resampling.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(above) < 2:
        return float(above.sum() / below.sum()), float(above.sum() / below.sum())
    lower, upper = bootstrap_bounds((above, below), _ratio, confidence, seed=seed, paired=True)
    return float(lower), float(upper)


def bootstrap_bounds(
    samples: tuple[np.ndarray, ...],
    statistic: Callable[..., np.ndarray],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
    paired: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper bound of scipy's percentile bootstrap, each with the shape of the statistic.

    Args:
        samples: arrays ``(n, ...)``, which are resampled along their first axis.
        statistic: reduces resampled arrays along the keyword argument ``axis``.
        confidence: confidence level.
        resamples: number of resamples.
        seed: seed of the resampling.
        paired: whether all arrays are resampled with the same indices.
    """
    from scipy.stats import bootstrap

    result = bootstrap(
        samples,
        statistic,
        axis=0,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=resamples,
        batch=max(1, _BATCH // max(sample.size for sample in samples)),
        rng=np.random.default_rng(seed),
        paired=paired,
    )
    return result.confidence_interval.low, result.confidence_interval.high


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval of a rate (J. Am. Stat. Assoc. 22, 1927), which lies inside [0, 1].

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    from scipy.stats import binomtest

    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes is {successes} of {trials} trials; it must be in [0, trials], trials positive.")
    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def interquartile_mean(values: ArrayLike, axis: int | None = None) -> np.ndarray:
    """Return the mean without the lowest and the highest quarter (arXiv:2108.13264).

    The number of values that are cut on each side is rounded down, as in rliable.

    Args:
        values: any shape.
        axis: axis to reduce; None reduces all, for example runs and tasks.

    Returns:
        An array without ``axis``, or a scalar ``()``.
    """
    from scipy.stats import trim_mean

    numbers = np.asarray(values, dtype=np.float64)
    return trim_mean(numbers.reshape(-1) if axis is None else numbers, 0.25, axis=axis or 0)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    return values.mean(axis=axis)


def _ratio(above: np.ndarray, below: np.ndarray, axis: int) -> np.ndarray:
    return above.sum(axis=axis) / below.sum(axis=axis)

"""Means, rates and interquartile means with intervals, by scipy.

scipy.stats takes a second to import, so it is imported where it is used: training does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Interval = tuple[float, float]
"""Lower and upper bound; nan where there is no interval."""

_RESAMPLES = 10_000
_BATCH = 2_000_000
"""Values that the bootstrap holds at a time."""


def t_interval(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of an unbounded figure; ``(nan, nan)`` for fewer than two values.

    Args:
        values: ``(n,)``.
        confidence: share of such intervals that hold the true mean.
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
    """Percentile bootstrap interval of a mean, which lies within the values; ``(nan, nan)`` for fewer than two.

    Args:
        values: ``(n,)``.
        confidence: of the interval.
        seed: of the resampling.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return math.nan, math.nan
    lower, upper = bootstrap_bounds((numbers,), _mean, confidence, seed=seed)
    return float(lower), float(upper)


def ratio_interval(numerators: ArrayLike, denominators: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of ``sum(numerators) / sum(denominators)``, resampling pairs ``(n,)``.

    For rates of turns: the turns of one episode depend on each other, so episodes are resampled and not turns. A single
    pair has an interval of width 0, the ratio itself.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(above) < 2:
        return float(above.sum() / below.sum()), float(above.sum() / below.sum())
    lower, upper = bootstrap_bounds((above, below), _ratio, confidence, seed=seed, paired=True)
    return float(lower), float(upper)


def bootstrap_bounds(
    samples: tuple[np.ndarray, ...],
    statistic: Callable[..., Any],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of scipy's percentile bootstrap, with a generator of a fixed seed.

    Args:
        samples: arrays that are resampled along their first axis.
        statistic: takes resampled arrays and ``axis``.
        confidence: of the interval.
        resamples: how often.
        seed: of the generator.
        options: of :func:`scipy.stats.bootstrap`.
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
        **options,
    )
    return result.confidence_interval.low, result.confidence_interval.high


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a rate (J. Am. Stat. Assoc. 22, 1927), which stays inside [0, 1].

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    from scipy.stats import binomtest

    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes is {successes} of {trials} trials; it must be in 0..trials, and trials positive.")
    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def interquartile_mean(values: ArrayLike, axis: int | None = None) -> Any:
    """Mean without the lowest and the highest quarter (arXiv:2108.13264; whole values are cut, as in rliable).

    Args:
        values: any shape.
        axis: which axis to reduce; None takes all values together, runs and tasks alike.
    """
    from scipy.stats import trim_mean

    numbers = np.asarray(values, dtype=np.float64)
    return trim_mean(numbers.reshape(-1) if axis is None else numbers, 0.25, axis=axis or 0)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    return values.mean(axis=axis)


def _ratio(above: np.ndarray, below: np.ndarray, axis: int) -> np.ndarray:
    return above.sum(axis=axis) / below.sum(axis=axis)

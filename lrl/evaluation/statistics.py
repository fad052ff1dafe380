"""Means, rates and interquartile means, each with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

Interval = tuple[float, float]
"""Lower and upper bound."""


def student_t_quantile(probability: float, degrees: int) -> float:
    """The t-distribution's quantile, by bisection of its integral (about 1e-6 exact).

    With ``t = sqrt(degrees) tan(angle)`` the density is proportional to ``cos(angle) ** (degrees - 1)``.

    Args:
        probability: in (0, 1).
        degrees: of freedom, at least 1.
    """
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    density = np.cos(angles).clip(min=0) ** (degrees - 1)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(probability, cumulative / cumulative[-1], angles)
    return float(math.sqrt(degrees) * math.tan(angle))


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Student's interval of a mean; ``(nan, nan)`` for fewer than two values.

    Args:
        values: ``(n,)``.
        confidence: share of such intervals that hold the true mean.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return math.nan, math.nan
    half = student_t_quantile((1 + confidence) / 2, len(numbers) - 1) * numbers.std(ddof=1) / math.sqrt(len(numbers))
    return float(numbers.mean() - half), float(numbers.mean() + half)


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a rate (J. Am. Stat. Assoc. 22, 1927), which stays inside [0, 1].

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes is {successes} of {trials} trials; it must be in 0..trials, and trials positive.")
    z, rate = NormalDist().inv_cdf((1 + confidence) / 2), successes / trials
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def interquartile_mean(values: ArrayLike, axis: int | None = None) -> np.ndarray:
    """Mean without the lowest and the highest quarter (arXiv:2108.13264; whole values are cut, as in rliable).

    Args:
        values: any shape.
        axis: which axis to reduce; None takes all values together, runs and tasks alike.
    """
    numbers = np.asarray(values, dtype=np.float64)
    numbers = np.sort(numbers.reshape(-1) if axis is None else numbers, axis=axis or 0)
    size = numbers.shape[axis or 0]
    cut = size // 4
    return numbers.take(np.arange(cut, size - cut), axis=axis or 0).mean(axis=axis or 0)


def stratified_bootstrap_interval(
    scores: ArrayLike,
    statistic: Callable[[np.ndarray], np.ndarray],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile interval from runs that are drawn again, for each task apart (arXiv:2108.13264).

    Args:
        scores: ``(run, task)``, or ``(run,)`` for one task.
        statistic: of resampled scores ``(resample, run * task)`` along the last axis, ``(resample,)``.
        confidence: of the interval.
        resamples: how often the runs are drawn.
        seed: of the draws.
    """
    numbers = np.asarray(scores, dtype=np.float64)
    numbers = numbers[:, None] if numbers.ndim == 1 else numbers
    runs, tasks = numbers.shape
    rows = np.random.default_rng(seed).integers(runs, size=(resamples, runs, tasks))
    drawn = statistic(numbers[rows, np.arange(tasks)].reshape(resamples, -1))
    lower, upper = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(lower), float(upper)


def iqm_interval(scores: ArrayLike, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """The stratified bootstrap interval of the interquartile mean of ``scores`` ``(run,)`` or ``(run, task)``."""
    return stratified_bootstrap_interval(
        scores, lambda drawn: interquartile_mean(drawn, axis=-1), confidence, resamples, seed
    )


def ratio_interval(
    numerators: Sequence[float] | np.ndarray,
    denominators: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of ``sum(numerators) / sum(denominators)``, drawing pairs ``(n,)``.

    For rates of turns: turns of one episode hang together, so episodes are drawn and not turns.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    rows = np.random.default_rng(seed).integers(len(above), size=(resamples, len(above)))
    lower, upper = np.quantile(above[rows].sum(1) / below[rows].sum(1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(lower), float(upper)

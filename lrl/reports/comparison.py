"""Two sets of runs compared by pairs with the same seed: the difference, its interval, and what the pairs can detect.

Power is that of the two-sided paired t test (Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from lrl.evaluation.statistics import Interval, bootstrap_interval, t_interval
from lrl.reports.seed_intervals import MIN_SEEDS

POWER = 0.8
"""Probability with which a difference is to be detected."""

_ALPHA = 0.05
_LARGE_SAMPLE = 10_000
"""Number of pairs above which the t test's power is that of the normal distribution."""
_NODES = 4096
"""Points of the numerical integral over the sample's variance."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The figures of runs and baseline runs, paired by seed."""

    seeds: np.ndarray
    """Seeds that both have, sorted, int64 ``(pair,)``."""
    values: np.ndarray
    """Figures of the runs, float64 ``(pair,)``."""
    baseline: np.ndarray
    """Figures of the baseline runs, float64 ``(pair,)``."""
    unpaired: tuple[int, ...]
    """Seeds that only the runs have, sorted; they are left out."""
    unpaired_baseline: tuple[int, ...]
    """Seeds that only the baseline has, sorted; they are left out."""
    bounded: bool
    """Whether the figure has a least and a greatest value."""

    @property
    def differences(self) -> np.ndarray:
        """Return ``values - baseline``, ``(pair,)``."""
        return self.values - self.baseline

    @property
    def mean(self) -> float:
        """Return the mean difference."""
        return float(self.differences.mean())

    @property
    def standard_deviation(self) -> float:
        """Return the standard deviation of the differences; nan for a single pair."""
        return float(self.differences.std(ddof=1)) if len(self.seeds) > 1 else math.nan

    def interval(self, bootstrap: bool | None = None) -> Interval | None:
        """Return the 95% interval of the mean difference, or None with fewer than five pairs.

        Bounded figures have a percentile bootstrap over pairs, whose ends are means of observed differences and so
        never outside the range; with few pairs it is somewhat too narrow. Others have Student's paired interval.

        Args:
            bootstrap: whether it is a bootstrap; None decides by ``bounded``.
        """
        if len(self.seeds) < MIN_SEEDS:
            return None
        resampled = self.bounded if bootstrap is None else bootstrap
        return bootstrap_interval(self.differences) if resampled else t_interval(self.differences)

    def smallest_effect(self) -> float:
        """Return the smallest difference that this many pairs detect with power .8; nan for a single pair."""
        if len(self.seeds) < 2:
            return math.nan
        return smallest_effect(len(self.seeds)) * self.standard_deviation

    def pairs_needed(self) -> float:
        """Return the number of pairs that detect the observed mean difference with power .8.

        At least 2; infinite where the mean difference is 0, nan for a single pair.
        """
        if len(self.seeds) < 2:
            return math.nan
        if self.mean == 0:
            return math.inf
        spread = self.standard_deviation
        return pairs_needed(abs(self.mean) / spread) if spread > 0 else 2


def compare(values: Mapping[int, float], baseline: Mapping[int, float], bounded: bool) -> Comparison:
    """Pair the figures of two sets of runs by seed.

    Args:
        values: seed to figure of the runs.
        baseline: seed to figure of the baseline runs.
        bounded: whether the figure has a least and a greatest value.

    Raises:
        ValueError: the two have no seed in common.
    """
    seeds = sorted(set(values) & set(baseline))
    if not seeds:
        ours, theirs = (", ".join(map(str, sorted(side)[:5])) for side in (values, baseline))
        raise ValueError(f"the runs have seeds {ours} and the baseline {theirs}; at least one seed must be in both.")
    return Comparison(
        seeds=np.array(seeds),
        values=np.array([values[seed] for seed in seeds], dtype=np.float64),
        baseline=np.array([baseline[seed] for seed in seeds], dtype=np.float64),
        unpaired=tuple(sorted(set(values) - set(baseline))),
        unpaired_baseline=tuple(sorted(set(baseline) - set(values))),
        bounded=bounded,
    )


def power_of_pairs(effect: float, pairs: int) -> float:
    """Return the power of the two-sided paired t test at level .05.

    Args:
        effect: mean difference over the standard deviation of the differences.
        pairs: their number, at least 2.
    """
    from scipy.stats import chi2, norm, t

    shift, spread = effect * math.sqrt(pairs), np.ones(1)
    critical = norm.isf(_ALPHA / 2)
    if pairs <= _LARGE_SAMPLE:
        # The noncentral t distribution as a mean over the sample's standard deviation: scipy 1.17's own is nan for some
        # arguments.
        critical = t.isf(_ALPHA / 2, pairs - 1)
        spread = np.sqrt(chi2.ppf((np.arange(_NODES) + 0.5) / _NODES, pairs - 1) / (pairs - 1))
    return float(np.mean(norm.cdf(shift - critical * spread) + norm.cdf(-shift - critical * spread)))


def smallest_effect(pairs: int) -> float:
    """Return the effect, in standard deviations of the differences, that ``pairs`` pairs detect with power .8."""
    from scipy.optimize import brentq

    return float(cast(float, brentq(lambda effect: power_of_pairs(effect, pairs) - POWER, 0.0, 30.0)))


def pairs_needed(effect: float) -> int:
    """Return the smallest number of pairs, at least 2, that detect an effect above 0 with power .8.

    Args:
        effect: mean difference over the standard deviation of the differences.
    """
    from scipy.stats import norm

    enough = ((norm.isf(_ALPHA / 2) + norm.isf(1 - POWER)) / effect) ** 2  # with a known standard deviation
    pairs = max(2, math.ceil(enough))
    while pairs <= _LARGE_SAMPLE and power_of_pairs(effect, pairs) < POWER:  # estimating it takes about two more
        pairs += 1
    return pairs

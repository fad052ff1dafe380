"""Paired comparison of two sets of runs with the same seeds: mean difference, interval and statistical power.

The power is computed for the two-sided paired t test (Cohen, Statistical Power Analysis for the Behavioral Sciences,
1988).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from lrl.evaluation.pictures import logged_rows
from lrl.evaluation.report import read_result
from lrl.evaluation.statistics import MIN_SEEDS, Interval, bootstrap_interval, bounds_of, t_interval

POWER = 0.8
"""Target power: probability of detecting a difference."""

_ALPHA = 0.05
_NODES = 4096
"""Number of points of the numerical integral over the sample's variance."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds one number per run and baseline run, such as a final return, paired by seed."""

    seeds: np.ndarray
    """Common seeds in ascending order, int64 ``(pair,)``."""
    values: np.ndarray
    """Values of the runs, float64 ``(pair,)``."""
    baseline: np.ndarray
    """Values of the baseline runs, float64 ``(pair,)``."""
    unpaired: tuple[int, ...]
    """Seeds of runs without a baseline run, in ascending order; these runs are omitted."""
    unpaired_baseline: tuple[int, ...]
    """Seeds of baseline runs without a run, in ascending order; these runs are omitted."""
    bounded: bool
    """Whether the values have a known minimum and maximum."""

    @property
    def differences(self) -> np.ndarray:
        """Differences ``values - baseline``, float64 ``(pair,)``."""
        return self.values - self.baseline

    @property
    def mean(self) -> float:
        """Mean of the differences over pairs."""
        return float(self.differences.mean())

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the differences; there must be at least two pairs."""
        return float(self.differences.std(ddof=1))

    def interval(self, bootstrap: bool) -> Interval | None:
        """Return the 95% interval of the mean difference, or None with fewer than five pairs.

        Args:
            bootstrap: True computes a percentile bootstrap over pairs, which stays within the range of the observed
                differences but is somewhat too narrow for few pairs. False computes Student's paired interval.
        """
        if len(self.seeds) < MIN_SEEDS:
            return None
        return bootstrap_interval(self.differences) if bootstrap else t_interval(self.differences)

    def smallest_effect(self) -> float:
        """Return the smallest mean difference that this number of pairs, at least two, detects with power 0.8."""
        return smallest_effect(len(self.seeds)) * self.standard_deviation

    def pairs_needed(self) -> float:
        """Return the smallest number of pairs that would detect the observed mean difference with power 0.8.

        It is at least 2, and infinite if the mean difference is 0. At least two pairs must be given, from which the
        standard deviation is estimated.
        """
        if self.mean == 0:
            return math.inf
        spread = self.standard_deviation
        return pairs_needed(abs(self.mean) / spread) if spread > 0 else 2


def compare(values: Mapping[int, float], baseline: Mapping[int, float], bounded: bool) -> Comparison:
    """Pair the values of two sets of runs by seed.

    Args:
        values: seed to value of each run.
        baseline: seed to value of each baseline run.
        bounded: whether the values have a known minimum and maximum.

    Raises:
        ValueError: If the two have no seed in common.
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
    """Return the power of the two-sided paired t test at level 0.05.

    Args:
        effect: mean difference over the standard deviation of the differences.
        pairs: number of pairs, at least 2.
    """
    from scipy.stats import chi2, norm, t

    shift, critical = effect * math.sqrt(pairs), t.isf(_ALPHA / 2, pairs - 1)
    # The noncentral t distribution is computed as a mean over the sample's standard deviation, because the function of
    # scipy 1.17 returns nan for some arguments.
    spread = np.sqrt(chi2.ppf((np.arange(_NODES) + 0.5) / _NODES, pairs - 1) / (pairs - 1))
    return float(np.mean(norm.cdf(shift - critical * spread) + norm.cdf(-shift - critical * spread)))


def smallest_effect(pairs: int) -> float:
    """Return the smallest effect that is detected with power 0.8, in standard deviations of the differences.

    Args:
        pairs: number of pairs, at least 2.
    """
    from scipy.optimize import brentq

    return float(cast(float, brentq(lambda effect: power_of_pairs(effect, pairs) - POWER, 0.0, 30.0)))


def pairs_needed(effect: float) -> int:
    """Return the smallest number of pairs, at least 2, that detect an effect above 0 with power 0.8.

    Args:
        effect: mean difference over the standard deviation of the differences.
    """
    from scipy.stats import norm

    enough = ((norm.isf(_ALPHA / 2) + norm.isf(1 - POWER)) / effect) ** 2  # with a known standard deviation
    pairs = max(2, math.ceil(enough))
    while power_of_pairs(effect, pairs) < POWER:  # an estimated deviation needs about 2 more
        pairs += 1
    return pairs


# Values of runs, read from run directories or from stored results.

DEFAULT_METRIC = "val/exact_success"
"""Metric that is read if neither the user nor a stored result names one."""


def common_metric(paths: Sequence[Path], metric: str | None = None) -> str:
    """Return ``metric`` if it is given, otherwise the common metric of all stored results among ``paths``.

    Raises:
        ValueError: If the stored results have different metrics.
    """
    if metric is not None:
        return metric
    metrics = {str(path): _stored_result(path)["metric"] for path in paths if path.suffix == ".json"}
    if len(set(metrics.values())) > 1:
        listed = ", ".join(f"{name} has {own}" for name, own in metrics.items())
        raise ValueError(f"the results have different metrics ({listed}); name results that have the same metric.")
    return next(iter(metrics.values()), DEFAULT_METRIC)


def read_figures(paths: Sequence[Path], metric: str) -> tuple[dict[int, float], bool]:
    """Read the last value of a metric of every run.

    Args:
        paths: run directories, and JSON files of stored results, which contain several runs each.
        metric: a column of ``metrics.csv``. A stored result must contain it as its own metric, or as the metric of its
            learning curve (``drawn``).

    Returns:
        The values by seed, and whether the minimum and maximum of the possible values are known.

    Raises:
        ValueError: If a path does not exist or lacks the metric, or two runs have the same seed.
    """
    values: dict[int, float] = {}
    bounded = bounds_of({"metric": metric}) is not None
    for path in paths:
        if not path.exists():
            raise ValueError(f"run is {str(path)!r}, which does not exist; name a run directory or a file of results.")
        if path.suffix == ".json":
            result = _stored_result(path)
            found = [(int(run["seed"]), _stored_value(path, result, run, metric)) for run in result["runs"]]
            bounded = bounded or (metric == result["metric"] and bounds_of(result) is not None)
        else:
            found = [(_seed(path), float(logged_rows(path, metric)[-1][metric]))]
        for seed, value in found:
            if seed in values:
                raise ValueError(f"run is {str(path)!r}, whose seed {seed} another run has; name one run per seed.")
            values[seed] = value
    return values, bounded


def _stored_result(path: Path) -> dict[str, Any]:
    """Read a stored result that contains runs.

    Raises:
        ValueError: If the file cannot be read, or contains no runs with a metric.
    """
    result = read_result(path)
    if "metric" not in result or not result.get("runs"):
        raise ValueError(f"run is {str(path)!r}, which holds no runs with a metric; name the result of training runs.")
    return result


def _stored_value(path: Path, result: Mapping[str, Any], run: Mapping[str, Any], metric: str) -> float:
    """Return the last value of a metric in a run of a stored result.

    Raises:
        ValueError: If the run contains no values of the metric.
    """
    curve = next((run[name] for name in ("curve", "drawn") if metric in run.get(name, {})), None)
    if curve is None:
        raise ValueError(f"metric is {metric!r}, but {path} holds {result['metric']!r}; name that metric.")
    return float(curve[metric][-1])


def _seed(run: Path) -> int:
    """Return the seed of a run directory.

    Raises:
        ValueError: If the folder is not a run directory.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"run is {str(run)!r}, which is not a run directory: it has no config.yaml.")
    return int(yaml.safe_load(file.read_text(encoding="utf-8"))["seed_everything"])

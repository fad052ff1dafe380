"""Confidence intervals over episodes and seeds, computed by scipy, and the rule that determines seeds.

``scipy.stats`` is imported inside functions because its import takes a second and training does not need it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Interval = tuple[float, float]
"""Lower and upper bound; nan if there is no interval."""

_CONFIDENCE = 0.95
_RESAMPLES = 10_000
_BATCH = 2_000_000
"""Number of values that the bootstrap holds in memory at a time."""


def json_bounds(interval: Interval) -> list[float | None]:
    """Return the bounds of an interval for a JSON file, with None for nan."""
    return [None if math.isnan(bound) else bound for bound in interval]


def t_interval(values: ArrayLike) -> Interval:
    """Return Student's 95% interval of the mean of values ``(n,)``, for unbounded values; nan for fewer than two."""
    from scipy.stats import sem, t

    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return math.nan, math.nan
    if np.ptp(numbers) == 0:  # scipy returns nan
        return float(numbers[0]), float(numbers[0])
    lower, upper = t.interval(_CONFIDENCE, len(numbers) - 1, loc=numbers.mean(), scale=sem(numbers))
    return float(lower), float(upper)


def bootstrap_interval(values: ArrayLike, seed: int = 0) -> Interval:
    """Return a 95% percentile bootstrap interval of a mean, which lies within the range of the values.

    Args:
        values: the values, ``(n,)``; for fewer than two of them both bounds are nan.
        seed: seed of the resampling.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return math.nan, math.nan
    lower, upper = bootstrap_bounds((numbers,), _mean, seed=seed)
    return float(lower), float(upper)


def ratio_interval(numerators: ArrayLike, denominators: ArrayLike, seed: int = 0) -> Interval:
    """Return a 95% percentile bootstrap interval of ``sum(numerators) / sum(denominators)``, resampling pairs.

    It is used for rates of turns: since the turns of one episode are correlated, episodes are resampled instead of
    turns. For a single pair the interval has width 0.

    Args:
        numerators: numerator of each pair, ``(n,)``.
        denominators: denominator of each pair, ``(n,)``.
        seed: seed of the resampling.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(above) < 2:
        return float(above.sum() / below.sum()), float(above.sum() / below.sum())
    lower, upper = bootstrap_bounds((above, below), _ratio, seed=seed, paired=True)
    return float(lower), float(upper)


def bootstrap_bounds(
    samples: tuple[np.ndarray, ...],
    statistic: Callable[..., np.ndarray],
    resamples: int = _RESAMPLES,
    seed: int = 0,
    paired: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of scipy's 95% percentile bootstrap interval, each with the shape of the statistic.

    Args:
        samples: arrays ``(n, ...)``, which are resampled along their first axis.
        statistic: reduces resampled arrays along the keyword argument ``axis``.
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
        confidence_level=_CONFIDENCE,
        n_resamples=resamples,
        batch=max(1, _BATCH // max(sample.size for sample in samples)),
        rng=np.random.default_rng(seed),
        paired=paired,
    )
    return result.confidence_interval.low, result.confidence_interval.high


def wilson_interval(successes: int, trials: int) -> Interval:
    """Return Wilson's 95% score interval of a rate (J. Am. Stat. Assoc. 22, 1927), which lies inside [0, 1].

    Raises:
        ValueError: If there are no trials, or more successes than trials.
    """
    from scipy.stats import binomtest

    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes is {successes} of {trials} trials; it must be in [0, trials], trials positive.")
    interval = binomtest(successes, trials).proportion_ci(_CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def interquartile_mean(values: ArrayLike, axis: int | None = None) -> np.ndarray:
    """Return the interquartile mean (arXiv:2108.13264): the mean without the lowest and the highest quarter.

    The number of values that are omitted on each side is rounded down, as in rliable.

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


# Seeds of headline results, which are determined by a rule before the runs.


def headline_seed(index: int) -> int:
    """Return the seed with this index: the first 32 bits of the SHA-256 of ``lrl-<index>``, in [0, 2**32)."""
    return int.from_bytes(hashlib.sha256(f"lrl-{index}".encode()).digest()[:4], "big")


# Intervals over the seeds of one experiment.

MIN_SEEDS = 5
"""Minimum number of seeds for an interval; with fewer, the value of each seed is reported."""

RESULT_METRICS = (
    "val/exact_success",
    "val/return",
    "val/success_rate",
    "val/r2",
    "val/loss",
    "search/best_return",
    "rollout/return",
    "train/loss",
)
"""Metrics that are the result of a run, the most important first."""

_LARGER_IS_BETTER = ("/return", "best_return", "success_rate", "_success", "success_of_optimum", "/r2", "_likelihood")
_SMALLER_IS_BETTER = ("loss", "invalid_action_rate")
_RATES = ("_rate", "_success", "_success_of_optimum", "_fraction")
"""Endings of the names of metrics that lie in [0, 1]."""


def best_of(metric: str) -> Callable[[Iterable[float]], float] | None:
    """Return ``max`` or ``min``, which chooses the best of a metric's values; None if no direction is better."""
    return max if metric.endswith(_LARGER_IS_BETTER) else min if metric.endswith(_SMALLER_IS_BETTER) else None


def bounds_of(result: dict[str, Any]) -> tuple[float, float] | None:
    """Return the minimum and maximum of the possible values of a result's metric; None if they are not known.

    Rates lie in [0, 1]; the bounds of a return are the entry ``bounds`` of the result.
    """
    if result["metric"].endswith(_RATES):
        return 0.0, 1.0
    return tuple(result["bounds"]) if "bounds" in result else None


def check_bounds(result: dict[str, Any], values: np.ndarray) -> None:
    """Raise if a final value lies outside the bounds of the metric.

    Args:
        result: a result, with its metric and bounds.
        values: final value of each run, ``(run,)``.

    Raises:
        ValueError: If a value is out of bounds.
    """
    bounds = bounds_of(result)
    if bounds is not None and not ((bounds[0] <= values) & (values <= bounds[1])).all():
        raise ValueError(
            f"bounds is {bounds[0]:g} {bounds[1]:g}, but {result['metric']} ends between {values.min():g} and"
            f" {values.max():g}; the final value of every run must be in between."
        )


def spread(values: np.ndarray, bounds: tuple[float, float] | None) -> str:
    """Return the 95% interval of the mean over seeds as text, or the value of each seed if there are fewer than five.

    Args:
        values: final value of each seed, ``(seed,)``.
        bounds: bounds of the metric, for which a bootstrap interval is used; None uses Student's interval.
    """
    if len(values) < MIN_SEEDS:
        return ", ".join(f"{value:.3f}" for value in values)
    low, high = t_interval(values) if bounds is None else bootstrap_interval(values)
    return f"{low:.3f} to {high:.3f}"


def mean_with_spread(values: np.ndarray, bounds: tuple[float, float] | None) -> str:
    """Return the mean over seeds as text, followed by :func:`spread` in parentheses if there are several seeds."""
    return f"{values.mean():.3f}" + (f" ({spread(values, bounds)})" if len(values) > 1 else "")


def without_seed(text: str, seed: str | int) -> str:
    """Replace the seed of a run by ``{seed}``, as in the options of ``lrl run_seeds``.

    The text may be a run directory that contains the seed in its name. Digits of other numbers are not replaced.
    """
    return re.sub(rf"(?<!\d){seed}(?!\d)", "{seed}", text)


def without_run(config: dict[str, Any]) -> dict[str, Any]:
    """Return a run's resolved configuration without its seed, paths and loggers, which differ in each run."""
    config = copy.deepcopy(config)
    start, seed = config.get("model", {}).get("init_args", {}), config.get("seed_everything", "")
    if isinstance(start.get("init_from"), str):
        start["init_from"] = without_seed(start["init_from"], seed)
    for key in ("seed_everything", "run_directory", "ckpt_path", "config"):
        config.pop(key, None)
    for key in ("logger", "default_root_dir"):
        config.get("trainer", {}).pop(key, None)
    config.get("data", {}).get("init_args", {}).pop("seed", None)
    return config


def config_digest(config: dict[str, Any]) -> str:
    """Return a hash of a run's resolved configuration without its seed and paths, as 12 hexadecimal digits."""
    text = json.dumps(without_run(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_earlier_runs(result: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return ``result`` with the runs of ``earlier`` for other seeds added, ordered by seed.

    Raises:
        ValueError: If the two have different commands, configurations or metrics.
    """
    for key in ("command", "metric", "drawn"):
        if result[key] != earlier[key]:
            raise ValueError(f"add: the {key} was {earlier[key]!r} and is {result[key]!r}; it must be the same.")
    configs = {run.get("config") for run in (*result["runs"], *earlier["runs"])}
    if len(configs) > 1:
        raise ValueError(
            "add: the configuration has changed since the file was written; it must be written from all runs."
        )
    seeds = {run["seed"] for run in result["runs"]}
    runs = [*result["runs"], *(run for run in earlier["runs"] if run["seed"] not in seeds)]
    return result | {"runs": sorted(runs, key=lambda run: run["seed"])}

"""Intervals over the seeds of one experiment, which stay within the bounds of the metric."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from typing import Any

import numpy as np

from lrl.evaluation.statistics import bootstrap_interval, t_interval

MIN_SEEDS = 5
"""Minimum number of seeds for an interval; with fewer, the value of each seed is reported."""

_RATES = ("_rate", "_success", "_success_of_optimum", "_fraction")
"""Endings of the names of metrics that lie in [0, 1]."""


def bounds_of(result: dict[str, Any]) -> tuple[float, float] | None:
    """Return the smallest and the largest possible value of a result's metric; None if it is unbounded.

    Rates lie in [0, 1]; the bounds of a return are stored in the result, under ``bounds``.
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
        ValueError: a value is out of bounds.
    """
    bounds = bounds_of(result)
    if bounds is not None and not ((bounds[0] <= values) & (values <= bounds[1])).all():
        raise ValueError(
            f"--bounds is {bounds[0]:g} {bounds[1]:g}, but {result['metric']} ends between {values.min():g} and"
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


def without_seed(text: str, seed: str | int) -> str:
    """Return a text in which the seed of a run, a number of its own, is ``{seed}``, as in ``lrl run_seeds``.

    A run may start from an earlier run on its seed, whose directory has the seed in its name.
    """
    return re.sub(rf"(?<!\d){seed}(?!\d)", "{seed}", text)


def config_digest(config: dict[str, Any]) -> str:
    """Return a hash of a run's resolved configuration without its seed and paths, as 12 hexadecimal digits."""
    config = copy.deepcopy(config)
    start, seed = config.get("model", {}).get("init_args", {}), config.get("seed_everything", "")
    if isinstance(start.get("init_from"), str):
        start["init_from"] = without_seed(start["init_from"], seed)
    for key in ("seed_everything", "run_directory", "ckpt_path", "config"):
        config.pop(key, None)
    for key in ("logger", "default_root_dir"):
        config.get("trainer", {}).pop(key, None)
    config.get("data", {}).get("init_args", {}).pop("seed", None)
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def with_earlier_runs(result: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return ``result`` with the runs of ``earlier`` on other seeds added, ordered by seed.

    Raises:
        ValueError: the two have different commands, configurations or metrics.
    """
    for key in ("command", "metric", "drawn"):
        if result[key] != earlier[key]:
            raise ValueError(f"--add: the {key} was {earlier[key]!r} and is {result[key]!r}; it must be the same.")
    configs = {run.get("config") for run in (*result["runs"], *earlier["runs"])}
    if len(configs) > 1:
        raise ValueError(
            "--add: the configuration has changed since the file was written; it must be written from all runs."
        )
    seeds = {run["seed"] for run in result["runs"]}
    runs = [*result["runs"], *(run for run in earlier["runs"] if run["seed"] not in seeds)]
    return result | {"runs": sorted(runs, key=lambda run: run["seed"])}

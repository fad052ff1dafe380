"""What the seeds of one experiment say of a figure: an interval that stays within its bounds, or the single values."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import numpy as np

from lrl.evaluation.statistics import bootstrap_interval, t_interval

MIN_SEEDS = 5
"""With fewer seeds their single values are reported instead of an interval."""

_RATES = ("_rate", "_success", "_success_of_optimum", "_fraction")
"""How the names of metrics end that lie in [0, 1]."""


def bounds_of(result: dict[str, Any]) -> tuple[float, float] | None:
    """The least and the greatest value that a result's metric can take; None where it has no such bounds.

    Rates lie in [0, 1]; the bounds of a return stand in the result, under ``bounds``.
    """
    if result["metric"].endswith(_RATES):
        return 0.0, 1.0
    return tuple(result["bounds"]) if "bounds" in result else None


def check_bounds(result: dict[str, Any], values: np.ndarray) -> None:
    """Raise if one of the final values lies outside the bounds of the metric.

    Raises:
        ValueError: one does.
    """
    bounds = bounds_of(result)
    if bounds is not None and not ((bounds[0] <= values) & (values <= bounds[1])).all():
        raise ValueError(
            f"--bounds is {bounds[0]:g} {bounds[1]:g}, but {result['metric']} ends between {values.min():g} and"
            f" {values.max():g}; it must hold the final value of every run."
        )


def spread(values: np.ndarray, bounds: tuple[float, float] | None) -> str:
    """The 95% interval of the mean over seeds as text, or the value of each seed where there are fewer than five.

    Args:
        values: of each seed, ``(seed,)``.
        bounds: of the figure; a bootstrap where there are some, else Student's interval.
    """
    if len(values) < MIN_SEEDS:
        return ", ".join(f"{value:.3f}" for value in values)
    low, high = t_interval(values) if bounds is None else bootstrap_interval(values)
    return f"{low:.3f} to {high:.3f}"


def config_digest(config: dict[str, Any]) -> str:
    """Return 12 hex digits of a run's resolved configuration, without its seed and its directory."""
    config = copy.deepcopy(config)
    for key in ("seed_everything", "run_directory", "ckpt_path", "config"):
        config.pop(key, None)
    for key in ("logger", "default_root_dir"):
        config.get("trainer", {}).pop(key, None)
    config.get("data", {}).get("init_args", {}).pop("seed", None)
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def with_earlier_runs(result: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return ``result`` with the runs of ``earlier`` on other seeds, ordered by seed.

    Raises:
        ValueError: the two are results of other commands, configurations or metrics.
    """
    for key in ("command", "metric", "drawn"):
        if result[key] != earlier[key]:
            raise ValueError(f"--add: the {key} was {earlier[key]!r} and is {result[key]!r}; it must be the same.")
    configs = {run.get("config") for run in (*result["runs"], *earlier["runs"])}
    if len(configs) > 1:
        raise ValueError("--add: the configuration has changed since the file was kept; keep all runs anew.")
    seeds = {run["seed"] for run in result["runs"]}
    runs = [*result["runs"], *(run for run in earlier["runs"] if run["seed"] not in seeds)]
    return result | {"runs": sorted(runs, key=lambda run: run["seed"])}

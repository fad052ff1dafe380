"""Runs side by side: groups with the same configuration, and the paired comparison of two groups with the same seeds.

A comparison has the mean difference, an interval and the statistical power, which is computed for the two-sided paired
t test (Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988).
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from lrl.evaluation.report import read_result
from lrl.evaluation.run_records import logged_metrics, logged_rows, read_config, training_runs
from lrl.evaluation.statistics import (
    MIN_SEEDS,
    RESULT_METRICS,
    Interval,
    bootstrap_interval,
    bounds_of,
    t_interval,
    without_run,
)
from lrl.files import is_replaced

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

        It is at least 2, and infinite if the mean difference is 0 up to rounding. At least two pairs must be given, to
        estimate the standard deviation.
        """
        if abs(self.mean) <= _ROUNDING * max(np.abs(self.values).max(), np.abs(self.baseline).max()):
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


def pairs_needed(effect: float) -> float:
    """Return the smallest number of pairs, at least 2, that detect an effect above 0 with power 0.8.

    It is infinite for an effect so small that a billion pairs would not detect it.

    Args:
        effect: mean difference over the standard deviation of the differences.
    """
    from scipy.stats import norm

    enough = ((norm.isf(_ALPHA / 2) + norm.isf(1 - POWER)) / effect) ** 2  # with a known standard deviation
    if enough > 1e9:
        return math.inf
    pairs = max(2, math.ceil(enough))
    while power_of_pairs(effect, pairs) < POWER:  # an estimated deviation needs about 2 more
        pairs += 1
    return pairs


# Groups of runs.

_ROUNDING = 1e-12
"""Difference of means that is 0 up to rounding, as a share of the largest value."""
ABSENT = "not set"
"""Text of a setting that the configuration of a group does not contain."""
_CLASS = "class_path"
_Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Holds runs with the same configuration; their seeds, directories and loggers may differ."""

    runs: tuple[Path, ...]
    """The run directories."""
    settings: Mapping[str, str]
    """The settings in which the configurations of the compared groups differ: short name to value as text."""

    @property
    def label(self) -> str:
        """The differing settings as ``name=value``, or the folder of the runs if there are none.

        Values that begin with a capital letter, which are mostly names of classes, are shown without ``name=``.
        """
        known = {name: value for name, value in self.settings.items() if value != ABSENT} or self.settings
        parts = (value if value[:1].isupper() else f"{name}={value}" for name, value in known.items())
        return ", ".join(parts) or self.runs[0].resolve().parent.name


def group_by_configuration(runs: Iterable[Path]) -> list[RunGroup]:
    """Group run directories by configuration, in the order of the first run of each group.

    The arguments of two objects are only compared if both have the same class. Otherwise the class is the difference.

    Args:
        runs: directories that contain a ``config.yaml``.

    Raises:
        ValueError: If a directory has no ``config.yaml``.
    """
    groups: dict[str, list[Path]] = {}
    for run in runs:
        config = without_run(read_config(run))
        groups.setdefault(json.dumps(config, sort_keys=True, default=str), []).append(run)
    configs = [dict(_leaves(json.loads(text))) for text in groups]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if _differs(key, configs)]
    names = short_names(keys)
    return [
        RunGroup(runs=tuple(members), settings={name: config.get(key, ABSENT) for key, name in names.items()})
        for members, config in zip(groups.values(), configs, strict=True)
    ]


def group_runs(arguments: Iterable[str]) -> dict[str, list[Path]]:
    """Group runs by label, and those without a label by configuration.

    An argument is ``label=run`` or a run, which is a run directory or its ``metrics.csv``. It may be a pattern such as
    ``runs/a/*``, which a shell does not expand after ``label=``. If the name of a directory contains an equals sign,
    the shortest label whose directory exists is used. A run without ``config.yaml`` is labelled by its parent's name.
    Interrupted runs that were started again (:func:`lrl.files.is_replaced`) are left out if there are others.

    Returns:
        The runs by label; for a configuration it is :attr:`RunGroup.label`.

    Raises:
        ValueError: If no run is given, or a run does not exist.
    """
    groups: dict[str, list[Path]] = {}
    configured: dict[Path, Path] = {}
    named = [(label, run) for label, runs in map(_labelled_runs, arguments) for run in runs]
    kept = {*training_runs(run for _, run in named if not is_replaced(run))}
    for label, run in [(label, run) for label, run in named if run in kept] or named:
        folder = run.parent if run.is_file() else run
        if not label and (folder / "config.yaml").is_file():
            configured[folder] = run
        else:
            groups.setdefault(label or run.resolve().parent.name, []).append(run)
    for group in group_by_configuration(configured):
        groups.setdefault(group.label, []).extend(configured[folder] for folder in group.runs)
    if not groups:
        raise ValueError("no run is given; at least one run directory is needed.")
    return groups


def _labelled_runs(argument: str) -> tuple[str, list[Path]]:
    """Return the label of an argument of :func:`group_runs`, empty if it has none, and its runs.

    Raises:
        ValueError: If a run does not exist.
    """
    parts, name = argument.split("="), argument
    for place in range(len(parts)):
        label, name = "=".join(parts[:place]), "=".join(parts[place:])
        found = [name] if Path(name).exists() else sorted(glob.glob(name))
        if found:
            return label, list(map(Path, found))
    raise ValueError(f"run is {name!r}, which does not exist; it must be a run directory, a metrics.csv, or a pattern.")


def _leaves(value: Any, key: _Key = ()) -> Iterator[tuple[_Key, str]]:
    """Yield the settings of a nested configuration, each with its value as text."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        parts = enumerate(value)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
        yield key, text.rpartition(".")[2] if key[-1:] == (_CLASS,) else text
    for name, part in parts:
        yield from _leaves(part, (*key, str(name)))


def _differs(key: _Key, configs: Sequence[Mapping[_Key, str]]) -> bool:
    """Return whether a setting differs between configurations in which the same classes contain it."""
    values: dict[tuple[str | None, ...], set[str | None]] = {}
    for config in configs:
        classes = tuple(config.get((*key[:depth], _CLASS)) for depth in range(len(key)) if key[depth] != _CLASS)
        values.setdefault(classes, set()).add(config.get(key))
    return any(len(found) > 1 for found in values.values())


def short_names(keys: Iterable[Sequence[str]]) -> dict[tuple[str, ...], str]:
    """Return for each key the shortest ending that no other key has: ``lr`` for ``model.init_args.optimizer.lr``.

    The parts ``init_args`` and ``class_path`` of a key are left out of its name, which never begins with the index of
    an element in a list.

    Args:
        keys: different keys, each as a sequence of its parts.
    """
    parts = {tuple(key): [part for part in key if part not in ("init_args", _CLASS)] for key in keys}
    names = {}
    for key, own in parts.items():
        others = [other for another, other in parts.items() if another != key]
        sizes = [size for size in range(1, len(own) + 1) if not own[-size].isdecimal()]
        size = next((size for size in sizes if all(other[-size:] != own[-size:] for other in others)), len(own))
        names[key] = ".".join(own[-size:])
    return names


# Values of runs, read from run directories or from stored results.


def common_metric(paths: Iterable[Path], metric: str | None = None) -> str:
    """Return ``metric`` if it is given, otherwise the common metric of all runs.

    For stored results it is their metric, otherwise the first of
    :data:`lrl.evaluation.statistics.RESULT_METRICS` that every run has logged.

    Args:
        paths: run directories, and JSON files of stored results.
        metric: the metric that the user gave, if any.

    Raises:
        ValueError: If the stored results have different metrics, or the runs have no metric in common.
    """
    if metric is not None:
        return metric
    paths = list(paths)
    metrics = {str(path): _stored_result(path)["metric"] for path in paths if path.suffix == ".json"}
    if len(set(metrics.values())) > 1:
        listed = ", ".join(f"{name} has {own}" for name, own in metrics.items())
        raise ValueError(f"the results have different metrics ({listed}); name results that have the same metric.")
    if metrics:
        return next(iter(metrics.values()))
    logged = {path: logged_metrics(path) for path in paths}
    found = next((name for name in RESULT_METRICS if all(name in names for names in logged.values())), None)
    if found is None:
        shown = {", ".join(name for name in RESULT_METRICS if name in names): path for path, names in logged.items()}
        listed = "; ".join(f"{path} has {names or 'none'}" for names, path in shown.items())
        raise ValueError(f"the runs have no metric in common ({listed}); give a metric, or other runs.")
    return found


def read_figures(paths: Sequence[Path], metric: str) -> tuple[dict[int, float], bool]:
    """Read the last value of a metric of every run.

    Args:
        paths: run directories, and JSON files of stored results, which contain several runs each.
        metric: a column of ``metrics.csv``. A stored result must contain it as its own metric, or as the metric of its
            learning curve (``drawn``).

    Returns:
        The values by seed, and whether the minimum and maximum of the possible values are known.

    Raises:
        ValueError: If a path does not exist, is damaged or lacks the metric, if a value is NaN, or if two runs have the
            same seed.
    """
    values: dict[int, float] = {}
    bounded = bounds_of({"metric": metric}) is not None
    for path in paths:
        try:
            if path.suffix == ".json":
                result = _stored_result(path)
                found = [(int(run["seed"]), _stored_value(path, result, run, metric)) for run in result["runs"]]
                bounded = bounded or (metric == result["metric"] and bounds_of(result) is not None)
            else:
                found = [(int(read_config(path)["seed_everything"]), float(logged_rows(path, metric)[-1][metric]))]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"run is {str(path)!r}, which has no seed or no {metric} ({error!r}).") from error
        for seed, value in found:
            if math.isnan(value):
                raise ValueError(f"run is {str(path)!r}, whose last {metric} is not a number; leave seed {seed} out.")
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
    runs = result.get("runs")
    has_runs = isinstance(runs, list) and runs and all(isinstance(run, dict) for run in runs)
    if not has_runs or not isinstance(result.get("metric"), str):
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

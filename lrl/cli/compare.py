"""The command ``lrl compare``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.cli.command import command

if TYPE_CHECKING:
    from lrl.evaluation.comparison import Comparison, RunGroup


def compare(runs: list[Path], *, baseline: list[Path], metric: str | None = None, bootstrap: bool = False) -> None:
    """Compare runs with baseline runs, paired by seed.

    Runs with different configurations are compared separately; the baseline runs must have the same configuration.

    lrl compare runs/lake/grpo/* --baseline runs/lake/ppo/* --metric val/success_rate
    lrl compare assets/results/cartpole_trpo_mlp.json --baseline assets/results/cartpole_ppo_mlp.json

    The output has these parts:

    - the final value of the metric for each seed
    - the mean difference with a 95% interval: a bootstrap over pairs if the metric is bounded, otherwise Student's
      paired interval
    - the smallest difference that this number of seeds detects with a probability of 0.8
    - the number of seeds that are needed to detect the observed difference
    - the seeds that only one of the two sets of runs has, which are omitted
    - the environments, if those of run directories differ

    Args:
        runs: run directories or files of assets/results.
        baseline: runs to compare with.
        metric: a column of metrics.csv; default: that of the results, or the most important one that all runs have.
        bootstrap: print a bootstrap over pairs in addition if the metric is unbounded.

    Raises:
        ValueError: If the runs have no common metric or seed, or the baseline runs have different configurations.
    """
    from lrl.evaluation import comparison
    from lrl.evaluation.run_records import environment_of, training_runs

    runs, baseline = training_runs(runs), training_runs(baseline)
    ours, theirs = (_groups(paths) for paths in (runs, baseline))
    labels = {run: group.label for group in _groups([*runs, *baseline]) for run in group.runs}
    if len(theirs) > 1:
        listed = "; ".join(labels[group.runs[0]] for group in theirs)
        raise ValueError(f"baseline has runs of {len(theirs)} configurations ({listed}); name runs of one of them.")
    metric = comparison.common_metric([*runs, *baseline], metric)
    figures = [comparison.read_figures(group.runs, metric) for group in ours]
    others, baseline_bounded = comparison.read_figures(theirs[0].runs, metric)
    reports = []
    for group, (values, bounded) in zip(ours, figures, strict=True):
        text = report(comparison.compare(values, others, bounded or baseline_bounded), metric, bootstrap)
        names = [labels[side.runs[0]] for side in (group, theirs[0])]
        different = len(ours) > 1 or names[0] != names[1]
        environments = {environment_of(run) for run in (*group.runs, *theirs[0].runs) if run.is_dir()}
        if len(environments) > 1:
            text += (
                f"\nthe environments differ ({'; '.join(sorted(environments))}), so the values may not be comparable"
            )
        reports.append(f"runs: {names[0]}\nbaseline: {names[1]}\n\n{text}" if different else text)
    print("\n\n".join(reports))


def _groups(paths: Sequence[Path]) -> list[RunGroup]:
    """Return runs grouped by configuration; paths with a file of results are one group."""
    from lrl.evaluation.comparison import RunGroup, group_by_configuration

    if any(path.suffix == ".json" for path in paths):
        return [RunGroup(runs=tuple(paths), settings={})]
    return group_by_configuration(paths)


def report(result: Comparison, metric: str, bootstrap: bool = False) -> str:
    """Return a Markdown table of the pairs, followed by the interval and the power of the comparison.

    Args:
        result: the pairs.
        metric: name of the compared value, for the first line.
        bootstrap: whether unbounded values have a bootstrap interval in addition to Student's.
    """
    rows = zip(result.seeds, result.values, result.baseline, result.differences, strict=True)
    lines = [f"{metric} of the runs and of the baseline, paired by seed", ""]
    lines += ["| seed | runs | baseline | difference |", "|---|---|---|---|"]
    lines += [f"| {seed} | {value:.4g} | {other:.4g} | {gap:+.4g} |" for seed, value, other, gap in rows]
    lines += [
        f"| mean | {result.values.mean():.4g} | {result.baseline.mean():.4g} | {result.mean:+.4g} |",
        "",
        *_intervals(result, bootstrap),
        *_power(result),
    ]
    for name, seeds in (("runs", result.unpaired), ("baseline runs", result.unpaired_baseline)):
        if seeds:
            lines.append(f"seeds that only the {name} have, omitted: {', '.join(map(str, seeds))}")
    return "\n".join(lines)


def _intervals(result: Comparison, bootstrap: bool) -> list[str]:
    """Return the lines with the intervals of the mean difference, or one line if there are too few pairs."""
    from lrl.evaluation.statistics import MIN_SEEDS

    lines = list[str]()
    for resampled in [True] if result.bounded else [False, True] if bootstrap else [False]:
        bounds = result.interval(resampled)
        if bounds is None:
            return [f"no interval: it needs at least {MIN_SEEDS} pairs, and there are {len(result.seeds)}"]
        kind = "bootstrap over pairs" if resampled else "paired t"
        lines.append(f"95% interval of the mean difference: {bounds[0]:+.4g} to {bounds[1]:+.4g} ({kind})")
    return lines


def _power(result: Comparison) -> list[str]:
    """Return the lines with the smallest detectable difference and the seeds that the observed difference needs."""
    from lrl.evaluation.comparison import POWER

    pairs = len(result.seeds)
    if pairs < 2:
        return ["the detectable difference cannot be estimated from one pair"]
    needed = result.pairs_needed()
    smallest = f"{pairs} seeds detect a difference of {result.smallest_effect():.4g} with probability {POWER:g}"
    if math.isinf(needed):
        return [smallest, "the observed difference is 0, which no number of seeds detects"]
    more = max(0, int(needed) - pairs)
    further = f"{more} more" if more else "which these runs have"
    return [smallest, f"detecting the observed difference needs {int(needed)} seeds, {further}"]


main = command(compare)

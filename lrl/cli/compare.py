"""Compare runs with baseline runs, paired by seed.

lrl compare runs/lake/grpo/* --baseline runs/lake/ppo/* --metric val/success_rate
lrl compare assets/results/cartpole_trpo_mlp.json --baseline assets/results/cartpole_ppo_mlp.json
lrl compare runs/cart/ppo/* --baseline runs/cart/trpo/* --metric rollout/return --steps_to 195

Prints the final figures of each seed, or with --steps_to the env steps until a figure is reached; the mean difference
with a 95% interval (a bootstrap over pairs where the metric is bounded, Student's paired interval where it is not, with
--bootstrap followed by a bootstrap), the smallest difference that this many seeds detect with a probability of .8, and
how many seeds it takes to detect the observed difference. Seeds without a partner are left out.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from lrl.cli.arguments import command_parser, subcommand
from lrl.evaluation.comparison import POWER, Comparison, common_metric, compare, read_figures
from lrl.evaluation.statistics import MIN_SEEDS


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories or files of assets/results")
    parser.add_argument("--baseline", nargs="+", type=Path, required=True, metavar="RUN", help="to compare with")
    parser.add_argument("--metric", help="a column of metrics.csv (default: that of the results, or val/exact_success)")
    parser.add_argument(
        "--bounds", nargs=2, type=float, metavar=("LOW", "HIGH"), help="range of a bounded return; rates lie in [0, 1]"
    )
    parser.add_argument(
        "--bootstrap", action="store_true", help="print a bootstrap over pairs where the metric is unbounded as well"
    )
    parser.add_argument(
        "--steps_to", type=float, metavar="FIGURE", help="compare the env steps after which the metric reaches FIGURE"
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print the comparison."""
    metric = common_metric([*arguments.runs, *arguments.baseline], arguments.metric)
    reached = "" if arguments.steps_to is None else f"env steps until {arguments.steps_to:g} is reached by "
    print(report(compared(arguments, metric), reached + metric, arguments.bootstrap))


def compared(arguments: argparse.Namespace, metric: str) -> Comparison:
    """Read both sets of runs and pair them.

    Raises:
        ValueError: runs cannot be read or paired, or a figure lies outside its bounds.
    """
    bounds = tuple(arguments.bounds) if arguments.bounds else None
    if bounds and arguments.steps_to is not None:
        raise ValueError(f"bounds is {list(bounds)}, but env steps have no such bounds; leave it out with --steps_to.")
    sides = (arguments.runs, arguments.baseline)
    runs, baseline = (read_figures(paths, metric, bounds, arguments.steps_to) for paths in sides)
    bounds = bounds or runs.bounds or baseline.bounds
    for value in (*runs.by_seed.values(), *baseline.by_seed.values()):
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            low, high = bounds
            raise ValueError(f"{metric} has bounds {low:g} and {high:g}, but a run ends at {value:g}; set --bounds.")
    return compare(runs.by_seed, baseline.by_seed, bounded=bounds is not None)


def report(result: Comparison, metric: str, bootstrap: bool = False) -> str:
    """Return a Markdown table of the pairs, followed by what they say about the difference.

    Args:
        result: the pairs.
        metric: what the figures are.
        bootstrap: whether unbounded figures have a bootstrap interval beside Student's.
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
    for name, seeds in (("runs", result.unpaired), ("baseline", result.unpaired_baseline)):
        if seeds:
            lines.append(f"left out, only in the {name}: seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
    return "\n".join(lines)


def _intervals(result: Comparison, bootstrap: bool) -> list[str]:
    lines = list[str]()
    kinds = [True] if result.bounded else [False]
    if bootstrap and not result.bounded:
        kinds.append(True)
    for resampled in kinds:
        bounds = result.interval(resampled)
        if bounds is None:
            return [f"no interval: there are {len(result.seeds)} pairs, and an interval takes {MIN_SEEDS}"]
        kind = "bootstrap over pairs" if resampled else "paired t"
        lines.append(f"95% interval of the mean difference: {bounds[0]:+.4g} to {bounds[1]:+.4g} ({kind})")
    return lines


def _power(result: Comparison) -> list[str]:
    """Describe the smallest effect and the seeds that the observed difference takes."""
    pairs, needed = len(result.seeds), result.pairs_needed()
    if math.isnan(needed):
        return ["one pair does not tell what difference can be detected"]
    smallest = f"{pairs} seeds detect a difference of {result.smallest_effect():.4g} with probability {POWER:g}"
    if math.isinf(needed):
        return [smallest, "the observed difference is 0: no number of seeds detects it"]
    more = max(0, int(needed) - pairs)
    return [smallest, f"the observed difference takes {int(needed)} seeds, {f'{more} more' if more else 'no more'}"]


main = subcommand(make_parser, run)

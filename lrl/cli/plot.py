"""The command ``lrl plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lrl.cli.command import command
from lrl.cli.options import labelled_number


def plot(
    runs: list[str],
    *,
    metric: str | None = None,
    clock: Literal["env_steps", "episodes", "tokens", "minutes"] | None = None,
    baseline: tuple[str, ...] | None = None,
    title: str = "",
    out: Path = Path("plot.png"),
) -> None:
    """Draw the interquartile mean of a logged metric over runs, with a 95% interval over seeds.

    lrl plot runs/frozen_lake/grpo/* --metric val/success_rate --baseline optimum=0.744 --out curve.png
    lrl plot small=runs/a/x-seed0 small=runs/a/x-seed1 large=runs/b/x-seed0 --clock minutes --out b.png

    Runs with the same configuration are one curve; their seeds, directories and loggers may differ. Several curves are
    labelled by the settings in which the configurations differ. A run that has ended keeps its last value, and the
    curve is dotted from there on.

    Args:
        runs: run directories, each as RUN or LABEL=RUN. Runs with the same label are one curve whatever their
            configurations.
        metric: a column of metrics.csv; default: the most important metric that all runs have logged.
        clock: the x axis; default: env_steps, or the first other clock that all runs have logged.
        baseline: a horizontal line, as LABEL=VALUE; the option may be given several times.
        title: title of the plot.
        out: the PNG to write.
    """
    from lrl.evaluation.comparison import common_metric, group_runs
    from lrl.evaluation.pictures import aggregate, common_clock, draw_curves, read_series

    groups = group_runs(runs)
    every = [run for grouped in groups.values() for run in grouped]
    metric = common_metric(every, metric)
    unit = clock or common_clock(every, metric)
    baselines = dict(labelled_number("baseline", text) for text in baseline or ())
    curves = [
        aggregate(label, [read_series(run, metric, unit) for run in grouped], by_row=unit == "minutes")
        for label, grouped in groups.items()
    ]
    draw_curves(curves, metric, unit, out, baselines, title)
    print(f"wrote {metric} of the runs to {out}")


main = command(plot)

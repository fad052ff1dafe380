"""Draw a logged metric of any runs, with a 95% interval over seeds.

    python scripts/plot.py runs/frozen_lake/grpo/* --metric val/success_rate --baseline optimum=.744 --out curve.png
    python scripts/plot.py small=runs/a/x-seed0 small=runs/a/x-seed1 large=runs/b/x-seed0 --clock minutes --out b.png

Runs with the same label are one curve; without ``label=`` a run is labelled by the folder it lies in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lrl.reports.plots import CLOCKS, aggregate, draw_curves, group_runs, read_series


def main() -> None:
    """Read the arguments, draw, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="run directories")
    parser.add_argument("--metric", default="val/success_rate", help="any column of metrics.csv")
    parser.add_argument("--clock", default="env_steps", choices=CLOCKS, help="the x axis")
    parser.add_argument("--statistic", default="iqm", choices=("mean", "iqm"), help="over the runs of a label")
    parser.add_argument("--baseline", action="append", default=[], metavar="LABEL=VALUE", help="a horizontal line")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", default="plot.png", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    try:
        draw(arguments)
    except ValueError as error:
        parser.exit(2, f"plot.py: {error}\n")
    print(f"wrote {arguments.out}")


def draw(arguments: argparse.Namespace) -> None:
    """Draw what the arguments ask for."""
    baselines = dict(baseline(text) for text in arguments.baseline)
    curves = [
        aggregate(label, [read_series(run, arguments.metric, arguments.clock) for run in runs], arguments.statistic)
        for label, runs in group_runs(arguments.runs).items()
    ]
    draw_curves(curves, arguments.metric, arguments.clock, arguments.out, baselines, arguments.title)


def baseline(text: str) -> tuple[str, float]:
    """``label=value``."""
    label, _, value = text.rpartition("=")
    try:
        return label or value, float(value)
    except ValueError as error:
        raise ValueError(f"--baseline is {text!r}; it must be LABEL=VALUE with a number as value.") from error


if __name__ == "__main__":
    main()

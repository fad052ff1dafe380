"""Draw a logged metric of runs, with a 95% interval over seeds.

lrl plot runs/frozen_lake/grpo/* --metric val/success_rate --baseline optimum=.744 --out curve.png
lrl plot small=runs/a/x-seed0 small=runs/a/x-seed1 large=runs/b/x-seed0 --clock minutes --out b.png

Runs with the same label are one curve; a run without ``label=`` is labelled by the folder that holds it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lrl.cli.arguments import command_parser, labelled_number, subcommand
from lrl.evaluation.pictures import CLOCKS, aggregate, draw_curves, group_runs, read_series


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="run directories")
    parser.add_argument("--metric", default="val/success_rate", help="any column of metrics.csv")
    parser.add_argument("--clock", default="env_steps", choices=CLOCKS, help="the x axis")
    parser.add_argument("--statistic", default="iqm", choices=("mean", "iqm"), help="over the runs of a label")
    parser.add_argument("--baseline", action="append", default=[], metavar="LABEL=VALUE", help="a horizontal line")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", default="plot.png", type=Path, help="the PNG to write")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Draw one curve per label and one line per baseline."""
    baselines = dict(labelled_number("baseline", text) for text in arguments.baseline)
    curves = [
        aggregate(label, [read_series(run, arguments.metric, arguments.clock) for run in runs], arguments.statistic)
        for label, runs in group_runs(arguments.runs).items()
    ]
    draw_curves(curves, arguments.metric, arguments.clock, arguments.out, baselines, arguments.title)
    print(f"wrote {arguments.out}")


main = subcommand(make_parser, run)

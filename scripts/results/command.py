"""Summarise runs as JSON files, and write the documentation's tables and figures from these files.

python scripts/results.py keep grpo --title "GRPO from Q-values" --metric val/exact_success runs/frozen_lake/grpo/*
python scripts/results.py write        (tables, assets/figures.ipynb and assets/pictures from assets/results)
python scripts/results.py check        (fails where `write` would change a page or the notebook)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrl.cli.arguments import command_parser, labelled_number, subcommand
from lrl.evaluation.report import read_result, result_text
from lrl.evaluation.statistics import check_bounds, with_earlier_runs
from lrl.files import write_whole
from results.documentation import documentation_pages, fill_tables, filled_notebook
from results.summaries import draw_picture, final_values, kept_results, pictures, summarise

RESULTS, PICTURES = Path("assets/results"), Path("assets/pictures")
NOTEBOOK = Path("assets/figures.ipynb")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    parsers = parser.add_subparsers(dest="action", required=True)
    keep_parser = parsers.add_parser("keep", help="summarise runs as one file of assets/results")
    keep_parser.add_argument("name", help="of the file")
    keep_parser.add_argument("runs", nargs="+", type=Path)
    keep_parser.add_argument("--title", required=True)
    keep_parser.add_argument("--add", action="store_true", help="keep the runs of the file on other seeds as well")
    keep_parser.add_argument("--metric", default="val/exact_success")
    keep_parser.add_argument("--drawn", help="another metric for the figure")
    keep_parser.add_argument("--twin", action="store_true", help="draw --metric as well as --drawn")
    keep_parser.add_argument("--label", help="in figures, instead of the title")
    keep_parser.add_argument("--window", type=int, help="draw the mean of this many measurements")
    keep_parser.add_argument("--picture", help="name of a figure that several results share")
    keep_parser.add_argument("--rows", type=int, help="number of demonstrated rows, which the figure is drawn against")
    keep_parser.add_argument("--clocks", nargs="+", help="x axes of the figures; the first file has no suffix")
    keep_parser.add_argument("--machine", default="2-core x86-64 virtual machine")
    keep_parser.add_argument("--bar", type=float, help="the value that a run should reach")
    keep_parser.add_argument(
        "--bounds", nargs=2, type=float, metavar=("LOW", "HIGH"), help="range of a bounded return; rates lie in [0, 1]"
    )
    keep_parser.add_argument(
        "--reach", type=float, help="keep when the mean of 25 training episodes first reaches this return"
    )
    keep_parser.add_argument("--baseline", action="append", default=[], metavar="LABEL=VALUE")
    keep_parser.add_argument("--note", default="")
    parsers.add_parser("write", help="write the tables and draw the figures")
    parsers.add_parser("check", help="fail where `write` would change a page or the notebook")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Keep, write or check."""
    if arguments.action == "keep":
        keep(arguments)
    elif arguments.action == "write":
        write()
    else:
        check()


def keep(arguments: argparse.Namespace) -> None:
    """Write the summary ``assets/results/<name>.json``.

    Raises:
        ValueError: an option is out of range, or the runs do not belong together.
    """
    baselines = dict(labelled_number("baseline", text) for text in arguments.baseline)
    about = {"title": arguments.title, "machine": arguments.machine, "baselines": baselines, "note": arguments.note}
    if arguments.window is not None and arguments.window < 1:
        raise ValueError(f"--window is {arguments.window}; it must be at least 1.")
    check_figure(arguments)
    about |= {"twin": True} if arguments.twin else {}
    names = ("label", "window", "picture", "clocks", "bar", "bounds", "rows")
    about |= {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    path = RESULTS / f"{arguments.name}.json"
    result = about | summarise(arguments.runs, arguments.metric, arguments.drawn, arguments.reach)
    if arguments.add and path.exists():
        result = with_earlier_runs(result, read_result(path))
    check_bounds(result, final_values(result))
    with write_whole(path) as file:
        file.write(result_text(result))
    print(f"wrote {path}")


def check_figure(arguments: argparse.Namespace) -> None:
    """Raise for options that the figure of ``--rows`` or ``--twin`` would not read.

    Raises:
        ValueError: so it is, or what the figure needs is missing.
    """
    ignored = {"--clocks": arguments.clocks, "--window": arguments.window}
    if arguments.rows is not None:
        if arguments.rows < 1 or arguments.label is None:
            raise ValueError(
                f"--rows is {arguments.rows}; it must be positive and come with a --label, the name of its line."
            )
        ignored |= {"--twin": arguments.twin or None, "--drawn": arguments.drawn}
    elif arguments.twin:
        if arguments.drawn in (None, arguments.metric):
            raise ValueError(f"--twin is given and --drawn is {arguments.drawn}; it must be another metric.")
        ignored |= {"--baseline": arguments.baseline or None, "--label": arguments.label}
    else:
        return
    for name, value in ignored.items():
        if value is not None:
            figure = "--twin" if arguments.rows is None else "--rows"
            raise ValueError(f"{name} is given, which the figure of {figure} does not read; leave it out.")


def write() -> None:
    """Fill in the tables and the notebook, and draw the figures."""
    for path, text in _filled().items():
        with write_whole(path) as file:
            file.write(text)
    kept = kept_results(RESULTS)
    for name, results in pictures(kept).items():
        draw_picture(name, results, PICTURES)
    for name, report in kept.items():
        if "planned" in report:
            _draw_searches(name, report)


def _draw_searches(name: str, report: Mapping[str, Any]) -> None:
    """Draw what ``lrl search_table --json`` wrote."""
    from lrl.search.experiments import report_records
    from lrl.search.pictures import draw_progress  # they import torch

    draw_progress(report_records(report, name), PICTURES / f"{name}.png")


def check() -> None:
    """Exit with status 1 where a page is not what ``write`` makes of it."""
    stale = [str(path) for path, text in _filled().items() if path.read_text(encoding="utf-8") != text]
    if stale:
        sys.exit(f"{', '.join(stale)}: differs from assets/results; run `python scripts/results.py write`")


def _filled() -> dict[Path, str]:
    """Return what ``write`` makes of every page and of the notebook."""
    results = kept_results(RESULTS)
    texts = {path: path.read_text(encoding="utf-8") for path in documentation_pages(Path())}
    pages = {path: fill_tables(path, text, results) for path, text in texts.items()}
    return pages | {NOTEBOOK: filled_notebook(NOTEBOOK.read_text(encoding="utf-8"), results)}


main = subcommand(make_parser, run)

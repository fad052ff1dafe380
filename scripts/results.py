"""Keep the results of runs, and write the documentation's tables and pictures from what is kept.

python scripts/results.py keep grpo --title "GRPO from Q-values" --metric val/exact_success runs/frozen_lake/grpo/*
python scripts/results.py write        (tables, assets/figures.ipynb and assets/pictures from assets/results)
python scripts/results.py check        (fails where `write` would change a page or the notebook)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lrl.reports.documentation import documentation_pages, fill_tables
from lrl.reports.results import draw_picture, final_values, kept_results, pictures, read_result, result_text, summarise
from lrl.reports.seed_intervals import check_bounds, with_earlier_runs

RESULTS, PICTURES = Path("assets/results"), Path("assets/pictures")
NOTEBOOK = Path("assets/figures.ipynb")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="what", required=True)
    keep_parser = parsers.add_parser("keep", help="summarise runs as one file of assets/results")
    keep_parser.add_argument("name", help="of the file")
    keep_parser.add_argument("runs", nargs="+", type=Path)
    keep_parser.add_argument("--title", required=True)
    keep_parser.add_argument("--add", action="store_true", help="keep the runs of the file on other seeds as well")
    keep_parser.add_argument("--metric", default="val/exact_success")
    keep_parser.add_argument("--drawn", help="another metric for the picture")
    keep_parser.add_argument("--label", help="in pictures, instead of the title")
    keep_parser.add_argument("--window", type=int, help="draw means of as many measurements")
    keep_parser.add_argument("--picture", help="of several results: all that name it are drawn into it")
    keep_parser.add_argument("--clocks", nargs="+", help="that it is drawn against; the first picture has no suffix")
    keep_parser.add_argument("--machine", default="2-core x86-64 virtual machine")
    keep_parser.add_argument("--bar", type=float, help="what a run should reach")
    keep_parser.add_argument(
        "--bounds", nargs=2, type=float, metavar=("LOW", "HIGH"), help="of a return that has some; rates lie in [0, 1]"
    )
    keep_parser.add_argument(
        "--reach", type=float, help="keep when the mean of 25 training episodes first reaches this"
    )
    keep_parser.add_argument("--baseline", action="append", default=[], metavar="LABEL=VALUE")
    keep_parser.add_argument("--note", default="")
    parsers.add_parser("write", help="tables and pictures")
    parsers.add_parser("check", help="are the tables what the results say?")
    arguments = parser.parse_args()
    try:
        {"keep": keep, "write": write, "check": check}[arguments.what](arguments)
    except ValueError as error:
        parser.exit(2, f"results.py: {error}\n")


def keep(arguments: argparse.Namespace) -> None:
    """Write ``assets/results/<name>.json``."""
    baselines = {label: float(value) for label, value in (text.rsplit("=", 1) for text in arguments.baseline)}
    about = {"title": arguments.title, "machine": arguments.machine, "baselines": baselines, "note": arguments.note}
    if arguments.window is not None and arguments.window < 1:
        raise ValueError(f"--window is {arguments.window}; it must be at least 1.")
    given = {name: getattr(arguments, name) for name in ("label", "window", "picture", "clocks", "bar", "bounds")}
    about |= {name: value for name, value in given.items() if value is not None}
    path = RESULTS / f"{arguments.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = about | summarise(arguments.runs, arguments.metric, arguments.drawn, arguments.reach)
    if arguments.add and path.exists():
        result = with_earlier_runs(result, read_result(path))
    check_bounds(result, final_values(result))
    path.write_text(result_text(result), encoding="utf-8")
    print(f"wrote {path}")


def write(arguments: argparse.Namespace) -> None:
    """Fill the tables, draw the pictures."""
    for path in (*documentation_pages(Path()), NOTEBOOK):
        path.write_text(filled(path), encoding="utf-8")
    for name, results in pictures(kept()).items():
        draw_picture(name, results, PICTURES)


def check(arguments: argparse.Namespace) -> None:
    """Exit with status 1 where a page is not what ``write`` makes of it."""
    stale = [
        str(path)
        for path in (*documentation_pages(Path()), NOTEBOOK)
        if path.read_text(encoding="utf-8") != filled(path)
    ]
    if stale:
        sys.exit(f"{', '.join(stale)}: not what assets/results says; run scripts/results.py write")


def filled(path: Path) -> str:
    """Return a page with the tables that belong into it, or the notebook with a cell for each picture."""
    text = path.read_text(encoding="utf-8")
    return notebook(text) if path == NOTEBOOK else fill_tables(path, text, kept())


def notebook(text: str) -> str:
    """A notebook's first two cells, which say how pictures are drawn, and then the pictures."""
    document = json.loads(text)
    cells = document["cells"][:2]
    for name, results in pictures(kept()).items():
        cells.append(_cell("markdown", f"## {' / '.join(result['title'] for result in results)}"))
        cells.append(_cell("code", f'table("{name}")\npicture("{name}")'))
        others = range(1, len(results[0].get("clocks") or [""]))
        cells += [_cell("code", f'picture("{name}", {number})') for number in others]
    return json.dumps(document | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def kept() -> dict[str, dict[str, Any]]:
    """All results, by name."""
    return kept_results(RESULTS)


if __name__ == "__main__":
    main()

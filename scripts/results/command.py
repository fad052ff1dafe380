"""Summarise runs as JSON files, and write the documentation's tables and figures from these files.

python scripts/results.py keep grpo --title "GRPO from Q-values" --all_started runs/frozen_lake/grpo/*
python scripts/results.py count search_table --left_out "lrl-2: stopped after two minutes"   (after another command)
python scripts/results.py write        (tables, assets/figures.ipynb and assets/pictures from assets/results)
python scripts/results.py check        (fails if `write` would change a page, or a result has no counts of its runs)
python scripts/results.py boards       (exact success of a random and of an optimal policy on RAGEN's boards)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrl.cli.command import command
from lrl.cli.options import labelled_number
from lrl.evaluation.report import read_result, result_text
from lrl.evaluation.statistics import check_bounds, with_earlier_runs
from lrl.files import write_whole
from lrl.ranges import PositiveInt
from results.boards import boards
from results.counts import fault_of, num_runs, restarted_runs, run_counts, with_earlier_counts
from results.credit_truth import draw_scores
from results.documentation import documentation_pages, fill_tables, filled_notebook
from results.sentences import SENTENCES, figure_faults, fill_sentences
from results.summaries import draw_picture, final_values, kept_results, pictures, summarise

RESULTS, PICTURES = Path("assets/results"), Path("assets/pictures")
NOTEBOOK = Path("assets/figures.ipynb")


def keep(
    name: str,
    runs: list[Path],
    *,
    title: str,
    add: bool = False,
    metric: str = "val/exact_success",
    drawn: str | None = None,
    label: str | None = None,
    window: PositiveInt | None = None,
    picture: str | None = None,
    rows: int | None = None,
    clocks: list[str] | None = None,
    machine: str = "2-core x86-64 virtual machine",
    bar: float | None = None,
    bounds: tuple[float, float] | None = None,
    reach: float | None = None,
    lasting: str | None = None,
    baseline: tuple[str, ...] | None = None,
    drawn_baseline: tuple[str, ...] | None = None,
    note: str = "",
    all_started: bool = False,
    failed: tuple[str, ...] | None = None,
    left_out: tuple[str, ...] | None = None,
) -> None:
    """Summarise runs as the file assets/results/<name>.json, which also counts the other runs that were started.

    Runs beside these that `lrl run_seeds` started again, because they had no checkpoint, are counted as failed.

    Args:
        name: name of the file.
        runs: run directories.
        title: title of the result.
        add: also keep the runs with other seeds that the file already contains.
        metric: metric of the summary.
        drawn: another metric, which the figure shows beside the metric.
        label: name in figures, instead of the title.
        window: draw the mean of this many measurements.
        picture: name of a figure that several results share.
        rows: number of demonstrated rows, which is the x axis of the figure.
        clocks: X axes of the figures; the first file has no suffix.
        machine: description of the machine.
        bar: the value that a run should reach.
        bounds: lowest and highest possible value of a bounded return; rates lie in [0, 1].
        reach: also store when the mean return of 25 training episodes first reaches this return.
        lasting: also store whether a metric keeps its value after it has reached a bar, as METRIC=BAR.
        baseline: a horizontal line, as LABEL=VALUE; the option may be given several times.
        drawn_baseline: a horizontal line for --drawn, whose figure otherwise has those of --baseline.
        note: a note for the file.
        all_started: the named runs are all that were started with their command.
        failed: a run that ended with an error or was lost, and why, such as "lrl-4: its machine was lost at turn
            120,000"; the option is given once per run.
        left_out: a run that was stopped or is not named for another reason, and why; given once per run.

    Raises:
        ValueError: If the options contradict each other, a run cannot be read or has not finished, or a value is out
            of bounds.
    """
    baselines = dict(labelled_number("baseline", text) for text in baseline or ())
    if rows is not None and (rows < 1 or label is None):
        raise ValueError(f"--rows is {rows}; it must be positive and come with a --label, the name of its line.")
    given = {"label": label, "window": window, "picture": picture, "clocks": clocks, "bar": bar}
    given |= {"bounds": bounds and list(bounds), "rows": rows}
    for option in ("clocks", "window", "drawn", "drawn_baseline") if rows is not None else ():
        if (given | {"drawn": drawn, "drawn_baseline": drawn_baseline})[option] is not None:
            raise ValueError(f"--{option} is given, which the figure of --rows does not read; leave it out.")
    _check_declared(all_started, failed, left_out)
    if drawn_baseline is not None:
        given["drawn_baselines"] = dict(labelled_number("drawn_baseline", text) for text in drawn_baseline)
    about: dict[str, Any] = {"title": title, "machine": machine, "baselines": baselines, "note": note}
    about |= {key: value for key, value in given.items() if value is not None}
    path = RESULTS / f"{name}.json"
    result = about | summarise(runs, metric, drawn, reach, labelled_number("lasting", lasting) if lasting else None)
    unfinished = [str(run["seed"]) for run in result["runs"] if run["minutes"] is None]
    if unfinished:
        raise ValueError(
            f"the runs with the seeds {', '.join(unfinished)} have not finished; name finished runs only, and the "
            "others with --failed or --left_out."
        )
    counts = run_counts(len(result["runs"]), [*(failed or ()), *restarted_runs(runs)], left_out or ())
    if add and path.exists():
        earlier = read_result(path)
        result = with_earlier_runs(result, earlier)
        counts = with_earlier_counts(counts, earlier.get("counts"), len(result["runs"]))
    result = about | {"counts": counts} | result
    check_bounds(result, final_values(result))
    with write_whole(path) as file:
        file.write(result_text(result))
    print(f"wrote {path}")


def count(
    name: str,
    *,
    all_started: bool = False,
    failed: tuple[str, ...] | None = None,
    left_out: tuple[str, ...] | None = None,
) -> None:
    """Write the counts of runs into a file of assets/results that another command wrote.

    Args:
        name: name of the file.
        all_started: the runs in the file are all that were started.
        failed: see `keep`.
        left_out: see `keep`.

    Raises:
        ValueError: If the options contradict each other, or the file has no training runs.
    """
    _check_declared(all_started, failed, left_out)
    path = RESULTS / f"{name}.json"
    result = read_result(path, "name")
    finished = num_runs(result)
    if finished is None:
        raise ValueError(f"name is {name!r}, which has no training runs to count; name a result that has.")
    with write_whole(path) as file:
        file.write(result_text(result | {"counts": run_counts(finished, failed or (), left_out or ())}))
    print(f"wrote {path}")


def _check_declared(all_started: bool, failed: tuple[str, ...] | None, left_out: tuple[str, ...] | None) -> None:
    """Raise unless the other runs are declared.

    Raises:
        ValueError: If neither or both kinds of options are given.
    """
    if all_started == bool(failed or left_out):
        raise ValueError(
            "give either --all_started, if these are all runs that were started with their command, or --failed and "
            "--left_out with the reason of each other run."
        )


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
        if "scores" in report:
            draw_scores(report, PICTURES / f"{name}.png")


def _draw_searches(name: str, report: Mapping[str, Any]) -> None:
    """Draw what ``lrl search_table --json`` wrote."""
    from lrl.search.experiments import report_records
    from lrl.search.pictures import draw_progress  # they import torch

    draw_progress(report_records(report, name), PICTURES / f"{name}.png")


def check() -> None:
    """Exit with status 1 if ``write`` would change a page, counts of runs are wrong, or a figure has no record."""
    faults = [fault for name, result in kept_results(RESULTS).items() if (fault := fault_of(name, result))]
    for page in (Path("README.md"), *sorted(Path("docs").rglob("*.md"))):
        faults += figure_faults(str(page), page.read_text(encoding="utf-8"))
    if faults:
        sys.exit("\n".join(faults))
    stale = [str(path) for path, text in _filled().items() if path.read_text(encoding="utf-8") != text]
    if stale:
        sys.exit(f"{', '.join(stale)}: differs from assets/results; run `python scripts/results.py write`")


def _filled() -> dict[Path, str]:
    """Return the text that ``write`` writes to every page and to the notebook, by path."""
    results = kept_results(RESULTS)
    texts = {path: path.read_text(encoding="utf-8") for path in documentation_pages(Path())}
    texts |= {Path(page): Path(page).read_text(encoding="utf-8") for page in SENTENCES}
    pages = {path: fill_sentences(str(path), fill_tables(path, text, results), results) for path, text in texts.items()}
    return pages | {NOTEBOOK: filled_notebook(NOTEBOOK.read_text(encoding="utf-8"), results)}


def main(prog: str, args: Sequence[str]) -> None:
    """Run ``keep``, ``count``, ``write``, ``check`` or ``boards``.

    Args:
        prog: name of the program.
        args: name of the action, and its command-line arguments.
    """
    actions = {"keep": keep, "count": count, "write": write, "check": check, "boards": boards}
    if args and args[0] in actions:
        command(actions[args[0]])(f"{prog} {args[0]}", args[1:])
    elif args and args[0] in ("-h", "--help"):
        print(__doc__)
    else:
        sys.exit(f"{prog}: the first word must be keep, count, write, check or boards")

"""Searches and networks side by side, with the record of each in a file of one folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lrl.evaluation.parameter_search import SearchBudget, SearchRun, search
from lrl.whole_file import write_whole

MakeRecord = Callable[[SearchRun, SearchBudget], dict[str, Any]]
"""Plays or trains one run, and returns its record."""


def read_record(run: SearchRun, budget: SearchBudget, folder: Path) -> dict[str, Any] | None:
    """Return the record of a finished run; None if it has not finished.

    Raises:
        ValueError: it was made with another budget.
    """
    file = run.file(folder)
    if not file.exists():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    _check_budget(run, budget, record, str(file), "give another folder")
    return record


def _check_budget(run: SearchRun, budget: SearchBudget, record: Mapping[str, Any], name: str, remedy: str) -> None:
    for entry, value in budget.entries(run.method).items():
        if record.get(entry) != value:
            raise ValueError(f"--{entry} is {value}, but {name} was made with {record.get(entry)}; {remedy}.")


def restore_records(
    records: Mapping[SearchRun, dict[str, Any] | None], runs: Sequence[SearchRun], budget: SearchBudget, folder: Path
) -> int:
    """Write the records of runs that have none in the folder yet, as if they had finished there; return how many.

    Args:
        records: of an earlier report; runs without one are left out.
        runs: what :func:`~lrl.evaluation.parameter_search.planned` returned.
        budget: of the runs.
        folder: of the records.

    Raises:
        ValueError: one of them was made with another budget; none is written.
    """
    found = {run: record for run in runs if (record := records.get(run)) and not run.file(folder).exists()}
    for run, record in found.items():
        _check_budget(run, budget, record, f"--finished has {run.task} {run.method} {run.index}, which", "leave it out")
    for run, record in found.items():
        _write(record, run.file(folder))
    return len(found)


def search_all(
    runs: Sequence[SearchRun],
    budget: SearchBudget,
    folder: Path,
    jobs: int = 1,
    about: Mapping[str, Any] | None = None,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    make_record: MakeRecord = search,
) -> None:
    """Finish all runs that have no record yet; each record is written whole when its run ends.

    Args:
        runs: what :func:`~lrl.evaluation.parameter_search.planned` returned.
        budget: the same for all.
        folder: of the records.
        jobs: number of processes, of one thread each.
        about: further entries of each record.
        on_record: called with each new record.
        make_record: returns the record of a run; a function of a module, which other processes import.

    Raises:
        ValueError: ``jobs`` is below 1, or a record was made with another budget.
    """
    if jobs < 1:
        raise ValueError(f"--jobs is {jobs}; it must be at least 1.")
    todo = [run for run in runs if read_record(run, budget, folder) is None]
    told = on_record or (lambda record: None)
    if jobs == 1:
        for run in todo:
            told(finish(run, budget, folder, about, make_record))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are started now
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            submitted = [pool.submit(finish, run, budget, folder, about, make_record) for run in todo]
            for future in as_completed(submitted):
                told(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)  # otherwise all others would run before the error is seen
            raise


def finish(
    run: SearchRun,
    budget: SearchBudget,
    folder: Path,
    about: Mapping[str, Any] | None,
    make_record: MakeRecord = search,
) -> dict[str, Any]:
    """Search or train, write the record and return it; arguments are those of :func:`search_all`."""
    record = make_record(run, budget) | dict(about or {})
    _write(record, run.file(folder))
    return record


def _write(record: dict[str, Any], file: Path) -> None:
    """Write a record as JSON, whole or not at all."""
    with write_whole(file) as lines:
        lines.write(json.dumps(record) + "\n")

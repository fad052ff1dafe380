"""Reports of ``lrl search_table``: the records of all planned runs in one file, which tables and figures read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lrl.evaluation.pictures import Series
from lrl.evaluation.report import result_text
from lrl.files import write_whole
from lrl.search.experiments import SearchRun

Records = Mapping[SearchRun, dict[str, Any] | None]
"""The record of each planned run; None where it has not finished."""


def is_random(record: Mapping[str, Any]) -> bool:
    """Return whether most proposals of a language model were random for want of a usable reply."""
    return record.get("failed", 0) > record.get("iterations", 0) / 2


def best_so_far(record: Mapping[str, Any]) -> Series:
    """Return the best mean return so far against episodes: where it changes, and at the end.

    Args:
        record: of a search or a network, with its ``values``, or as :func:`search_report` keeps it.
    """
    if "best_so_far" in record:
        kept = record["best_so_far"]
        return Series(clock=np.array(kept["episodes"], dtype=np.float64), values=np.array(kept["values"]))
    best = np.maximum.accumulate(np.array(record["values"], dtype=np.float64))
    last = len(best) - 1
    kept = [place for place in range(len(best)) if place in (0, last) or best[place] > best[place - 1]]
    return Series(clock=(np.array(kept, dtype=np.float64) + 1) * record["rollouts"], values=best[kept])


def search_report(records: Records, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of all records; :func:`report_records` reads it.

    Instead of the ``values`` of all proposals it has ``best_so_far``, where they exceed all before.

    Args:
        records: of all planned runs.
        about: further entries of the report.
    """
    planned = Counter((run.task, run.method) for run in records)
    seeds = [{"task": task, "method": method, "seeds": count} for (task, method), count in planned.items()]
    searches = [_without_values(record) | vars(run) for run, record in records.items() if record is not None]
    return {**about, "planned": seeds, "searches": searches}


def _without_values(record: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in record.items() if name != "values"}
    if "values" in record:
        series = best_so_far(record)
        kept["best_so_far"] = {"episodes": series.clock.astype(int).tolist(), "values": series.values.tolist()}
    return kept


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write a report as JSON, whole or not at all, with a line for each list of numbers."""
    with write_whole(path) as file:
        file.write(result_text(dict(report)))


def read_report(path: Path) -> Records:
    """Return the record of each planned run of a report's file.

    Raises:
        ValueError: there is no such file, or it is of another kind.
    """
    if not path.is_file():
        raise ValueError(f"finished is {str(path)!r}, which is no file; give a report of `lrl search_table`.")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"finished is {str(path)!r}, which is no JSON; give one of `lrl search_table`.") from error
    return report_records(report, str(path))


def report_records(report: Mapping[str, Any], name: str = "the report") -> Records:
    """Return the record of each planned run of a report.

    Args:
        report: what :func:`search_report` returned.
        name: of the report, for the error.

    Raises:
        ValueError: it is another kind of file.
    """
    if not isinstance(report, Mapping) or not {"planned", "searches"} <= set(report):
        raise ValueError(f"{name!r} holds no searches of `lrl search_table`.")
    try:
        found = {SearchRun(one["task"], one["method"], one["index"]): one for one in report["searches"]}
        planned = [(one["task"], one["method"], range(one["seeds"])) for one in report["planned"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name!r} has entries of another kind; give a report of `lrl search_table`.") from error
    runs = [SearchRun(task, method, index) for task, method, indices in planned for index in indices]
    return {run: found.get(run) for run in runs}

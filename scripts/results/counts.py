"""Counts of the runs of an experiment: how many were started, finished, failed and left out, and why.

Each result with training runs has an entry ``counts`` with the keys ``started``, ``finished``, ``failed``, ``left_out``
and ``reasons``. A run is one launch with the command of the result; a run that is resumed is not a further one.

- ``finished``: the runs of the file, which trained to their end, or to the step that the file names.
- ``failed``: runs that ended with an error, or were lost before their end.
- ``left_out``: runs that a person stopped or left out of the file.
- ``started``: the sum of the three.

A number that nobody recorded is None, and is shown as :data:`UNKNOWN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrl.files import is_replaced

Result = Mapping[str, Any]

HEADING = "started / failed / left out"
"""Title of the column of :func:`counts_text`."""
UNKNOWN = "–"
_KEYS = ("started", "finished", "failed", "left_out")


def run_counts(finished: int, failed: Sequence[str], left_out: Sequence[str]) -> dict[str, Any]:
    """Return the entry ``counts`` of a result.

    Args:
        finished: number of runs in the file.
        failed: the reason for each failed run.
        left_out: the reason for each run that was left out.
    """
    counts = {"finished": finished, "failed": len(failed), "left_out": len(left_out)}
    reasons = [*(f"failed: {text}" for text in failed), *(f"left out: {text}" for text in left_out)]
    return {"started": sum(counts.values()), **counts, "reasons": reasons}


def restarted_runs(runs: Sequence[Path]) -> list[str]:
    """Return the reason for each run beside ``runs`` that was interrupted before its first checkpoint and replaced."""
    found = [file for run in runs for file in sorted(run.resolve().parent.glob(f"{run.resolve().name}-interrupted-*"))]
    return [f"{run.name}, before its first checkpoint; started again" for run in found if is_replaced(run)]


def with_earlier_counts(counts: Result, earlier: Result | None, finished: int) -> dict[str, Any]:
    """Return the counts of a result to which the runs of an earlier version of the file were added.

    Args:
        counts: counts of the new runs.
        earlier: counts of the earlier runs, if they have any.
        finished: number of runs in the file.
    """
    if earlier is None or None in (earlier[key] for key in _KEYS):
        reasons = ["of the earlier runs in this file only those that finished were recorded"]
        return {**dict.fromkeys(_KEYS), "finished": finished, "reasons": [*counts["reasons"], *reasons]}
    replaced = counts["finished"] + earlier["finished"] - finished
    again = [f"left out: {replaced} of the earlier runs, whose seeds were run again"] if replaced else []
    sums = {key: counts[key] + earlier[key] for key in _KEYS}
    sums |= {"finished": finished, "left_out": sums["left_out"] + replaced}
    return {**sums, "reasons": [*earlier["reasons"], *counts["reasons"], *again]}


def num_runs(result: Result) -> int | None:
    """Return the number of training runs or searches in a result; None if it holds an evaluation or a benchmark."""
    if "screening" in result:
        return sum(len(option["runs"]) for option in result["screening"])
    kinds = (result[kind] for kind in ("runs", "pilots", "searches", "returns") if kind in result)
    return next((len(runs) for runs in kinds), None)


def fault_of(name: str, result: Result) -> str:
    """Return what is wrong with the counts of a result as a sentence; empty if nothing is.

    Args:
        name: name of the result.
        result: a kept result.
    """
    finished, counts = num_runs(result), result.get("counts")
    if finished is None:
        return "" if counts is None else f"{name} has counts, but no training runs; remove them."
    if not isinstance(counts, dict) or set(counts) != {*_KEYS, "reasons"}:
        return f"{name} has no counts of its runs; add them with `python scripts/results.py count {name}`."
    if counts["finished"] != finished:
        return f"{name} counts {counts['finished']} finished runs; it must count its {finished} runs."
    others = [counts[key] for key in ("failed", "left_out")]
    known = None not in others
    if counts["started"] != (finished + sum(others) if known else None):
        return f"{name} counts {counts['started']} started runs; it must be the sum of the others, or null if one is."
    if len(counts["reasons"]) < (any(others) if known else 1):
        return f"{name} has counts without reasons; name the reason of each run that failed or was left out."
    return ""


def counts_text(result: Result) -> str:
    """Return the number of started, failed and left out runs of a result, or :data:`UNKNOWN` if it is not recorded."""
    counts = result.get("counts") or dict.fromkeys(_KEYS)
    shown = [counts[key] for key in ("started", "failed", "left_out")]
    return UNKNOWN if None in shown else " / ".join(map(str, shown))

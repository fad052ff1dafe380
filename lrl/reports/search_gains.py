"""Compare a language model that learned to search with random search, seed by seed."""

from __future__ import annotations

import numpy as np

from lrl.evaluation.parameter_search import IN_CONTEXT, UNPLAYABLE
from lrl.evaluation.statistics import bootstrap_interval
from lrl.reports.search_records import Records, is_random
from lrl.reports.seed_intervals import MIN_SEEDS

CONTROL = "random_search"
"""Name of the method that the language model is compared with."""
_RULES = ("best_iteration", "fresh")


def gains(records: Records, task: str, rule: str) -> np.ndarray:
    """Return the figures of the language model minus those of random search on the same seeds, ``(seed,)``.

    Seeds that only one of them has finished are left out.

    Args:
        records: of all planned runs.
        task: name of the task.
        rule: ``best_iteration`` or ``fresh``.
    """
    found: dict[str, dict[int, float]] = {IN_CONTEXT: {}, CONTROL: {}}
    for run, record in records.items():
        if run.task == task and run.method in found and record is not None and UNPLAYABLE not in record:
            found[run.method][run.index] = record[rule]
    model, control = found[IN_CONTEXT], found[CONTROL]
    return np.array([model[index] - control[index] for index in model if index in control])


def is_better(differences: np.ndarray) -> bool:
    """Return whether differences ``(seed,)`` are above 0: their interval, or each of them if there are fewer than five.

    Fewer than three are never enough.
    """
    if len(differences) < 3:
        return False
    least = bootstrap_interval(differences)[0] if len(differences) >= MIN_SEEDS else differences.min()
    return bool(least > 0)


def has_gains(records: Records) -> bool:
    """Return whether there is a task that both have played with the same seed."""
    return any(len(gains(records, task, _RULES[0])) for task in {run.task for run in records})


def gains_table(records: Records) -> str:
    """Return a Markdown table with a row per task that both have played, and on how many the model is better.

    A cell is the mean difference with its 95% bootstrap interval over seeds, or the single differences of fewer than
    five. Tasks on which most proposals of a seed were random for want of a usable reply count as not
    better; tasks that the model cannot play are left out.
    """
    lines = ["| task | seeds | best iteration | chosen policy on fresh episodes |", "|---|---|---|---|"]
    better, played = dict.fromkeys(_RULES, 0), 0
    for task in dict.fromkeys(run.task for run in records):
        differences = {rule: gains(records, task, rule) for rule in _RULES}
        if not len(differences[_RULES[0]]):
            continue
        played += 1
        lost = any(
            run.task == task and run.method == IN_CONTEXT and record is not None and is_random(record)
            for run, record in records.items()
        )
        for rule in _RULES:
            better[rule] += not lost and is_better(differences[rule])
        cells = [task, str(len(differences[_RULES[0]]))]
        cells += ["random replies" if lost else _cell(differences[rule]) for rule in _RULES]
        lines.append(f"| {' | '.join(cells)} |")
    sentence = (
        f"The language model is better than random search on {better['best_iteration']} of {played} tasks by the best "
        f"iteration and on {better['fresh']} by the chosen policy: its interval is above 0, or every difference where "
        "there are three or four."
    )
    return "\n".join([*lines, "", sentence])


def _cell(differences: np.ndarray) -> str:
    if len(differences) >= MIN_SEEDS:
        low, high = bootstrap_interval(differences)
        return f"{_number(differences.mean())} ({_number(low)} to {_number(high)})"
    return ", ".join(map(_number, differences))


def _number(value: float) -> str:
    return f"{value:+.3g}" if abs(value) < 999.5 else f"{value:+.0f}"

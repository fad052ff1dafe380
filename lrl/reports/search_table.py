"""The table of searches and networks beside the published figures of ProPS, under both rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lrl.evaluation.parameter_search import METHODS, NETWORKS, SearchRun
from lrl.reports.seed_intervals import MIN_SEEDS
from lrl.search.tasks import TASKS

RULES = {"best_iteration": "best iteration", "fresh": "chosen policy on fresh episodes"}
"""The two figures of a search, by their name in a record."""
_NETWORK_RULES = (
    "the best iteration is the best mean of as many consecutive training episodes as a proposal has, in blocks that do "
    "not overlap; the policy samples its actions and is updated meanwhile. The chosen policy is the last one, which "
    "does not sample."
)
Records = Mapping[SearchRun, dict[str, Any] | None]
"""The record of each planned run; None where it has not finished."""


def search_tables(records: Records) -> str:
    """Return Markdown tables of both rules and of what was played, how often ProPS is reached, and what is missing.

    A cell is the mean over seeds with their standard deviation, or the single values of fewer than five; ``n/m``
    follows where only n of m planned seeds have finished.
    """
    heading = "mean ± standard deviation over seeds, single values of fewer than five"
    parts = [f"{title.capitalize()}, {heading}:\n\n{_table(records, rule)}" for rule, title in RULES.items()]
    parts.append(f"Episodes / env steps of a seed, mean:\n\n{budget_table(records)}")
    networks = [method for method in _names(records, "method") if method in NETWORKS]
    if networks:
        parts.append(f"Of {' and '.join(networks)}, {_NETWORK_RULES}")
    parts += [reached_text(records, rule) for rule in RULES]
    missing = unfinished(records)
    parts.append(f"Unfinished: {', '.join(missing)}." if missing else "All planned runs have finished.")
    return "\n\n".join(parts)


def _table(records: Records, rule: str) -> str:
    methods = _names(records, "method")
    heads = ["task", "parameters", *methods, "ProPS", "ProPS+", "PPO", "best baseline", "ceiling"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in _names(records, "task"):
        task = TASKS[name]
        published = task.published
        cells = [name, str(task.num_parameters), *(_cell(records, name, method, rule) for method in methods)]
        cells += [_number(value) for value in (published.props, published.props_plus, published.ppo)]
        cells += [f"{_number(published.best_baseline)} {published.best_name}", _number(task.yardsticks.ceiling)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(records: Records, task: str, method: str, rule: str) -> str:
    planned = _of(records, task, method)
    values = np.array([record[rule] for record in planned if record is not None])
    if not len(values):
        return f"0/{len(planned)}"
    spread = f" ± {_number(values.std())}" if len(values) >= MIN_SEEDS else f" ({', '.join(map(_number, values))})"
    finished = "" if len(values) == len(planned) else f" {len(values)}/{len(planned)}"
    return f"{_number(values.mean())}{spread if len(values) > 1 else ''}{finished}"


def budget_table(records: Records) -> str:
    """Return a Markdown table of the episodes and env steps that a seed of each method has played, the mean of seeds.

    The fresh episodes of the chosen policy are not counted.
    """
    methods = _names(records, "method")
    lines = [f"| {' | '.join(['task', *methods])} |", "|" + "---|" * (1 + len(methods))]
    for task in _names(records, "task"):
        cells = [task]
        for method in methods:
            finished = [record for record in _of(records, task, method) if record is not None]
            means = [np.mean([record[name] for record in finished]) for name in ("episodes", "env_steps") if finished]
            cells.append(" / ".join(f"{mean:,.0f}" for mean in means))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reached_text(records: Records, rule: str) -> str:
    """Return a sentence on how many finished tasks each method reaches the published ProPS and ProPS+ on.

    Means are rounded to two decimals, as the published figures are. The last count is that of tasks on which at least
    one of the searches does so, among the tasks that all of them have finished.
    """
    methods, parts = _names(records, "method"), []
    searches = [method for method in methods if method in METHODS]
    groups = [(method, [method]) for method in methods]
    for title, group in [*groups, ("at least one search", searches)] if len(searches) > 1 else groups:
        best = {task: _best(records, task, group, rule) for task in _names(records, "task")}
        whole = {task: round(mean, 2) for task, mean in best.items() if mean is not None}
        counts = [
            sum(mean >= getattr(TASKS[task].published, row) for task, mean in whole.items())
            for row in ("props", "props_plus")
        ]
        parts.append(f"{title} {counts[0]} and {counts[1]} of {len(whole)}")
    return f"Tasks on which the mean reaches the published ProPS and ProPS+ ({RULES[rule]}): {'; '.join(parts)}."


def _best(records: Records, task: str, methods: Sequence[str], rule: str) -> float | None:
    """Return the largest mean over seeds that one of the methods has; None where one of them has not finished."""
    planned = [_of(records, task, method) for method in methods]
    if any(None in seeds for seeds in planned):
        return None
    return max(float(np.mean([record[rule] for record in seeds if record is not None])) for seeds in planned)


def unfinished(records: Records) -> list[str]:
    """Return the planned runs without record, as ``task method (n of m seeds missing)``."""
    found = []
    for task in _names(records, "task"):
        for method in _names(records, "method"):
            planned = _of(records, task, method)
            missing = sum(record is None for record in planned)
            if missing:
                found.append(f"{task} {method} ({missing} of {len(planned)} seeds missing)")
    return found


def _of(records: Records, task: str, method: str) -> list[dict[str, Any] | None]:
    return [record for run, record in records.items() if (run.task, run.method) == (task, method)]


def _names(records: Records, part: str) -> Sequence[str]:
    """Return the tasks or methods of the planned runs, in their order."""
    return list(dict.fromkeys(getattr(run, part) for run in records))


def _number(value: float | None) -> str:
    """Return a figure with about four digits; empty where there is none."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

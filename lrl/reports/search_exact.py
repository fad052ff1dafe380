"""The exact success on FrozenLake of the tables that searches chose."""

from __future__ import annotations

from functools import cache

import numpy as np

from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.statistics import bootstrap_interval
from lrl.reports.search_records import Records
from lrl.reports.seed_intervals import MIN_SEEDS
from lrl.search.tasks import TASKS

TASK = "frozen_lake"
"""Name of the task whose transition table is known."""


@cache
def lake() -> Lake:
    """Return the map of the task with its time limit."""
    return lakes_of(TASKS[TASK].env_factory())[0]


def exact_success(parameters: list[int]) -> float:
    """Return the probability that a table of one action for each state reaches the goal within the time limit."""
    table = lake().table
    return lake().success(np.eye(table.num_actions)[np.asarray(parameters, dtype=np.int64)])


def exact_table(records: Records) -> str:
    """Return a Markdown table with a row per search: both figures of its tables beside their exact success.

    A cell is the mean with its 95% bootstrap interval over seeds, or the mean alone of fewer than five.
    """
    heads = ["search", "seeds", "best mean of 20 episodes", "100 fresh episodes", "exact success", "optimal tables"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    found: dict[str, list[tuple[float, float, float]]] = {}
    for run, record in records.items():
        if run.task == TASK and record is not None and record.get("parameters"):
            figures = record["best_iteration"], record["fresh"], exact_success(record["parameters"])
            found.setdefault(run.method, []).append(figures)
    for method, figures in found.items():
        exact = [row[-1] for row in figures]
        optimal = sum(value > lake().best_stationary - 1e-6 for value in exact)
        cells = [method, str(len(figures)), *map(_cell, zip(*figures, strict=True)), str(optimal)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: tuple[float, ...]) -> str:
    mean = f"{np.mean(values):.3f}"
    if len(values) < MIN_SEEDS:
        return mean
    low, high = bootstrap_interval(values)
    return f"{mean} ({low:.2f} to {high:.2f})"

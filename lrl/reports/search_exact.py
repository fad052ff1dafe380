"""The exact success on FrozenLake of the tables that searches chose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.parameter_search import NETWORKS, UNPLAYABLE
from lrl.evaluation.statistics import bootstrap_interval
from lrl.reports.search_records import Records
from lrl.reports.seed_intervals import MIN_SEEDS
from lrl.search.tasks import TASKS

TASK = "frozen_lake"
"""Name of the task whose transition table is known."""
_EQUAL = 1e-6
"""Two probabilities of success that are closer together are the same."""


@cache
def lake() -> Lake:
    """Return the map of the task with its time limit."""
    return lakes_of(TASKS[TASK].env_factory())[0]


def exact_success(parameters: Sequence[float]) -> float:
    """Return the probability that a table of one action for each state reaches the goal within the time limit."""
    table = lake().table
    return lake().success(np.eye(table.num_actions)[np.asarray(parameters, dtype=np.int64)])


def exact_table(records: Records) -> str:
    """Return a Markdown table with a row per search: both figures of its tables beside their exact success.

    A cell is the mean with its 95% bootstrap interval over seeds, or the single values of fewer than five; ``n/m``
    says that n of m planned seeds have finished. Networks have no table.
    """
    planned: dict[str, list[dict[str, Any] | None]] = {}
    for run, record in records.items():
        if run.task == TASK and run.method not in NETWORKS:
            planned.setdefault(run.method, []).append(record)
    lines, heads = list[str](), list[str]()
    best = lake().best_stationary - _EQUAL
    for method, seeds in planned.items():
        found = [record for record in seeds if record is not None and UNPLAYABLE not in record]
        if not found:
            continue
        exact = [exact_success(record["parameters"]) for record in found]
        heads = [f"best mean of {found[0]['rollouts']} episodes", f"{found[0]['fresh_episodes']} fresh episodes"]
        columns = [[record["best_iteration"] for record in found], [record["fresh"] for record in found], exact]
        count = f"{len(found)}" if len(found) == len(seeds) else f"{len(found)}/{len(seeds)}"
        cells = [method, count, *map(_cell, columns), str(sum(value > best for value in exact))]
        lines.append(f"| {' | '.join(cells)} |")
    names = ["search", "seeds", *heads, "exact success", "optimal tables"]
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *lines])


def _cell(values: Sequence[float]) -> str:
    if len(values) < MIN_SEEDS:
        return ", ".join(f"{value:.3f}" for value in values)
    low, high = bootstrap_interval(values)
    return f"{np.mean(values):.3f} ({low:.2f} to {high:.2f})"

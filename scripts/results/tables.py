"""Markdown tables of what ``scripts/benchmark.py`` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_interval
from lrl.search.experiments import NETWORKS, UNPLAYABLE, Records
from lrl.search.tasks import TASKS


def benchmark_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per comparison of ``scripts/benchmark.py``."""
    return comparisons_table([(report, one) for report in reports for one in report["comparisons"]])


def comparisons_table(comparisons: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return a Markdown table with one row per comparison, each given with the report that it is from."""
    lines = ["| comparison | ours | theirs | ratio (repeats) |", "|---|---|---|---|"]
    for report, one in comparisons:
        ours, theirs = (_rate(float(np.median(one[side]))) for side in ("ours", "theirs"))
        ratios = f"{one['ratio']:.2f} ({one['ratio_min']:.2f} to {one['ratio_max']:.2f})"
        lines.append(f"| {report['title']}, {one['name']} | {ours} {one['unit']} | {theirs} | {ratios} |")
    return "\n".join(lines)


def _rate(rate: float) -> str:
    """Return a rate without decimals, or with two digits below 10."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def text_cost_table(report: dict[str, Any]) -> str:
    """Return a Markdown table of the cost of text in each environment of ``scripts/benchmark.py text``."""
    lines = ["| environment | text layer, microseconds per step | steps/s in text | native |", "|---|---|---|---|"]
    for one in report["environments_in_text"]:
        cost = np.array(one["text_layer_us"])
        spread = f"{np.median(cost):.1f} ({cost.min():.1f} to {cost.max():.1f})"
        rates = (f"{np.median(one[name]):,.0f}" for name in ("steps_per_second", "native_steps_per_second"))
        lines.append(f"| `{one['env_id']}` | {spread} | {' | '.join(rates)} |")
    return "\n".join(lines)


# The table of trained policies on rephrased prompts, from the reports of ``lrl evaluate --rephrase FILE --json``.


def rephrased_table(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a Markdown table of success rates: a row per kind of policy, a column per phrasing.

    Args:
        reports: For each kind of policy one report per seed, all with the same phrasings.
    """
    phrasings = list(
        dict.fromkeys(name for seeds in reports.values() for report in seeds for name in report["rephrased"])
    )
    heads = ["policy", "as trained", *phrasings]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for policy, seeds in reports.items():
        known = ([report["rephrased"][name] for report in seeds if name in report["rephrased"]] for name in phrasings)
        columns = [seeds, *known]
        cells = [", ".join(f"{report['success_rate']:.3f}" for report in column) for column in columns]
        lines.append(f"| {' | '.join([policy, *cells])} |")
    return "\n".join(lines)


# The exact success on FrozenLake of the tables that searches chose.

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

"""Comparison of searchers on held-out synthetic functions, with equal budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from lrl.evaluation.report import markdown_table
from lrl.evaluation.statistics import bootstrap_interval, json_bounds
from lrl.functional.random import seeds
from lrl.search.searchers import Searcher, Trial
from lrl.search.synthetic import REAL_KINDS, TABLE_KINDS, SyntheticFunction, sample_function

_CONTROL = "random_search"
"""Name of the searcher with which the others are compared."""
_NAMES = {_CONTROL: "random search", "cma_es": "CMA-ES", "in_context": "in-context search"}
_GROUPS = {"real": ("real parameters", REAL_KINDS), "tables": ("tables", TABLE_KINDS)}
"""Titles and kinds of the groups of functions whose figures are also reported separately, by name."""


def search_function(
    searcher: Searcher, function: SyntheticFunction, seed: int, warmup: int, iterations: int
) -> np.ndarray:
    """Search one function and return the exact value of the best proposal so far after each trial, ``(trial,)``.

    The best proposal is the one with the highest measured value.

    Args:
        searcher: the searcher.
        function: the function to maximise.
        seed: seed of the search and of the warm-up, which is the same for all searchers.
        warmup: number of random proposals before the search.
        iterations: number of proposals of the searcher.
    """
    space, rng = function.space, np.random.default_rng(int(seeds("synthetic measurement", seed)))
    warm = np.random.default_rng(int(seeds("synthetic warm-up", seed)))
    searcher.setup(space, seed, iterations)
    best: Trial | None = None
    exact = np.zeros(warmup + iterations)
    for trial in range(warmup + iterations):
        proposal = space.sample(warm) if trial < warmup else searcher.ask()
        measured = function.measure(proposal, rng)
        searcher.tell(measured)
        if best is None or measured.value > best.value:
            best = measured
        exact[trial] = function.values(best.parameters[None])[0]
    return exact


def compare_searchers(
    searchers: Mapping[str, Callable[[], Searcher]], seed: int, indices: Iterable[int], warmup: int, iterations: int
) -> dict[str, dict[str, Any]]:
    """Search the same held-out functions with several searchers.

    Args:
        searchers: functions that create the searchers, by name; the others are compared with ``random_search``.
        seed: seed of the functions and searches.
        indices: indices of at least two functions.
        warmup: number of random proposals before each search, the same for all searchers.
        iterations: number of proposals of each searcher.

    Returns:
        For each searcher, the mean exact value of the chosen proposal over functions (``value``), the mean difference
        to random search (``gain``), both with 95% bootstrap intervals, the fraction of functions with a positive
        difference (``better_share``), and ``values``. ``real`` and ``tables`` contain the same figures of the functions
        of real parameters and of tables, if the comparison contains at least two but not all of the functions.
    """
    finals, kinds = {name: list[float]() for name in searchers}, list[str]()
    for index in indices:
        function = sample_function(seed, index, held_out=True)
        kinds.append(function.kind)
        search_seed = int(seeds("synthetic search", seed, index))
        for name, make in searchers.items():
            finals[name].append(float(search_function(make(), function, search_seed, warmup, iterations)[-1]))
    control, report = np.array(finals[_CONTROL]), {}
    for name, values in finals.items():
        report[name] = {**_figures(np.array(values), control), "values": values}
        for group, (_, members) in _GROUPS.items():
            rows = np.isin(kinds, members)
            if 1 < rows.sum() < len(rows):
                report[name][group] = _figures(np.array(values)[rows], control[rows])
    return report


def _figures(values: np.ndarray, control: np.ndarray) -> dict[str, Any]:
    """Return the figures of a searcher from its values ``(function,)`` and the values of random search."""
    gains = values - control
    return {
        "value": float(values.mean()),
        "value_ci95": json_bounds(bootstrap_interval(values)),
        "gain": float(gains.mean()),
        "gain_ci95": json_bounds(bootstrap_interval(gains)),
        "better_share": float((gains > 0).mean()),
    }


def synthetic_table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row per searcher and group of functions of each report.

    Args:
        reports: results of ``lrl synthetic_search --json`` by name.

    Raises:
        ValueError: If a report has no key ``searchers``.
    """
    heads = ["searcher", "functions", "proposals", "exact value", "gain over random search", "functions with a gain"]
    rows = []
    for name, report in reports.items():
        if "searchers" not in report:
            raise ValueError(f"{name!r} is not a report of `lrl synthetic_search`: it has no key 'searchers'.")
        whole = report["searchers"]
        groups = {"all": whole} | {
            title: {searcher: figures[group] for searcher, figures in whole.items() if group in figures}
            for group, (title, _) in _GROUPS.items()
        }
        for title, group in groups.items():
            for searcher, figures in group.items():
                cells = [_interval(figures, "value"), _interval(figures, "gain"), f"{figures['better_share']:.0%}"]
                if searcher == _CONTROL:
                    cells[1:] = ["", ""]
                rows.append([_NAMES.get(searcher, searcher), title, str(report["iterations"]), *cells])
    return markdown_table(heads, rows)


def _interval(figures: Mapping[str, Any], name: str) -> str:
    """Return a mean with its interval as text."""
    low, high = figures[f"{name}_ci95"]
    return f"{figures[name]:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")

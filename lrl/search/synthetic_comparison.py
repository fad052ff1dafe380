"""Comparison of searchers on held-out synthetic functions, with equal budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lrl.evaluation.report import markdown_table
from lrl.evaluation.statistics import bootstrap_interval
from lrl.functional.random import seeds
from lrl.search.searchers import Searcher, Trial
from lrl.search.synthetic import REAL_KINDS, TABLE_KINDS, SyntheticFunction, sample_function

GROUPS = {"real": REAL_KINDS, "tables": TABLE_KINDS}
"""Kinds of functions by group; the figures of each group are also reported separately."""


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
    searchers: Mapping[str, Callable[[], Searcher]],
    seed: int,
    num_functions: int,
    warmup: int,
    iterations: int,
    on_function: Callable[[int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Search the same held-out functions with several searchers.

    Args:
        searchers: functions that create the searchers, by name. If one is named ``random_search``, the others are
            compared with it.
        seed: seed of the functions and the searches.
        num_functions: number of functions.
        warmup: number of random proposals before each search, the same for all searchers.
        iterations: number of proposals of each search.
        on_function: function that is called with the index of each finished function.

    Returns:
        A dictionary per name with the mean exact value of the chosen proposal, ``value``, its 95% interval over
        functions, and the ``values`` of all functions. If ``random_search`` is given, it also contains the mean
        difference from random search on the same functions, ``gain``, its interval, and the share of functions with a
        positive difference, ``better_share``. The same figures, without ``values``, follow for each of :data:`GROUPS`
        that contains at least two but not all of the functions.
    """
    finals: dict[str, list[float]] = {name: [] for name in searchers}
    kinds: list[str] = []
    for index in range(num_functions):
        function = sample_function(seed, index, held_out=True)
        kinds.append(function.kind)
        search_seed = int(seeds("synthetic search", seed, index))
        for name, make in searchers.items():
            finals[name].append(float(search_function(make(), function, search_seed, warmup, iterations)[-1]))
        if on_function is not None:
            on_function(index)
    control = np.array(finals.get("random_search", []))
    groups = {group: np.isin(kinds, members) for group, members in GROUPS.items()}
    return {
        name: _figures(np.array(values), control)
        | {"values": values}
        | {
            group: _figures(np.array(values)[rows], control[rows] if len(control) else control)
            for group, rows in groups.items()
            if 1 < rows.sum() < num_functions
        }
        for name, values in finals.items()
    }


def _figures(values: np.ndarray, control: np.ndarray) -> dict[str, Any]:
    """Return the figures of a searcher from its values ``(function,)`` and the values of random search."""
    figures: dict[str, Any] = {"value": float(values.mean()), "value_ci95": list(bootstrap_interval(values))}
    if len(control):
        gains = values - control
        figures |= {"gain": float(gains.mean()), "gain_ci95": list(bootstrap_interval(gains))}
        figures["better_share"] = float((gains > 0).mean())
    return figures


_NAMES = {"random_search": "random search", "cma_es": "CMA-ES", "in_context": "in-context search"}
_CONTROL = "random_search"
_GROUPS = {"all": "all", "real": "real parameters", "tables": "tables"}


def synthetic_table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row per searcher and group of functions of each report.

    Args:
        reports: results of ``lrl synthetic_search --json`` by name.

    Raises:
        ValueError: If a report has no key ``searchers``.
    """
    heads = ["searcher", "functions", "proposals", "exact value", "gain on random search", "functions with a gain"]
    rows = []
    for name, report in reports.items():
        if "searchers" not in report:
            raise ValueError(f"{name!r} is not a report of `lrl synthetic_search`: it has no key 'searchers'.")
        for group, title in _GROUPS.items():
            for searcher, whole in report["searchers"].items():
                figures = whole if group == "all" else whole.get(group)
                if figures is None:
                    continue
                cells = [_NAMES.get(searcher, searcher), title, str(report["iterations"])]
                cells.append(_interval(figures["value"], figures["value_ci95"]))
                compared = searcher != _CONTROL and "gain" in figures
                cells.append(_interval(figures["gain"], figures["gain_ci95"]) if compared else "")
                cells.append(f"{figures['better_share']:.0%}" if compared else "")
                rows.append(cells)
    return markdown_table(heads, rows)


def _interval(mean: float, bounds: Sequence[float]) -> str:
    """Return a mean with its interval as text."""
    return f"{mean:.3f} ({bounds[0]:.3f} to {bounds[1]:.3f})"

"""Tests of the comparison of a language model with random search, seed by seed."""

import json
from pathlib import Path

import numpy as np
import pytest
from results.documentation import fill_tables

from lrl.search.experiments import SearchRun, search_report
from lrl.search.tables import gains, gains_table, is_better


def records(**tasks):
    """Return records of both methods from pairs per task: the figures of the model and of random search."""
    made = {}
    for task, pairs in tasks.items():
        for index, pair in enumerate(pairs):
            for method, value in zip(("in_context", "random_search"), pair, strict=True):
                run = SearchRun(task, method, index)
                record = {"iterations": 10, "rollouts": 2, "values": [1.0], **vars(run)}
                made[run] = None if value is None else record | {"best_iteration": value, "fresh": value - 1}
    return made


def test_differences_are_those_of_the_same_seed():
    made = records(maze=[(3, 1), (None, 5), (2, None), (0, 4)])
    assert gains(made, "maze", "best_iteration").tolist() == [2, -4]
    assert gains(made, "nim", "best_iteration").tolist() == []


@pytest.mark.parametrize(
    ("differences", "better"),
    [([1, 1], False), ([1, 2, 3], True), ([1, 2, 0], False), ([1, 1, 1, 1, -0.5], True), ([9, -9, 9, -9, 9], False)],
)
def test_a_gain_needs_an_interval_above_zero_or_a_gain_on_each_of_few_seeds(differences, better):
    assert is_better(np.array(differences, dtype=float)) is better


def test_the_table_counts_tasks_with_a_gain():
    made = records(maze=[(3, 1), (4, 2), (5, 4)], nim=[(1, 2), (1, 0), (3, 0)], pong=[(2, None)])
    text = gains_table(made)
    assert "| maze | 3 | +2, +2, +1 | +2, +2, +1 |" in text and "| nim | 3 | -1, +1, +3 |" in text
    assert "pong" not in text, "no seed has finished with both"
    assert "better than random search on 1 of 2 tasks by the best iteration and on 1 by the chosen policy" in text
    assert gains_table(records(pong=[(2, None)])) == ""
    assert "| nim | 3 | +1000, +1234, +998 |" in gains_table(records(nim=[(999.7, 0), (1234, 0), (998.2, 0)]))
    five = gains_table(records(maze=[(3, 1)] * 4 + [(2, 1)]))
    assert "| maze | 5 | +1.8 (+1.4 to +2) |" in five


def test_random_proposals_never_count_as_a_gain():
    made = records(maze=[(3, 1), (4, 2), (5, 4)])
    made[SearchRun("maze", "in_context", 1)]["failed"] = 9
    assert "| maze | 3 | random replies | random replies |" in gains_table(made)
    assert "on 0 of 1 tasks" in gains_table(made)


def test_the_documentation_has_the_table_of_a_kept_file():
    made = records(maze=[(3, 1), (4, 2), (5, 4)])
    kept = json.loads(json.dumps(search_report(made, {})))
    page = "<!-- table: search_gains kept -->\n<!-- end table -->"
    assert gains_table(made) in fill_tables(Path("docs/a.md"), page, {"kept": kept})

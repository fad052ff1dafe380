"""The exact success of tables on FrozenLake, against hand-made tables and played episodes."""

from pathlib import Path

import numpy as np
import pytest

from lrl.evaluation.parameter_search import SearchRun
from lrl.reports.documentation import fill_tables
from lrl.reports.search_exact import exact_success, exact_table, lake
from lrl.reports.search_records import search_report
from lrl.search.tasks import TASKS

LEFT, DOWN, RIGHT, UP = range(4)
OPTIMAL = [*(LEFT, UP, UP, UP), *(LEFT, LEFT, LEFT, LEFT), *(UP, DOWN, LEFT, LEFT), *(LEFT, RIGHT, DOWN, LEFT)]


def test_the_best_table_has_the_known_success_and_one_that_never_moves_has_none():
    assert exact_success(OPTIMAL) == pytest.approx(0.7402, abs=1e-4)
    assert exact_success([LEFT] * 16) == 0


def test_it_is_the_share_of_episodes_that_reach_the_goal():
    table, envs, reached = [*OPTIMAL[:9], LEFT, *OPTIMAL[10:]], TASKS["frozen_lake"].env_factory(), 0
    env = envs.make_native()
    for seed in range(1000):
        state, _ = env.reset(seed=seed)
        ended = truncated = False
        reward = 0.0
        while not (ended or truncated):
            state, reward, ended, truncated, _ = env.step(table[state])
        reached += reward > 0
    assert exact_success(table) == pytest.approx(reached / 1000, abs=0.05)
    assert exact_success(table) < lake().best_stationary - 0.05


def record(index, parameters):
    run = SearchRun("frozen_lake", "ars", index)
    return run, {"best_iteration": 0.8, "fresh": 0.7, "parameters": parameters, "values": [1.0], "rollouts": 2}


def test_a_row_has_all_three_figures_of_the_seeds_that_have_tables():
    records = dict([record(0, OPTIMAL), record(1, [LEFT] * 16), record(2, [])]) | {SearchRun("maze", "ars", 0): None}
    line = "| ars | 2 | 0.800 | 0.700 | 0.370 | 1 |"
    assert exact_table(records).endswith(line)
    page = "<!-- table: search_exact kept -->\n<!-- end table -->"
    assert line in fill_tables(Path("docs/a.md"), page, {"kept": search_report(records, {})})
    five = dict(record(index, OPTIMAL) for index in range(5))
    assert "0.800 (0.80 to 0.80)" in exact_table(five) and np.isclose(lake().optimum, 0.7442, atol=1e-4)

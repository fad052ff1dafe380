"""Tests of the exact success of tables on FrozenLake against hand-made tables and episodes."""

from pathlib import Path

import numpy as np
import pytest
from results.documentation import exact_success, exact_table, fill_tables, lake

from lrl.search.experiments import SearchRun, search_report
from lrl.search.tasks import TASKS

LEFT, DOWN, RIGHT, UP = range(4)
OPTIMAL = [*(LEFT, UP, UP, UP), *(LEFT, LEFT, LEFT, LEFT), *(UP, DOWN, LEFT, LEFT), *(LEFT, RIGHT, DOWN, LEFT)]


def test_the_best_table_has_the_known_success_and_a_table_that_never_moves_has_none():
    assert exact_success(OPTIMAL) == pytest.approx(0.7402, abs=1e-4)
    assert exact_success([float(action) for action in OPTIMAL]) == exact_success(OPTIMAL), "as records have them"
    assert exact_success([LEFT] * 16) == 0


def test_exact_success_equals_the_fraction_of_episodes_that_reach_the_goal():
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
    figures = {"best_iteration": 0.8, "fresh": 0.7, "parameters": parameters, "values": [1.0]}
    return SearchRun("frozen_lake", "ars", index), figures | {"rollouts": 2, "fresh_episodes": 9}


def test_a_row_contains_all_three_figures_of_the_finished_seeds():
    records = dict([record(0, OPTIMAL), record(1, [LEFT] * 16)])
    records |= {SearchRun("frozen_lake", "ars", 2): None, SearchRun("maze", "ars", 0): None}
    records |= {SearchRun("frozen_lake", "ppo", 0): record(0, None)[1], SearchRun("frozen_lake", "cma_es", 0): None}
    lines = [
        "| search | seeds | best mean of 2 episodes | 9 fresh episodes | exact success | optimal tables |",
        "|---|---|---|---|---|---|",
        "| ars | 2/3 | 0.800, 0.800 | 0.700, 0.700 | 0.740, 0.000 | 1 |",
    ]
    assert exact_table(records).split("\n") == lines
    page = "<!-- table: search_exact kept -->\n<!-- end table -->"
    assert lines[-1] in fill_tables(Path("docs/a.md"), page, {"kept": search_report(records, {})})
    five = dict(record(index, OPTIMAL) for index in range(5))
    assert "| ars | 5 | 0.800 (0.80 to 0.80) |" in exact_table(five)
    assert np.isclose(lake().optimum, 0.7442, atol=1e-4)

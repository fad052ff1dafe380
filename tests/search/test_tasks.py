"""Tests of the table of tasks against the environments."""

import numpy as np
import pytest

from lrl.search.batched import DynamicsVectorEnv
from lrl.search.experiments import make_policy
from lrl.search.rollouts import make_batched, play_parameters
from lrl.search.tasks import TASKS

RANKS = [3, 5, 10, 22, 18, 36, 108, 16, 48, 9, 11, 9, 18, 18, 10]
"""Numbers of parameters of the paper's table, in its order."""


def test_the_table_contains_the_fifteen_tasks_of_the_paper():
    assert [task.num_parameters for task in TASKS.values()] == RANKS
    short = [name for name, task in TASKS.items() if task.num_seeds == 10]
    assert short == ["reacher", "frozen_lake", "cliff_walking", "maze", "nim", "mountain_car"]
    assert all(task.published["best_baseline"] >= (task.published["ppo"] or -np.inf) for task in TASKS.values())


@pytest.mark.parametrize("name", TASKS)
def test_a_task_can_be_played(name):
    task = TASKS[name]
    policy, envs = make_policy(task), make_batched(task.env_factory(), 2)
    space = policy.parameter_space()
    assert space.size == task.num_parameters
    assert isinstance(envs, DynamicsVectorEnv) == (task.env_id[-2:] != "v5"), "all but MuJoCo step many copies at once"
    trial = play_parameters(policy, envs, space.sample(np.random.default_rng(0)), [1, 2], task.max_steps)
    assert np.isfinite(trial.returns).all() and 2 <= trial.env_steps <= 2 * task.max_steps
    ceiling = task.yardsticks["ceiling"]
    assert ceiling is None or trial.value <= ceiling + (1 if task.policy == "tabular" else 0)
    envs.close()


def test_short_tasks_end_at_their_time_limit():
    envs = make_batched(TASKS["cliff_walking"].env_factory(), 1)
    envs.reset(seed=[0])
    cuts = [bool(envs.step(np.array([3]))[3][0]) for _ in range(100)]
    assert cuts == [False] * 99 + [True]


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.env_id[-2:] != "v5"])
def test_doing_nothing_has_the_return_of_the_table(name):
    task = TASKS[name]
    policy = make_policy(task)
    space = policy.parameter_space()
    nothing = np.full(space.size, 0.0 if space.actions is None else space.actions[0])
    trial = play_parameters(policy, make_batched(task.env_factory(), 20), nothing, range(100), task.max_steps)
    assert trial.value == pytest.approx(task.yardsticks["nothing"], rel=0.005, abs=0.005)

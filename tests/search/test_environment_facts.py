"""Tests of the facts about environments in ProPS+ prompts, by comparison with the environments."""

import re

import numpy as np
import pytest
from environment_facts import facts_of, last_step, numbers
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from lrl.search.described import environment_facts
from lrl.search.tasks import TASKS

LABELS = ["Observation", "Actions", "Reward of a step", "End of an episode", "Randomness"]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_all_facts_and_its_time_limit_but_not_its_best_return(name):
    task = TASKS[name]
    facts = environment_facts(task.env_factory().make_native().unwrapped)
    lines = facts.render(task.max_steps).splitlines()
    assert [line.split(":")[0] for line in lines[-5:]] == LABELS
    assert all(re.fullmatch(r"[^:]+: .+[.]", line) and "  " not in line for line in lines[-5:])
    assert lines[-2].endswith(f"It is cut after {task.max_steps} steps.")
    said, published = facts.render(None), task.published
    for value in {published["props_plus"], published["best_baseline"], task.yardsticks["ceiling"]} - {None, 1.0}:
        assert not re.search(rf"(?<![\d.-]){re.escape(f'{value:g}')}(?![\d.])", said), value
    assert not re.search(r"optim|best|maximum|solved", said)


def test_unknown_environments_and_subclasses_of_known_ones_have_no_facts():
    class Own(FrozenLakeEnv):
        pass

    assert environment_facts(Own()) is None
    assert facts_of("Acrobot-v1")[0] is None
    assert facts_of("Swimmer-v4")[0] is None


def test_without_a_limit_no_time_limit_is_described_and_reset_options_replace_the_start():
    facts, _ = facts_of("CartPole-v1")
    assert "cut" not in facts.render(None) and "-0.05" in facts.render(None)
    assert facts.render(9, known_start=False).endswith(
        "It is cut after 9 steps.\nRandomness: Options of the reset set the start. Nothing else is random."
    )


@pytest.mark.parametrize(("sparse", "told"), [(False, [1.0]), (True, [0.0, -1.0])])
def test_cart_pole(sparse, told):
    facts, native = facts_of("CartPole-v1", sutton_barto_reward=sparse)
    rewards, before, after, terminated = last_step(native, lambda observation: 1)
    assert terminated and numbers(facts.reward) == told and (rewards[0], rewards[-1]) == (told[0], told[-1])
    low, high, left, right = numbers(facts.end)
    assert low < before[0] < high and left < before[2] < right and not left < after[2] < right
    assert (-low, right) == (native.x_threshold, pytest.approx(native.theta_threshold_radians, abs=5e-5))
    assert after[1] > 0 > after[2], "1 is right, after which the pole leans left"
    starts = np.array([native.reset(seed=seed)[0] for seed in range(99)])
    assert numbers(facts.start) == [-0.05, 0.05] and 0.045 < np.abs(starts).max() <= 0.05
    assert "position (m, from -4.8 to 4.8)" in facts.observation and "10 N" in facts.actions


def rocked(observation):
    return 2 if observation[1] > 0 else 0


@pytest.mark.parametrize("id", ["MountainCar-v0", "MountainCarContinuous-v0"])
def test_mountain_cars(id):
    facts, native = facts_of(id)
    continuous = "Continuous" in id

    def act(observation):
        return np.array([rocked(observation) - 1.0]) if continuous else rocked(observation)

    rewards, before, after, terminated = last_step(native, act)
    (goal,) = numbers(facts.end)
    assert terminated and before[0] < goal <= after[0] and f"flag is at position {goal:g}" in facts.world
    cost, *arrival = numbers(facts.reward)
    assert (rewards[0], rewards[-1]) == pytest.approx((cost, sum(arrival) + cost))
    native.reset(seed=1)
    native.state = np.array([-0.9, 0.01])
    after = native.step(np.array([0.5]) if continuous else 0)[0]
    push = 0.5 * 0.0015 if continuous else -0.001
    assert after[1] == pytest.approx(0.01 + push - 0.0025 * np.cos(3 * -0.9), abs=1e-6)
    assert f"{0.0015 if continuous else -0.001:g}" in facts.actions and "-0.0025 * cos(3 * position)" in facts.actions
    native.state = np.array([-1.19, -0.07])
    after = native.step(np.array([-1.0]) if continuous else 0)[0]
    assert after == pytest.approx([-1.2, 0.0]) and "A wall at -1.2 stops the car" in facts.actions
    starts = np.array([native.reset(seed=seed)[0] for seed in range(99)])
    assert (starts[:, 0] >= -0.6).all() and (starts[:, 0] <= -0.4).all() and not starts[:, 1].any()
    heights = native._height(np.linspace(-1.2, 0.6, 1801))
    assert np.linspace(-1.2, 0.6, 1801)[heights.argmin()] == pytest.approx(-0.524, abs=1e-3)


def test_arguments_of_the_mountain_car_are_described():
    facts, _ = facts_of("MountainCar-v0", goal_velocity=0.02)
    assert facts.end == "the position is at least 0.5, and the velocity at least 0.02."


def test_navigation():
    facts, native = facts_of("lrl/Navigation-v0")
    dynamics, (forward, turn, collision) = native.dynamics, numbers(facts.reward)
    assert numbers(facts.observation)[:5] == [-90, -45, 0, 45, 90]
    assert "0 is forward, 1 is right, 2 is left" in facts.actions
    state = np.concatenate([[1.5, 5.0, 0.0], np.full(5, 9.0)])[None]
    for action, moved, turned in ((0, 0.2, 0.0), (1, 0.04, 0.2), (2, 0.04, -0.2)):
        after, reward, ended = dynamics.step(state, np.array([action]), np.zeros((1, 7)))
        assert after[0, :3] == pytest.approx([1.5, 5.0 + moved, turned]) and not ended[0]
        assert reward[0] == (turn if action else forward)
    assert all(f"{number:g}" in facts.actions for number in (0.2, 0.04))
    limit = float(re.search(r"below ([\d.]+) m", facts.end)[1])
    state[0, 0] = limit + 0.01
    assert not dynamics.step(state, np.array([0]), np.zeros((1, 7)))[2][0]
    state[0, 0] = limit - 0.01
    _, reward, ended = dynamics.step(state, np.array([0]), np.zeros((1, 7)))
    assert ended[0] and reward[0] == collision
    deviation = float(re.search(r"standard deviation ([\d.]+)\.", facts.noise)[1])
    assert dynamics.noise(np.random.default_rng(0), 2000).std() == pytest.approx(deviation, rel=0.05)


def test_pong():
    facts, native = facts_of("lrl/Pong-v0")
    dynamics = native.dynamics
    state = np.array([[260.0, 260.0, 12.0, 300.0, -5.0, 0.0]])
    after, reward, ended = dynamics.step(state, np.array([2]), np.zeros((1, 0)))
    assert reward[0] == 1 and not ended[0] and after[0, 4] == 5 and facts.reward.startswith("1 if your paddle hits")
    assert after[0, 5] == 0, "the middle of the paddle sends the ball straight back"
    state[0, 3] = 260.0
    assert dynamics.step(state, np.array([2]), np.zeros((1, 0)))[0][0, 5] == -5
    for action, moved in enumerate((-5, 5, 0)):
        assert dynamics.step(state, np.array([action]), np.zeros((1, 0)))[0][0, 0] - 260 == moved
    missed = np.array([[0.0, 260.0, 4.0, 300.0, -5.0, 0.0]])
    _, reward, ended = dynamics.step(missed, np.array([2]), np.zeros((1, 0)))
    assert ended[0] and reward[0] == 0
    starts = np.array([native.reset(seed=seed)[0] for seed in range(99)])
    assert set(starts[:, 3]) == {-5, 5} and np.abs(starts[:, 4]).max() <= 5 and (starts[:, 1:3] == [400, 300]).all()

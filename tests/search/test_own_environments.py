"""Tests of Maze, Nim, Navigation and Pong against the numbers in their descriptions."""

from itertools import product

import gymnasium as gym
import numpy as np
import pytest
from search_runs import play

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.tabular import policy_values
from lrl.search.batched import DynamicsVectorEnv
from lrl.search.environments import CENTRE_LINES, Pong, distances, maze, nim
from lrl.search.policies import LinearPolicy


def linear(id):
    policy, factory = LinearPolicy(), GymnasiumEnvs(id)
    policy.connect_spaces(*factory.spaces)
    return policy, factory


def exact(dynamics, actions, start, steps):
    """Return the expected return of a table of actions, which are counted from 0."""
    policy = np.eye(dynamics.table.num_actions)[np.asarray(actions)]
    return policy_values(dynamics.table, policy, steps)[1][0, start]


# -- maze ----------------------------------------------------------------------------------------------------------


def test_exactly_one_of_256_tables_solves_the_maze():
    values = [exact(maze(), [a, 0, 0, b, 0, 0, c, d, 0], 0, 100) for a, b, c, d in product(range(4), repeat=4)]
    solved = [table for table, value in zip(product(range(4), repeat=4), values, strict=True) if value > 0]
    assert solved == [(1, 1, 2, 2)]  # down, down, right, right
    assert max(values) == pytest.approx(0.96667, abs=1e-5) and min(values) == pytest.approx(-1.11111, abs=1e-5)


def test_a_move_into_a_wall_of_the_maze_has_no_effect():
    env = gym.make("lrl/Maze3x3-v0", disable_env_checker=True)
    assert env.reset(seed=0)[0] == 0
    walk = [(0, 0), (3, 0), (2, 1), (1, 1), (2, 2), (1, 5), (3, 4), (1, 4), (0, 4), (2, 5), (1, 5), (0, 2)]
    for action, cell in walk:  # the dead end above, and walls around it
        observation, reward, terminated, truncated, _ = env.step(action)
        assert (observation, terminated, truncated) == (cell, False, False)
        assert reward == pytest.approx(-0.0111111, abs=1e-6)
    env.close()


# -- nim -----------------------------------------------------------------------------------------------------------


def nim_table(**entries):
    table = np.ones(11, dtype=int)
    for sticks, taken in entries.items():
        table[int(sticks[1:])] = taken
    return table - 1


def test_exactly_one_of_2187_tables_always_wins_nim():
    sticks = (10, 8, 7, 6, 4, 3, 2)
    perfect = {"s10": 1, "s8": 3, "s7": 2, "s6": 1, "s4": 3, "s3": 2, "s2": 1}
    assert exact(nim(), nim_table(**perfect), 10, 10) == pytest.approx(1.0)
    assert exact(nim(), nim_table(**perfect), 10, 2) < 1
    assert exact(nim(), nim_table(**perfect), 10, 3) == pytest.approx(1.0)
    for number in sticks:  # each of these entries matters
        for taken in (1, 2, 3):
            if taken != perfect[f"s{number}"]:
                assert exact(nim(), nim_table(**{**perfect, f"s{number}": taken}), 10, 10) < 0.99


@pytest.mark.parametrize(
    ("id", "actions"), [("lrl/Nim-v0", (0, 4)), ("lrl/Pong-v0", (-1, 3)), ("lrl/Maze3x3-v0", (-1, 4))]
)
def test_illegal_actions_raise(id, actions):
    env = gym.make(id, disable_env_checker=True)
    env.reset(seed=0)
    for action in actions:
        with pytest.raises(ValueError, match=rf"action is {action}; it must be in Discrete\("):
            env.step(action)
    env.close()


def test_the_opponent_of_nim_is_perfect_and_taking_the_last_stick_loses():
    table = nim().table

    def after(sticks, taken):
        outcomes = zip(*(getattr(table, name)[sticks, taken - 1] for name in ("probability", "next_state", "reward")))
        return sorted((round(p, 6), int(n), float(r)) for p, n, r in outcomes if p)

    assert after(10, 1) == [(0.333333, 6, 0.0), (0.333333, 7, 0.0), (0.333333, 8, 0.0)]
    assert after(10, 2) == [(1.0, 5, 0.0)] and after(10, 3) == [(1.0, 5, 0.0)]
    assert after(6, 1) == [(0.333333, 2, 0.0), (0.333333, 3, 0.0), (0.333333, 4, 0.0)]
    assert after(2, 1) == [(1.0, 0, 1.0)] and after(4, 3) == [(1.0, 0, 1.0)]
    assert after(1, 1) == [(1.0, 0, -1.0)] and after(3, 3) == [(1.0, 0, -1.0)] and after(2, 3) == [(1.0, 0, -1.0)]
    assert table.terminated[1].all() and not table.terminated[10, :, 0].any()
    env = gym.make("lrl/Nim-v0", disable_env_checker=True)
    assert env.action_space == gym.spaces.Discrete(3, start=1) and env.observation_space.n == 11
    env.close()


# -- pong ----------------------------------------------------------------------------------------------------------

FOLLOW = np.zeros((6, 3))
FOLLOW[0, :2], FOLLOW[2, :2] = (1, -1), (-1, 1)
"""Weights of a linear policy: the score of up is paddle minus ball, that of down the negative, that of nothing zero."""


def test_a_linear_policy_of_pong_reaches_the_maximum_of_three_hits():
    policy, factory = linear("lrl/Pong-v0")
    trial = play(policy, factory, FOLLOW.ravel(), np.arange(200), 1000)
    assert trial.returns.tolist() == [3.0] * 200 and trial.env_steps == 200_000


def test_paddles_that_do_not_follow_the_ball_rarely_hit_it():
    policy, factory = linear("lrl/Pong-v0")
    up = play(policy, factory, np.zeros(18), np.arange(500), 1000)
    assert up.value == pytest.approx(0.2, abs=0.06)
    envs = DynamicsVectorEnv(Pong(), 4000)
    envs.reset(seed=0)
    rewards = np.array([envs.step(np.full(4000, 2))[1] for _ in range(78)])
    assert rewards[:77].sum() == 0  # then half of the serves arrive, with 300 + 78 v in 260 to 340 for v in -5 to 5
    assert rewards[77].mean() == pytest.approx(0.5 * 80 / 780, abs=0.012)


def test_the_first_hit_comes_after_78_steps_or_after_230():
    pong, states = Pong(), np.array([[260.0, 260, 400, 300, -5, 0], [260, 260, 400, 300, 5, 0]])
    hits = {0: [], 1: []}
    for step in range(1, 1001):
        states, rewards, terminated = pong.step(states, np.array([2, 2]), np.zeros((2, 0)))
        states[:, 0] = states[:, 3] - 40  # the paddle is always there, and returns the ball without angle
        for copy in np.flatnonzero(rewards):
            hits[copy].append(step)
        assert not terminated.any()
    assert hits == {0: [78, 386, 694], 1: [230, 538, 846]}


def test_pong_serves_and_bounces_as_described():
    pong, rng = Pong(), np.random.default_rng(0)
    starts = np.array([pong.start(rng) for _ in range(2000)])
    assert (starts[:, :4] == [260, 260, 400, 300]).all() and set(starts[:, 4]) == {-5.0, 5.0}
    assert starts[:, 4].mean() == pytest.approx(0, abs=0.5) and starts[:, 5].std() == pytest.approx(2.89, abs=0.1)
    assert pong.observe(starts[:1]).tolist() == [pytest.approx([300, 400, 300, *starts[0, 4:]])]
    states = np.array(
        [
            [0.0, 260, 300, 3, 5, -4],  # into the upper wall, while the paddle is at its upper end
            [260, 520, 300, 588, 5, 3],  # into the lower wall, away from the opponent
            [100, 260, 14, 160, -5, 0],  # hit at 60 of 80 pixels
            [260, 260, 4, 100, -5, 0],  # missed
        ]
    )
    after, rewards, terminated = pong.step(states, np.array([0, 1, 2, 2]), np.zeros((4, 0)))
    assert after[0].tolist() == [0, 255, 305, -1, 5, 4] and after[1].tolist() == [265, 520, 305, 591, 5, -3]
    assert after[2].tolist() == [100, 255, 9, 160, 5, 2.5] and after[3, 2] == -1
    assert rewards.tolist() == [0, 0, 1, 0] and terminated.tolist() == [False, False, False, True]


def test_observations_of_pong_come_close_to_the_bounds_of_their_space():
    pong, rng = Pong(), np.random.default_rng(0)
    states = np.array([pong.start(rng) for _ in range(400)])
    actions, seen = np.arange(400) % 3, []  # paddles that always move up, move down or stay
    for _ in range(200):
        seen.append(pong.observe(states))
        states, _, terminated = pong.step(states, actions, np.zeros((len(states), 0)))
        seen.append(pong.observe(states))
        states, actions = states[~terminated], actions[~terminated]
    seen, space = np.concatenate(seen), pong.observation_space
    np.testing.assert_allclose(seen.min(axis=0), space.low, atol=1)
    np.testing.assert_allclose(seen.max(axis=0), space.high, atol=15)  # the opponent returns the ball at x = 780


# -- navigation ----------------------------------------------------------------------------------------------------


def test_distances_to_walls_are_exact():
    places = np.array([[1.5, 10.0], [1.5, 18.6], [9.9, 10.0]])
    seen = distances(places, np.array([0.0, np.pi / 2, np.pi]))  # to +y, to +x, to -y
    root = np.sqrt(2)
    assert seen[0] == pytest.approx([1.5, 1.5 * root, 10.0, 1.5 * root, 1.5])
    assert seen[1] == pytest.approx([1.4, 1.4 * root, 18.5, 1.6 * root, 18.6])
    assert seen[2] == pytest.approx([10.1, 1.6 * root, 10.0, 1.4 * root, 1.4])  # at the inner corner, looking down


def test_episodes_begin_on_the_centre_lines():
    env = gym.make("lrl/Navigation-v0", disable_env_checker=True).unwrapped
    starts = []
    for seed in range(600):
        env.reset(seed=seed)
        starts.append(env._states[0, :3].copy())
    starts = np.array(starts)
    on = np.stack(
        [
            (np.abs(starts[:, :2] - np.clip(starts[:, :2], begin, end)) < 1e-9).all(1)
            for begin, end in np.sort(np.array(CENTRE_LINES), axis=1)
        ]
    )
    assert on.any(0).all() and on.sum(1) / 600 == pytest.approx([1 / 6] * 6, abs=0.05)
    assert starts[:, 2].min() < -3 and starts[:, 2].max() > 3 and starts[:, 2].std() == pytest.approx(1.81, abs=0.1)
    env.close()


def test_the_robot_turns_right_by_action_1_and_is_rewarded_as_described():
    dynamics = gym.make("lrl/Navigation-v0", disable_env_checker=True).unwrapped.dynamics
    state = np.zeros((3, 8))
    state[:, :3] = (1.5, 10.0, 0.0)
    after, rewards, terminated = dynamics.step(state, np.array([0, 1, 2]), np.zeros((3, 7)))
    assert after[:, :3] == pytest.approx(np.array([[1.5, 10.2, 0], [1.5, 10.04, 0.2], [1.5, 10.04, -0.2]]))
    assert rewards.tolist() == [5, -0.5, -0.5] and not terminated.any()
    turned = [1.5 / np.sin(angle) for angle in (np.pi / 4 - 0.2, np.pi / 4 + 0.2)]
    assert after[1, [4, 6]] == pytest.approx(turned)
    near = np.zeros((2, 8))
    near[:, :3] = (0.45, 10.0, -np.pi / 2)
    noise = np.zeros((2, 7))
    noise[1, 0] = -0.3  # a negative distance still moves forward
    after, rewards, terminated = dynamics.step(near, np.array([1, 0]), noise)
    assert after[:, 0] == pytest.approx([0.41, 0.35]) and rewards.tolist() == [-0.5, -200]
    assert terminated.tolist() == [False, True]
    noise[0, 4] = -0.02  # the observation decides, not the distance
    assert dynamics.step(near, np.array([1, 0]), noise)[2].tolist() == [True, True]


@pytest.mark.slow
def test_the_hand_made_policy_of_navigation_returns_what_was_measured():
    policy, factory = linear("lrl/Navigation-v0")
    weights = np.zeros((6, 3))
    weights[2, 0], weights[5, 0] = 3, -1
    weights[3, 1:], weights[1, 1:] = (6, -6), (-6, 6)
    trial = play(policy, factory, weights.ravel(), np.arange(300), 1000)
    assert trial.value == pytest.approx(2497, abs=250) and trial.returns.std() == pytest.approx(1218, abs=250)
    assert (trial.returns > -200).mean() > 0.5

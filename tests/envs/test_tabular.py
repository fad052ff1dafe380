"""Tests of optimal values and exact success probabilities."""

import gymnasium as gym
import numpy as np
import pytest

from lrl.envs.frozen_lake import ExpertQRows, named_map, transition_table
from lrl.envs.tabular import (
    TransitionTable,
    optimal_q,
    optimal_success,
    policy_values,
    reachable_states,
    success_probability,
)
from lrl.rewards.expert_q import NormalizedAdvantageReward

SLIPPERY = transition_table(named_map("4x4"))
DETERMINISTIC = transition_table(named_map("4x4"), is_slippery=False)


def test_the_table_equals_that_of_the_environment() -> None:
    native = gym.make("FrozenLake-v1").unwrapped.P
    for state, actions in native.items():
        for action, outcomes in actions.items():
            for index, (probability, after, reward, terminated) in enumerate(outcomes):
                at = (state, action, index)
                assert SLIPPERY.probability[at] == probability and SLIPPERY.next_state[at] == after
                assert SLIPPERY.reward[at] == reward and SLIPPERY.terminated[at] == terminated
    assert np.allclose(SLIPPERY.probability.sum(-1), 1)


def test_value_iteration_on_a_corridor_gives_powers_of_gamma() -> None:
    corridor = transition_table(("SFFG",), is_slippery=False)
    q = optimal_q([corridor], gamma=0.9)[0]
    np.testing.assert_allclose(q[:3, 2], [0.81, 0.9, 1])
    np.testing.assert_allclose(q[:3, 0], [0.729, 0.729, 0.81])
    assert not q[3].any()


def test_value_iteration_satisfies_the_bellman_equation_on_several_maps() -> None:
    other = transition_table(("SFFF", "FFFF", "FHFH", "FFFG"))
    for table, q in zip((SLIPPERY, other), optimal_q([SLIPPERY, other]), strict=True):
        after = np.where(table.terminated, 0, 0.99 * q.max(1)[table.next_state])
        np.testing.assert_allclose(q, (table.probability * (table.reward + after)).sum(-1), atol=1e-8)


def test_value_iteration_finds_the_known_values_of_the_slippery_map() -> None:
    q = optimal_q([SLIPPERY])[0]
    np.testing.assert_allclose(q[0], [0.5420, 0.5278, 0.5278, 0.5223], atol=1e-4)
    np.testing.assert_allclose(q[14], [0.7325, 0.8628, 0.8211, 0.7811], atol=1e-4)
    assert q.argmax(1)[[0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14]].tolist() == [0, 3, 3, 3, 0, 0, 3, 1, 0, 2, 1]


def test_known_success_probabilities_of_the_slippery_map() -> None:
    assert optimal_success(SLIPPERY) == pytest.approx(0.7442, abs=1e-4)
    greedy = optimal_q([SLIPPERY])[0].argmax(-1)
    assert success_probability(SLIPPERY, greedy) == pytest.approx(0.7402, abs=1e-4)
    assert success_probability(SLIPPERY, np.full((16, 4), 0.25)) == pytest.approx(0.0139, abs=1e-4)
    assert success_probability(SLIPPERY, greedy, steps=10_000) == pytest.approx(14 / 17, abs=1e-4)


def test_the_time_limit_is_exact() -> None:
    path = np.zeros(16, dtype=np.int64)
    path[[0, 4, 8, 9, 13, 14]] = [1, 1, 2, 1, 2, 2]
    assert (
        success_probability(DETERMINISTIC, path, steps=6) == 1
        and success_probability(DETERMINISTIC, path, steps=5) == 0
    )
    assert optimal_success(DETERMINISTIC, steps=6) == 1 and optimal_success(DETERMINISTIC, steps=5) == 0


@pytest.mark.slow
def test_the_exact_success_equals_the_success_rate_of_episodes() -> None:
    policy = np.random.default_rng(0).dirichlet(np.full(4, 0.3), size=16)
    policy[[0, 4, 8, 9]] = np.eye(4)[[0, 0, 3, 1]]
    env, rng = gym.make("FrozenLake-v1", disable_env_checker=True), np.random.default_rng(1)
    successes = 0.0
    for episode in range(2000):
        state, _ = env.reset(seed=episode)
        ended, reward = False, 0.0
        while not ended:
            state, reward, terminated, truncated, _ = env.step(int(rng.choice(4, p=policy[state])))
            ended = terminated or truncated
        successes += float(reward)
    exact = success_probability(SLIPPERY, policy)
    assert successes / 2000 == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 2000))


def test_reachable_states_exclude_terminal_and_isolated_states() -> None:
    assert reachable_states(SLIPPERY) == [0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14]
    island = transition_table(("SFF", "HHF", "FHG"))
    assert reachable_states(island) == [0, 1, 2, 5]


def test_the_original_reward_of_random_and_constant_actions() -> None:
    rows = ExpertQRows().rows()
    greedy = optimal_q([SLIPPERY])[0].argmax(1)
    visits, state = np.zeros(16), np.eye(16)[0]
    _, transitions = SLIPPERY.dynamics
    for _ in range(100):
        visits += state
        state = state @ transitions[np.arange(16), greedy]
    weights = visits[[row.state for row in rows]] / visits.sum()
    totals = [
        (1 + NormalizedAdvantageReward()(rows, [""] * len(rows), [action] * len(rows))) / 2 for action in range(4)
    ]
    assert weights @ np.mean(totals, axis=0) == pytest.approx(0.675, abs=1e-3)
    assert weights @ totals[0] == pytest.approx(0.804, abs=1e-3)


def test_actions_with_different_numbers_of_outcomes_are_padded() -> None:
    table = TransitionTable.from_gymnasium(
        {
            0: {0: [(0.5, 0, 0, False), (0.5, 1, 1, True)], 1: [(1.0, 1, 2, True)]},
            1: {0: [(1.0, 1, 0, True)], 1: [(1.0, 1, 0, True)]},
        }
    )
    np.testing.assert_allclose(optimal_q([table], gamma=0.5)[0], [[1.0, 2.0], [0, 0]])


def test_the_values_of_a_policy_within_a_time_limit_by_hand() -> None:
    corridor = transition_table(("SFG",), is_slippery=False)
    policy = np.tile([0.5, 0.0, 0.5, 0.0], (3, 1))  # left or right
    q, values = policy_values(corridor, policy, steps=3, gamma=0.5)
    np.testing.assert_allclose(values[:, :2], [[0.15625, 0.53125], [0.125, 0.5], [0, 0.5]])
    np.testing.assert_allclose(q[0, 1, [0, 2]], [0.0625, 1])
    np.testing.assert_allclose(q[0, 0, [0, 2]], [0.0625, 0.25])


@pytest.mark.parametrize("steps", [1, 20, 100])
def test_the_value_of_the_start_is_the_probability_of_success(steps) -> None:
    policy = np.random.default_rng(0).dirichlet(np.ones(4), 16)
    _, values = policy_values(SLIPPERY, policy, steps)
    assert values[0, 0] == pytest.approx(success_probability(SLIPPERY, policy, steps), abs=1e-12)

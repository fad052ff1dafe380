"""Tests of the expert actions of environments."""

import gymnasium as gym
import pytest

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.text import expert_action
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import load_baseline


def returns(name, id, episodes, **settings):
    envs = GymnasiumEnvs(id, **settings)
    return evaluate_policy(load_baseline(name, envs).policy, envs, episodes, 0, min(episodes, 25)).returns


@pytest.mark.slow
def test_the_cartpole_controller_reaches_the_time_limit():
    native = gym.make("CartPole-v1").unwrapped
    for seed in range(100):
        native.reset(seed=seed)
        for step in range(500):
            fallen = native.step(expert_action(native))[2]
            assert not fallen, f"seed {seed} at step {step}"
    assert returns("expert", "CartPole-v1", 4).tolist() == [500] * 4


def test_value_iteration_is_optimal_in_cliff_walking():
    assert returns("expert", "CliffWalking-v1", 1).tolist() == [-13]


@pytest.mark.slow
def test_value_iteration_is_optimal_in_taxi():
    assert 7 < returns("expert", "Taxi-v4", 100).mean() < 9  # 7.9 on average over all initial states


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "Taxi-v4", "Blackjack-v1"])
def test_random_and_constant_policies_act_in_any_environment(id):
    for name in ("random", "constant"):
        assert len(returns(name, id, 3)) == 3


def test_an_environment_without_an_expert_raises():
    with pytest.raises(ValueError, match="'expert', but no expert is known"):
        load_baseline("expert", GymnasiumEnvs("Pendulum-v1"))
    with pytest.raises(ValueError, match="no expert is known for PendulumEnv"):
        expert_action(gym.make("Pendulum-v1").unwrapped)

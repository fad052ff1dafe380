"""Tests of episodes with given parameters against plain loops over Gymnasium's environments."""

import time

import gymnasium as gym
import numpy as np
import pytest
from search_runs import play

from lrl.envs.factory import GymnasiumEnvs
from lrl.search.policies import LinearPolicy, TabularPolicy
from lrl.search.rollouts import SeparateEnvs, describe, fresh_seeds, make_batched, play_parameters, proposal_seeds

BALANCED = np.array([-0.5, 0.5, -0.5, 0.5, -6.0, 6.0, -2.0, 2.0, 0.0, 0.0])
"""Parameters of a linear policy of CartPole that never falls."""


def policy_for(id, kwargs=None):
    envs = GymnasiumEnvs(id, kwargs)
    spaces = envs.spaces
    policy = TabularPolicy() if isinstance(spaces[0], gym.spaces.Discrete) else LinearPolicy()
    policy.connect_spaces(*spaces)
    return policy, envs


def plain_returns(id, kwargs, policy, parameters, seeds, max_steps):
    """Play one episode after the other in a plain loop."""
    env, decide, returns, steps = gym.make(id, **(kwargs or {})), policy.decider(parameters), [], 0
    for seed in seeds:
        observation, _ = env.reset(seed=int(seed))
        total = 0.0
        for _ in range(max_steps):
            observation, reward, terminated, truncated, _ = env.step(decide(np.asarray(observation)[None])[0])
            total, steps = total + float(reward), steps + 1
            if terminated or truncated:
                break
        returns.append(total)
    env.close()
    return returns, steps


@pytest.mark.parametrize(
    ("id", "kwargs", "max_steps"),
    [
        ("CartPole-v1", None, 1000),
        ("MountainCar-v0", None, 150),
        ("MountainCarContinuous-v0", None, 300),
        ("FrozenLake-v1", {"is_slippery": True}, 100),
        ("CliffWalkingSlippery-v1", None, 60),
        ("lrl/Maze3x3-v0", None, 100),
        ("lrl/Nim-v0", None, 100),
        ("lrl/Navigation-v0", None, 200),
        ("lrl/Pong-v0", None, 400),
        ("InvertedPendulum-v5", None, 100),
    ],
)
def test_parallel_episodes_equal_episodes_of_a_plain_loop(id, kwargs, max_steps):
    policy, factory = policy_for(id, kwargs)
    envs, rng, lengths = make_batched(factory, 7), np.random.default_rng(0), set()
    for proposal in range(3):
        parameters = policy.parameter_space().sample(rng)
        seeds = proposal_seeds(0, proposal, 10)  # more than copies: the last part leaves some of them idle
        trial = play_parameters(policy, envs, parameters, seeds, max_steps)
        returns, steps = plain_returns(id, kwargs, policy, parameters, seeds, max_steps)
        np.testing.assert_allclose(trial.returns, returns, rtol=1e-6, atol=1e-6)
        assert trial.env_steps == steps and trial.value == pytest.approx(np.mean(returns))
        lengths.add(steps)
    assert len(lengths) > 1 or max_steps in (60, 150, 300, 100)
    envs.close()


def test_an_episode_does_not_depend_on_other_episodes():
    for id in ("CartPole-v1", "lrl/Navigation-v0", "FrozenLake-v1"):
        policy, factory = policy_for(id)
        parameters, seeds = policy.parameter_space().sample(np.random.default_rng(1)), proposal_seeds(3, 0, 12)
        many, few = make_batched(factory, 12), make_batched(factory, 5)
        wanted = play_parameters(policy, many, parameters, seeds, 150)
        for envs in (few, many):  # the last ones are used again
            again = play_parameters(policy, envs, parameters, seeds, 150)
            assert again.returns.tolist() == wanted.returns.tolist() and again.env_steps == wanted.env_steps
        alone = play_parameters(policy, few, parameters, seeds[7:8], 150)
        assert alone.returns.tolist() == wanted.returns[7:8].tolist()


def test_each_environment_is_created_once(monkeypatch):
    policy, factory = policy_for("InvertedPendulum-v5")
    envs = make_batched(factory, 20)
    assert isinstance(envs, SeparateEnvs)
    monkeypatch.setattr(gym, "make", None)
    parameters = policy.parameter_space().sample(np.random.default_rng(0))
    for _ in range(2):
        play_parameters(policy, envs, parameters, [1, 2, 3], 5)


def test_the_trajectory_is_that_of_the_first_episode():
    policy, factory = policy_for("lrl/Maze3x3-v0")
    table = np.array([1.0, 0, 0, 1, 0, 0, 2, 2, 0])
    trial = play(policy, factory, table, [5, 6], 100, trajectory=True)
    step = pytest.approx(-0.1 / 9)
    assert trial.trajectory == [("0", "1", step), ("3", "1", step), ("6", "2", step), ("7", "2", 1.0)]
    assert play(policy, factory, table, [5, 6], 100).trajectory == []
    assert describe(np.array([0.123456, -12345.6], np.float32)) == "0.1235, -1.235e+04"


def test_no_seed_is_used_twice():
    every = [proposal_seeds(4, proposal, 20) for proposal in range(-20, 400)] + [fresh_seeds(4, 100)]
    assert len(set(np.concatenate(every).tolist())) >= 8500 - 1  # 31 bits may collide once in a while


def test_an_environment_that_cannot_be_played_raises_one_sentence():
    policy, factory = policy_for("CartPole-v1")
    with pytest.raises(ValueError, match="seeds is empty; there must be one for each episode."):
        play(policy, factory, BALANCED, [], 10)
    envs = make_batched(factory, 3)
    step = envs.step
    envs.step = lambda actions: (*(seen := step(actions))[:1], np.where([0, 0, 1], np.nan, seen[1]), *seen[2:])
    failed = r"^environment 2 of CartPole-v1 \(episode seed 7, step 1\): reward is nan; it must be finite\.$"
    with pytest.raises(ValueError, match=failed):
        play_parameters(policy, envs, BALANCED, [5, 6, 7], 10)
    assert play_parameters(policy, envs, BALANCED, [5, 6], 10).returns.tolist() == [10, 10]  # the third is idle


@pytest.mark.slow
def test_twenty_episodes_of_cart_pole_take_a_tenth_of_a_second():
    policy, factory = policy_for("CartPole-v1")
    envs = make_batched(factory, 20)
    times = []
    for proposal in range(5):
        started = time.perf_counter()
        trial = play_parameters(policy, envs, BALANCED, proposal_seeds(0, proposal, 20), 1000)
        times.append(time.perf_counter() - started)
    assert trial.returns.tolist() == [500.0] * 20 and trial.env_steps == 10_000
    assert trial.env_steps / min(times) >= 30_000  # beside other processes; alone it is more than 100,000

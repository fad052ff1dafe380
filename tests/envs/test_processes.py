"""Tests of detecting and restarting dead environment processes."""

import os
import signal
import threading
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.processes import EnvironmentFailedError
from lrl.evaluation.episodes import evaluate_policy
from lrl.policies.baselines import RandomActor

RESPONSES = ("LEFT", "DOWN", "RIGHT", "UP")


def walk(on_death="fail", deaths=(), steps=30):
    """Step three environments, kill the process of environment 1 before the turns ``deaths``, and return the trace."""
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async", on_death=on_death).make(3, "direct")
    trace, rng = [], np.random.default_rng(0)
    try:
        env.set_attr("noise_seed", [7, 8, 9])
        trace.append(env.reset(seed=[0, 1, 2], options={"episode": np.arange(3)})[0])
        for turn in range(steps):
            if turn in deaths:
                os.kill(env.processes[1].pid, signal.SIGKILL)
                env.processes[1].join()
            responses = rng.choice(RESPONSES, size=3).tolist()
            observations, rewards, terminated, truncated, infos = env.step(tuple(responses))
            ended = terminated | truncated
            trace.append((observations, rewards.tolist(), ended.tolist(), infos["success"].tolist()))
            if ended.any():
                env.reset(seed=[turn, turn, turn], options={"reset_mask": ended, "episode": np.arange(3)})
    finally:
        env.close()
    return trace, env


@pytest.mark.slow
def test_a_dead_process_raises_with_environment_seed_and_signal():
    died = r"environment 1 of FrozenLake-v1 \(episode seed 1\) died.*signal 9"
    with pytest.raises(EnvironmentFailedError, match=died):
        walk(deaths=[2])


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [(0,), (2,), (3, 20)])
def test_a_restart_does_not_change_the_trace(deaths):
    assert walk("restart", deaths)[0] == walk()[0]


def test_a_second_death_in_an_episode_raises():
    with pytest.raises(EnvironmentFailedError, match="twice in one episode"):
        walk("restart", (0, 1))


def test_set_attr_detects_a_dead_process():
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async").make(2, "direct")
    os.kill(env.processes[0].pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailedError, match=r"environment 0 of FrozenLake-v1 \(episode seed None\)"):
        env.set_attr("noise_seed", [1, 2])
    assert not any(process.is_alive() for process in env.processes)
    env.close()


def test_an_error_in_an_environment_raises_with_environment_and_seed():
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async").make(2, None)
    env.reset(seed=[3, 4])
    env.idle = np.array([False, True])
    observations, rewards, terminated, *_ = env.step(np.array([0, 99]))
    assert observations[1] == rewards[1] == terminated[1] == 0, "an idle environment does not receive its action"
    env.idle = np.array([False, False])
    failed = r"environment 1 .*\(episode seed 4, step 1\): step raised KeyError: .*99"
    with pytest.raises(EnvironmentFailedError, match=failed):
        env.step(np.array([0, 99]))
    assert not any(process.is_alive() for process in env.processes)


@pytest.mark.slow
def test_an_idle_copy_in_a_process_is_neither_reset_nor_stepped():
    envs = GymnasiumEnvs("CartPole-v1", vectorization="async")
    sent, make = [], envs.make

    def recording(num_envs, response_format):
        vectorized: Any = make(num_envs, response_format)
        for pipe in vectorized.parent_pipes:
            send = pipe._pipe.send
            pipe._pipe = Mock(wraps=pipe._pipe)
            pipe._pipe.send.side_effect = lambda message, send=send: (sent.append(message[0]), send(message))
        return vectorized

    envs.make = recording
    policy = RandomActor(response_format="direct")
    policy.connect(envs.codec)
    results = evaluate_policy(policy, envs, 2, 5, 2)
    assert results.lengths[0] != results.lengths[1]
    assert [sent.count("reset"), sent.count("step")] == [2, results.lengths.sum()]
    assert "reset-noop" not in sent


class Locked(gym.Env):
    """Takes an argument that cannot be pickled."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, lock=None):
        self.lock = lock


@pytest.mark.parametrize("argument", [threading.Lock(), pytest.param(None, marks=pytest.mark.slow)])
def test_an_environment_that_cannot_be_created_in_a_process_raises_one_sentence(argument):
    """Pickle raised TypeError, and an environment that is registered here only ConnectionResetError or EOFError."""
    gym.register("test/Locked-v0", entry_point=lambda **kwargs: Locked(**kwargs), max_episode_steps=9)
    envs = GymnasiumEnvs("test/Locked-v0", {"lock": argument}, vectorization="async")
    try:
        with pytest.raises(ValueError, match="'test/Locked-v0' cannot be created in another process .*module:id"):
            envs.make(2, "direct")
    finally:
        gym.registry.pop("test/Locked-v0")


def test_an_unknown_value_of_on_death_raises():
    with pytest.raises(ValueError, match="env.on_death is 'ignore'"):
        GymnasiumEnvs("FrozenLake-v1", on_death="ignore")  # pyright: ignore[reportArgumentType]

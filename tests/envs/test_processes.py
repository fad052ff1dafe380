"""Tests of detecting dead environment processes."""

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


@pytest.mark.slow
def test_a_dead_process_raises_with_environment_seed_and_signal():
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async").make(3, "direct")
    env.reset(seed=[0, 1, 2])
    env.step(("LEFT",) * 3)
    os.kill(env.processes[1].pid, signal.SIGKILL)
    env.processes[1].join()
    died = r"environment 1 of FrozenLake-v1 \(episode seed 1\) died.*signal 9"
    with pytest.raises(EnvironmentFailedError, match=died):
        env.step(("LEFT",) * 3)
    assert not any(process.is_alive() for process in env.processes)


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

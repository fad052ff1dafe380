"""Tests of detecting dead environment processes."""

import os
import signal
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.processes import EnvironmentFailedError


@pytest.mark.slow
def test_a_dead_process_raises_with_environment_seed_and_signal():
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async", num_processes=3).make(3, "direct")
    env.reset(seed=[0, 1, 2])
    env.step(("LEFT",) * 3)
    os.kill(env.processes[1].pid, signal.SIGKILL)
    env.processes[1].join()
    died = r"environment 1 of FrozenLake-v1 \(episode seed 1\) died.*signal 9"
    with pytest.raises(EnvironmentFailedError, match=died):
        env.step(("LEFT",) * 3)
    assert not any(process.is_alive() for process in env.processes)


def test_set_attr_detects_a_dead_process():
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async", num_processes=2).make(2, "direct")
    os.kill(env.processes[0].pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailedError, match=r"environment 0 of FrozenLake-v1 \(episode seed None\)"):
        env.set_attr("noise_seed", [1, 2])
    assert not any(process.is_alive() for process in env.processes)
    env.close()


def test_an_error_in_an_environment_raises_with_environment_and_seed():
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async", num_processes=2).make(2, None)
    env.reset(seed=[3, 4])
    env.idle = np.array([False, True])
    observations, rewards, terminated, *_ = env.step(np.array([0, 99]))
    assert observations[1] == rewards[1] == terminated[1] == 0, "an idle environment does not receive its action"
    env.idle = np.array([False, False])
    failed = r"environment 1 .*\(episode seed 4, step 1\): step raised KeyError: .*99"
    with pytest.raises(EnvironmentFailedError, match=failed):
        env.step(np.array([0, 99]))
    assert not any(process.is_alive() for process in env.processes)


def test_a_process_of_idle_copies_is_neither_reset_nor_stepped():
    env: Any = GymnasiumEnvs("CartPole-v1", vectorization="async", num_processes=2).make(3, None)
    calls, call = [], env._call
    env._call = lambda messages: (calls.append(sorted(messages)), call(messages))[1]
    try:
        env.reset(seed=[0, 1, 2])
        env.idle = np.array([True, False, False])
        env.step(np.zeros(3, dtype=np.int64))
        env.reset(seed=[3, 4, 5], options={"reset_mask": np.array([True, False, False])})
    finally:
        env.close()
    assert calls == [[0, 1], [1], [0]], "the first process has one copy, the second has two"


class Slow(gym.Env):
    """Waits when it gets action 1."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        if action == 1:
            time.sleep(60)
        return 0, 0.0, False, False, {}


gym.register("test/Slow-v0", entry_point=Slow, max_episode_steps=9)


def test_an_environment_that_does_not_answer_is_named():
    env = GymnasiumEnvs(f"{__name__}:test/Slow-v0", vectorization="async", num_processes=1, timeout=0.5).make(3, None)
    env.reset(seed=[5, 6, 7])
    with pytest.raises(
        EnvironmentFailedError, match=r"environment 1 of .*Slow-v0 \(episode seed 6\): no answer within"
    ):
        env.step(np.array([0, 1, 0]))
    assert not any(process.is_alive() for process in env.processes)


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

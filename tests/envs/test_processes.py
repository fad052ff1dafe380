"""Tests of detecting dead environment processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.processes import EnvironmentFailedError
from lrl.rollouts.runner import EnvRunner


def test_set_attr_detects_a_dead_process():
    env = GymnasiumEnvs("FrozenLake-v1", vectorization="async", num_processes=2).make(2, "direct")
    os.kill(env.processes[0].pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailedError, match=r"environment 0 of FrozenLake-v1 \(episode seed None, step 0\)"):
        env.set_attr("noise_seed", [1, 2])
    assert not any(process.is_alive() for process in env.processes)
    env.close()


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


@pytest.mark.slow
def test_processes_start_with_the_modules_of_environments_imported(tmp_path):
    (tmp_path / "script.py").write_text(
        "import random, sys\nimport gymnasium as gym\nimport numpy as np\nfrom lrl.envs.processes import ProcessEnvs\n"
        "def make():\n    env = gym.make('FrozenLake-v1').unwrapped\n"
        "    env.loaded = 'lrl.envs.factory' in sys.modules\n"
        "    env.drawn = np.random.rand(), sys.modules['torch'].rand(1).item(), random.random()\n    return env\n"
        "if __name__ == '__main__':\n    envs = ProcessEnvs([make] * 2, 'lake', 2)\n"
        "    print(*envs.call('loaded'), 'lrl.envs.factory' in sys.modules)\n"
        "    again = ProcessEnvs([make] * 2, 'lake', 2)\n"
        "    for drawn in (*envs.call('drawn'), *again.call('drawn')):\n        print(list(drawn))\n"
        "    envs.close()\n    again.close()\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    loaded, *drawn = done.stdout.splitlines()
    assert loaded == "True True False" and not done.stderr
    assert all(len({*one}) == 4 for one in zip(*map(json.loads, drawn), strict=True)), "two of two starts each"


class Faulty(gym.Env):
    """Does what its action says."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        fault, observation = list(FAULTS)[action], np.zeros(2, np.float32)
        if fault == "raises":
            raise KeyError("joint")
        if fault == "hangs":
            time.sleep(60)
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        wrong = {"shape": np.zeros(3), "dtype": np.array(["a", "b"]), "NaN observation": np.array([0, np.nan])}
        return wrong.get(fault, observation), np.nan if fault == "NaN reward" else 0.0, False, False, {}


FAULTS = {
    "none": "",
    "raises": ": step raised KeyError: 'joint'.",
    "hangs": ": no answer within 1 seconds (env.timeout).",
    "dies": " died: its process was killed by signal 9.",
    "shape": ": observation has shape (3,); it must have shape (2,).",
    "dtype": ": observation is array(['a', 'b'], dtype='<U1'); it must be an array of numbers.",
    "NaN observation": ": observation[1] is nan; it must be finite.",
    "NaN reward": ": reward is nan; it must be finite.",
}
"""How an environment fails, and the end of the error."""
CASES = [(fault, kind) for fault in list(FAULTS)[1:] for kind in ("sync", "async")]
CASES = [case for case in CASES if case not in (("hangs", "sync"), ("dies", "sync"))]  # they take this process along
RARE = [("dtype", "async"), ("NaN reward", "async")]
"""Cases that run the same code as others."""

gym.register("test/Faulty-v0", entry_point=Faulty, max_episode_steps=9)


@pytest.mark.parametrize(
    ("fault", "kind"), [pytest.param(*case, marks=[pytest.mark.reference] * (case in RARE)) for case in CASES]
)
def test_an_environment_that_fails_is_named_with_its_seed_and_step(fault, kind):
    settings = {"num_processes": 1, "timeout": 1} if kind == "async" else {}
    env: Any = GymnasiumEnvs(f"{__name__}:test/Faulty-v0", vectorization=kind, **settings).make(3, None)
    runner = EnvRunner(Mock(), env)
    runner.reset(np.array([5, 6, 7]), np.arange(3))
    runner.step([0, 0, 0], np.arange(3))
    with pytest.raises(EnvironmentFailedError) as error:
        runner.step([0, list(FAULTS).index(fault), 0], np.arange(3))
    found = re.fullmatch(r"environment 1 of (\S+) \(episode seed 6, step 2\)(.*)", str(error.value))
    assert found and found[1].endswith("test/Faulty-v0") and found[2] == FAULTS[fault], str(error.value)
    assert not any(process.is_alive() for process in getattr(env, "processes", ()) if fault in ("hangs", "dies"))
    env.close()
    assert not any(process.is_alive() for process in getattr(env, "processes", ()))


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

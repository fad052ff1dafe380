"""The one loop that plays environments, and the rollout of its steps."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import lrl
from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.baselines import ConstantActor
from lrl.rollouts.runner import EnvRunner, Step, stack_steps
from lrl.types import Decisions, RandomKeys, SamplingConfig


class Countdown(gym.Env):
    """Environment that ends after as many steps as its seed, and records its actions."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        self.left, self.actions = seed, []
        return np.array([seed, self.left], np.float32), {}

    def step(self, action):
        self.left -= 1
        self.actions.append(int(action))
        info = {"left": self.left, "word": "text"}
        return np.array([0, self.left], np.float32), 1.0, self.left == 0, False, info


class Counter:
    """Actor whose action is the index of the environment, with its turns as memory."""

    sampling = SamplingConfig()

    def prepare(self, envs):
        self.envs = envs

    def act(self, observations, memory, keys, sampling):
        rows = len(observations)
        return Decisions(
            actions=keys.env,
            inputs={},
            response_mask=torch.ones(rows, 1, dtype=torch.bool),
            logprobs=torch.zeros(rows, 1),
            memory=[(*history, turn) for history, turn in zip(memory, keys.turn.tolist(), strict=True)],
        )


def started(*lengths):
    runner = EnvRunner(Counter(), SyncVectorEnv([Countdown] * len(lengths), autoreset_mode=AutoresetMode.DISABLED))
    runner.reset(np.array(lengths), np.arange(len(lengths)))
    return runner


def turn(runner, rows, **changes):
    keys = RandomKeys(seed=0, purpose="", collection=0, env=np.array(rows), turn=runner.lengths[rows])
    return runner.turn(keys, np.array(rows), **changes)


def test_a_step_holds_the_rows_that_took_the_turn():
    runner = started(1, 3, 2)
    step = turn(runner, [1, 2])
    assert [observation.tolist() for observation in step.observations] == [[3, 3], [2, 2]]
    assert step.turn.tolist() == [0, 0] and step.rewards.tolist() == step.episode_return.tolist() == [1, 1]
    assert step.infos["left"].tolist() == [2, 1] and step.infos["word"].tolist() == ["text", "text"]
    assert runner.memory == [(), (0,), (0,)], "what the other environments do is not remembered"


def test_only_environments_that_ended_are_reset():
    runner = started(1, 3, 2)
    turn(runner, [0, 1, 2])
    assert runner.ended.tolist() == [True, False, False]
    runner.reset(np.array([7, 8, 9]), np.arange(3))
    assert np.asarray(runner.observations).tolist() == [[7, 7], [0, 2], [0, 1]]
    assert runner.memory == [(), (0,), (0,)] and runner.lengths.tolist() == runner.returns.tolist() == [0, 1, 1]
    before = runner.observations
    runner.reset(np.array([7, 8, 9]), np.arange(3))
    assert runner.observations is before, "no episode has ended"


def test_the_transitions_of_episodes_with_one_seed_follow_their_noise_seeds():
    def after_one_move(noise_seeds):
        actor, factory, envs = ConstantActor("RIGHT"), GymnasiumEnvs("FrozenLake-v1"), np.arange(6)
        actor.connect(factory.codec)
        runner = EnvRunner(actor, factory.make(6, "think_answer"))
        runner.reset(np.full(6, 3), envs, noise_seeds)
        runner.turn(RandomKeys(seed=0, purpose=0, collection=0, env=envs, turn=runner.lengths))
        keys = RandomKeys(seed=0, purpose=0, collection=0, env=envs, turn=runner.lengths)
        return {str(text) for text in runner.turn(keys).observations}

    assert len(after_one_move(np.full(6, 5))) == 1
    assert len(after_one_move(np.arange(6))) == 3  # slippery: RIGHT moves UP, RIGHT or DOWN


def test_idle_environments_repeat_the_first_action():
    runner = started(3, 3, 3)
    turn(runner, [2])
    turn(runner, [1, 2])
    assert [env.unwrapped.actions for env in runner.envs.envs] == [[2, 1], [2, 1], [2, 2]]


def test_max_turns_truncates_episodes_that_have_not_terminated():
    runner = started(2, 5)
    assert not turn(runner, [0, 1], max_turns=2).ended.any()
    step = turn(runner, [0, 1], max_turns=2)
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False], [False, True])
    assert runner.ended.all()


def test_only_the_runner_steps_vectorised_environments():
    """The exceptions are parameter search, which has no time for texts, and the replay that checks the runner."""
    package = Path(lrl.__file__).parent
    calls = ("envs.step(", "_vector.step(")
    stepping = {path for path in package.rglob("*.py") if any(call in path.read_text() for call in calls)}
    others = {package / "search" / "rollouts.py", package / "training" / "replay.py"}
    assert stepping == {package / "rollouts" / "runner.py"} | others


def step_of(rows, reward):
    """Return a turn of some environments, whose rewards have the dtype of ``reward``."""
    ended, mask = np.zeros(len(rows), dtype=bool), torch.ones(len(rows), 1, dtype=torch.bool)
    decisions = Decisions(
        actions=["left"] * len(rows),
        inputs={},
        response_mask=mask,
        logprobs=torch.zeros(len(rows), 1),
        memory=[()] * len(rows),
    )
    return Step(
        rows=np.array(rows),
        observations=["seen"] * len(rows),
        decisions=decisions,
        rewards=np.full(len(rows), reward),
        terminated=ended,
        truncated=ended,
        turn=np.zeros(len(rows), dtype=np.int64),
        origin=np.zeros((len(rows), 3), dtype=np.int64),
        episode_return=np.zeros(len(rows)),
        infos={},
    )


@pytest.mark.parametrize("second", [[0, 1], [1]])
def test_later_steps_of_a_wider_dtype_keep_their_numbers(second):
    rollout = stack_steps([step_of([0, 1], 1), step_of(second, 0.75)], np.arange(2), None)
    assert rollout.rewards[:, 1].tolist() == [1, 0.75]

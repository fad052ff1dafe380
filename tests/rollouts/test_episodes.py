"""Whole episodes, in groups, with nothing lost and nothing from after a reset."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lrl.policies.policy import Policy
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.types import Decisions


class Countdown(gym.Env):
    """Environment whose seed determines the number of steps of the episode, with reward k at step k."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(4)
    noise_seed = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.steps = int(self.np_random.integers(1, 6)), 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.length, self.steps], dtype=np.float32)

    def step(self, action):
        self.steps += 1
        ended = self.steps >= self.length
        return (
            self.observe(),
            float(self.steps),
            ended and self.length % 2 == 0,
            ended and self.length % 2 == 1,
            {"success": ended and self.length > 3, "action_valid": True},
        )


class Recorder(Policy):
    """Policy that always takes action 1 and records its calls."""

    response_format = None

    def __init__(self):
        super().__init__()
        self.calls = []

    def configure(self):
        pass

    def evaluate(self, batch):
        raise AssertionError

    def reference_logprobs(self, batch):
        raise AssertionError

    def build_reference(self, warm_started):
        raise AssertionError

    def act(self, observations, memory, keys, sampling):
        self.calls.append((np.array(observations), keys.env.copy(), keys.turn.copy()))
        rows = len(observations)
        width = 1 + keys.turn[0]
        mask = torch.ones(rows, width, dtype=torch.bool)
        ids = torch.full((rows, width), 7)
        return Decisions(
            actions=np.ones(rows, dtype=np.int64),
            inputs={"response_ids": ids},
            response_mask=mask,
            logprobs=-torch.ones(rows, width),
            memory=[(*history, keys.turn[0]) for history in memory],
        )


def collect(num_groups=3, group_size=2, **changes):
    plan = CollectionPlan(seed=9, collection=2, num_groups=num_groups, group_size=group_size, **changes)
    envs = SyncVectorEnv([Countdown] * plan.num_envs, autoreset_mode=AutoresetMode.DISABLED)
    policy = Recorder()
    return EpisodeCollector(policy, envs).collect(plan), policy, plan


def test_every_episode_runs_to_its_end():
    rollout, policy, _ = collect()
    lengths = policy.calls[0][0][:, 0]
    assert rollout.lengths.tolist() == lengths.tolist()
    assert rollout.episode_returns.tolist() == [n * (n + 1) / 2 for n in lengths]
    ends = rollout.terminated | rollout.truncated
    assert ends.sum(0).tolist() == [1] * 6
    last = rollout.lengths.long() - 1
    assert ends[last, torch.arange(6)].all()


def test_terminated_and_truncated_are_kept_apart():
    rollout, policy, _ = collect()
    odd = torch.from_numpy(policy.calls[0][0][:, 0] % 2 == 1)
    assert rollout.truncated.any(0).tolist() == odd.tolist()
    assert rollout.terminated.any(0).tolist() == (~odd).tolist()


def test_groups_start_from_the_same_state_and_differ_from_each_other():
    _, policy, plan = collect(num_groups=8, group_size=3)
    starts = policy.calls[0][0][:, 0].reshape(8, 3)
    assert (starts == starts[:, :1]).all() and len(set(starts[:, 0])) > 1
    assert plan.group.tolist() == sorted(list(range(8)) * 3)


def test_the_policy_acts_only_in_episodes_that_have_not_ended():
    rollout, policy, _ = collect()
    for time, (seen, env, turn) in enumerate(policy.calls):
        assert env.tolist() == torch.nonzero(rollout.active[time]).squeeze(1).tolist()
        assert (seen[:, 1] == time).all() and (turn == time).all()


def test_nothing_is_recorded_after_an_end():
    rollout, _, _ = collect()
    idle = ~rollout.active
    assert idle.any()
    for tensor in (rollout.rewards, rollout.terminated, rollout.truncated, rollout.response_mask.any(-1)):
        assert not tensor[idle].any()


def test_success_is_counted_once_per_episode():
    rollout, policy, _ = collect()
    assert sorted(rollout.metrics["success"].tolist()) == sorted((policy.calls[0][0][:, 0] > 3).astype(float).tolist())


def test_turns_keep_their_own_tokens():
    rollout, _, _ = collect()
    batch = rollout.turns()
    assert len(batch) == rollout.num_turns
    assert batch.response_mask.sum(1).tolist() == (rollout.turn[rollout.active] + 1).tolist()
    assert (batch.old_logprobs[batch.response_mask] == -1).all() and (
        batch.old_logprobs[~batch.response_mask] == 0
    ).all()


def test_a_cut_episode_is_truncated_and_kept():
    rollout, policy, _ = collect(max_turns=2)
    longer = torch.from_numpy(policy.calls[0][0][:, 0] > 2)
    assert rollout.lengths.max() == 2
    assert rollout.truncated[1][longer].all() and not rollout.terminated[1][longer].any()


@pytest.mark.parametrize("group_size", [1, 2])
def test_two_ranks_play_the_same_episodes_as_one(group_size):
    whole, _, _ = collect(num_groups=4, group_size=group_size)
    parts = [collect(num_groups=2, group_size=group_size, rank=rank)[0] for rank in (0, 1)]
    assert whole.episode_returns.tolist() == [r for part in parts for r in part.episode_returns.tolist()]


def test_replace_and_an_index_return_another_batch():
    rollout, _, _ = collect()
    batch = rollout.turns()
    assert batch.replace(ref_logprobs=batch.old_logprobs).ref_logprobs is batch.old_logprobs
    assert len(batch[torch.tensor([0, 2])]) == 2

"""Episodes that go on from one collection to the next."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from lrl.envs.factory import GymnasiumEnvs
from lrl.functional.random import seeds
from lrl.policies.fixed import RandomPolicy
from lrl.policies.mlp import MLPPolicy
from lrl.rollouts.collector import CollectionPlan
from lrl.rollouts.continuing import ContinuingCollector

SEED = 5


def network(envs, **settings):
    torch.manual_seed(0)
    policy = MLPPolicy(hidden_sizes=(8,), init_seed=0, **settings)
    policy.connect_spaces(*envs.spaces)
    policy.configure()
    return policy


def collector(policy, envs, num_envs=3, first=0, total=None):
    env = first + np.arange(num_envs)
    return ContinuingCollector(policy, envs.make(num_envs, policy.response_format), SEED, env, total or num_envs)


def plan(collection, num_envs=3, num_steps=16, **changes):
    return CollectionPlan(
        seed=SEED, collection=collection, num_groups=num_envs, group_size=1, num_steps=num_steps, **changes
    )


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_turns_are_those_of_the_native_environment(vectorization):
    envs = GymnasiumEnvs("CartPole-v1", max_episode_steps=30, vectorization=vectorization)
    policy = network(envs)
    playing = collector(policy, envs)
    rollouts = [playing.collect(plan(number)) for number in range(4)]
    playing.envs.close()
    seen, actions = (torch.cat([r.inputs[name] for r in rollouts]) for name in ("observation", "action"))
    names = ("rewards", "terminated", "truncated", "turn", "final_values")
    rewards, terminated, truncated, turn, final = (torch.cat([getattr(r, name) for r in rollouts]) for name in names)
    assert terminated.any() and not (terminated & truncated).any()
    for env in range(3):
        native = gym.make("CartPole-v1", 30)
        episode, length = 0, 0
        observation, _ = native.reset(seed=int(seeds("reset", SEED, episode, env)))
        for time in range(64):
            np.testing.assert_array_equal(seen[time, env].numpy(), observation)
            assert turn[time, env] == length
            observation, reward, ended, cut, _ = native.step(int(actions[time, env]))
            assert (rewards[time, env], terminated[time, env], truncated[time, env]) == (reward, ended, cut)
            length += 1
            stopped = not ended and (cut or time % 16 == 15)
            worth = policy.state_values([observation], [()])[0] if stopped else torch.tensor(0.0)
            torch.testing.assert_close(final[time, env], worth)
            if ended or cut:
                episode, length = episode + 1, 0
                observation, _ = native.reset(seed=int(seeds("reset", SEED, episode, env)))


def test_returns_are_of_whole_episodes_that_ended():
    envs = GymnasiumEnvs("CartPole-v1")
    playing = collector(network(envs), envs)
    rollouts = [playing.collect(plan(number)) for number in range(6)]
    ends = torch.cat([r.terminated | r.truncated for r in rollouts])
    turn = torch.cat([r.turn for r in rollouts])
    for name in ("episode_return", "episode_length"):
        told = torch.cat([r.metrics[name] for r in rollouts])
        assert sorted(told.tolist()) == sorted((turn[ends] + 1).tolist())  # CartPole pays 1 per turn


def same(one, other):
    for name in ("rewards", "terminated", "truncated", "turn", "logprobs", "values", "final_values"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), name
    assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
    assert one.observations == other.observations and one.responses == other.responses


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "lrl/BabyAI-GoToLocal-v0"])
def test_a_resumed_collector_goes_on_as_if_nothing_had_happened(id, vectorization):
    envs = GymnasiumEnvs(id, vectorization=vectorization, max_episode_steps=23)
    if id in ("CartPole-v1", "Pendulum-v1"):
        policy = network(envs)
    else:
        policy = RandomPolicy()
        policy.connect(envs.codec)
    playing = collector(policy, envs, num_envs=4)
    for number in range(3):
        playing.collect(plan(number, num_envs=4, num_steps=7))
    state = playing.state()
    expected = [playing.collect(plan(number, num_envs=4, num_steps=7)) for number in (3, 4, 5)]
    resumed = collector(policy, envs, num_envs=4)
    resumed.restore(torch.load(_saved(state), weights_only=True))
    for number, rollout in zip((3, 4, 5), expected, strict=True):
        same(resumed.collect(plan(number, num_envs=4, num_steps=7)), rollout)
    playing.envs.close()
    resumed.envs.close()


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_an_environment_plays_the_same_beside_any_others():
    envs = GymnasiumEnvs("CartPole-v1")
    policy = network(envs)
    together = collector(policy, envs, num_envs=4)
    alone = collector(policy, envs, num_envs=1, first=2, total=4)
    for number in range(3):
        both = together.collect(plan(number, num_envs=4)), alone.collect(plan(number, num_envs=1))
        assert torch.equal(both[0].inputs["action"][:, 2:3], both[1].inputs["action"])
        torch.testing.assert_close(both[0].values[:, 2:3], both[1].values)


def test_a_limit_of_turns_truncates_and_starts_over():
    envs = GymnasiumEnvs("Pendulum-v1")
    playing = collector(network(envs), envs)
    rollout = playing.collect(plan(0, max_turns=5))
    assert torch.equal(rollout.truncated[:, 0], torch.arange(16) % 5 == 4) and not rollout.terminated.any()
    assert torch.equal(rollout.turn[:, 0], torch.arange(16) % 5)

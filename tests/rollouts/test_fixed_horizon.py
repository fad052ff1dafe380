"""Episodes that go on from one collection to the next."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lrl.envs.factory import GymnasiumEnvs
from lrl.functional.random import seeds
from lrl.policies.baselines import RandomActor
from lrl.policies.mlp import MLPPolicy
from lrl.training.collect import CollectionPlan, FixedHorizonCollector

SEED = 5


def network(envs, **settings):
    torch.manual_seed(0)
    policy = MLPPolicy(hidden_sizes=(8,), init_seed=0, **settings)
    policy.connect_spaces(*envs.spaces)
    policy.configure()
    return policy


def collector(policy, envs, num_envs=3, first=0, total=None):
    env = first + np.arange(num_envs)
    return FixedHorizonCollector(policy, envs.make(num_envs, policy.response_format), SEED, env, total or num_envs)


def plan(collection, num_envs=3, num_steps=16, **changes):
    return CollectionPlan(
        seed=SEED, collection=collection, num_groups=num_envs, group_size=1, num_steps=num_steps, **changes
    )


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_turns_are_those_of_the_native_environment(vectorization):
    envs = GymnasiumEnvs("CartPole-v1", max_episode_steps=30, vectorization=vectorization)
    policy = network(envs)
    playing = collector(policy, envs)
    rollouts = [playing.collect(plan(number)) for number in range(4)]
    playing.runner.envs.close()
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


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "lrl/BabyAI-GoToLocal-v0"])
def test_a_resumed_collector_continues_identically(id, vectorization):
    envs = GymnasiumEnvs(id, vectorization=vectorization, max_episode_steps=23)
    if id in ("CartPole-v1", "Pendulum-v1"):
        policy = network(envs)
    else:
        policy = RandomActor()
        policy.has_critic = False
        policy.connect(envs.codec)
    playing = collector(policy, envs, num_envs=4)
    for number in range(3):
        playing.collect(plan(number, num_envs=4, num_steps=7))
    state = playing.state(2)
    expected = [playing.collect(plan(number, num_envs=4, num_steps=7)) for number in (3, 4, 5)]
    resumed = collector(policy, envs, num_envs=4)
    resumed.restore(torch.load(_saved(state), weights_only=True))
    for number, rollout in zip((3, 4, 5), expected, strict=True):
        same(resumed.collect(plan(number, num_envs=4, num_steps=7)), rollout)
    playing.runner.envs.close()
    resumed.runner.envs.close()


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_collection_after_the_saved_one_is_played_again():
    envs = GymnasiumEnvs("CartPole-v1")
    policy = network(envs)
    playing = collector(policy, envs)
    playing.collect(plan(0))
    expected = playing.collect(plan(1))
    assert playing.state(0) != playing.state(1)
    resumed = collector(policy, envs)
    resumed.restore(playing.state(0))
    same(resumed.collect(plan(1)), expected)
    with pytest.raises(ValueError, match="contains the episodes of 3 environments per device, but this run has 2"):
        collector(policy, envs, num_envs=2).restore(playing.state(0))


class Pair(gym.Env):
    """Environment whose observation contains its own number twice."""

    observation_space = gym.spaces.Tuple((gym.spaces.Box(-9, 9, (2,)), gym.spaces.Discrete(3)))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(3))
        return self.seen(), {"action_valid": True}

    def seen(self):
        return np.full(2, self.number, np.float32), self.number

    def step(self, action):
        return self.seen(), 0.0, False, False, {"action_valid": True}


def test_observations_in_parts_stay_with_their_environment():
    class Pairs(GymnasiumEnvs):
        def make(self, num_envs, response_format):
            return SyncVectorEnv([Pair] * num_envs, autoreset_mode=AutoresetMode.DISABLED)

    envs = Pairs("CartPole-v1")
    policy = network(envs)
    seen = collector(policy, envs, num_envs=9).collect(plan(0, num_envs=9)).inputs["observation"]
    assert seen.shape == (16, 9, 5)
    numbers = seen[..., 0].long()
    assert torch.equal(seen[..., :2], numbers[..., None].expand(-1, -1, 2).float())
    assert torch.equal(seen[..., 2:].argmax(-1), numbers) and len(numbers.unique()) > 1


def test_an_episode_does_not_depend_on_the_other_environments():
    envs = GymnasiumEnvs("CartPole-v1")
    policy = network(envs)
    together = collector(policy, envs, num_envs=4)
    alone = collector(policy, envs, num_envs=1, first=2, total=4)
    for number in range(3):
        both = together.collect(plan(number, num_envs=4)), alone.collect(plan(number, num_envs=1))
        assert torch.equal(both[0].inputs["action"][:, 2:3], both[1].inputs["action"])
        torch.testing.assert_close(both[0].logprobs[:, 2:3], both[1].logprobs)


def test_max_turns_truncates_episodes_and_starts_new_ones():
    envs = GymnasiumEnvs("Pendulum-v1")
    playing = collector(network(envs), envs)
    rollout = playing.collect(plan(0, max_turns=5))
    assert torch.equal(rollout.truncated[:, 0], torch.arange(16) % 5 == 4) and not rollout.terminated.any()
    assert torch.equal(rollout.turn[:, 0], torch.arange(16) % 5)

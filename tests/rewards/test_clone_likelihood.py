"""Tests of the log-likelihood reward against the cloned policy and against hand-computed values."""

import math

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.policies.mlp import MLPPolicy
from lrl.rewards.clone_likelihood import CloneLikelihoodReward
from lrl.rewards.reward import Row
from lrl.types import NativeTurn, RandomKeys, TurnBatch

SEEN, PUSH = spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Box(-1.0, 1.0, (2,))
STEP = spaces.Discrete(3)
SETTINGS = {
    "hidden_sizes": [4],
    "activation": "tanh",
    "normalise_observations": True,
    "observation_clip": 10.0,
    "initial_log_std": -1.0,
    "critic": True,
    "init_seed": 3,
}


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a policy in a run directory, and returns the policy and the path."""

    def save(action_space=PUSH, class_path="lrl.policies.mlp.MLPPolicy", **changes):
        settings = SETTINGS | changes
        policy = MLPPolicy(**settings)
        policy.connect_spaces(SEEN, action_space)
        policy.configure()
        if policy.normalise_observations:
            policy.norm.counting.copy_(torch.tensor([[9.0] * 3, [1.0, 2.0, 3.0], [9.0, 18.0, 36.0]]))
        weights = {f"policy.{name}": weight for name, weight in policy.state_dict().items()}
        config = {"model": {"init_args": {"policy": {"class_path": class_path, "init_args": settings}}}}
        path = tmp_path / "clone.ckpt"
        torch.save({"state_dict": weights, "lrl": {"config": yaml.safe_dump(config)}}, path)
        return policy, str(path)

    return save


def row(*observed: float, action=None) -> Row:
    action = np.zeros(2, np.float32) if action is None else action
    return Row(observation="", action=action, native_observation=np.array(observed))


def connected(path: str, codec=None, **settings) -> CloneLikelihoodReward:
    codec = SpaceCodec(SEEN, PUSH) if codec is None else codec
    reward = CloneLikelihoodReward(path, **settings)
    reward.connect(codec, None, row(0, 0, 0, action=codec.text_to_action(codec.default_action_text)))
    return reward


SETTINGS_OF_NETWORKS = [{}, {"normalise_observations": False}, {"critic": False}]


@pytest.mark.parametrize(("action_space", "actions"), [(STEP, [2, 0]), (spaces.Discrete(3, start=5), [7, 5])])
@pytest.mark.parametrize("changes", SETTINGS_OF_NETWORKS)
def test_the_reward_of_a_discrete_action_is_its_log_probability_under_the_policy(
    saved, action_space, actions, changes
) -> None:
    policy, path = saved(action_space, **changes)
    rows = [row(1.0, 2.0, -3.0), row(0.5, 0.0, 2.0)]
    turns = [NativeTurn(one.native_observation, action) for one, action in zip(rows, actions, strict=True)]
    mask, ones = torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1)
    batch = TurnBatch(inputs=policy.encode_turns(turns), response_mask=mask, old_logprobs=ones, advantages=ones)
    expected = policy.evaluate(batch).logprobs[:, 0].detach()
    found = connected(path, SpaceCodec(SEEN, action_space))(rows, ["", ""], actions)
    np.testing.assert_allclose(found, expected.double().numpy(), rtol=1e-6)
    assert found.dtype == np.float64


@pytest.mark.parametrize("changes", SETTINGS_OF_NETWORKS)
def test_the_greedy_action_has_the_highest_reward_and_distances_are_in_standard_deviations(saved, changes) -> None:
    policy, path = saved(initial_log_std=math.log(0.5), **changes)
    rows = [row(1.0, 2.0, -3.0), row(0.5, 0.0, 2.0)]
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(2), turn=np.zeros(2, int))
    seen = [one.native_observation for one in rows]
    greedy = policy.act(seen, [()] * 2, keys, policy.sampling_at(0.0)).actions
    reward = connected(path)
    assert reward(rows, ["", ""], list(greedy)).tolist() == pytest.approx([0, 0], abs=1e-9)
    away = [action + np.float32([0.5, 0.0]) for action in greedy]  # one deviation in one of two dimensions
    assert reward(rows, ["", ""], away).tolist() == pytest.approx([-0.25, -0.25], rel=1e-5)


def test_means_are_clipped_to_the_bounds_and_deviations_to_a_minimum(saved) -> None:
    policy, path = saved(normalise_observations=False)
    with torch.no_grad():
        policy.actor[2].weight.zero_()
        policy.actor[2].bias.copy_(torch.tensor([3.0, 0.0]))
        policy.head.log_std.copy_(torch.tensor([0.01, 2.0]).log())
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"] = {f"policy.{name}": weight for name, weight in policy.state_dict().items()}
    torch.save(checkpoint, path)
    actions = [np.float32([1.0, 0.0]), np.float32([0.8, 1.0])]
    found = connected(path)([row(0, 0, 0)] * 2, ["", ""], actions)
    assert found.tolist() == pytest.approx([0, -(4.0 + 0.25) / 4], rel=1e-5)


def test_invalid_responses_and_unlikely_actions_have_the_minimum_reward(saved, monkeypatch) -> None:
    _, path = saved()
    reward = connected(path)
    monkeypatch.setattr(reward, "invalid", -0.1)
    far, near = np.float32([1.0, -1.0]), np.float32([0.0, 0.0])
    found = reward([row(1, 2, 3)] * 3, [""] * 3, [far, None, near])
    assert found[:2].tolist() == [-0.1, -0.1] and found[2] > -0.1
    assert reward([row(1, 2, 3)], [""], [None]).tolist() == [-0.1]


def test_a_checkpoint_or_row_that_does_not_fit_raises_one_sentence(saved, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"rewards.path is '.*nothing'; it must be a checkpoint, or a run"):
        CloneLikelihoodReward(str(tmp_path / "nothing"))
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="which contains no MLPPolicy"):
        connected(str(tmp_path / "list.ckpt"))
    _, path = saved(class_path="lrl.policies.head.HeadPolicy")
    with pytest.raises(ValueError, match="which contains no MLPPolicy"):
        connected(path)
    _, path = saved(spaces.Discrete(2))
    with pytest.raises(ValueError, match="does not fit the environment: its actions are integers with 2 outputs"):
        connected(path)
    _, path = saved(spaces.Box(-1, 1, (4,)))
    with pytest.raises(ValueError, match="its actions are vectors with 4 outputs; they must be of Discrete"):
        connected(path, FrozenLakeCodec())
    _, path = saved()
    reward = CloneLikelihoodReward(path)
    with pytest.raises(ValueError, match="the clone reads vectors of 3 numbers; an observation is"):
        reward.connect(SpaceCodec(SEEN, PUSH), None, row(1.0))
    with pytest.raises(ValueError, match="the clone reads vectors of 3 numbers; an observation is"):
        reward.connect(SpaceCodec(SEEN, PUSH), None, Row(observation="", action=0, native_observation={"a": 1}))
    with pytest.raises(ValueError, match=r"env.rows contain no native observations"):
        reward.connect(SpaceCodec(SEEN, PUSH), None, Row(observation="", action=0))
    with pytest.raises(ValueError, match="they must be Discrete or a Box"):
        reward.connect(SpaceCodec(SEEN, spaces.MultiDiscrete([2, 3])), None, row(1, 2, 3))

"""Tests of the reward that is a clone's log-likelihood, against the policy itself and against numbers typed by hand."""

import math

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

from lrl.codecs.grid import FrozenLakeCodec
from lrl.codecs.spaces import SpaceCodec
from lrl.policies.mlp import MLPPolicy
from lrl.rewards.clone_likelihood import CloneLikelihoodReward
from lrl.rewards.row import Row
from lrl.turn_batch import TurnBatch
from lrl.types import NativeTurn

SEEN, PUSH = spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Box(-1.0, 1.0, (2,))
STEP = spaces.Discrete(3)
SETTINGS = {
    "hidden_sizes": [4],
    "activation": "tanh",
    "normalise_observations": True,
    "observation_clip": 10.0,
    "shared_value_network": False,
    "initial_log_std": -1.0,
    "critic": True,
    "init_seed": 3,
}


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a policy as a run does, and returns the policy and the path."""

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


@pytest.mark.parametrize(
    ("action_space", "actions"),
    [(PUSH, [np.float32([0.2, -1.0]), np.float32([1.0, 0.7])]), (STEP, [2, 0]), (spaces.Discrete(3, start=5), [7, 5])],
)
@pytest.mark.parametrize(
    "changes", [{}, {"normalise_observations": False}, {"shared_value_network": True}, {"critic": False}]
)
def test_the_reward_is_the_log_likelihood_that_the_policy_is_trained_on(saved, action_space, actions, changes) -> None:
    policy, path = saved(action_space, **changes)
    rows = [row(1.0, 2.0, -3.0), row(0.5, 0.0, 2.0)]
    turns = [NativeTurn(one.native_observation, action) for one, action in zip(rows, actions, strict=True)]
    mask = torch.ones(2, 1, dtype=torch.bool)
    batch = TurnBatch(
        inputs=policy.encode_turns(turns), response_mask=mask, old_logprobs=mask.float(), advantages=mask.float()
    )
    expected = policy.evaluate(batch).logprobs[:, 0].detach()
    reward = connected(path, SpaceCodec(SEEN, action_space), minimum=-1e9)
    found = reward(rows, ["", ""], actions)
    np.testing.assert_allclose(found, expected.double().numpy(), rtol=1e-6)
    assert found.dtype == np.float64


def test_a_known_gaussian_gives_the_numbers_of_the_formula(saved) -> None:
    policy, path = saved(normalise_observations=False)
    with torch.no_grad():
        for layer in (policy.actor[0], policy.actor[2]):
            layer.weight.zero_()
            layer.bias.zero_()
        policy.actor[2].bias.copy_(torch.tensor([0.5, 0.0]))
        policy.head.log_std.copy_(torch.tensor([0.5, 2.0]).log())
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"] = {f"policy.{name}": weight for name, weight in policy.state_dict().items()}
    torch.save(checkpoint, path)
    reward = connected(path)
    inside = -0.5 * 1.0 - math.log(0.5) - 0.5 * math.log(2 * math.pi)  # one standard deviation below the mean
    upper = math.log(0.3085375387)  # beyond half a standard deviation: all that is clipped to 1
    assert reward([row(0, 0, 0)], [""], [np.float32([0.0, 1.0])]).tolist() == pytest.approx([inside + upper], rel=1e-5)


def test_an_invalid_response_has_the_least_reward_and_so_has_an_unlikely_action(saved) -> None:
    _, path = saved(initial_log_std=-5.0)
    reward = connected(path, minimum=-7.0)
    far, near = np.float32([1.0, -1.0]), np.float32([0.0, 0.0])
    found = reward([row(1, 2, 3)] * 3, [""] * 3, [far, None, near])
    assert found[:2].tolist() == [-7, -7] and found[2] > -7
    assert reward([row(1, 2, 3)], [""], [None]).tolist() == [-7]


def test_what_does_not_fit_raises_one_sentence(saved, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"rewards.path is '.*nothing', which is neither a checkpoint nor a run"):
        CloneLikelihoodReward(str(tmp_path / "nothing"))
    _, path = saved(class_path="lrl.policies.head.HeadPolicy")
    with pytest.raises(ValueError, match="which holds no MLPPolicy"):
        connected(path)
    _, path = saved(STEP)
    with pytest.raises(ValueError, match="which does not fit the environment: it has 3 outputs, but actions are of"):
        connected(path)
    with pytest.raises(ValueError, match="it has 3 outputs"):
        connected(path, FrozenLakeCodec())
    _, path = saved()
    reward = CloneLikelihoodReward(path)
    with pytest.raises(ValueError, match="the clone reads 3 numbers; observations have shape"):
        reward.connect(SpaceCodec(SEEN, PUSH), None, row(1.0))
    with pytest.raises(ValueError, match=r"env.rows hold no native observations"):
        reward.connect(SpaceCodec(SEEN, PUSH), None, Row(observation="", action=0))
    with pytest.raises(ValueError, match="they must be Discrete or a Box"):
        reward.connect(SpaceCodec(SEEN, spaces.MultiDiscrete([2, 3])), None, row(1, 2, 3))

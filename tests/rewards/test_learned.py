"""Tests of the learned reward on models whose predictions are known."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from network_runs import save_reward_model

from lrl.codecs.spaces import SpaceCodec
from lrl.rewards.reward import Row
from lrl.rewards.reward_model import LearnedReward, RewardModel

BOX, PUSH = spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-1.0, 1.0, (1,))
STILL = np.zeros(1)


def linear(weights, biases, action_space=PUSH) -> RewardModel:
    """Return members that predict ``weight * (sum of all inputs) + bias`` each, for positive sums."""
    model = RewardModel(BOX, action_space, (1,), members=len(weights), dropout=0.5)
    model.minimum.fill_(-9.0)
    with torch.no_grad():
        for member, weight, bias in zip(model.members, weights, biases, strict=True):
            first, *_, last = member
            first.weight.fill_(1.0)
            last.weight.fill_(weight)
            last.bias.fill_(bias)
    return model


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a model and returns its path."""

    def save(model: RewardModel) -> str:
        path = tmp_path / "model.ckpt"
        save_reward_model(model, path)
        return str(path)

    return save


def rows(*observations) -> list[Row]:
    return [Row(observation="", q_values=(), action=0, native_observation=np.array(one)) for one in observations]


def test_the_reward_is_the_prediction_and_a_constant_for_invalid_responses(saved) -> None:
    reward = LearnedReward(saved(linear([2.0], [0.5])))
    found = reward(rows([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]), [""] * 3, [np.array([0.25]), None, np.array([1.0])])
    assert found.tolist() == pytest.approx([2 * 3.25 + 0.5, -3.15, 2 * 12 + 0.5], rel=1e-4)
    assert found.dtype == np.float64 and (reward.name, reward.weight) == ("learned", 1.0)


@pytest.mark.parametrize(("invalid", "expected"), [(-3.15, -3.15), (-10.0, -10.0), (None, -9.0)])
def test_invalid_null_selects_the_minimum_of_the_training_data(saved, invalid, expected: float) -> None:
    reward = LearnedReward(saved(linear([1.0], [0.0])), invalid=invalid)
    assert reward(rows([1.0, 2.0]) * 2, ["", ""], [None, None]).tolist() == [expected, expected]


def test_disagreement_is_subtracted(saved) -> None:
    path = saved(linear([1.0, 3.0], [0.0, 0.0]))  # 4 and 12: mean 8, standard deviation 4
    seen = rows([1.0, 2.0]), [""], [np.array([1.0])]
    assert LearnedReward(path)(*seen).tolist() == pytest.approx([8], rel=1e-4)
    assert LearnedReward(path, disagreement_coef=0.5)(*seen).tolist() == pytest.approx([6], rel=1e-4)


def test_discrete_actions_are_one_hot(saved) -> None:
    model = linear([1.0], [0.0], spaces.Discrete(3))
    with torch.no_grad():
        model.members[0][0].weight.copy_(torch.tensor([[1.0, 1.0, 10.0, 20.0, 30.0]]))
    found = LearnedReward(saved(model))(rows([1.0, 2.0]) * 4, [""] * 4, [0, 1, 2, None])
    assert found.tolist() == pytest.approx([13, 23, 33, -3.15], rel=1e-4)


def test_a_batch_is_one_forward_pass_and_the_model_is_loaded_once(saved) -> None:
    reward, calls = LearnedReward(saved(linear([1.0], [0.0]))), []
    model = reward.model
    model.register_forward_hook(lambda _, args, __: calls.append(args[0].shape))
    reward(rows([1.0, 2.0]) * 5, [""] * 5, [np.array([0.0]), None, *[np.array([1.0])] * 3])
    assert calls == [(4, 3)] and reward.model is model


def test_a_missing_folder_is_an_error_at_once(tmp_path) -> None:
    with pytest.raises(ValueError, match="rewards.path is '.*none'; it must be a checkpoint, or a run directory"):
        LearnedReward(str(tmp_path / "none"))


def connected(reward, row) -> LearnedReward:
    """Return the reward as an environment with this first row connects it."""
    reward.connect(SpaceCodec(BOX, PUSH), None, row)
    return reward


def row_of(observation, action=STILL) -> Row:
    return Row(observation="", action=action, native_observation=observation)


def test_the_file_is_read_when_an_environment_is_created_and_not_before(tmp_path) -> None:
    path = tmp_path / "later.ckpt"
    path.touch()
    reward = LearnedReward(str(path))
    save_reward_model(linear([1.0], [0.0]), path)
    connected(reward, row_of(np.ones(2)))
    path.unlink()
    assert reward(rows([1.0, 2.0]), [""], [np.array([1.0])]).tolist() == pytest.approx([4], rel=1e-4)


def test_an_ensemble_of_one_is_an_error_when_an_environment_is_created(saved) -> None:
    reward = LearnedReward(saved(linear([1.0], [0.0])), disagreement_coef=0.5)
    with pytest.raises(ValueError, match="disagreement_coef is 0.5, but the model .* has one member"):
        connected(reward, row_of(np.ones(2)))


def test_a_checkpoint_without_a_reward_model_is_an_error_when_an_environment_is_created(tmp_path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="^rewards.path is '.*other.ckpt', which contains no reward model"):
        connected(LearnedReward(str(tmp_path / "other.ckpt")), row_of(np.ones(2)))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (row_of(None), "env.rewards has a LearnedReward, but env.rows contain no native observations; they must be"),
        (row_of(np.ones(3)), r"which does not fit env.rows: .* trained on observations of .*, but these are .* \(3,\)"),
        (row_of(np.ones(2), 1), "which does not fit env.rows: the reward model was trained on actions of Box"),
    ],
)
def test_rows_that_do_not_fit_are_an_error_when_an_environment_is_created(saved, row, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        connected(LearnedReward(saved(linear([1.0], [0.0]))), row)

"""Tests of the reward model against values computed by hand and by loops."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from network_runs import save_reward_model
from torch import nn

from lrl.lm.heads import mlp
from lrl.rewards.reward_model import RewardModel, ZScores, load_reward_model, reward_model_file, transition_vectors

BOX, PUSH = spaces.Box(-np.inf, np.inf, (3,)), spaces.Box(-1.0, 1.0, (2,))
CHOICE = spaces.Discrete(3, start=1)


def fitted(**changes) -> RewardModel:
    """Return a small model of CHOICE in BOX with statistics, ready to predict."""
    model = RewardModel(BOX, CHOICE, **{"hidden_sizes": (4,), "members": 2} | changes)
    generator = torch.Generator().manual_seed(0)
    model.fit_statistics(torch.randn(50, 6, generator=generator), 5 + 3 * torch.randn(50, generator=generator))
    return model.eval()


def test_z_scores_match_hand_computed_values() -> None:
    scores = ZScores(3)
    scores.fit(torch.tensor([[1.0, 5.0, 0.1], [3.0, 5.0, 0.1], [5.0, 5.0, 0.1], [7.0, 9.0, 0.1]]))
    # Means 4, 6, 0.1; deviations -3, -1, 1, 3 and -1, -1, -1, 3; a constant column is only centred.
    assert scores.mean.tolist() == pytest.approx([4, 6, 0.1])
    assert scores.std.tolist() == pytest.approx([5**0.5, 3**0.5, 1])
    found = scores(torch.tensor([[4.0 + 2 * 5**0.5, 6.0 - 3**0.5, 2.1]]))
    assert found.tolist() == [pytest.approx([2, -1, 2])]
    assert scores.inverse(found).tolist() == [pytest.approx([4 + 2 * 5**0.5, 6 - 3**0.5, 2.1])]


def test_statistics_of_many_rows_equal_those_of_numpy() -> None:
    rows = torch.randn(70_000, 2) * torch.tensor([1e-3, 1e3]) + torch.tensor([1e2, -1e-2])  # more than one chunk
    scores = ZScores(2)
    scores.fit(rows)
    np.testing.assert_allclose(scores.mean, rows.double().numpy().mean(0), rtol=1e-6)
    np.testing.assert_allclose(scores.std, rows.double().numpy().std(0), rtol=1e-6)


def test_statistics_are_buffers_and_the_minimum_is_that_of_the_data() -> None:
    model = RewardModel(BOX, PUSH, (4,))
    model.fit_statistics(torch.rand(3, 5), torch.tensor([2.0, -7.0, 4.0]))
    assert float(model.minimum) == -7 and float(model.rewards.mean) == pytest.approx(-1 / 3)
    assert {"minimum", "inputs.mean", "inputs.std", "rewards.mean", "rewards.std"} <= set(model.state_dict())
    assert not any(name.startswith(("inputs", "rewards", "minimum")) for name, _ in model.named_parameters())


def test_discrete_values_become_one_hot_beside_the_others() -> None:
    found = transition_vectors(BOX, CHOICE, [[0.5, 1.0, 2.0], np.array([3.0, 4.0, 5.0])], [3, 1])
    assert found.tolist() == [[0.5, 1, 2, 0, 0, 1], [3, 4, 5, 1, 0, 0]] and found.dtype == torch.float32
    found = transition_vectors(spaces.Discrete(2), PUSH, [1, 0], [np.array([0.25, -1]), np.array([0, 1])])
    assert found.tolist() == [[0, 1, 0.25, -1], [1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("observations", "actions", "sentence"),
    [
        ([[0.0] * 4], [1], "trained on observations of Box.*these are float64 of shape \\(4,\\)"),
        ([[0.0] * 3], [0], "trained on actions of Discrete\\(3, start=1\\), but these are int64 .*as \\[0\\]"),
        ([[0.0] * 3], [4], "trained on actions of Discrete"),
        ([[0.0] * 3], [1.5], "trained on actions of Discrete"),
        ([[0.0] * 3], [[1.0, 1.0]], "trained on actions of Discrete"),
    ],
)
def test_observations_and_actions_from_other_spaces_raise(observations, actions, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        fitted().predict(observations, actions)
    assert "\n" not in str(caught.value)


def test_an_unsupported_space_raises() -> None:
    with pytest.raises(ValueError, match="the observation space is Dict.*needs a Box or a Discrete one"):
        RewardModel(spaces.Dict({"a": BOX}), CHOICE)


def test_a_hidden_layer_is_linear_batch_norm_relu_and_dropout() -> None:
    layers = mlp((5, 7, 6, 1), batch_norm=True, dropout=0.1)
    hidden = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout]
    assert [type(layer) for layer in layers] == [*hidden, *hidden, nn.Linear]
    assert [type(layer) for layer in mlp((5, 7, 1))] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [layer.p for layer in layers if isinstance(layer, nn.Dropout)] == [0.1, 0.1]


def test_the_default_is_the_original_network() -> None:
    (member,) = RewardModel(spaces.Box(-1, 1, (17,)), spaces.Box(-1, 1, (6,))).members
    assert [(m.in_features, m.out_features) for m in member if isinstance(m, nn.Linear)] == [
        (23, 256),
        (256, 256),
        (256, 1),
    ]


def test_a_prediction_is_the_mean_of_the_members_minus_a_multiple_of_their_deviation() -> None:
    model = RewardModel(BOX, PUSH, (4,), members=3)
    model.rewards.fit(torch.tensor([[8.0], [12.0]]))  # mean 10, standard deviation 2
    scores = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    # Rewards 10, 12, 14 and 12, 12, 12: means 12; deviations sqrt((4 + 0 + 4) / 3) and 0.
    assert model.combine(scores).tolist() == [12, 12]
    assert model.combine(scores, 0.5).tolist() == pytest.approx([12 - 0.5 * (8 / 3) ** 0.5, 12])


def test_predictions_equal_a_loop_over_rows_and_members() -> None:
    model = fitted(members=3, dropout=0.5)
    observations, actions = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), [1, 2, 3, 3, 1]
    expected = []
    for observation, action in zip(observations, actions, strict=True):
        x = np.concatenate([observation, [float(action == choice) for choice in (1, 2, 3)]])
        z = torch.tensor((x - model.inputs.mean.numpy()) / model.inputs.std.numpy(), dtype=torch.float32)[None]
        with torch.no_grad():
            scores = [float(member(z)) for member in model.members]
        members = np.array(scores) * float(model.rewards.std) + float(model.rewards.mean)
        expected.append(np.mean(members) - 0.7 * np.std(members))
    found = model.predict(observations, actions, 0.7)
    assert found.dtype == np.float64 and found.shape == (5,)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_predictions_do_not_depend_on_the_batch_or_on_the_precision_of_a_rollout() -> None:
    model = fitted(dropout=0.5)
    observations, actions = np.random.default_rng(0).normal(size=(9, 3)), [1, 2, 3] * 3
    together = model.predict(observations, actions)
    one_by_one = [model.predict(observations[i : i + 1], actions[i : i + 1])[0] for i in range(9)]
    np.testing.assert_allclose(together, one_by_one, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(model.predict(observations, actions), together)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_loaded_model_predicts_the_same_and_loading_does_not_change_random_numbers(tmp_path) -> None:
    model = fitted()
    save_reward_model(model, tmp_path / "model.ckpt")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loaded = load_reward_model(tmp_path / "model.ckpt")
    assert torch.equal(torch.get_rng_state(), before)
    observations, actions = np.random.default_rng(0).normal(size=(5, 3)), [1, 2, 3, 3, 1]
    np.testing.assert_array_equal(loaded.predict(observations, actions), model.predict(observations, actions))
    assert loaded.about == model.about and loaded.action_space == CHOICE and loaded.minimum == model.minimum
    assert not any(weight.requires_grad for weight in loaded.parameters())


def test_the_best_checkpoint_of_a_run_is_preferred_to_the_last(tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "last.ckpt").touch()
    assert reward_model_file(tmp_path).name == "last.ckpt"
    (folder / "best.ckpt").touch()
    assert reward_model_file(tmp_path).name == "best.ckpt"
    assert reward_model_file(folder / "last.ckpt").name == "last.ckpt"


def test_a_checkpoint_without_a_reward_model_raises_one_sentence(tmp_path) -> None:
    def error(path) -> str:
        with pytest.raises(ValueError) as caught:
            load_reward_model(path, "rewards.path")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "it must be a checkpoint, or a run directory" in error(tmp_path / "none")
    assert "it must be a checkpoint, or a run directory" in error(tmp_path)
    (tmp_path / "text.ckpt").write_text("nothing")
    assert "is damaged (torch.save did not write it, or not completely)" in error(tmp_path / "text.ckpt")
    torch.save({"state_dict": {}, "lrl": {}}, tmp_path / "policy.ckpt")
    assert "contains no reward model" in error(tmp_path / "policy.ckpt")
    model = fitted()
    model.about["hidden_sizes"] = [5]
    save_reward_model(model, tmp_path / "other.ckpt")
    assert "weights ['members.0.0.bias', 'members.0.0.weight', 'members.0.1.bias'] do not fit" in error(
        tmp_path / "other.ckpt"
    )

"""Tests of rollouts from tables: exact properties and averages."""

import numpy as np
import pytest
import torch
from results.credit_truth import sample_rollout

from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.exact import lakes_of

(LAKE,) = lakes_of(GymnasiumEnvs("FrozenLake-v1"))
POLICY = np.random.default_rng(0).dirichlet(np.ones(4), 16)


def softmax(temperature):
    weights = np.exp(LAKE.q_values / temperature)
    return weights / weights.sum(-1, keepdims=True)


def test_the_success_rate_of_episodes_equals_the_exact_success():
    policy = softmax(0.01)
    sample = sample_rollout(LAKE, policy, 400, 10, seed=0)
    exact = LAKE.success(policy)
    assert 0.2 < exact < 0.7 and float(sample.rollout.episode_returns.mean()) == pytest.approx(exact, abs=0.03)
    torch.testing.assert_close(sample.rollout.values[0].mean(), torch.tensor(exact, dtype=torch.float64))


def test_every_episode_ends_once_and_has_no_later_turns():
    rollout = sample_rollout(LAKE, softmax(0.01), 20, 10, seed=1).rollout
    ends = rollout.terminated | rollout.truncated
    assert bool((ends.sum(0) == 1).all()) and bool(rollout.truncated.any())
    length = rollout.lengths
    assert torch.equal(ends.int().argmax(0) + 1, length) and int(length[rollout.truncated.any(0)].min()) == 100
    for tensor in (rollout.rewards, rollout.state, rollout.values[..., 0], rollout.terminated, rollout.truncated):
        assert not tensor[~rollout.active].any()
    assert rollout.group.bincount().tolist() == [10] * 20


@pytest.mark.parametrize("tokens", [1, 3])
def test_exact_advantages_have_mean_zero_under_the_policy(tokens):
    sample = sample_rollout(LAKE, POLICY, 200, 50, tokens=tokens, gamma=0.9, seed=2)
    start = sample.advantages[0]  # all episodes are in the same state
    assert float(start[:, 0].abs().max()) > 0
    torch.testing.assert_close(start.mean(0), torch.zeros(tokens, dtype=torch.float64), atol=1e-4, rtol=0)


def test_the_advantages_of_the_tokens_of_a_turn_sum_to_the_advantage_of_the_turn():
    one, three = (sample_rollout(LAKE, POLICY, 5, 8, tokens=tokens, seed=3) for tokens in (1, 3))
    torch.testing.assert_close(three.advantages.sum(-1), one.advantages[..., 0])
    assert bool(three.advantages[..., :2].any()) and not three.advantages[..., 2].any()
    torch.testing.assert_close(three.rollout.values.diff(dim=-1), three.advantages[..., :2])
    assert three.rollout.response_mask.sum() == 3 * one.rollout.response_mask.sum()


def test_another_number_of_tokens_raises():
    with pytest.raises(ValueError, match="tokens is 2; it must be one of 1, 3"):
        sample_rollout(LAKE, POLICY, 1, 1, tokens=2, seed=0)


def test_equal_choices_have_equal_exact_advantages_at_the_same_turn():
    for tokens, most in ((1, 4), (3, 2 + 4 + 4)):
        sample = sample_rollout(LAKE, softmax(1.0), 20, 10, tokens=tokens, seed=4)
        choice, true = sample.choice[0].flatten(), sample.advantages[0].flatten()
        of_choice = {number: true[choice == number] for number in choice.unique().tolist()}
        assert len(of_choice) == most and all(float(same.max() - same.min()) < 1e-12 for same in of_choice.values())

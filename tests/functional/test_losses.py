"""Hand-typed numbers for losses, advantages and KL estimators."""

import math

import pytest
import torch

from lrl.functional.distributions import Categorical
from lrl.functional.groups import group_advantages
from lrl.functional.losses import clipped_surrogate, kl_estimate, reduce_tokens


def test_group_advantages_are_centred_and_divided_by_the_groups_own_deviation():
    returns, group = torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.tensor([4, 4, 9, 9])
    std = torch.tensor([0.5**0.5, 0.5**0.5, 2**0.5, 2**0.5])
    torch.testing.assert_close(group_advantages(returns, group), torch.tensor([0.5, -0.5, -1.0, 1.0]) / (std + 1e-4))


def test_group_advantages_do_not_need_groups_to_be_contiguous():
    returns, group = torch.tensor([1.0, 3.0, 0.0, 5.0]), torch.tensor([0, 1, 0, 1])
    assert group_advantages(returns, group, "none").tolist() == [0.5, -1.0, -0.5, 1.0]


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_a_group_with_equal_returns_has_advantage_zero(scale):
    returns, group = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = group_advantages(returns, group, scale)
    assert advantages[:3].tolist() == [0, 0, 0] and advantages[3] > 0
    assert abs(float(advantages.sum())) < 1e-5


def test_the_surrogate_clips_only_where_that_makes_it_smaller():
    ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.25]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 2.0]])
    assert clipped_surrogate(ratio, advantages, 0.2, 0.3)[0].tolist() == pytest.approx([1.3, -0.8, -1.5, 0.5, 2.5])


def test_at_ratio_one_the_surrogates_gradient_is_the_policy_gradient():
    logprobs = torch.tensor([[-0.3, -1.2]], requires_grad=True)
    advantages = torch.tensor([[2.0, -0.7]])
    (grad,) = torch.autograd.grad(
        clipped_surrogate((logprobs - logprobs.detach()).exp(), advantages, 0.2, 0.2).sum(), logprobs
    )
    assert grad.tolist() == advantages.tolist()


def test_normalisations_weigh_turns_tokens_or_a_constant():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    sizes = torch.tensor(2.0), torch.tensor(4.0), 5
    assert float(reduce_tokens(values, mask, "sequence", *sizes)) == 3.0
    assert float(reduce_tokens(values, mask, "token", *sizes)) == 2.5
    assert float(reduce_tokens(values, mask, "constant", *sizes)) == 1.0


def test_the_kl_estimate_on_a_halved_probability():
    logprobs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert float(kl_estimate(logprobs, reference)) == pytest.approx(math.log(2) - 0.5, abs=1e-6)


def test_the_kl_estimate_averages_to_the_true_kl():
    policy, reference = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    true = float((policy * (policy / reference).log()).sum())
    assert float((policy * kl_estimate(policy.log(), reference.log())).sum()) == pytest.approx(true, abs=1e-6)


def test_logprobs_and_entropy_of_a_uniform_distribution():
    logits = torch.zeros(1, 4)
    assert float(Categorical(logits).logprobs(torch.tensor([2]))) == pytest.approx(-math.log(4))
    assert float(Categorical(logits).entropy()) == pytest.approx(math.log(4))

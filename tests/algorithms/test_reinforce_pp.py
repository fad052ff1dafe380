"""REINFORCE++: its advantages and loss against hand-typed numbers, and that it learns."""

import math

import pytest
import torch
from tiny_runs import from_settings, make_trainer, rollout_data, save_tiny_model, text_policy

from lrl.algorithms.grpo import GRPOModule
from lrl.algorithms.reinforce_pp import REINFORCEPlusPlusModule
from lrl.policies.policy import Policy
from lrl.training.metrics import derived
from lrl.types import Evaluation, Rollout, TurnBatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@Policy.register
class Silent(torch.nn.Module):
    """Stub of a policy that only has the attributes of a module."""

    has_critic, response_format, sampling = False, None, None


def two_turns(ref_logprobs=None):
    """Two episodes of two turns of up to two tokens; the second ends after its first turn."""
    mask = torch.tensor([[[1, 1], [1, 0]], [[1, 0], [0, 0]]], dtype=torch.bool)
    logprobs = torch.tensor([[[-1.0, -2.0], [-1.0, 0.0]], [[-3.0, 0.0], [0.0, 0.0]]])
    return Rollout(
        inputs={},
        response_mask=mask,
        logprobs=logprobs,
        rewards=torch.tensor([[1.0, 5.0], [2.0, 0.0]]),
        terminated=torch.tensor([[False, True], [True, False]]),
        truncated=torch.zeros(2, 2, dtype=torch.bool),
        active=mask.any(-1),
        turn=torch.zeros(2, 2, dtype=torch.int64),
        group=torch.tensor([0, 0]),
        observations=[],
        responses=[],
        metrics={},
        ref_logprobs=ref_logprobs,
    )


def scaled(*values):
    values = torch.tensor(values)
    return ((values - values.mean()) / values.std()).tolist()


def test_a_token_is_credited_with_the_rewards_that_follow_it():
    advantages = REINFORCEPlusPlusModule(Silent()).advantages(two_turns()).advantages
    first, second, third, fourth = scaled(3.0, 3.0, 5.0, 2.0)
    expected = [[[first, second], [third, 0.0]], [[fourth, 0.0], [0.0, 0.0]]]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_the_kl_penalty_of_a_token_includes_those_of_later_tokens():
    rollout = two_turns()
    reference = rollout.logprobs - torch.tensor([[[0.1, 0.2], [0.4, 9.0]], [[0.3, 9.0], [9.0, 9.0]]])
    module = REINFORCEPlusPlusModule(Silent(), kl_coef=0.5)
    advantages = module.advantages(two_turns(reference)).advantages
    expected = scaled(3 - 0.5 * 0.6, 3 - 0.5 * 0.5, 5 - 0.5 * 0.4, 2 - 0.5 * 0.3)
    assert advantages[rollout.response_mask].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_baseline_of_a_group_is_its_mean_return():
    module = REINFORCEPlusPlusModule(Silent(), group_baseline=True)
    advantages = module.advantages(two_turns()).advantages
    expected = scaled(3.0 - 4.0, 3.0 - 4.0, 5.0 - 4.0, 2.0 - 4.0)
    assert advantages[two_turns().response_mask].tolist() == pytest.approx(expected, abs=1e-5)


def test_an_episode_that_continues_in_the_next_collection_raises():
    rollout = two_turns().replace(terminated=torch.tensor([[False, True], [False, False]]))
    for module in (REINFORCEPlusPlusModule(Silent()), GRPOModule(Silent())):
        with pytest.raises(ValueError, match="data.num_steps is 2; it must be null, .* needs whole episodes"):
            module.advantages(rollout)


def test_the_loss_equals_its_formula():
    logprobs, old = torch.tensor([[-1.0, -0.5], [-2.0, 0.0]]), torch.tensor([[-1.5, -0.4], [-1.2, 0.0]])
    mask, advantages = torch.tensor([[True, True], [True, False]]), torch.tensor([[1.0, -2.0], [-0.5, 0.0]])
    batch = TurnBatch(inputs={}, response_mask=mask, old_logprobs=old, advantages=advantages)
    module = REINFORCEPlusPlusModule(Silent(), clip_range=0.2, clip_range_high=0.4)
    tokens = module.loss(batch, Evaluation(logprobs=logprobs, entropy=torch.ones(2, 2)))
    for turn, token in mask.nonzero().tolist():
        ratio, advantage = math.exp(logprobs[turn, token] - old[turn, token]), float(advantages[turn, token])
        expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.4) * advantage)
        assert float(tokens.loss[turn, token]) == pytest.approx(expected, rel=1e-5)
    assert derived(tokens.metrics)["train/clip_fraction"].tolist() == [True, False, True]


@pytest.mark.slow
def test_a_run_learns_what_is_rewarded_and_unlearns_it_with_the_sign_flipped(folder, tmp_path):
    class Flipped(REINFORCEPlusPlusModule):
        def advantages(self, rollout):
            credit = super().advantages(rollout)
            return type(credit)(advantages=-credit.advantages)

    rewards = {}
    for kind in (REINFORCEPlusPlusModule, Flipped):
        module = from_settings(kind, text_policy(folder), optimizer={"lr": 3e-2})
        trainer = make_trainer(tmp_path / kind.__name__, max_epochs=6)
        data = rollout_data("prompts", group_size=16)
        trainer.fit(module, datamodule=data)
        rewards[kind] = float(data.rollout.episode_returns.mean())
    assert rewards[REINFORCEPlusPlusModule] > rewards[Flipped]

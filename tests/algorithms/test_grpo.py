"""Tests of GRPO on a language model of 10,000 weights."""

import itertools
import re

import lightning as L
import numpy as np
import pytest
import tiny_runs
import torch
from tiny_runs import from_settings

import lrl.algorithms.grpo
from lrl.algorithms.grpo import GRPOModule
from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.prompt_env import PromptEnvs, RowSource
from lrl.functional.distributions import Categorical
from lrl.functional.groups import group_advantages
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.rewards.reward import Reward, Row
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.types import RandomKeys, SamplingConfig, TurnBatch

MAX_NEW_TOKENS = 12


class Words(TextCodec):
    """Codec of the task to write the word that the observation names."""

    description = ""
    action_texts = ("left", "right", "up")

    def observation_to_text(self, observation, context=None):
        return self.action_texts[observation]

    def text_to_action(self, text):
        if text not in self.action_texts:
            raise InvalidActionError(f"{text} is no action")
        return self.action_texts.index(text)

    def action_to_text(self, action):
        return self.action_texts[action]


class Bandit(RowSource):
    """Environment with three states, in each of which one action is right."""

    codec = Words()

    def rows(self):
        words, values = Words.action_texts, np.eye(3)
        return [Row(observation=word, q_values=tuple(values[n]), action=n) for n, word in enumerate(words)]


class Right(Reward):
    """Rewards the right word with 1 and any other with 0."""

    name = "right"

    def __call__(self, rows, responses, actions):
        return np.array([float(action in row.best_actions) for row, action in zip(rows, actions, strict=True)])


class Agreed(Reward):
    """Reward that is the same for all responses."""

    name = "agreed"

    def __call__(self, rows, responses, actions):
        return np.ones(len(rows))


def grpo(folder, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, response_format="direct", dtype="float32", **changes):
    """Return a module without a trainer."""
    policy = TextPolicy(
        LanguageModelConfig(name=folder, dtype=dtype),
        PromptTemplate(system="", response_format=response_format),
        SamplingConfig(temperature=temperature, max_new_tokens=max_new_tokens),
    )
    policy.connect(Words())
    module = from_settings(GRPOModule, policy, **changes)
    module.configure_model()
    return module


def acted(module, words=("left", "left", "up", "left"), seed=0, advantages=None):
    """Return turns that the policy itself took, each with its advantage."""
    rows = len(words)
    keys = RandomKeys(seed=seed, purpose="test", collection=0, env=np.arange(rows), turn=np.zeros(rows, dtype=np.int64))
    decisions = module.policy.act(words, [()] * rows, keys, module.policy.sampling)
    mask = decisions.response_mask
    given = torch.linspace(-1, 2, rows) if advantages is None else torch.tensor(advantages)
    batch = TurnBatch(
        inputs=decisions.inputs, response_mask=mask, old_logprobs=decisions.logprobs, advantages=given[:, None] * mask
    )
    if module.needs_reference:
        batch = batch.replace(ref_logprobs=module.policy.reference_logprobs(batch))
    return batch


def gradient(module, loss):
    """Return the gradient as one vector over all weights."""
    weights = [weight for weight in module.policy.parameters() if weight.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])


def wander(module, size=0.02):
    """Change the weights a little, so that ratios are not 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in module.policy.parameters():
            weight.add_(size * torch.randn_like(weight))


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
def test_values_at_masked_positions_are_ignored(tiny_model, normalisation):
    module = grpo(tiny_model, kl={"coef": 0.1}, ent_coef=0.1, loss_normalisation=normalisation)
    batch = acted(module, words=("left", "up", "left", "right up right") * 6)
    assert not batch.response_mask.all() and not batch.inputs["prompt_mask"].all()
    wander(module)
    outside, no_prompt = ~batch.response_mask, ~batch.inputs["prompt_mask"]
    changed = batch.replace(
        inputs=dict(batch.inputs)
        | {
            "prompt_ids": batch.inputs["prompt_ids"].masked_fill(no_prompt, 9),
            "response_ids": batch.inputs["response_ids"].masked_fill(outside, 9),
        },
        old_logprobs=batch.old_logprobs.masked_fill(outside, -0.3),
        advantages=batch.advantages.masked_fill(outside, 5.0),
        ref_logprobs=batch.ref_logprobs.masked_fill(outside, -0.7),
    )
    losses = module.training_step(batch), module.training_step(changed)
    assert torch.equal(*losses)
    assert torch.equal(gradient(module, losses[0]), gradient(module, losses[1]))


@pytest.mark.parametrize("response_format", ["direct", "think_answer"])
def test_gradient_reaches_the_sampled_tokens_and_the_end_token_and_no_other(tiny_model, monkeypatch, response_format):
    module = grpo(tiny_model, response_format=response_format)
    batch = acted(module, words=("left", "left", "up") * 20, advantages=[1.0, -1.0, 0.5] * 20)
    kept, original = [], module.policy.language_model.distribution

    def distribution(layout, temperature):
        shared, states = original(layout, temperature)
        kept.append(shared.coordinates)  # a copy for each token
        kept[-1].retain_grad()
        return Categorical(kept[-1]), states

    monkeypatch.setattr(module.policy.language_model, "distribution", distribution)
    module.training_step(batch).backward()
    reached = kept[0].grad.abs().sum(-1) > 0
    assert torch.equal(reached, batch.response_mask)

    sizes = batch.response_mask.sum(1)
    last = batch.inputs["response_ids"][torch.arange(len(batch)), sizes - 1]
    ended = torch.isin(
        last, torch.tensor(sorted(module.policy.language_model.tokenizer.stop_ids(module.policy.stop_text)))
    )
    assert ended[sizes < MAX_NEW_TOKENS].all() and 0 < int(ended.sum()) < len(batch)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_ratio_of_the_first_update_is_one(tiny_model, temperature):
    module = grpo(tiny_model, temperature)
    batch = acted(module, words=("left", "left up", "up", "left") * 4)
    ratio = (module.policy.evaluate(batch).logprobs - batch.old_logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_adapters_that_drop_out_leave_the_ratio_of_every_collections_first_update_at_one(tiny_model, tmp_path):
    module = tiny_runs.grpo(tiny_model, kl={"coef": 0.0}, model={"lora": LoRAConfig(r=2, dropout=0.5)})
    trainer = tiny_runs.make_trainer(tmp_path, enable_checkpointing=False)
    trainer.fit(module, datamodule=tiny_runs.rollout_data("prompts", num_epochs=1, num_minibatches=1))
    assert any(bool(weight.any()) for name, weight in module.named_parameters() if "lora_B" in name)
    assert all(row["train/ratio_error"] < 1e-5 for _, row in trainer.logger.rows)


# -- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalisation", ["sequence", "constant"])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_accumulating_over_parts_is_the_whole_batch(tiny_model, normalisation, parts):
    module = grpo(tiny_model, dtype="float64", loss_normalisation=normalisation, kl={"coef": 0.1}, ent_coef=0.01)
    batch = acted(module, words=("left", "up") * 12)
    assert not batch.response_mask.all()
    wander(module)
    whole = module.training_step(batch)
    losses = [module.training_step(batch[index]) for index in torch.arange(24).chunk(parts)]
    torch.testing.assert_close(sum(losses) / parts, whole)
    summed = torch.stack([gradient(module, loss) for loss in losses]).mean(0)
    torch.testing.assert_close(summed, gradient(module, whole), atol=5e-7, rtol=1e-6)  # RMSNorm computes in float32


def test_a_minibatch_without_turns_changes_nothing(tiny_model):
    module = grpo(tiny_model)
    loss = module.training_step(acted(module)[torch.arange(0)])
    assert float(loss.detach()) == 0 and not gradient(module, loss).any()


@pytest.mark.parametrize("changes", [{}, {"ent_coef": 0.1}, {"kl": {"coef": 0.1}}])
def test_a_group_with_equal_returns_trains_only_entropy_and_kl(tiny_model, changes):
    module = grpo(tiny_model, **changes)
    advantages = group_advantages(torch.full((4,), 0.7), torch.zeros(4, dtype=torch.long))
    batch = acted(module, words=("up",) * 4, advantages=advantages.tolist())
    wander(module)
    moved = bool(gradient(module, module.training_step(batch)).any())
    assert moved == bool(changes)


def test_the_surrogate_is_constant_outside_the_clip_range(tiny_model):
    module = grpo(tiny_model, clip_range=0.2, clip_range_high=0.3)
    batch = acted(module, words=("up",), advantages=[1.0])
    cases = [(0.28, 1, False), (0.25, 1, True), (-0.25, -1, False), (-0.25, 1, True), (0.5, -1, True)]
    for log_ratio, advantage, pays in cases:
        old = (batch.old_logprobs - log_ratio) * batch.response_mask
        changed = batch.replace(old_logprobs=old, advantages=advantage * batch.response_mask.float())
        assert bool(gradient(module, module.training_step(changed)).any()) == pays


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"clip_range": 0.0}, "model.clip_range is 0.0; it must be positive"),
        ({"clip_range_high": -0.1}, "model.clip_range_high is -0.1; it must be positive, or null"),
        ({"kl": {"coef": -1.0}}, "model.kl.coef is -1.0; it must be 0 or positive"),
        ({"optimizer": {"lr": 0.0}}, "model.optimizer.lr is 0.0; it must be positive"),
    ],
)
def test_invalid_settings_raise_their_name(tiny_model, settings, key):
    with pytest.raises(ValueError, match=re.escape(key)):
        grpo(tiny_model, **settings)


# -- with a trainer ---------------------------------------------------------------------------------------------------


def fit(module, collections, reward=None, callbacks=(), seed=0, **changes):
    """Train a policy on the bandit."""
    env = PromptEnvs(Bandit(), [reward or Right()])
    sizes = {"num_groups": 3, "group_size": 16} | changes
    module.train()
    data = RolloutDataModule(env, seed=seed, **sizes)
    settings = {"max_epochs": collections, "accelerator": "cpu", "limit_val_batches": 0}
    return lrl.train(module, data, callbacks=callbacks, **settings)


class Weights(L.Callback):
    """Callback that stores the weights and the optimiser's state after each minibatch."""

    def __init__(self):
        self.seen, self.skipped = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = trainer.optimizers[0].state.values()
        moments = [state[name].flatten() for state in state for name in ("exp_avg", "exp_avg_sq", "step")]
        self.seen.append(torch.cat([*(weight.detach().flatten() for weight in pl_module.parameters()), *moments]))
        self.skipped.append(pl_module.skip_updates)


def test_once_target_kl_is_exceeded_the_weights_stay_as_they_are_until_the_next_collection(tiny_model):
    module, weights = (
        grpo(tiny_model, optimizer={"lr": 1e-3, "weight_decay": 0.1}, ent_coef=0.1, target_kl=1e-6),
        Weights(),
    )
    fit(module, 2, callbacks=[weights], num_epochs=5)
    assert len(weights.seen) == 10
    for first in (0, 5):
        tripped = next(part for part in range(first, first + 5) if weights.skipped[part])
        assert first < tripped < first + 3
        for part in range(tripped + 1, first + 5):
            assert torch.equal(weights.seen[part], weights.seen[tripped])
    assert not torch.equal(weights.seen[4], weights.seen[5])


def test_without_target_kl_every_minibatch_changes_the_weights(tiny_model):
    module, weights = grpo(tiny_model, optimizer={"lr": 1e-3}, ent_coef=0.1), Weights()
    fit(module, 1, callbacks=[weights], num_epochs=2, num_minibatches=2)
    assert len(weights.seen) == 4
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights.seen))


def test_a_collection_whose_groups_have_equal_returns_changes_no_weights(tiny_model):
    module = grpo(tiny_model, optimizer={"lr": 1e-2})
    before = [weight.clone() for weight in module.parameters()]
    fit(module, 2, reward=Agreed())
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_every_token_carries_its_episodes_advantage_over_the_group(tiny_model, monkeypatch):
    module = grpo(tiny_model, max_new_tokens=1)
    monkeypatch.setattr(module, "all_gather", lambda own: own)
    plan = CollectionPlan(seed=5, collection=0, num_groups=3, group_size=8)
    rollout = EpisodeCollector(module.policy, PromptEnvs(Bandit(), [Right()]).make(24, "direct")).collect(plan)
    batch, better = module.prepare(rollout), group_advantages(rollout.episode_returns, rollout.group)
    assert (
        better.min() < 0 < better.max()
        and rollout.episode_returns[better.argmax()] > rollout.episode_returns[better.argmin()]
    )
    assert torch.equal(batch.advantages, better[:, None] * batch.response_mask)


def mean_return(module):
    """Return the mean return of the policy at its sampling temperature."""
    env = PromptEnvs(Bandit(), [Right()]).make(96, "direct")
    plan = CollectionPlan(seed=5, collection=0, num_groups=3, group_size=32)
    return float(EpisodeCollector(module.policy, env).collect(plan).episode_returns.mean())


@pytest.mark.learning
@pytest.mark.parametrize("sign", [1, -1])
def test_the_bandit_is_solved_and_with_flipped_advantages_it_is_not(tiny_model, monkeypatch, sign):
    monkeypatch.setattr(lrl.algorithms.grpo, "group_advantages", lambda *args: sign * group_advantages(*args))
    module = grpo(tiny_model, max_new_tokens=1, optimizer={"lr": 3e-3}, kl={"coef": 0.01}, ent_coef=0.01)
    fit(module, 100 if sign > 0 else 30)  # wrong from the first steps on
    assert mean_return(module) > 0.9 if sign > 0 else mean_return(module) < 0.1

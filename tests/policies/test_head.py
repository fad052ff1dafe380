"""Tests of the policy with a head on a language model."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from tiny_runs import batch_of, make_trainer, sampled_values, save_tiny_model

from lrl.algorithms.grpo import GRPOModule, KLConfig
from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.codecs.numbers import NumberFormat
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.functional.advantages import CreditConfig
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.policies import head
from lrl.policies.head import HeadPolicy, ObservationCriticConfig
from lrl.training.optimizer import OptimizerConfig
from lrl.training.weights import take_weights
from lrl.types import RandomKeys, SamplingConfig

NUMBERS = NumberFormat(kind="integers", ranges=[(-2.0, 664.0)])  # 1.5 bins per unit: words from 0 to 3, mostly
ENVS = {"discrete": GymnasiumEnvs("CartPole-v1", numbers=NUMBERS), "box": GymnasiumEnvs("Pendulum-v1", numbers=NUMBERS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def policy_on(kind, folder, model=None, **settings):
    policy = HeadPolicy(LanguageModelConfig(name=folder, **model or {}), **{"init_seed": 0} | settings)
    policy.connect(ENVS[kind].codec)
    policy.connect_spaces(*ENVS[kind].spaces)
    policy.configure()
    return policy


def seen_in(kind, rows):
    space = ENVS[kind].spaces[0]
    high = np.minimum(space.high, 2)
    return list((np.random.default_rng(0).uniform(-1, 1, (rows, *space.shape)) * high).astype(np.float32))


def keys(rows):
    return RandomKeys(seed=0, purpose="rollout", collection=0, env=np.arange(rows), turn=np.zeros(rows, int))


@pytest.mark.parametrize("kind", ENVS)
def test_evaluated_logprobs_equal_sampled_ones(folder, kind):
    policy = policy_on(kind, folder)
    seen = seen_in(kind, 40)
    decisions = policy.act(seen, [()] * 40, keys(40), policy.sampling)
    evaluation = policy.evaluate(batch_of(decisions))
    torch.testing.assert_close(evaluation.logprobs, decisions.logprobs)
    assert decisions.values is None  # values are computed once for a whole collection
    torch.testing.assert_close(evaluation.values, sampled_values(policy, batch_of(decisions)))
    torch.testing.assert_close(policy.state_values(seen, [()] * 40), evaluation.values[:, 0])
    acted = ENVS[kind].spaces[1]
    assert all(acted.contains(action) for action in np.asarray(decisions.actions, dtype=acted.dtype))
    assert evaluation.entropy.shape == evaluation.logprobs.shape == (40, 1)
    calm = policy.act(seen, [()] * 40, keys(40), SamplingConfig(temperature=0))
    again = policy.act(seen, [()] * 40, keys(40), SamplingConfig(temperature=0))
    assert np.array_equal(np.asarray(calm.actions), np.asarray(again.actions))


def test_a_frozen_trunk_computes_states_once_and_they_are_whitened(folder, monkeypatch):
    policy = policy_on("box", folder, freeze_trunk=True, whiten_states=1e-3)
    seen, reads = seen_in("box", 200), []
    read = policy.language_model.states
    monkeypatch.setattr(policy.language_model, "states", lambda *args: reads.append(1) or read(*args))
    for collection in range(2):
        policy.settle_statistics(collection)
        decisions = policy.act(seen, [()] * 200, keys(200), policy.sampling)
        batch = batch_of(decisions)
        assert torch.equal(policy.evaluate(batch).logprobs, decisions.logprobs)
        policy.learn_statistics(batch, collection)
        assert torch.equal(policy.evaluate(batch).logprobs, decisions.logprobs)
    assert len(reads) == 2
    assert sorted(batch.inputs) == ["action", "observation", "states"]
    states = batch.inputs["states"]
    white = policy.whitening(states)
    centred = white - white.mean(0)
    variances = torch.linalg.eigvalsh(centred.T @ centred / len(white))
    assert (variances > 0.9).sum() > 3
    assert variances.max() < 1.2


def test_a_trained_trunk_computes_states_again_with_the_same_whitening(folder):
    policy, seen = policy_on("box", folder, whiten_states=1e-2), seen_in("box", 100)
    raw = policy.act(seen, [()] * 100, keys(100), policy.sampling)
    policy.learn_statistics(batch_of(raw), 0)
    policy.settle_statistics(1)
    decisions = policy.act(seen, [()] * 100, keys(100), policy.sampling)
    batch = batch_of(decisions)
    assert (policy.outputs(raw.inputs) - policy.layers(raw.inputs["states"])).abs().max() > 1e-2
    torch.testing.assert_close(policy.evaluate(batch).logprobs, decisions.logprobs)
    before = policy.outputs(batch.inputs).detach()
    with torch.no_grad():
        policy.language_model.model.get_input_embeddings().weight.mul_(1.5)
    assert (policy.outputs(batch.inputs) - before).abs().max() > 1e-3
    policy.outputs(batch.inputs).sum().backward()
    assert policy.language_model.model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_initial_means_are_near_zero_and_whitened_states_are_clipped(folder):
    policy = policy_on("box", folder, critic=ObservationCriticConfig(observation_clip=1.5))
    torch.testing.assert_close(torch.linalg.svdvals(policy.layers[-1].weight), torch.full((1,), 0.1))
    policy.norm.learn(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), 0)
    policy.norm.settle(1)
    assert policy.norm(torch.full((1, 3), 100.0)).tolist() == [[1.5] * 3]
    whitened = policy_on("box", folder, whiten_states=1e-3, freeze_trunk=True)
    states = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    whitened.whitening.learn(states, 0)
    whitened.whitening.settle(1)
    assert whitened.whitening(100 * states[:1]).abs().max() == 5.0


def test_padding_does_not_change_the_outputs(folder):
    policy = policy_on("discrete", folder)
    ids = torch.tensor([[5, 7, 9, 8, 6, 4]])
    alone = policy.outputs({"text_ids": ids[:, :4], "text_mask": torch.ones(1, 4, dtype=torch.bool)})
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    together = policy.outputs({"text_ids": ids.expand(2, 6), "text_mask": mask})
    torch.testing.assert_close(together[:1], alone)
    assert (together[1] - alone[0]).abs().max() > 1e-4


def test_the_language_model_reads_only_the_text_of_the_observation(folder):
    policy = policy_on("box", folder)
    text = policy.codec.observation_to_text(np.zeros(3, np.float32))
    assert policy.encode_observation(np.zeros(3, np.float32)) == policy.language_model.tokenizer.encode_text(text)
    short = policy_on("box", folder, max_text_tokens=3)
    with pytest.raises(ValueError, match="policy.max_text_tokens is 3; an observation has"):
        short.act(seen_in("box", 2), [()] * 2, keys(2), short.sampling)
    with pytest.raises(ValueError, match="an observation has the text '', which the tokenizer of .* converts to no"):
        policy.encode_observation("")


def trained(policy):
    return {name.split(".")[0] for name, weight in policy.named_parameters() if weight.requires_grad}


def test_every_trainable_weight_has_a_gradient(folder):
    policy = policy_on("box", folder)
    decisions = policy.act(seen_in("box", 10), [()] * 10, keys(10), policy.sampling)
    evaluation = policy.evaluate(batch_of(decisions))
    (evaluation.logprobs.sum() + evaluation.values.sum()).backward()
    missing = [name for name, weight in policy.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not missing and trained(policy) == {"language_model", "head", "layers", "critic"}
    assert trained(policy_on("box", folder, freeze_trunk=True)) == {"head", "layers", "critic"}
    adapted = policy_on("box", folder, model={"lora": LoRAConfig(r=2)})
    names = [n for n, w in adapted.language_model.named_parameters() if w.requires_grad]
    assert names and all("lora" in name for name in names)


@pytest.mark.parametrize(
    ("model", "settings"),
    [({}, {}), ({"lora": LoRAConfig(r=2)}, {}), ({}, {"whiten_states": 0.1, "freeze_trunk": True})],
    ids=["whole", "lora", "whitened"],
)
def test_the_reference_is_the_policy_before_the_update(folder, model, settings):
    policy = policy_on("box", folder, model=model, **settings)
    policy.build_reference(warm_started=False)
    batch = batch_of(policy.act(seen_in("box", 10), [()] * 10, keys(10), policy.sampling))
    policy.learn_statistics(batch, 0)
    policy.settle_statistics(1)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(policy.reference_logprobs(batch), batch.old_logprobs)
    assert (policy.evaluate(batch).logprobs - batch.old_logprobs).abs().max() > 1e-3


def test_the_critic_normalises_observations_and_the_text_is_not_normalised(folder):
    policy = policy_on("box", folder)
    decisions = policy.act(seen_in("box", 50), [()] * 50, keys(50), policy.sampling)
    before = sampled_values(policy, batch_of(decisions))
    policy.learn_statistics(batch_of(decisions), 0)
    policy.settle_statistics(1)
    after = policy.act(seen_in("box", 50), [()] * 50, keys(50), policy.sampling)
    assert torch.equal(after.logprobs, decisions.logprobs)
    assert not torch.equal(sampled_values(policy, batch_of(after)), before)
    assert policy.norm(decisions.inputs["observation"]).std(0) == pytest.approx([1.0] * 3, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"hidden_sizes": (0,)}, "policy.hidden_sizes is [0]"),
        ({"max_text_tokens": 0}, "policy.max_text_tokens is 0"),
        ({"whiten_states": 0.0}, "policy.whiten_states is 0.0; it must be in (0, 1], or null"),
        ({"activation": "sine"}, "policy.activation is 'sine'"),
    ],
)
def test_invalid_settings_raise_with_their_key(folder, settings, complaint):
    with pytest.raises(ValueError) as error:
        HeadPolicy(LanguageModelConfig(name=folder), **settings)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"hidden_sizes": [0]}, "hidden_sizes"), ({"observation_clip": 0.0}, "observation_clip")],
)
def test_invalid_settings_of_the_critic_raise_with_their_key(settings, complaint):
    with pytest.raises(ValueError, match=f"policy.critic.{complaint} is"):
        ObservationCriticConfig(**settings)


def test_unsupported_spaces_raise(folder):
    policy = HeadPolicy(LanguageModelConfig(name=folder))
    with pytest.raises(ValueError, match="actions are Text"):
        policy.connect_spaces(gym.spaces.Box(0, 1, (2,)), gym.spaces.Text(5))
    with pytest.raises(ValueError, match="policy.critic is .* where they are not numeric"):
        policy.connect_spaces(gym.spaces.Text(5), gym.spaces.Discrete(2))
    frozen = LanguageModelConfig(name=folder, lora=LoRAConfig())
    with pytest.raises(ValueError, match="freeze_trunk is true, but language_model.lora is set"):
        HeadPolicy(frozen, freeze_trunk=True)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_ppo_trains_a_head_in_16_bits(folder, tmp_path, precision):
    policy = HeadPolicy(LanguageModelConfig(name=folder), (4,), init_seed=0, whiten_states=0.1, freeze_trunk=True)
    trainer = make_trainer(tmp_path, max_epochs=2, precision=precision)
    data = RolloutDataModule(ENVS["box"], num_envs=2, num_steps=4)
    trainer.fit(PPOValueHeadModule(policy, credit=CreditConfig(gamma=0.9)), datamodule=data)
    assert all(np.isfinite(row["train/value_loss"]) for _, row in trainer.logger.rows)
    assert policy.whitening.counting[0, 0] == 8
    assert not torch.equal(policy.whitening.matrix, torch.eye(len(policy.whitening.matrix)))


def test_whitening_the_states_of_a_trunk_that_is_trained_in_16_bits_raises(folder, tmp_path):
    policy = HeadPolicy(LanguageModelConfig(name=folder), (4,), init_seed=0, whiten_states=0.1)
    data = RolloutDataModule(ENVS["box"], num_envs=2, num_steps=4)
    with pytest.raises(
        ValueError, match="whiten_states is 0.1, and the language model is trained in 16 bits; .* be null"
    ):
        make_trainer(tmp_path, max_epochs=1, precision="bf16-mixed").fit(PPOValueHeadModule(policy), datamodule=data)


def test_grpo_whitens_states(folder, tmp_path):
    policy = HeadPolicy(LanguageModelConfig(name=folder), (4,), critic=None, whiten_states=0.1, freeze_trunk=True)
    data = RolloutDataModule(ENVS["discrete"], num_groups=2, group_size=2, max_turns=5)
    make_trainer(tmp_path, max_epochs=2).fit(GRPOModule(policy, optimizer=OptimizerConfig(lr=1e-3)), datamodule=data)
    assert policy.whitening.counting[0, 0] > 4


def test_a_codec_that_needs_more_than_the_observation_raises(folder):
    lake = GymnasiumEnvs("FrozenLake-v1")
    policy = HeadPolicy(LanguageModelConfig(name=folder))
    policy.connect(lake.codec)
    with pytest.raises(ValueError, match="but FrozenLakeCodec cannot write its text from the observation alone"):
        policy.connect_spaces(*lake.spaces)


def test_init_from_can_load_only_the_language_model_or_leave_out_the_critic(folder):
    policy = policy_on("box", folder, critic=None, init_seed=1)
    whole = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    other = policy_on("box", folder)
    take_weights(other, whole, "run")
    assert torch.equal(other.layers[0].weight, policy.layers[0].weight)
    trunk = {name: tensor for name, tensor in whole.items() if name.startswith("language_model.")}
    take_weights(policy_on("box", folder), trunk, "run")
    with pytest.raises(ValueError, match="it lacks \\['layers.0.bias'"):
        take_weights(other, {name: t for name, t in whole.items() if name != "layers.0.bias"}, "run")


def test_init_from_a_head_on_unwhitened_states_raises_if_states_are_whitened(folder):
    raw = {name: tensor.detach().clone() for name, tensor in policy_on("box", folder).state_dict().items()}
    with pytest.raises(ValueError, match="it lacks \\['whitening.counting'"):
        take_weights(policy_on("box", folder, whiten_states=0.1), raw, "run")


@pytest.fixture(scope="module")
def dropping(tmp_path_factory):
    """A GPT-2, whose default dropout is 0.1."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "gpt2", "gpt2")


@pytest.mark.parametrize("freeze_trunk", [True, False])
def test_statistics_of_demonstrations_are_computed_without_dropout(dropping, freeze_trunk):
    policy = policy_on("box", dropping, whiten_states=1e-2, freeze_trunk=freeze_trunk, critic=None)
    decisions = policy.act(seen_in("box", 100), [()] * 100, keys(100), policy.sampling)
    states = decisions.inputs["states"]
    batch = batch_of(decisions).replace(inputs=policy._text(seen_in("box", 100)))
    policy.train()  # as Lightning does before the first batch
    policy.learn_statistics(batch, 0)
    policy.settle_statistics(1)
    count, mean = policy.whitening.counting[:2]
    off = (mean - states.double().mean(0)).abs() / states.double().std(0)
    assert count[0] == 100 and off.max() < 1e-4, f"{float(off.max()):.2f} standard deviations"
    torch.testing.assert_close(policy.statistics_input(batch.inputs, "states"), states)


def test_the_divergence_from_the_reference_is_zero_in_the_first_collection(dropping, tmp_path, monkeypatch):
    model = LanguageModelConfig(name=dropping, lora=LoRAConfig(r=2))
    monkeypatch.setattr(head, "_OUTPUT_GAIN", 5.0)
    policy = HeadPolicy(model, (4,), critic=None, init_seed=0)
    data = RolloutDataModule(ENVS["discrete"], num_groups=2, group_size=2, max_turns=5, num_epochs=1)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(GRPOModule(policy, kl=KLConfig(coef=0.1)), datamodule=data)
    row = trainer.logger.rows[0][1]
    assert row["train/kl_to_reference"] < 1e-6 and row["train/ratio_error"] < 1e-5

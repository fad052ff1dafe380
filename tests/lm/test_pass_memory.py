"""Passes over many turns: none takes memory in proportion to a collection, and their results are those of one pass."""

import pytest
import torch
from tiny_architectures import GEMMA3N
from tiny_runs import architecture, from_settings, make_trainer, ppo, rollout_data, save_tiny_model, text_policy
from transformers import AutoModelForCausalLM

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.algorithms.trpo import TRPOModule
from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm import forward as pass_memory
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.forward import PassMemory, divide_turns
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.head import HeadPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.training.value_fit import ValueFit, fit_values

SMALL = 600_000
"""Bytes: about four turns with gradient, and twelve without."""
LIMITS = {"scoring": 150_000, "head": 150_000}
CRITIC = ValueHeadConfig(hidden_sizes=(8,), init_seed=0)
KINDS = ["text", "scoring", "head", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("packed", "adapter"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def module_of(kind, folder, algorithm=PPOValueHeadModule, **settings):
    """A module in float64 with a reference and a critic, and its environment."""
    env, model = GymnasiumEnvs("FrozenLake-v1", {"is_slippery": True}, max_episode_steps=6), {"dtype": "float64"}
    language_model = LanguageModelConfig(name=folder, **model)
    if kind == "scoring":
        policy = ScoringPolicy(language_model, PromptTemplate(response_format="direct", system=""), value_head=CRITIC)
    elif kind == "head":
        numbers = NumberFormat(kind="integers", ranges=[(-0.05, 33.25)])
        env = GymnasiumEnvs("CartPole-v1", max_episode_steps=6, numbers=numbers)
        policy = HeadPolicy(language_model, (4,), init_seed=0)
    elif kind == "adapter":
        critic = ValueHeadConfig(hidden_sizes=(8,), init_seed=0, adapter=True)
        policy = text_policy(folder, value_head=critic, lora=LoRAConfig(r=2, target_modules=["q_proj"]), **model)
    else:
        policy = text_policy(folder, value_head=CRITIC, history=2, **model)
        policy.pack_tokens = 40 if kind == "packed" else None
    policy.connect(env.codec)
    if policy.response_format is None:
        policy.connect_spaces(*env.spaces)
    module = from_settings(algorithm, policy, **settings).double()
    module.configure_model()
    policy.double()
    return module, env


def test_the_largest_layer_counts_where_layers_have_sizes_of_their_own():
    model = AutoModelForCausalLM.from_config(architecture("gemma3n_text", **GEMMA3N))
    assert model.config.intermediate_size == [16, 32]
    several = pass_memory.pass_memory(model, 8, True, True, False)
    model.config.intermediate_size = 32
    assert several == pass_memory.pass_memory(model, 8, True, True, False)


def rollout_of(module, env, groups=5):
    envs = env.make(groups, module.policy.response_format)
    plan = CollectionPlan(seed=0, collection=0, num_groups=groups, group_size=1)
    rollout = EpisodeCollector(module.policy, envs).collect(plan)
    envs.close()
    return rollout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_in_passes_is_that_of_one_pass(folder, monkeypatch, kind):
    module, env = module_of(kind, folder, kl={"coef": 0.1, "target": None}, ent_coef=0.01)
    rollout, found = rollout_of(module, env), []
    for limit in (None, LIMITS.get(kind, SMALL)):
        if limit:
            monkeypatch.setattr(pass_memory, "_LIMIT", limit)
            widest = watch(module.policy)
        batch = module.prepare(rollout)
        loss = module.step(batch)
        loss.backward(torch.tensor(0.5, dtype=loss.dtype))
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        gradient = torch.cat([weight.grad.flatten() for weight in trained if weight.grad is not None])
        found.append([loss.detach(), gradient, batch.ref_logprobs, batch.old_values, *module.flush().values()])
        module.zero_grad()
    assert len(module.policy.passes(batch)) > 1
    assert len(module.policy.passes(batch, gradient=True)) > len(module.policy.passes(batch))
    assert 3 * max(widest) < sum(widest)
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-7)  # norms compute in float32


def watch(policy):
    """The positions of each forward pass from now on."""
    positions = []

    def note(model, args, kwargs):
        positions.append((args[0] if args else kwargs["input_ids"]).numel())

    policy.language_model.model.register_forward_pre_hook(note, with_kwargs=True)
    return positions


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_the_fit_of_the_critic_is_the_same_in_passes(folder, monkeypatch, kind):
    fits = []
    for limit in (2**30, LIMITS.get(kind, SMALL)):
        monkeypatch.setattr(pass_memory, "_LIMIT", limit)
        module, env = module_of(kind, folder, kl={"coef": 0.0})
        batch = module.prepare(rollout_of(module, env))
        widest = watch(module.policy)
        fits.append(fit_values(module, batch, ValueFit(iterations=3)))
    assert len(widest) > 1
    torch.testing.assert_close(*fits)


@pytest.mark.slow
def test_a_trust_region_step_without_chunk_size_is_the_same_in_passes(folder, monkeypatch):
    weights = []
    for limit in (2**30, SMALL):
        monkeypatch.setattr(pass_memory, "_LIMIT", limit)
        module, env = module_of("text", folder, TRPOModule, natural_gradient={"cg_iterations": 1})
        batch = module.prepare(rollout_of(module, env, groups=3))
        module._improve(batch)
        weights.append(torch.cat([weight.detach().flatten() for weight in module.actor_parameters()]))
    assert len(module._chunks(batch)) > 1
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-9)


def test_values_of_many_prompts_are_computed_in_passes(folder, monkeypatch):
    module, _ = module_of("text", folder, kl={"coef": 0.0})
    prompts = [[4, 5 + n % 3, 6, *range(7, 7 + n % 5)] for n in range(60)]
    one = module.policy.trunk.values(prompts)
    monkeypatch.setattr(pass_memory, "_LIMIT", 20_000)
    widest = watch(module.policy)
    torch.testing.assert_close(module.policy.trunk.values(prompts), one)
    assert len(widest) > 1


@pytest.mark.slow
def test_a_run_trains_in_passes_as_in_one(folder, tmp_path, monkeypatch):
    rows = []
    for limit in (2**30, SMALL):
        monkeypatch.setattr(pass_memory, "_LIMIT", limit)
        trainer = make_trainer(tmp_path / str(limit), max_epochs=2, gradient_clip_val=0.5)
        trainer.fit(ppo(folder), datamodule=rollout_data("continuing", num_envs=24, num_epochs=1, num_minibatches=1))
        rows.append([row for _, row in trainer.logger.rows if "train/loss" in row])
    assert len(rows[0]) == 2
    for one, several in zip(*rows, strict=True):
        assert several == pytest.approx(one, rel=1e-3, abs=1e-5)


def turns_of(count, vocabulary=3):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 9, (count,), generator=generator)
    sizes = torch.randint(1, 5, (count,), generator=generator)
    ids = torch.randint(1, vocabulary, (count, 8), generator=generator)
    response = torch.randint(1, vocabulary, (count, 4), generator=generator)
    mask = torch.arange(8) < lengths[:, None]
    return {"prompt_ids": ids * mask, "prompt_mask": mask, "response_ids": response}, sizes


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 50, 200])
def test_every_turn_is_in_one_pass_and_no_pass_is_too_large(shared, count):
    inputs, sizes = turns_of(count)
    memory = PassMemory(limit=600, per_token=10, per_logit_column=1)
    passes = divide_turns(inputs, sizes, memory, shared)
    assert sorted(torch.cat(passes).tolist()) == list(range(count))
    assert (len(passes) > 1) == (count >= 50)
    for turns in passes if count else ():
        texts = [
            [*prompt[:length], *response[: size - 1]]
            for prompt, length, response, size in zip(
                inputs["prompt_ids"][turns].tolist(),
                inputs["prompt_mask"][turns].sum(1).tolist(),
                inputs["response_ids"][turns].tolist(),
                sizes[turns].tolist(),
            )
        ]
        beginnings = {tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)}
        tokens = len(beginnings) if shared else max(map(len, texts)) * len(texts)
        assert memory.of(tokens, int(sizes[turns].sum()) + len(turns)) <= 600


def test_turns_that_fit_into_one_pass_keep_their_order():
    inputs, sizes = turns_of(200, vocabulary=2)  # eight distinct prompts
    memory = PassMemory(limit=30_000, per_token=10, per_logit_column=1)
    assert [len(turns) for turns in divide_turns(inputs, sizes, memory, True)] == [200]
    assert torch.equal(divide_turns(inputs, sizes, memory, True)[0], torch.arange(200))
    memory = memory._replace(limit=4_000)
    assert len(divide_turns(inputs, sizes, memory, True)) < len(divide_turns(inputs, sizes, memory, False))

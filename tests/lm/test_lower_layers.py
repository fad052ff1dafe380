"""States below the lowest adapter are computed once, and no bit of a gradient depends on it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_architectures import load
from tiny_runs import WORDS, grpo, make_trainer, rollout_data, save_tiny_model

from lrl.functional.distributions import Categorical
from lrl.functional.random import seeded
from lrl.lm.config import LoRAConfig
from lrl.training.checkpoint import CollectionCheckpoint

LAST = LoRAConfig(r=2, alpha=8, last_layers=2)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft under transformers 5


@pytest.fixture(scope="module")
def pairs(folder):
    """Models that keep states and that compute them again, by dtype and options."""
    made = {}

    def pair(dtype="float32", **options):
        options = {"lora": LAST} | options
        key = dtype, str(options)
        if key not in made:
            made[key] = [disturbed(load(folder, dtype=dtype, state_cache_mb=mb, **options)) for mb in (64, 0)]
        return made[key]

    return pair


def disturbed(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return model


def turns(sizes, seed=0, padding=0):
    """Turns of one of three prompts each, given as pairs of the prompt's number and the length of the response."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 4, 6])
    prompts = torch.randint(4, len(WORDS), (3, 9 + padding), generator=generator)
    responses = torch.randint(4, len(WORDS), (3, 8, 5 + padding), generator=generator)
    number, size = (torch.tensor(part) for part in zip(*sizes))
    prompt_mask = torch.arange(9 + padding)[None] < lengths[number][:, None]
    mask = torch.arange(5 + padding)[None] < size[:, None]
    own = responses[number, torch.arange(len(sizes)) % 8]
    inputs = {"prompt_ids": prompts[number] * prompt_mask, "prompt_mask": prompt_mask, "response_ids": own * mask}
    return inputs, mask


def part_of(batch, rows):
    inputs, mask = batch
    return {name: tensor[rows] for name, tensor in inputs.items()}, mask[rows]


def logprobs(model, batch, pack_tokens=None, logits=None):
    inputs, mask = batch
    logits = (logits or model.logits)(model.lay_out(inputs, mask, pack_tokens))
    return Categorical(logits).logprobs(inputs["response_ids"]) * mask


def gradients(model, *parts, pack_tokens=None, dropout_seed=None):
    """Gradients of a loss with a KL term to the reference, accumulated over parts."""
    model.train(dropout_seed is not None)
    model.zero_grad()
    for part in parts:
        with seeded(dropout_seed, model.device):
            own = logprobs(model, part, pack_tokens)
        reference = logprobs(model.eval(), part, logits=model.reference_logits)
        (own.sum() + (own - reference).square().sum()).backward()
        model.train(dropout_seed is not None)
    model.eval()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.requires_grad])


def assert_near(one, other):
    assert float((one - other).norm()) <= 1e-4 * float(other.norm()) > 0


SIZES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=2, max_size=8)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(SIZES, st.integers(0, 3), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([None, 24]), st.data())
def test_kept_states_change_no_bit_of_a_gradient(pairs, sizes, padding, dtype, pack_tokens, data):
    keeping, again = pairs(dtype)
    batch = turns(sizes, seed=len(sizes), padding=padding)
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(1, len(sizes) - 1))
    logprobs(keeping, part_of(turns(sizes, seed=len(sizes)), order[:cut]))  # kept from a batch of another composition
    parts = [part_of(batch, order[cut:]), part_of(batch, order[:cut])]
    for pieces in ([batch], parts):
        one, other = (gradients(model, *pieces, pack_tokens=pack_tokens) for model in (keeping, again))
        assert torch.equal(one, other) and one.any()


@pytest.mark.parametrize("pack_tokens", [None, 24])
def test_the_gradient_is_that_of_the_plain_pass(folder, pairs, pack_tokens):
    keeping, plain = pairs()[0], disturbed(load(folder, lora=LAST))
    assert plain.lower is not None
    plain.lower = None
    batch = turns([(0, 5), (1, 2), (0, 3), (2, 1), (1, 5)])
    assert_near(*(gradients(model, batch, pack_tokens=pack_tokens) for model in (keeping, plain)))
    alone = turns([(0, 1)])
    alone[1][:] = False  # a prompt alone
    inputs, mask = alone
    torch.testing.assert_close(*(model.logits(model.lay_out(inputs, mask)) for model in (keeping, plain)))


@pytest.mark.slow
def test_dropout_of_the_adapters_draws_the_same_and_that_of_the_base_switches_keeping_off(pairs, folder):
    models = pairs(lora=LoRAConfig(r=2, alpha=8, last_layers=2, dropout=0.5))
    batch = turns([(0, 5), (1, 2), (0, 3)])
    results = [gradients(model, batch, dropout_seed=3) for model in models for _ in range(2)]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert not torch.equal(results[0], gradients(models[0], batch, dropout_seed=4))
    model = load(folder, lora=LAST)
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5
    model.lower.__init__(model.model, 2, 2**20)
    inputs, mask = batch
    assert model.train().lay_out(inputs, mask).lower is None
    assert model.eval().lay_out(inputs, mask).lower is not None


def test_each_token_is_computed_once_for_policy_reference_and_critic(folder):
    model = disturbed(load(folder, lora=LAST))
    model.add_critic_adapter()
    batch = turns([(0, 5), (1, 2), (0, 3)])
    layout = model.lay_out(*batch)
    tokens = 9 + 4 + 5 + 2 + 3
    assert model.lower.computed_tokens == tokens
    calls = []
    model.model.base_model.model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    layers = model.model.base_model.model.model.layers
    layers[0].mlp.register_forward_hook(lambda *_: calls.append("below"))
    model.logits_and_states(layout)
    model.reference_logits(layout)
    gradients(model, batch)
    model.states(batch[0]["prompt_ids"], batch[0]["prompt_mask"])
    assert model.lower.computed_tokens == tokens and "below" not in calls


def test_states_of_texts_are_those_of_the_plain_pass(folder):
    keeping, plain = disturbed(load(folder, lora=LAST)), disturbed(load(folder, lora=LAST))
    plain.lower = None
    inputs, _ = turns([(0, 5), (1, 2)], padding=2)
    seen = inputs["prompt_mask"]
    one, other = (model.states(inputs["prompt_ids"], seen)[seen] for model in (keeping, plain))
    torch.testing.assert_close(one, other)


def test_memory_is_bounded_and_the_least_recently_used_go_first(folder):
    model = load(folder, lora=LAST)
    size = 16 * 4  # bytes of a token
    model.lower.max_bytes = 13 * size
    prompts = [turns([(number, 1)]) for number in range(3)]
    for inputs, mask in prompts:
        model.lay_out(inputs, mask[:, :0])
    assert model.lower._kept.bytes == (4 + 6) * size and model.lower.computed_tokens == 19
    model.lay_out(prompts[1][0], prompts[1][1][:, :0])
    assert model.lower.computed_tokens == 19
    model.lay_out(prompts[0][0], prompts[0][1][:, :0])
    assert model.lower._kept.bytes == (4 + 9) * size and model.lower.computed_tokens == 28


def test_keys_and_values_of_a_prompt_that_comes_back_are_kept_and_change_no_bit(folder):
    keeping, again = (disturbed(load(folder, lora=LAST, state_cache_mb=mb)) for mb in (64, 0))
    batches = [turns([(0, 5), (1, 2)], seed=seed) for seed in range(3)]
    batches = [(inputs | {"prompt_ids": batches[0][0]["prompt_ids"]}, mask) for inputs, mask in batches]
    counts = []
    for inputs, mask in batches:
        one, other = (model.lay_out(inputs, mask).lower.states for model in (keeping, again))
        assert torch.equal(one, other)
        counts.append(keeping.lower.computed_tokens)
    prompts, responses = 9 + 4, 5 + 2
    assert counts == [prompts + responses, 2 * (prompts + responses), 2 * (prompts + responses) + responses]
    assert len(keeping.lower._prompts) == 2 and len(again.lower._prompts) == 0
    with torch.no_grad():
        keeping.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").weight.mul_(2)
    keeping.lay_out(*batches[0])
    assert len(keeping.lower._prompts) == 0


def test_null_computes_all_turns_together(folder):
    model = load(folder, lora=LAST, state_cache_mb=None)
    assert model.lower is None
    with pytest.raises(ValueError, match="state_cache_mb is -1; it must be 0 or positive, or null"):
        load(folder, state_cache_mb=-1)


def test_states_are_forgotten_when_a_weight_below_changes(folder):
    model = load(folder, lora=LAST)
    inputs, mask = turns([(0, 5)])
    before, tokens = model.lay_out(inputs, mask).lower.states, model.lower.computed_tokens
    with torch.no_grad():
        model.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").weight.mul_(2)
        disturbed(model)
    after = model.lay_out(inputs, mask).lower.states
    assert model.lower.computed_tokens == 2 * tokens and not torch.equal(before, after)
    disturbed(model)
    model.lay_out(inputs, mask)
    assert model.lower.computed_tokens == 2 * tokens


def test_models_whose_layers_cannot_be_kept_say_so(tmp_path, caplog):
    folder = save_tiny_model(tmp_path / "m", "mistral", num_hidden_layers=4, sliding_window=4)
    assert load(folder, lora=LAST).lower is None
    assert "not every layer of this model attends to all earlier tokens" in caplog.text
    folder = save_tiny_model(tmp_path / "l", "llama", num_hidden_layers=4)
    lora = LoRAConfig(r=2, last_layers=1, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    assert load(folder, lora=lora).lower is None
    assert "what the first layer reads is trained as well" in caplog.text
    assert load(folder, lora=LoRAConfig(r=2, last_layers=4)).lower is None and len(caplog.records) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma"])
def test_other_architectures_keep_states_as_well(tmp_path, kind):
    changes = {"n_layer": 4} if kind == "gpt2" else {"num_hidden_layers": 4}
    folder = save_tiny_model(tmp_path / kind, kind, **changes)
    keeping, plain = (disturbed(load(folder, lora=LAST)) for _ in range(2))
    assert keeping.lower.depth == 2
    plain.lower = None
    batch = turns([(0, 5), (1, 2), (0, 3)])
    assert_near(*(gradients(model, batch) for model in (keeping, plain)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")  # a run is resumed without it
@pytest.mark.parametrize(("steps", "history"), [(1, 0), (2, 0), (1, 3)])
def test_whole_runs_and_resumed_ones_end_with_the_same_weights(folder, tmp_path, steps, history):
    """A run is resumed after a collection, and within one."""

    def run(name, epochs, mb=64, ckpt=None):
        module = grpo(
            folder, model={"lora": LAST, "state_cache_mb": mb}, optimizer={"schedule": "constant"}, kl={"coef": 0.1}
        )
        module.policy.prompt = replace(module.policy.prompt, history=history)
        options = {"max_epochs": epochs, "accumulate_grad_batches": steps}
        saved = [ModelCheckpoint(dirpath=tmp_path / "steps", every_n_train_steps=1, save_top_k=-1)]
        trainer = make_trainer(tmp_path / name, CollectionCheckpoint(1), *(saved if name == "whole" else []), **options)
        given = {} if ckpt is None else {"ckpt_path": ckpt, "weights_only": True}
        trainer.fit(module, datamodule=rollout_data("episodes" if history else "prompts"), **given)
        lower = module.policy.language_model.lower
        return torch.cat([w.flatten() for w in module.parameters() if w.requires_grad]), lower.computed_tokens

    (whole, few), (again, many) = run("whole", 2), run("again", 2, mb=0)
    torch.testing.assert_close(whole, again, atol=2e-4, rtol=0)  # states have other rounding errors, which Adam scales
    assert few < many
    run("half", 1)
    within = tmp_path / "steps/epoch=0-step=1.ckpt"
    state = torch.load(within, weights_only=True)
    assert next(iter(state["lrl"]["recorded_states"][0])) and state["RolloutDataModule"]["trained_minibatches"] > 0
    for place, ckpt in enumerate((next((tmp_path / "half").rglob("last.ckpt")), within)):
        assert torch.equal(whole, run(f"rest{place}", 2, ckpt=str(ckpt))[0])

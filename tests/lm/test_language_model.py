"""Any causal LM: adapters, four bits, random weights, references, and one sentence for what cannot be loaded."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from tiny_architectures import LORA, folder_of, load, logprobs, plain_logprobs, trainable, turns
from tiny_runs import save_tiny_model
from transformers import AutoModelForCausalLM

from lrl.functional.random import seeded
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.decoding import DecodeLoop
from lrl.lm.loading import load_base
from lrl.lm.model import LanguageModel
from lrl.types import SamplingConfig


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a function that creates the folder of an architecture at its first use."""
    root = tmp_path_factory.mktemp("architectures")
    return lambda name: folder_of(root, name)


def disturb(model, size=0.3):
    """Change the trainable weights, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(size * torch.randn_like(weight))


def test_a_base_model_without_a_template_uses_plain_and_says_so(tmp_path, caplog):
    folder = Path(save_tiny_model(tmp_path / "gpt2", "gpt2"))
    (folder / "chat_template.jinja").unlink()
    messages = [{"role": "user", "content": "row 1"}]
    plain = load(str(folder), chat_template="plain").tokenizer.encode_chat(messages)
    assert not caplog.records
    assert load(str(folder)).tokenizer.encode_chat(messages) == plain
    assert "this tokenizer has no chat template" in caplog.text


def test_activations_that_are_computed_again_change_no_gradient_and_need_no_dropout(folders):
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = load(folders("llama"), gradient_checkpointing=checkpointing)
        layer = model.model.model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(checkpointing))  # noqa: B023
        loss = logprobs(model).sum()
        assert not any(part.training for part in model.modules())
        gradients.append(torch.autograd.grad(loss, list(trainable(model).values())))
    assert calls.count(True) == 2 * calls.count(False)
    torch.testing.assert_close(*gradients)


def test_dropout_is_the_same_when_activations_are_computed_again(folders):
    gradients = []
    for checkpointing in (False, True):
        lora = LoRAConfig(r=2, alpha=4, dropout=0.5)
        model = load(folders("tied"), gradient_checkpointing=checkpointing, lora=lora).train()
        disturb(model)
        with seeded(3, torch.device("cpu")):
            loss = logprobs(model).sum()
        gradients.append(torch.autograd.grad(loss, list(trainable(model).values())))
    torch.testing.assert_close(*gradients)


def test_a_model_whose_activations_cannot_be_computed_again_raises(folders, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="gradient_checkpointing is true, which a LlamaForCausalLM does not support"):
        load(folders("llama"), gradient_checkpointing=True)
    assert load(folders("llama"))


def test_a_model_is_handed_over_in_the_mode_of_its_owner(folders):
    model = LanguageModel(LanguageModelConfig(name=folders("llama")))
    model.configure()
    assert all(part.training for part in model.modules())


# -- random weights ---------------------------------------------------------------------------------------------------


def test_random_weights_are_named_by_their_seed(folders):
    state, first = torch.get_rng_state(), load(folders("llama"), random_init=True, init_seed=3)
    assert torch.equal(state, torch.get_rng_state())
    again, other = (load(folders("llama"), random_init=True, init_seed=seed) for seed in (3, 4))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_random_weights_are_drawn_on_the_cpu_whatever_the_default_device(folders, monkeypatch):
    """Lightning configures models with the GPU as the default device, whose generator draws other numbers."""
    create, devices = AutoModelForCausalLM.from_config, []

    def recorded(*args, **options):
        devices.append(torch.get_default_device())
        return create(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", recorded)
    with torch.device("meta"):  # stands for a GPU
        model = load_base(LanguageModelConfig(name=str(folders("llama")), random_init=True))
    assert devices == [torch.device("cpu")]
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


# -- fewer layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "layers"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_the_first_layers_alone_compute_the_states_after_them(folders, tmp_path, architecture, layers):
    whole, cut = load(folders(architecture)), load(folders(architecture), first_layers=1)
    assert len(cut.model.get_submodule(layers)) == 1
    ids = torch.arange(1, 9)[None]
    wanted = whole.model(input_ids=ids, output_hidden_states=True).hidden_states[1]
    found = []
    handle = cut.model.get_submodule(layers)[0].register_forward_hook(lambda _, args, out: found.append(out))
    cut.model(input_ids=ids)
    handle.remove()
    torch.testing.assert_close(found[0][0] if isinstance(found[0], tuple) else found[0], wanted)
    cut.model.save_pretrained(tmp_path / "cut")
    cut.tokenizer.tokenizer.save_pretrained(tmp_path / "cut")
    again = load(str(tmp_path / "cut"))
    assert torch.equal(again.model(input_ids=ids).logits, cut.model(input_ids=ids).logits)


def test_more_layers_than_there_are_is_an_error(folders):
    with pytest.raises(ValueError, match=r"language_model.first_layers is 9; .* has 2 layers."):
        load(folders("llama"), first_layers=9)
    with pytest.raises(ValueError, match=r"first_layers is 0; it must be at least 1, or null."):
        LanguageModelConfig(first_layers=0)


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "tied"])
def test_every_adapter_gets_a_gradient_and_nothing_else_does(folders, name):
    model = load(folders(name), lora=LORA)
    assert trainable(model) and all("lora_" in weight for weight in trainable(model))
    disturb(model)
    logprobs(model).sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in trainable(model).values())
    assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        LoRAConfig(r=2, target_modules="q_proj"),
        LoRAConfig(r=2, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    ],
)
@torch.no_grad()
def test_the_reference_of_an_adapter_that_started_at_zero_is_the_base(folders, lora):
    base, model = load(folders("llama")), load(folders("llama"), lora=lora)
    model.build_reference(warm_started=False)
    assert torch.equal(logprobs(model), logprobs(base))
    disturb(model)
    assert not torch.allclose(logprobs(model), logprobs(base), atol=1e-3)
    torch.testing.assert_close(logprobs(model, logits=model.reference_logits), logprobs(base), atol=1e-6, rtol=0)
    assert model.fingerprint == base.fingerprint


def test_a_warm_started_adapter_is_kept_as_a_second_frozen_one(folders):
    model = load(folders("llama"), lora=LORA)
    disturb(model)
    started, names = logprobs(model).detach(), sorted(trainable(model))
    model.build_reference(warm_started=True)
    disturb(model)
    before = logprobs(model).detach()
    assert torch.equal(logprobs(model, logits=model.reference_logits), started)
    assert torch.equal(logprobs(model), before) and not torch.allclose(before, started, atol=1e-3)
    assert sorted(trainable(model)) == names
    logprobs(model).sum().backward()
    assert not any(weight.grad is not None for name, weight in model.named_parameters() if ".reference." in name)


def test_without_adapters_the_reference_is_a_frozen_copy(folders):
    model = load(folders("llama"))
    model.build_reference(warm_started=True)
    started = logprobs(model).detach()
    disturb(model)
    assert torch.equal(logprobs(model, logits=model.reference_logits), started)
    assert len(list(model.parameters())) == len(list(model.model.parameters()))


@pytest.mark.parametrize(
    "changes", [{}, *({"target_modules": ["q_proj"], "modules_to_save": [end]} for end in ("embed_tokens", "lm_head"))]
)
@torch.no_grad()
def test_logits_do_not_change_when_adapters_are_merged_into_tied_embeddings(folders, changes):
    model = load(folders("tied"), lora=LoRAConfig(r=2, **changes))
    disturb(model, 0.1)
    merged = model.model.merge_and_unload()
    said = logprobs(model)
    torch.testing.assert_close(plain_logprobs(merged), said, atol=1e-5, rtol=0)
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_an_adapter_on_tied_weights_raises_because_it_would_be_merged_twice(folders, name):
    with pytest.raises(ValueError, match=f"lora.target_modules names .'{name}'.*modules_to_save"):
        load(folders("tied"), lora=LoRAConfig(r=2, target_modules=["q_proj", name]))
    assert trainable(load(folders("llama"), lora=LoRAConfig(r=2, target_modules=[name])))


@pytest.mark.parametrize(
    ("lora", "complaint"),
    [
        ({"target_modules": ["q_prj"]}, r"lora.target_modules names 'q_prj'.*down_proj, gate_proj.*v_proj"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["head"]}, r"lora.modules_to_save names 'head'.*lm_head"),
        ({"target_modules": []}, r"lora.target_modules is \[\]"),
        ({"r": 0}, "lora.r is 0"),
        ({"dropout": 1.0}, "lora.dropout is 1.0"),
    ],
)
def test_impossible_adapters_raise_with_their_name(folders, lora, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(folders("llama"), lora=LoRAConfig(**lora))


# -- four bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["wide", "wide_tied"])
def test_four_bit_weights_are_near_the_whole_ones_and_train_through_adapters(folders, name, dtype):
    whole, model = load(folders(name)), load(folders(name), quantization="nf4", lora=LORA, dtype=dtype)
    kinds = {type(part).__name__ for part in model.modules()}
    assert "Params4bit" in {type(weight).__name__ for weight in model.parameters()} and "Linear4bit" in kinds
    with torch.no_grad():
        near, exact = logprobs(model).float(), logprobs(whole)
    assert 1e-4 < (near - exact).abs().mean() < 0.3
    disturb(model)
    logprobs(model).sum().backward()
    assert all(weight.grad.any() for weight in trainable(model).values())
    inputs, _ = turns()
    prompts = [ids[seen].tolist() for ids, seen in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
    with torch.no_grad():
        assert (
            DecodeLoop(model, None)
            .generate(prompts, torch.randint(9, (6, 4)), SamplingConfig(max_new_tokens=4))
            .mask[:, 0]
            .all()
        )


def test_four_bits_without_bitsandbytes_are_one_sentence(folders, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *args: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ValueError, match=r"quantization nf4 needs the package bitsandbytes, which .*\[qlora\]'\.$"):
        load(folders("wide"), quantization="nf4", lora=LORA)


@pytest.mark.parametrize("changes", [{}, {"lora": LORA, "random_init": True}])
def test_four_bits_without_adapters_or_of_random_weights_raise(changes):
    with pytest.raises(ValueError, match="quantization is nf4"):
        LanguageModelConfig(quantization="nf4", **changes)


# -- what cannot be loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no/such-model", "no-such-folder", "./no-such-folder", "a/b/c"])
@pytest.mark.parametrize("random_init", [False, True])
def test_an_unknown_model_raises_one_sentence_soon(monkeypatch, name, random_init):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{filename}"
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"^language_model.name is '{name}', which is not a local folder.*\.$"):
        load(name, random_init=random_init)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("name", "attention", "others"),
    [
        ("llama", "sdp", "auto, sdpa or eager"),
        ("llama", "flash_attention_2", "auto, sdpa or eager"),
        ("gemma2", "sdpa", "auto or eager"),
    ],
)
def test_unsupported_attention_raises_with_its_name(folders, name, attention, others):
    with pytest.raises(ValueError, match=rf"language_model.attention is '{attention}'.*it must be {others}\.$"):
        load(folders(name), attention=attention)


def test_a_folder_without_weights_is_one_sentence(folders, tmp_path):
    folder = Path(save_tiny_model(tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="which transformers cannot read as a causal LM"):
        load(str(folder))


def test_unknown_types_raise_with_their_name():
    with pytest.raises(ValueError, match="dtype is 'float8'.*bfloat16"):
        LanguageModelConfig(dtype="float8")
    with pytest.raises(ValueError, match="quantization is 'int8'"):
        LanguageModelConfig(quantization="int8", lora=LORA)

"""Any causal LM: adapters, four bits, random weights, references, and one sentence for what cannot be loaded."""

import time
from pathlib import Path

import pytest
import torch
from tiny_runs import WORDS, save_tiny_model

from lrl.functional.masking import selected_logprobs
from lrl.policies.language_model import LanguageModel, LanguageModelConfig, LoRAConfig
from lrl.types import SamplingConfig

WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.05}
WINDOW = {"sliding_window": 4, "num_hidden_layers": 2}
LOCAL = {"num_layers": 2, "num_heads": 2}
LINEAR = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
LINEAR |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
ALIBI = {"num_kv_heads": 2, "alibi": True, "new_decoder_architecture": False}
OTHERS = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 2}),
    "falcon": ("falcon", ALIBI),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "jamba": ("jamba", {"attn_layer_period": 2, "num_experts": 2, "mamba_d_state": 4, "attn_layer_offset": 1}),
    "qwen3_next": (
        "qwen3_next",
        LINEAR
        | EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 8},
    ),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4}),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 16}),
}
"""Models whose state or positions cannot be padded."""
FOLDERS = OTHERS | {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "short": ("gpt2", {"n_positions": 12}),
    "mistral": ("mistral", WINDOW),
    "gemma2": ("gemma2", WINDOW),
    "gemma3": ("gemma3_text", WINDOW),
    "qwen3": ("qwen3", {}),
    "gpt_neo": ("gpt_neo", LOCAL | {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "wide": ("llama", WIDE),
    "wide_tied": ("llama", WIDE | {"tie_word_embeddings": True}),
}
LORA = LoRAConfig(r=2, alpha=4)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """One folder for each architecture, made when it is asked for."""
    root = tmp_path_factory.mktemp("architectures")

    def folder(name):
        if not (root / name).exists():
            kind, changes = FOLDERS[name]
            save_tiny_model(root / name, kind, **changes)
        return str(root / name)

    return folder


def load(name, **settings):
    model = LanguageModel(LanguageModelConfig(name=name, **settings))
    model.configure()
    return model.eval()


def turns(rows=6, prompt=9, response=5, seed=0):
    """Right-padded turns over two prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompt_of, sizes = torch.arange(rows) % 2, torch.arange(rows) % response + 1
    prompts = torch.randint(4, len(WORDS), (2, prompt), generator=generator)[prompt_of]
    prompt_mask = torch.arange(prompt)[None] < torch.tensor([prompt, prompt - 3])[prompt_of][:, None]
    mask = torch.arange(response)[None] < sizes[:, None]
    responses = torch.randint(4, len(WORDS), (rows, response), generator=generator)
    return {"prompt_ids": prompts * prompt_mask, "prompt_mask": prompt_mask, "response_ids": responses * mask}, mask


def logprobs(model, logits=None):
    inputs, mask = turns()
    chosen = (logits or model.logits)(model.lay_out(inputs, mask))
    return selected_logprobs(chosen, inputs["response_ids"]) * mask


def plain_logprobs(hugging_face):
    """Each turn alone, without padding, mask or positions."""
    inputs, mask = turns()
    rows = []
    for prompt, seen, response, counts in zip(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], mask
    ):
        prompt, response = prompt[seen], response[counts]
        logits = hugging_face(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.nn.functional.pad(selected_logprobs(logits, response), (0, mask.shape[1] - len(response))))
    return torch.stack(rows)


def disturb(model, size=0.3):
    """Train for a while, as far as anybody can tell."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(size * torch.randn_like(weight))


def trainable(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


# -- every architecture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shares", "settings"),
    [
        ("llama", True, {}),
        ("tied", True, {}),
        ("gpt2", True, {}),
        ("qwen3", True, {}),
        ("gpt2", True, {"lora": LORA}),
        ("mistral", False, {}),
        ("gemma3", False, {}),
        ("gemma2", False, {}),
        ("gpt_neo", False, {}),
        *((name, False, {}) for name in OTHERS),
    ],
)
@torch.no_grad()
def test_logprobs_are_those_of_the_plain_model_and_prompts_are_shared_where_that_is_exact(
    folders, name, shares, settings
):
    model = load(folders(name), **settings)
    assert model.share == shares
    torch.testing.assert_close(logprobs(model), plain_logprobs(model.model), atol=1e-5, rtol=0)
    sampled, recorded = sampled_logprobs(model)
    torch.testing.assert_close(recorded, sampled, atol=1e-5, rtol=0)


@torch.no_grad()
def sampled_logprobs(model):
    """Log-probabilities of a few sampled answers: each turn alone in the plain model, and as recorded."""
    inputs, _ = turns()
    prompts = [ids[seen].tolist() for ids, seen in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
    uniforms = torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out, alone = model.generate(prompts, uniforms, SamplingConfig(max_new_tokens=6), None), []
    for prompt, ids, mask in zip(prompts, out.ids, out.mask, strict=True):
        row = torch.tensor(prompt + ids[mask].tolist())[None]
        alone.append(selected_logprobs(model.model(row, use_cache=False).logits[0, len(prompt) - 1 : -1], ids[mask]))
    return torch.cat(alone), out.logprobs[out.mask]


def test_no_path_shares_prompts_that_are_not_to_be_shared(folders, monkeypatch):
    model = load(folders("llama"), share_prompts=False)
    assert not model.share and model.cached
    masks, forward = [], model.model.forward
    monkeypatch.setattr(
        model.model, "forward", lambda **given: masks.append(given["attention_mask"]) or forward(**given)
    )
    logprobs(model)
    sampled = model.generate([[4, 5, 6]] * 4, torch.rand(4, 3), SamplingConfig(max_new_tokens=3), None)
    assert sampled.mask.any() and {mask.ndim for mask in masks} == {2}


@torch.no_grad()
def test_a_model_that_counts_columns_instead_of_positions_neither_shares_rows_nor_pads_before_a_cache(
    folders, monkeypatch, caplog
):
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward
    monkeypatch.setattr(
        LlamaModel, "forward", lambda self, *args, position_ids=None, **rest: forward(self, *args, **rest)
    )
    model = load(folders("llama"))
    assert not model.share and not model.cached and "share_prompts is switched off" in caplog.text
    torch.testing.assert_close(logprobs(model), plain_logprobs(model.model), atol=1e-5, rtol=0)
    torch.testing.assert_close(*sampled_logprobs(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("share", [True, False])
def test_prompts_of_different_lengths_have_finite_gradients_in_eager_float64(folders, name, share):
    model = load(folders(name), dtype="float64", attention="eager", share_prompts=share)
    said = logprobs(model)
    torch.testing.assert_close(said, plain_logprobs(model.model), atol=1e-5, rtol=0)
    gradients = torch.autograd.grad(said.sum(), list(trainable(model).values()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(*sampled_logprobs(model), atol=1e-5, rtol=0)


def test_more_tokens_than_learned_positions_are_one_sentence(folders):
    model = load(folders("short"))
    sentence = "knows 12 positions, and a turn has 14 tokens.*max_prompt_tokens or max_new_tokens must be smaller"
    with pytest.raises(ValueError, match=sentence):
        logprobs(model)
    with pytest.raises(ValueError, match="13 tokens, 4 of them to be sampled"):
        model.generate([[4] * 9], torch.rand(1, 4), SamplingConfig(max_new_tokens=4), None)
    with pytest.raises(ValueError, match="knows 12 positions"):
        model.states(torch.ones(1, 13, dtype=torch.long), torch.ones(1, 13, dtype=torch.bool))
    assert model.generate([[4] * 9], torch.rand(1, 3), SamplingConfig(max_new_tokens=3), None).mask.any()
    assert load(folders("llama")).max_positions is None


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "gemma2"])
def test_greedy_answers_are_those_of_stock_generate(folders, name):
    model = load(folders(name))
    inputs, _ = turns()
    prompts = [ids[seen].tolist() for ids, seen in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
    ours = model.generate(prompts, torch.zeros(6, 8), SamplingConfig(temperature=0, max_new_tokens=8), None)
    for prompt, ids, mask in zip(prompts, ours.ids, ours.mask, strict=True):
        ids = ids[mask].tolist()
        theirs = model.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=8,
            pad_token_id=0,
        )
        assert ids == theirs[0, len(prompt) :].tolist()[: len(ids)]
        assert len(ids) == 8 or ids[-1] in model.tokenizer.stop_ids()


def test_a_base_model_without_a_template_must_be_given_one(folders, tmp_path):
    folder = Path(save_tiny_model(tmp_path / "gpt2", "gpt2"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat_template is 'auto'.*plain, chatml"):
        load(str(folder))
    assert load(str(folder), chat_template="plain").tokenizer is not None


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


def test_the_architecture_of_random_weights_can_be_changed_by_names_that_exist(folders):
    settings = {"random_init": True, "config_overrides": {"num_hidden_layers": 1}}
    assert len(load(folders("llama"), **settings).model.model.layers) == 1
    with pytest.raises(ValueError, match="'num_layer'.*num_hidden_layers"):
        load(folders("llama"), random_init=True, config_overrides={"num_layer": 1})
    with pytest.raises(ValueError, match="random_init"):
        LanguageModelConfig(config_overrides={"num_hidden_layers": 1})


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
def test_merged_into_tied_embeddings_adapters_say_what_they_said_before(folders, changes):
    model = load(folders("tied"), lora=LoRAConfig(r=2, **changes))
    disturb(model, 0.1)
    merged = model.model.merge_and_unload()
    said = logprobs(model)
    torch.testing.assert_close(plain_logprobs(merged), said, atol=1e-5, rtol=0)
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_an_adapter_on_tied_weights_is_refused_because_it_would_be_merged_twice(folders, name):
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
def test_impossible_adapters_are_refused_by_name(folders, lora, complaint):
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
        assert model.generate(prompts, torch.rand(6, 4), SamplingConfig(max_new_tokens=4), None).mask[:, 0].all()


@pytest.mark.parametrize("changes", [{}, {"lora": LORA, "random_init": True}])
def test_four_bits_without_adapters_or_of_random_weights_are_refused(changes):
    with pytest.raises(ValueError, match="quantization is nf4"):
        LanguageModelConfig(quantization="nf4", **changes)


# -- what cannot be loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no/such-model", "no-such-folder", "./no-such-folder", "a/b/c"])
@pytest.mark.parametrize("random_init", [False, True])
def test_an_unknown_model_is_one_sentence_and_soon(monkeypatch, name, random_init):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{filename}"
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"^language_model.name is '{name}'; there is no .*\.$"):
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
def test_attention_that_a_model_cannot_have_is_refused_by_name(folders, name, attention, others):
    with pytest.raises(ValueError, match=rf"language_model.attention is '{attention}'.*it must be {others}\.$"):
        load(folders(name), attention=attention)


def test_a_folder_without_weights_is_one_sentence(folders, tmp_path):
    folder = Path(save_tiny_model(tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="a folder that holds no causal LM in safetensors"):
        load(str(folder))


def test_unknown_types_are_refused_by_name():
    with pytest.raises(ValueError, match="dtype is 'float8'.*bfloat16"):
        LanguageModelConfig(dtype="float8")
    with pytest.raises(ValueError, match="quantization is 'int8'"):
        LanguageModelConfig(quantization="int8", lora=LORA)

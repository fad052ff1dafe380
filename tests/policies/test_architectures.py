"""Every architecture: log-probabilities of the plain model, and turns in one row only where that is exact."""

import pytest
import torch
from tiny_architectures import (
    LORA,
    OTHERS,
    folder_of,
    load,
    logprobs,
    plain_logprobs,
    sampled_logprobs,
    trainable,
    turns,
)

from lrl.models.decode_loop import DecodeLoop
from lrl.types import SamplingConfig


def decode(model, prompts, tokens):
    """Random responses of at most ``tokens`` tokens."""
    uniforms = torch.randint(9, (len(prompts), tokens))
    return DecodeLoop(model, None).generate(prompts, uniforms, SamplingConfig(max_new_tokens=tokens))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """One folder for each architecture, made when it is asked for."""
    root = tmp_path_factory.mktemp("architectures")
    return lambda name: folder_of(root, name)


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


@pytest.mark.slow
def test_no_path_shares_prompts_that_are_not_to_be_shared(folders, monkeypatch):
    model = load(folders("llama"), share_prompts=False)
    assert not model.share and model.cached
    masks, forward = [], model.model.forward
    monkeypatch.setattr(
        model.model, "forward", lambda **given: masks.append(given["attention_mask"]) or forward(**given)
    )
    logprobs(model)
    sampled = DecodeLoop(model, None).generate(
        [[4, 5, 6]] * 4, torch.randint(9, (4, 3)), SamplingConfig(max_new_tokens=3)
    )
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
    sentence = "has 12 positions, and a turn has 14 tokens.*max_prompt_tokens or max_new_tokens must be smaller"
    with pytest.raises(ValueError, match=sentence):
        logprobs(model)
    with pytest.raises(ValueError, match="13 tokens, 4 of them to be sampled"):
        decode(model, [[4] * 9], 4)
    with pytest.raises(ValueError, match="has 12 positions"):
        model.states(torch.ones(1, 13, dtype=torch.long), torch.ones(1, 13, dtype=torch.bool))
    assert (
        DecodeLoop(model, None)
        .generate([[4] * 9], torch.randint(9, (1, 3)), SamplingConfig(max_new_tokens=3))
        .mask.any()
    )
    assert load(folders("llama")).max_positions is None


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "gemma2"])
def test_greedy_answers_are_those_of_stock_generate(folders, name):
    model = load(folders(name))
    inputs, _ = turns()
    prompts = [ids[seen].tolist() for ids, seen in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
    ours = DecodeLoop(model, None).generate(
        prompts, torch.zeros(6, 8, dtype=torch.long), SamplingConfig(temperature=0, max_new_tokens=8)
    )
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

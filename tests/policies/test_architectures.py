"""Tests of every architecture: log-probabilities equal those of the plain model on every path."""

import pytest
import torch
from tiny_architectures import (
    FOLDERS,
    LORA,
    MEMORY,
    OTHERS,
    PATHS,
    SEEN,
    acted,
    differences,
    folder_of,
    load,
    logprobs,
    plain_logprobs,
    policy_of,
    sampled_logprobs,
    trainable,
    turns,
)
from tiny_runs import batch_of, sampled_values

from lrl.lm.config import LoRAConfig
from lrl.lm.decoding import DecodeLoop
from lrl.lm.layouts import Candidates
from lrl.types import SamplingConfig


def decode(model, prompts, tokens):
    """Return random responses of at most ``tokens`` tokens."""
    uniforms = torch.randint(9, (len(prompts), tokens))
    return DecodeLoop(model, None).generate(prompts, uniforms, SamplingConfig(max_new_tokens=tokens))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a function that returns the folder of an architecture, which it creates at the first call."""
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
def test_logprobs_equal_those_of_the_plain_model_and_prompts_are_shared_only_if_that_is_exact(
    folders, name, shares, settings
):
    model = load(folders(name), **settings)
    assert model.share == shares
    torch.testing.assert_close(logprobs(model), plain_logprobs(model.model), atol=1e-5, rtol=0)
    sampled, recorded = sampled_logprobs(model)
    torch.testing.assert_close(recorded, sampled, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_no_path_shares_prompts_if_sharing_is_off(folders, monkeypatch):
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


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("short", "has 12 positions"),
        ("longrope", "embeds all positions differently in texts of more than 12 tokens"),
        ("dynamic", "embeds all positions differently in texts of more than 12 tokens"),
    ],
)
def test_more_tokens_than_positions_raise_one_sentence(folders, name, has):
    model = load(folders(name))
    with pytest.raises(ValueError, match=f"{has}.* a turn has 14 tokens; max_prompt_tokens or max_new_tokens must be"):
        logprobs(model)
    with pytest.raises(ValueError, match="13 tokens, 4 of them to be sampled"):
        decode(model, [[4] * 9], 4)
    candidates = Candidates.of([[4, 5, 6], [7]], model.device)
    inputs = {"prompt_ids": torch.full((1, 12), 4), "prompt_mask": torch.ones(1, 12, dtype=torch.bool)}
    inputs["response_ids"] = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=has):
        model.lay_out(inputs, torch.zeros(1, 1, dtype=torch.bool), candidates=candidates)
    with pytest.raises(ValueError, match=has):
        model.states(torch.ones(1, 13, dtype=torch.long), torch.ones(1, 13, dtype=torch.bool))
    assert (
        DecodeLoop(model, None)
        .generate([[4] * 9], torch.randint(9, (1, 3)), SamplingConfig(max_new_tokens=3))
        .mask.any()
    )
    assert load(folders("llama")).max_positions is None


@pytest.mark.parametrize(("name", "limit"), [("longrope", 12), ("dynamic", 12)])
@torch.no_grad()
def test_rotary_embeddings_that_depend_on_the_length_do_not_change_up_to_the_limit(folders, name, limit):
    model = load(folders(name)).model
    text = torch.arange(limit + 4)[None] % 15 + 4
    alone = model(text[:, :5]).logits
    assert (model(text[:, :limit]).logits[:, :5] - alone).abs().max() < 1e-5
    assert (model(text[:, : limit + 1]).logits[:, :5] - alone).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "gemma2"])
def test_greedy_responses_equal_those_of_transformers_generate(folders, name):
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


def check_every_path(folder, ways, **model):
    """Compare every path of every policy with passes over one row, for prompts of different lengths.

    Args:
        folder: Folder of the model.
        ways: Number of settings per policy to test; each arranges the passes differently.
        model: Settings of the language model.
    """
    for kind, settings in ((each, options) for each in PATHS for options in PATHS[each][:ways]):
        far = differences(kind, policy_of(kind, folder, **model, **settings))
        assert max(far.values()) < 2e-5, (kind, settings, far)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "llama4", "gemma3", "gpt2"])
def test_every_path_equals_passes_over_single_rows(folders, name):
    check_every_path(folders(name), 1)


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2, alpha=4, dropout=0.5)], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", PATHS)
def test_passes_without_gradient_have_no_dropout_and_keep_the_mode_of_modules(folders, kind, lora):
    """The model is a GPT-2, whose default dropout is 0.1; one submodule is in another mode than the rest."""
    policy = policy_of(kind, folders("gpt2"), lora=lora)
    batch = batch_of(acted(kind, policy))

    def results():
        found = {"act": acted(kind, policy).logprobs, "reference": policy.reference_logprobs(batch)}
        with policy.language_model.reference() as model:
            found["model"] = model(input_ids=torch.arange(4, 9)[None]).logits
        if policy.has_critic:
            found |= {"state_values": policy.state_values(SEEN, MEMORY), "values": sampled_values(policy, batch)}
        else:
            found["statistics"] = policy.statistics_input(batch.inputs, "states")
        if kind == "text":
            found["generate"] = sampled_logprobs(policy.language_model)[1]
        return found

    wanted = (policy.eval(), results())[1]
    policy.train().language_model.model.get_input_embeddings().eval()
    modes = [part.training for part in policy.modules()]
    found = results()
    far = {path: float((got - wanted[path]).detach().abs().max()) for path, got in found.items()}
    assert max(far.values()) < 1e-6, far
    assert not any(got.requires_grad for got in found.values())
    assert [part.training for part in policy.modules()] == modes and len(set(modes)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16-true", "16-true"])
@pytest.mark.parametrize("kind", PATHS)
@torch.no_grad()
def test_a_copied_reference_is_converted_with_the_policy(folders, kind, dtype):
    policy = policy_of(kind, folders("mixtral")).to(dtype)  # as the trainer does after the reference was built
    batch = batch_of(acted(kind, policy))
    far = (policy.reference_logprobs(batch) - policy.evaluate(batch).logprobs) * batch.response_mask
    assert far.abs().max() == 0, f"{float(far.abs().max()):.1e} nats"
    copied = [*policy.language_model.copied_reference, *policy.copied_reference]
    assert {weight.dtype for part in copied for weight in part.parameters()} == {dtype}


ADAPTED = ("llama", "gpt2", "bloom", "gemma3", "lfm2", "qwen3_moe")
EVERY = [(name, None) for name in FOLDERS if name not in ("short", "longrope", "dynamic", "tied", "wide_tied")]


@pytest.mark.reference
@pytest.mark.parametrize(("name", "lora"), EVERY + [(name, LORA) for name in ADAPTED])
def test_every_path_of_every_architecture_equals_passes_over_single_rows(folders, name, lora):
    check_every_path(folders(name), None, lora=lora)

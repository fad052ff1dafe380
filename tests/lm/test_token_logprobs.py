"""Logits in chunks: the same log-probabilities, entropies and gradients, and a fraction of the memory."""

import numpy as np
import pytest
import torch
from benchmarks.timing import PeakBytes
from tiny_architectures import LORA, load, turns
from tiny_runs import batch_of, save_tiny_model, text_policy

from lrl.algorithms.sft import SFTModule
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.functional.distributions import Categorical
from lrl.lm import logprobs as chunks
from lrl.lm.heads import ValueHeadConfig
from lrl.lm.logprobs import can_chunk, sampling_logprobs, token_logprobs
from lrl.types import RandomKeys, SamplingConfig, TurnBatch


def loss_of(logprobs, entropy):
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + 0.3 * entropy.square().sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_values_nor_gradients(dtype, temperature):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 300).to(dtype)
    states, ids = torch.randn(90, 8).to(dtype).requires_grad_(), torch.randint(300, (90,))
    whole = Categorical(head(states)[None], temperature)
    want = whole.logprobs(ids[None])[0], whole.entropy()[0]
    got = token_logprobs(head, states, ids, temperature, 300)
    limit = {"atol": 1e-12 if dtype == torch.float64 else 1e-5, "rtol": 0}
    torch.testing.assert_close(got, want, **limit)
    gradients = [torch.autograd.grad(loss_of(*given), [states, *head.parameters()]) for given in (want, got)]
    for one, other in zip(*gradients, strict=True):
        near = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert float((one - other).norm()) <= near * float(one.norm()) and one.dtype == dtype
    with torch.no_grad():
        assert torch.equal(token_logprobs(head, states, ids, temperature, 300)[0], got[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_training_computes_the_log_probabilities_that_tokens_were_sampled_with(dtype):
    torch.manual_seed(0)
    states, head, ids = torch.randn(50, 8).to(dtype) * 5, torch.nn.Linear(8, 300).to(dtype), torch.randint(300, (50,))
    sampled = sampling_logprobs(head(states), SamplingConfig(temperature=0.7)).gather(-1, ids[:, None])[:, 0]
    assert torch.equal(Categorical(head(states)[None], 0.7).logprobs(ids[None])[0], sampled)
    torch.testing.assert_close(token_logprobs(head, states, ids, 0.7, 300)[0], sampled, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "tokens"), [(49152, 684), (256000, 132)])
def test_the_loss_needs_at_most_a_quarter_of_the_memory_of_all_logits(vocabulary, tokens):
    assert chunks.AT_ONCE < vocabulary * tokens < 1.01 * chunks.AT_ONCE  # with fewer, all logits are computed at once
    head = torch.nn.Linear(4, vocabulary, bias=False).bfloat16()
    head.weight.requires_grad_(False)
    states, ids = torch.randn(tokens, 4).bfloat16().requires_grad_(), torch.arange(tokens)
    with PeakBytes() as peak:
        loss_of(*token_logprobs(head, states, ids, 1.0, vocabulary)).backward()
    assert states.grad.any()
    assert vocabulary * 8 * 4 < peak.most <= tokens * vocabulary * 4 / 4


@pytest.mark.slow
def test_a_step_of_sft_at_a_vocabulary_of_256k_never_holds_a_quarter_of_the_logits(tmp_path):
    turns, tokens, vocabulary = 60, 4, 256_000
    policy = text_policy(save_tiny_model(tmp_path / "large", vocab_size=vocabulary), lora=LORA)
    policy.configure()
    module = SFTModule(policy)
    ids = torch.arange(turns * tokens).reshape(turns, tokens)
    batch = TurnBatch(
        inputs={
            "prompt_ids": torch.full((turns, 3), 5),
            "prompt_mask": torch.ones(turns, 3, dtype=torch.bool),
            "response_ids": ids,
        },
        response_mask=torch.ones(turns, tokens, dtype=torch.bool),
        old_logprobs=torch.zeros(turns, tokens),
        advantages=torch.full((turns, tokens), 1 / ids.numel()),
    )
    with PeakBytes() as peak:
        module.loss(batch, policy.evaluate(batch, dropout_seed=0)).loss.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in policy.parameters())
    assert 8 * vocabulary * 4 < peak.most <= ids.numel() * vocabulary * 4 / 4


def test_no_tokens_have_no_logprobs():
    head = torch.nn.Linear(8, 30)
    logprobs, entropy = token_logprobs(head, torch.randn(0, 8), torch.zeros(0, dtype=torch.long), 1.0, 30)
    assert logprobs.shape == entropy.shape == (0,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("critic", "lora"), [(None, LORA), (ValueHeadConfig(), LORA), (ValueHeadConfig(adapter=True), LORA), (None, None)]
)
def test_logprobs_of_a_policy_are_equal_in_chunks(folder, monkeypatch, critic, lora):
    policy = text_policy(folder, max_new_tokens=4, value_head=critic, lora=lora)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    policy.build_reference(warm_started=False)
    with torch.no_grad():  # so that the reference and its head differ
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.ones_like(weight).cumsum(-1).sin())
    maps = [render_map(state, ("SFFF", "FHFH", "FFFH", "HFFG")) for state in (0, 1, 4, 9, 0)]
    rows = np.arange(5)
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=rows, turn=0 * rows)
    batch, results = batch_of(policy.act(maps, [()] * 5, keys, policy.sampling)), []
    for chunked in (False, True):
        policy.language_model.chunks = chunked
        monkeypatch.setattr("lrl.lm.model.AT_ONCE", 10)
        out = policy.evaluate(batch)
        assert (out.distribution is None) == chunked
        (out.logprobs.sum() + out.entropy.sum() + (0 if critic is None else out.values.sum())).backward()
        grads = torch.cat([w.grad.flatten() for w in policy.parameters() if w.grad is not None])
        policy.zero_grad()
        results.append((out.logprobs, out.entropy, out.values, policy.reference_logprobs(batch), grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(results[0][0], results[0][3], atol=1e-2)
    policy.needs_distribution = True
    assert policy.evaluate(batch).distribution is not None


def test_only_large_vocabularies_and_plain_heads_are_computed_in_chunks(folder, tmp_path, monkeypatch):
    model = load(folder)
    assert not model.chunks and not can_chunk(model.model)
    monkeypatch.setattr(chunks, "_LARGE", 1)
    assert can_chunk(model.model)
    capped = load(save_tiny_model(tmp_path / "gemma2", "gemma2", final_logit_softcapping=0.5))
    assert capped.chunks
    layout = capped.lay_out(*turns())
    states = capped.token_states(layout)
    torch.testing.assert_close(chunks.head_logits(capped.model, states), capped.logits(layout))
    capped.model.get_output_embeddings().register_forward_hook(lambda *given: given[2] * 2)
    assert can_chunk(capped.model)
    capped.model.register_forward_hook(lambda _, given, out: out.__setitem__("logits", out.logits * 2) or out)
    assert not can_chunk(capped.model)

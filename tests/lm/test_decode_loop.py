"""Tests that decoding samples by the counters, independent of the other rows of the batch."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lrl.functional.distributions import Categorical
from lrl.functional.random import exponentials, token_bits
from lrl.lm import prefill
from lrl.lm.decoding import decode, texts_per_row
from lrl.lm.logprobs import sample_tokens, sampling_logprobs
from lrl.lm.prefill import common_prefix
from lrl.types import RandomKeys, SamplingConfig

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 5], [8, 9, 10]]
STOP = {0, 11}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    torch.manual_seed(1)
    llama = LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    gpt2 = GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    config = llama if request.param == "llama" else gpt2
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def keys(env):
    env = np.asarray(env)
    return RandomKeys(seed=3, purpose="test", collection=0, env=env, turn=np.zeros_like(env))


def decode_rows(model, rows, sampling, share=True, stop_ids=STOP):
    uniforms = token_bits(keys(rows), sampling.max_new_tokens)
    return decode(model, [PROMPTS[row] for row in rows], uniforms, sampling, stop_ids=stop_ids, share=share)


@pytest.mark.parametrize("share", [True, False])
def test_recorded_logprobs_are_the_teacher_forced_ones(model, share):
    out = decode_rows(model, [0, 1, 2, 3], SamplingConfig(max_new_tokens=12, temperature=0.7), share)
    for row, prompt in enumerate(PROMPTS):
        response = out.ids[row][out.mask[row]]
        logits = model(torch.cat([torch.tensor(prompt), response])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        torch.testing.assert_close(
            out.logprobs[row][out.mask[row]], Categorical(logits).logprobs(response), atol=1e-9, rtol=0
        )


def test_a_row_is_the_same_alone_and_in_a_batch(model):
    sampling = SamplingConfig(max_new_tokens=12)
    together = decode_rows(model, [0, 1, 2, 3], sampling)
    for row in range(4):
        alone = decode_rows(model, [row], sampling)
        size = int(alone.mask.sum())
        assert together.ids[row][together.mask[row]].tolist() == alone.ids[0][:size].tolist()
        torch.testing.assert_close(together.logprobs[row, :size], alone.logprobs[0, :size], atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("per_row", [1, 2, 4, 32])
def test_responses_do_not_depend_on_the_number_of_responses_per_row(model, monkeypatch, per_row):
    monkeypatch.setattr("lrl.lm.decoding.texts_per_row", lambda *_: per_row)
    index = [0, 1, 0, 0, 3, 0, 1, 0, 0, 1, 0, 0]
    bits, sampling = token_bits(keys(np.arange(12)), 30), SamplingConfig(max_new_tokens=30, temperature=0.9)
    together = decode(model, [PROMPTS[i] for i in index], bits, sampling, stop_ids=STOP, share=True)
    sizes = together.mask.sum(1)
    assert len(sizes.unique()) > 5
    for row, size in enumerate(sizes.tolist()):
        alone = decode(model, [PROMPTS[index[row]]], bits[row : row + 1], sampling, stop_ids=STOP)
        assert together.ids[row, :size].tolist() == alone.ids[0].tolist()
        torch.testing.assert_close(together.logprobs[row, :size], alone.logprobs[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize(("share", "most"), [(True, 8), (True, 2), (False, 8)])
def test_equal_texts_are_computed_once(model, monkeypatch, share, most):
    monkeypatch.setattr("lrl.lm.decoding.texts_per_row", lambda *_: most)
    computed = []
    handle = model.register_forward_pre_hook(
        lambda _, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    bits = token_bits(keys(np.arange(8)), 6)
    sharp, usual = (SamplingConfig(max_new_tokens=6, temperature=value) for value in (1e-6, 0.02))
    decode(model, [PROMPTS[0]] * 8, bits, sharp, stop_ids=set(), share=share)
    agreed = computed[-5:]
    out = decode(model, [PROMPTS[0]] * 8, bits, usual, stop_ids=set(), share=share)
    handle.remove()
    assert agreed == ([1] * 5 if share else [8] * 5)
    texts = [len(out.ids[:, :size].unique(dim=0)) for size in range(1, 6)]
    assert 1 < texts[0] < 8
    if not share:
        assert computed[-5:] == [8] * 5
    elif most == 8:
        assert computed[-5:] == texts
    else:  # rows have as many places as the fullest of them
        assert all(size <= count < most * size for size, count in zip(texts, computed[-5:], strict=True))
        assert most < texts[-1]


@pytest.mark.parametrize("beginning", [[], [7, 3, 1, 4, 4, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]])
def test_prompts_that_are_read_in_groups_of_their_length_are_answered_as_if_alone(model, monkeypatch, beginning):
    monkeypatch.setattr(prefill, "_PASS", {"cpu": 2})
    read = []
    whole = prefill._read
    monkeypatch.setattr(prefill, "_read", lambda model, ids, *rest: read.append(ids.shape) or whole(model, ids, *rest))
    prompts = [[*beginning, 1, *rest] for rest in ([5], [1, 2, 3, 4, 5, 6, 7, 8], [9], [4, 4], [1, 2, 3, 9, 8], [])]
    out = prefill.prefill(model, [tuple(prompt) for prompt in prompts], share=True)
    assert read == [(1, 17)] * bool(beginning) + [(3, 2), (1, 3), (1, 6), (1, 9)]
    for row, prompt in enumerate(prompts):
        alone = prefill.prefill(model, [tuple(prompt)], share=True)
        torch.testing.assert_close(out.logits[row], alone.logits[0])
        torch.testing.assert_close(out.states[row], alone.states[0])
        for layer, expected in zip(out.cache.layers, alone.cache.layers, strict=True):
            torch.testing.assert_close(layer.keys[row][:, out.mask[row]], expected.keys[0])
            torch.testing.assert_close(layer.values[row][:, out.mask[row]], expected.values[0])
    bits, sampling = token_bits(keys(np.arange(6)), 9), SamplingConfig(max_new_tokens=9)
    together = decode(model, prompts, bits, sampling, stop_ids=STOP, share=True)
    for row, prompt in enumerate(prompts):
        alone = decode(model, [prompt], bits[row : row + 1], sampling, stop_ids=STOP)
        assert together.ids[row][together.mask[row]].tolist() == alone.ids[0][alone.mask[0]].tolist()


def test_the_head_gets_contiguous_states(model):
    """For a view, PyTorch would compute the product row by row, with a copy of the weights for each row."""
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(args[0]))
    prefill.prefill(model, [(1, 2, 3), (4, 5, 6)], share=True)
    with prefill.head_inputs(model, last_only=True) as states:
        model(input_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]), use_cache=False)
    handle.remove()
    assert [tuple(one.shape[:2]) for one in seen] == [(2, 1), (2, 1)] and all(one.is_contiguous() for one in seen)
    assert torch.equal(seen[1], states[0][:, -1:])


def test_groups_of_lengths_by_hand(monkeypatch):
    monkeypatch.setattr(prefill, "_PASS", {"cpu": 100})
    cpu = torch.device("cpu")
    assert prefill.length_groups([90, 20, 200, 30], cpu) == [[1, 3], [0], [2]]  # padding of 130 and of 110
    assert prefill.length_groups([70, 20, 100, 30], cpu) == [[0, 1, 3], [2]]  # of 90, then of 180
    assert prefill.length_groups([60, 20], cpu) == [[0, 1]]  # the padding is cheaper than another pass
    assert prefill.length_groups([1000, 10], cpu) == [[1], [0]]
    assert prefill.length_groups([60] * 50 + [120], cpu) == [[*range(50)], [50]]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_prompts_with_a_common_beginning_are_answered_as_if_alone(model, temperature):
    beginning = [7, 3, 1, 4, 4, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    prompts = [beginning + rest for rest in ([5], [1, 2, 3], [5], [4, 4], [1, 2, 3, 9, 8], [])]
    bits = token_bits(keys(np.arange(6)), 20)
    sampling = SamplingConfig(max_new_tokens=20, temperature=temperature)
    together = decode(model, prompts, bits, sampling, stop_ids=STOP, share=True)
    for row, prompt in enumerate(prompts):
        alone = decode(model, [prompt], bits[row : row + 1], sampling, stop_ids=STOP)
        size = int(together.mask[row].sum())
        assert together.ids[row, :size].tolist() == alone.ids[0].tolist()
        torch.testing.assert_close(together.logprobs[row, :size], alone.logprobs[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("prompts", "length"),
    [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2, 3], [1, 2]], 1), ([[1], [1, 2]], 0), ([[5, 6, 7], [5, 6, 7, 8]], 2)],
)
def test_the_common_prefix_leaves_every_prompt_a_token(prompts, length):
    assert common_prefix(prompts) == length


def test_samples_may_share_a_distribution():
    logprobs = torch.log_softmax(torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)), dim=-1)
    bits, row = token_bits(keys(np.arange(50)), 1)[:, 0], torch.arange(50) % 3
    assert torch.equal(sample_tokens(logprobs, bits, row), sample_tokens(logprobs[row], bits))
    assert torch.equal(sample_tokens(logprobs[:, :60], bits, row), sample_tokens(logprobs[row, :60], bits))


def test_many_answers_to_a_long_prompt_share_rows_and_single_ones_do_not():
    assert texts_per_row(torch.tensor([8] * 8), prompt=300, response=24) > 1
    assert texts_per_row(torch.tensor([1] * 64), prompt=300, response=24) == 1


def test_the_mask_ends_with_the_stop_token(model):
    out = decode_rows(model, [0, 1, 2, 3], SamplingConfig(max_new_tokens=40))
    for ids, mask in zip(out.ids, out.mask, strict=True):
        size = int(mask.sum())
        stops = [token in (0, 11) for token in ids[:size].tolist()]
        assert mask[:size].all() and not any(stops[:-1]) and (stops[-1] or size == 40)


def test_temperature_zero_is_greedy(model):
    out = decode_rows(model, [0], SamplingConfig(max_new_tokens=5, temperature=0), stop_ids={99})
    reference = model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=99
    )
    assert out.ids[0].tolist() == reference[0, 5:].tolist()
    assert (out.logprobs == 0).all()


@pytest.mark.parametrize("size", [5, 64, 150])
def test_samples_follow_the_distribution(size):
    """One block, exactly one block, and three of which the last is not full."""
    probabilities = torch.zeros(size)
    probabilities[[0, 2, 3, size - 1]] = torch.tensor([0.5, 0.25, 0.05, 0.2])
    logprobs = probabilities.log().repeat(20_000, 1)
    counts = torch.bincount(sample_tokens(logprobs, token_bits(keys(np.arange(20_000)), 1)[:, 0]), minlength=size)
    assert counts[1] == 0 and len(counts) == size
    torch.testing.assert_close(counts / 20_000, probabilities, atol=0.012, rtol=0)


def test_rounding_of_the_logits_hardly_ever_changes_a_draw():
    """An evaluation must not depend on the shape of its batches; 2,000 rare tokens stand beside three likely ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.cat([torch.tensor([8.0, 7.0, 7.5]), torch.randn(2000, generator=generator) - 6]).repeat(5_000, 1)
    moved = logits + 1e-6 * torch.randn(logits.shape, generator=generator)
    bits = token_bits(keys(np.arange(5_000)), 1)[:, 0]
    draws = [sample_tokens(sampling_logprobs(each, SamplingConfig()), bits) for each in (logits, moved)]
    assert int((draws[0] != draws[1]).sum()) <= 1


def test_top_k_and_top_p_keep_the_most_probable():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = sampling_logprobs(logits, SamplingConfig(top_k=2)).exp()
    torch.testing.assert_close(kept, torch.tensor([[4 / 7, 3 / 7, 0, 0]]))
    kept = sampling_logprobs(logits, SamplingConfig(top_p=0.65)).exp()
    torch.testing.assert_close(kept, torch.tensor([[4 / 7, 3 / 7, 0, 0]]))


def test_the_largest_uniform_number_still_leaves_the_certain_token():
    """Its exponential number must be finite, because 1 / inf equals the rate 0 of tokens that are never sampled."""
    golden, bits = 0x9E3779B97F4A7C15, (1 << 64) - 1
    seeds = []
    for token in range(3):  # SplitMix64's finaliser, undone: the seed whose number `token` is the largest
        state = bits
        undone = [pow(factor, -1, 1 << 64) for factor in (0x94D049BB133111EB, 0xBF58476D1CE4E5B9)]
        for shift, factor in zip((31, 27, 30), (*undone, 1)):
            state ^= (state >> shift) ^ (state >> 2 * shift)
            state = state * factor % (1 << 64)
        seeds.append((state - (token + 1) * golden) % (1 << 64))
    signed = torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed in seeds])
    for token, seed in enumerate(signed):
        assert exponentials(seed[None], 3)[0, token] == pytest.approx(24 * np.log(2))
        logprobs = torch.full((1, 3), -torch.inf)
        logprobs[0, token] = 0.0
        assert sample_tokens(logprobs, seed[None]).item() == token

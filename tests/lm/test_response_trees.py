"""Tests of responses as a tree: its prefixes, its mask, and results that equal separate passes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_architectures import LORA, load
from tiny_runs import WORDS, batch_of, text_policy

from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.functional.distributions import Categorical
from lrl.lm.config import LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.lm.layouts import Turns, lay_out, pack
from lrl.types import RandomKeys


def padded(rows, width):
    mask = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
    return torch.tensor([[*row, *[9] * (width - len(row))] for row in rows]), mask


def turns(prompts, responses):
    (ids, prompt_mask), (response, mask) = padded(prompts, 4), padded(responses, 5)
    return Turns(ids, prompt_mask, response, mask)


def test_a_row_holds_each_prefix_once_and_attends_to_its_own():
    layout = pack(turns([[1, 2]] * 5 + [[3]], [[5, 6, 7], [5, 6, 8], [5, 4, 7], [5, 6], [5, 4, 8], [5]]))
    assert layout.input_ids.tolist() == [[1, 2, 5, 4, 6, 3]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 3, 0]]
    assert layout.attention_mask(torch.float32)[0, 0].eq(0).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert layout.cells[layout.kept[0, :3]].tolist() == [1, 2, 4]
    assert layout.cells[layout.kept[2, :3]].tolist() == [1, 2, 3]
    assert layout.cells[layout.kept[5, :1]].tolist() == [5]


@pytest.fixture(scope="module")
def models(folder):
    last = LoRAConfig(r=2, alpha=8, last_layers=2)
    made = [load(folder, dtype="float64"), load(folder, dtype="float64", lora=last)]
    for weight in (weight for model in made for weight in model.parameters() if weight.requires_grad):
        with torch.no_grad():
            weight.add_(0.1 * torch.ones_like(weight).cumsum(-1).sin())
    return [model.eval() for model in made]


RESPONSES = st.lists(st.sampled_from([4, 5]), min_size=1, max_size=5)


PROMPTS = [[[6, 7, 8, 4], [5], [8, 8]], [[6, 7, 8, 4], [6, 7, 8], [6, 7, 4]]]


def check_against_plain_pass(models, ids, prompt_mask, response, mask):
    for model in models:
        results = []
        plain = lay_out(Turns(ids, prompt_mask, response, mask))
        inputs = {"prompt_ids": ids, "prompt_mask": prompt_mask, "response_ids": response}
        packed = model.lay_out(inputs, mask)
        assert packed.input_ids.numel() <= plain.input_ids.numel()
        for layout in (plain, packed):
            logprobs = Categorical(model.logits(layout)).logprobs(response)
            (logprobs * mask * torch.linspace(-1, 1, mask.numel()).view(mask.shape)).sum().backward()
            grads = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.requires_grad])
            model.zero_grad()
            results.append(((logprobs * mask).detach(), grads))
        for one, other in zip(*results, strict=True):  # norms and softmax are in float32
            assert float((one - other).norm()) <= 1e-5 * float(one.norm())


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1), st.lists(st.tuples(st.integers(0, 2), RESPONSES), min_size=6, max_size=12))
def test_logprobs_and_gradients_are_those_of_the_plain_pass(models, which, drawn):
    prompts = [PROMPTS[which][number] for number, _ in drawn]
    ids, prompt_mask, response, mask = turns(prompts, [tokens for _, tokens in drawn])
    check_against_plain_pass(models, ids, prompt_mask, response, mask)
    assert max(max(tokens) for _, tokens in drawn) < len(WORDS)


LAST = LoRAConfig(r=2, alpha=8, last_layers=2)
CRITIC = ValueHeadConfig(adapter=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critic", "lora"),
    [(None, LORA), (ValueHeadConfig(), LORA), (CRITIC, LORA), (ValueHeadConfig(), LAST), (CRITIC, LAST), (None, None)],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_policy_and_reference_have_equal_logprobs_packed_and_plain(folder, monkeypatch, critic, lora, chunked):
    policy = text_policy(folder, max_new_tokens=4, value_head=critic, lora=lora)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    policy.build_reference(warm_started=False)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.ones_like(weight).cumsum(-1).sin())
    maps = [render_map(state, ("SFFF", "FHFH", "FFFH", "HFFG")) for state in (0, 1, 0, 1, 0, 1, 0, 1)]
    rows = np.arange(8)
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=rows, turn=0 * rows)
    batch, results = batch_of(policy.act(maps, [()] * 8, keys, policy.sampling)), []
    ids, mask = batch.inputs["response_ids"].clone(), torch.ones_like(batch.response_mask)
    ids[:, :2] = torch.tensor([5, 6])  # then they differ, but for the last of each prompt, which ends there
    mask[6:, 2:] = False
    batch = batch.replace(inputs={**batch.inputs, "response_ids": ids * mask}, response_mask=mask)
    policy.language_model.chunks = chunked
    monkeypatch.setattr("lrl.lm.model.AT_ONCE", 10)
    tokens = []
    for share in (True, False):
        policy.language_model.share = share
        layout = policy.eval()._layout(batch.inputs, batch.response_mask)
        tokens.append(layout.input_ids.numel())
        out = policy.evaluate(batch)
        weights = torch.linspace(-1, 1, 8)[:, None] * batch.response_mask
        (weights * (out.logprobs + out.entropy) + (0 if critic is None else weights * out.values)).sum().backward()
        grads = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
        policy.zero_grad()
        results.append((out.logprobs, out.entropy, out.values, policy.reference_logprobs(batch), grads))
    for one, other in zip(*results, strict=True):
        assert one is None or float((one - other).detach().norm()) <= 1e-5 * float(one.detach().norm())
    assert tokens[0] < tokens[1] and not torch.allclose(results[0][0], results[0][3], atol=1e-2)

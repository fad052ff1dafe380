"""Several turns in one row: the same log-probabilities as one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from lrl.functional.distributions import Categorical
from lrl.lm.layouts import lay_out, pack, spread


def turns(prefix=0):
    """Five turns whose prompts begin with ``prefix`` equal tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths, sizes = torch.tensor([5, 9, 2, 7, 3]), torch.tensor([3, 1, 4, 2, 4])
    prompt_mask = torch.arange(9)[None] < lengths[:, None]
    response_mask = torch.arange(4)[None] < sizes[:, None]
    prompts = torch.randint(1, 30, (5, 9), generator=generator) * prompt_mask
    responses = torch.randint(1, 30, (5, 4), generator=generator) * response_mask
    common = torch.arange(1, prefix + 1).repeat(5, 1)
    prompts, prompt_mask = torch.cat([common, prompts], 1), torch.cat([common > 0, prompt_mask], 1)
    return prompts, prompt_mask, responses, response_mask


@pytest.mark.parametrize("row_tokens", [4, 16, 24, 100])
@pytest.mark.parametrize("prefix", [0, 6])
def test_packed_rows_give_the_logprobs_and_gradients_of_single_turns(row_tokens, prefix):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    batch = turns(prefix)
    results = []
    for layout in (pack(*batch, max_row_tokens=row_tokens), lay_out(*batch, share=False)):
        out = model(
            input_ids=layout.input_ids,
            attention_mask=layout.attention_mask(torch.float32),
            position_ids=layout.position_ids,
            logits_to_keep=layout.logit_columns,
            use_cache=False,
        ).logits
        logprobs = Categorical(out[layout.row[:, None], layout.kept]).logprobs(batch[2]) * batch[3]
        grads = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
        results.append((logprobs, torch.cat([grad.flatten() for grad in grads])))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-4)


def test_rows_are_filled_and_none_is_too_long():
    layout = pack(*turns(), max_row_tokens=16)
    computed = (layout.segments >= 0).sum(1)
    assert layout.input_ids.shape[0] == 3 and int(computed.sum()) == 40 - 5 and int(computed.max()) <= 16


def test_rows_are_as_long_as_the_longest_turn_at_least():
    layout = pack(*turns(), max_row_tokens=4)
    assert layout.input_ids.shape == (5, 9)


def test_what_prompts_begin_with_stands_in_a_row_once():
    layout = pack(*turns(prefix=6), max_row_tokens=6 + 16)
    assert int((layout.segments == 0).sum()) == 6 * len(layout.input_ids)
    assert int((layout.segments > 0).sum()) == 40 - 5


def test_logits_are_computed_at_few_columns():
    layout = pack(*turns(), max_row_tokens=64)
    assert layout.input_ids.shape == (1, 35) and len(layout.logit_columns) == 14


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=50), width=st.integers(-5, 100))
def test_items_are_spread_over_rows_that_hold_them(lengths, width):
    rows = spread(lengths, width)
    loads = [sum(length for length, row in zip(lengths, rows, strict=True) if row == index) for index in set(rows)]
    assert max(loads) <= max(width, *lengths) and sorted(set(rows)) == list(range(max(rows) + 1))

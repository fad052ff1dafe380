"""Several turns in one row: the same log-probabilities as one by one."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lrl.functional.masking import selected_logprobs
from lrl.policies.layout import lay_out
from lrl.policies.packing import pack


def turns():
    generator = torch.Generator().manual_seed(3)
    lengths, sizes = torch.tensor([5, 9, 2, 7, 3]), torch.tensor([3, 1, 4, 2, 4])
    prompt_mask = torch.arange(9)[None] < lengths[:, None]
    response_mask = torch.arange(4)[None] < sizes[:, None]
    prompts = torch.randint(1, 30, (5, 9), generator=generator) * prompt_mask
    responses = torch.randint(1, 30, (5, 4), generator=generator) * response_mask
    return prompts, prompt_mask, responses, response_mask


def test_packed_rows_give_the_logprobs_and_gradients_of_single_turns():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    batch = turns()
    results = []
    for layout in (pack(*batch, max_row_tokens=16), lay_out(*batch, share=False)):
        out = model(
            input_ids=layout.input_ids,
            attention_mask=layout.attention_mask(torch.float32),
            position_ids=layout.position_ids,
            logits_to_keep=layout.logit_columns,
            use_cache=False,
        ).logits
        logprobs = selected_logprobs(out[layout.row[:, None], layout.kept], batch[2]) * batch[3]
        grads = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
        results.append((logprobs, torch.cat([grad.flatten() for grad in grads])))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-4)


def test_rows_are_filled_and_none_is_too_long():
    layout = pack(*turns(), max_row_tokens=16)
    filled = (layout.segments > 0).sum(1)
    assert layout.input_ids.shape[0] == 3 and int(filled.sum()) == 40 and int(filled.max()) <= 16


def test_a_turn_longer_than_a_row_gets_its_own():
    layout = pack(*turns(), max_row_tokens=4)
    assert layout.input_ids.shape == (5, 10)

"""One prompt, many completions in one row: the same log-probabilities as one by one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lrl.functional.distributions import Categorical
from lrl.lm.layouts import lay_out

ARCHITECTURES = {
    "llama": LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    ),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=128),
}


def turns(seed=0):
    """Seven turns over three prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompt_of = torch.tensor([0, 1, 0, 2, 0, 1, 0])
    lengths, sizes = torch.tensor([5, 3, 8])[prompt_of], torch.tensor([4, 1, 3, 6, 2, 5, 6])
    prompts = torch.randint(1, 40, (3, 8), generator=generator)[prompt_of]
    prompt_mask = torch.arange(8)[None] < lengths[:, None]
    response_mask = torch.arange(6)[None] < sizes[:, None]
    responses = torch.randint(1, 40, (7, 6), generator=generator)
    return prompts * prompt_mask, prompt_mask, responses * response_mask, response_mask


def logits_of(model, layout):
    out = model(
        input_ids=layout.input_ids,
        attention_mask=layout.attention_mask(torch.float32),
        position_ids=layout.position_ids,
        logits_to_keep=layout.logit_columns,
        use_cache=False,
    )
    return out.logits[layout.row[:, None], layout.kept]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shared_rows_give_the_logprobs_and_gradients_of_single_turns(name, attention):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name], attn_implementation=attention).eval()
    prompts, prompt_mask, responses, response_mask = turns()
    results = []
    for share in (True, False):
        layout = lay_out(prompts, prompt_mask, responses, response_mask, share)
        logprobs = Categorical(logits_of(model, layout)).logprobs(responses) * response_mask
        grads = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
        results.append((logprobs, torch.cat([grad.flatten() for grad in grads]), layout))
    assert results[0][2].completions_per_row > 1 and results[1][2].completions_per_row == 1
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-4)


def test_the_plain_pass_is_one_turn_alone():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama"]).eval()
    prompts, prompt_mask, responses, response_mask = turns()
    layout = lay_out(prompts, prompt_mask, responses, response_mask, share=True)
    logprobs = Categorical(logits_of(model, layout)).logprobs(responses)
    for turn in range(len(prompts)):
        prompt, response = prompts[turn][prompt_mask[turn]], responses[turn][response_mask[turn]]
        alone = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(
            logprobs[turn][response_mask[turn]], Categorical(alone).logprobs(response), atol=1e-5, rtol=0
        )


def test_long_distinct_prompts_are_not_shared():
    prompts, mask = torch.arange(40).view(4, 10), torch.ones(4, 10, dtype=torch.bool)
    layout = lay_out(prompts, mask, prompts[:, :3], mask[:, :3], share=True)
    assert layout.completions_per_row == 1


def test_padding_never_reaches_a_completion():
    prompts, prompt_mask, responses, response_mask = turns()
    layout = lay_out(prompts, prompt_mask, responses, response_mask, share=True)
    mask = layout.attention_mask(torch.float32)[:, 0]
    queries, keys = (layout.segments >= 0)[:, :, None], (layout.segments < 0)[:, None, :]
    assert (mask[queries & keys] < -1e30).all()

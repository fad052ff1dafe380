"""Attention in blocks: which keys a block reads, and that loss and gradients equal those of whole rows."""

import pytest
import torch
from tiny_architectures import folder_of, load, turns
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from lrl.functional.distributions import Categorical
from lrl.lm import block_attention, layouts
from lrl.lm.block_attention import attend, divide, with_blocks
from lrl.lm.layouts import additive_mask, in_subtree

TREE = torch.tensor([[9, 4, 4, 3, 4, 9, 7, 7, 9, 9, -1, -1], [5, 5, 3, 3, 5, 5, -1, -1, -1, -1, -1, -1]])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_attention, "_SIZES", (2,))
    monkeypatch.setattr(block_attention, "_WORTH", 1e9)


def test_each_query_sees_in_its_block_what_it_sees_in_its_row(small_blocks):
    blocks = divide(TREE, torch.float32)
    assert blocks is not None
    seen, rows, width = in_subtree(TREE), *TREE.shape
    for number, (keys, mask) in enumerate(zip(blocks.keys, blocks.mask[:, 0], strict=True)):
        row, start = divmod(number * blocks.size, width)
        for query, read in enumerate(mask == 0):
            assert sorted(keys[read].tolist()) == [row * width + int(one) for one in seen[row, start + query].nonzero()]
    assert blocks.keys.shape[1] < width
    assert len(blocks.keys) * blocks.size == rows * width


def test_short_rows_and_single_paths_are_not_divided():
    assert divide(torch.full((1, 40), 39), torch.float32) is None
    assert divide(torch.full((1, 256), 255), torch.float32) is None
    branches = torch.arange(32).repeat_interleave(32)[None] * 32 + 31
    assert divide(branches, torch.float32) is not None


def test_a_kernel_may_be_called_without_mask():
    kernel = AttentionInterface().get_interface("sdpa", sdpa_attention_forward)
    module, states = torch.nn.Module(), torch.randn(1, 2, 3, 4)
    found = kernel(module, states, states, states, is_causal=True)[0]
    torch.testing.assert_close(found, sdpa_attention_forward(module, states, states, states, None, is_causal=True)[0])


def test_a_position_bias_is_added_to_whole_rows(small_blocks):
    mask = with_blocks(additive_mask(in_subtree(TREE), torch.float32), TREE)
    kernel = AttentionInterface().get_interface("sdpa", sdpa_attention_forward)
    module, states, bias = torch.nn.Module(), torch.randn(2, 2, 12, 4), torch.randn(1, 2, 12, 12)
    assert hasattr(mask, "lrl_blocks")
    found = kernel(module, states, states, states, mask, position_bias=bias)[0]
    wanted = sdpa_attention_forward(module, states, states, states, mask, position_bias=bias)[0]
    torch.testing.assert_close(found, wanted)


def gradients(model, mask, inputs):
    layout = model.lay_out(inputs, mask)
    assert not layout.single
    logprobs = Categorical(model.logits(layout)).logprobs(inputs["response_ids"]) * mask
    (logprobs * torch.linspace(-1, 1, mask.numel()).view(mask.shape)).sum().backward()
    grads = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.requires_grad])
    model.zero_grad()
    return logprobs.detach(), grads


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention": "eager"}),
        ("llama", {"gradient_checkpointing": True}),
        ("gpt2", {}),
        ("qwen3", {"attention": "eager"}),
    ],
)
def test_blocks_equal_whole_rows(tmp_path, monkeypatch, small_blocks, name, settings):
    model = load(folder_of(tmp_path, name), **settings)
    inputs, mask = turns()
    masks = list[bool]()

    def spied(attention, module, query, key, value, attention_mask, **kwargs):
        masks.append(hasattr(attention_mask, "lrl_blocks"))
        return attend(attention, module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(block_attention, "attend", spied)
    divided = gradients(model, mask, inputs)
    assert masks
    assert all(masks)
    monkeypatch.setattr(layouts, "with_blocks", lambda one, last: one)
    for one, other in zip(divided, gradients(model, mask, inputs), strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()

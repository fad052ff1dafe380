"""Weights in the memory layout of the kernel give the results of the plain weights, also after these change."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_architectures import load
from torch import nn

from lrl.lm import decoding
from lrl.lm.forward import packed_weights
from lrl.types import SamplingConfig

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 instructions"
)


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32, bias=False)).to(dtype).requires_grad_(False)


def is_packed(layer):
    return "forward" in vars(layer)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_results_are_those_of_plain_weights_also_after_a_change(rows):
    model, states = network(), torch.randn(rows, 3, 64).bfloat16()
    for _ in range(2):
        plain = model(states)
        with packed_weights(model):
            assert is_packed(model[0]) and is_packed(model[2])
            assert torch.allclose(model(states).float(), plain.float(), rtol=2e-2, atol=2e-2)
        assert not is_packed(model[0])
        model[0].weight.neg_()
        model[0].bias.add_(1.0)
        assert not torch.allclose(model(states).float(), plain.float(), rtol=2e-2, atol=2e-2)


def test_trained_weights_are_not_packed_because_fused_optimisers_change_them_without_a_new_version():
    model, states = network().requires_grad_(True), torch.randn(4, 64).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.no_grad():
            plain = model(states)
            with packed_weights(model):
                assert torch.equal(model(states), plain)
        version = model[0].weight._version
        model(states).float().square().sum().backward()
        optimizer.step()
        assert model[0].weight._version == version  # otherwise trained weights could be packed again after each step


def test_weights_of_several_processes_are_not_packed(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with packed_weights(model := network()):
        assert not is_packed(model[0])


def test_weights_are_packed_once(monkeypatch):
    packed, reorder = [], torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda weight: packed.append(weight) or reorder(weight)
    )
    model = network()
    for _ in range(3):
        with packed_weights(model):
            pass
    assert len(packed) == 2


def test_other_data_types_autocast_and_weights_beyond_the_limit_stay_as_they_are(monkeypatch):
    with packed_weights(model := network(torch.float32)):
        assert not is_packed(model[0])
    with torch.autocast("cpu", torch.bfloat16), packed_weights(model := network()):
        assert not is_packed(model[0])
    monkeypatch.setattr("lrl.lm.forward._PACKED_BYTES", 64 * 96 * 2)
    with packed_weights(model := network()):
        assert is_packed(model[0]) and not is_packed(model[2])


@torch.no_grad()
@pytest.mark.parametrize("change", ["merge_adapter", "merge_and_unload"])
def test_merged_adapters_change_packed_weights(change):
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False)
    model, states = get_peft_model(network(), config).requires_grad_(False), torch.randn(4, 64).bfloat16()
    with packed_weights(model):
        before = model(states)
    merged = getattr(model, change)() or model
    with packed_weights(merged):
        assert torch.allclose(merged(states).float(), before.float(), rtol=2e-2, atol=5e-2)
    if change == "merge_adapter":
        model.unmerge_adapter()
        with packed_weights(model):
            assert torch.allclose(model(states).float(), before.float(), rtol=2e-2, atol=5e-2)


def test_a_weight_that_was_trained_after_it_was_packed_is_packed_again():
    model, states = network(), torch.randn(4, 64).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for trained in (False, True, False):
        model.requires_grad_(trained)
        with torch.no_grad(), packed_weights(model):
            found = model(states)
        with torch.no_grad():
            assert torch.allclose(found.float(), model(states).float(), rtol=2e-2, atol=2e-2)
        if trained:
            model(states).float().square().sum().backward()
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_responses_are_those_of_plain_weights(folder, monkeypatch, temperature):
    model = load(folder, dtype="bfloat16").requires_grad_(False)
    uniforms = torch.randint(-(2**62), 2**62, (6, 12), generator=torch.Generator().manual_seed(0))
    prompts, sampling = [[4, 5, 6], [7, 8]] * 3, SamplingConfig(temperature=temperature, max_new_tokens=12)
    loop = decoding.DecodeLoop(model, None)
    packed = loop.generate(prompts, uniforms, sampling)
    monkeypatch.setattr(decoding, "packed_weights", lambda model: nullcontext())
    plain = loop.generate(prompts, uniforms, sampling)
    assert torch.equal(packed.ids, plain.ids) and torch.equal(packed.mask, plain.mask)
    assert torch.allclose(packed.logprobs, plain.logprobs, atol=2e-2)

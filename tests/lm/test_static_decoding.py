"""Tests of decoding with constant shapes, which a GPU replays as a CUDA graph."""

import copy
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from lrl.functional.random import token_bits
from lrl.lm import fused_parts as joined
from lrl.lm import static_decoding
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.decoding import DecodeLoop, decode
from lrl.lm.forward import replaced_forward
from lrl.lm.fused_parts import fused_parts, join_weights
from lrl.lm.model import LanguageModel
from lrl.lm.static_decoding import is_sharded, rounded_columns
from lrl.types import RandomKeys, SamplingConfig

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 5], [8, 9, 10], [6, 7]]
SIZES = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=32, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SIZES, intermediate_size=32, num_key_value_heads=1),
    "gpt2": GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=64),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bits(rows, steps):
    number = np.arange(rows)
    return token_bits(RandomKeys(seed=3, purpose="test", collection=0, env=number, turn=0 * number), steps)


@pytest.fixture(params=list(CONFIGS))
def model(request):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float64).eval()


def check_same(ours, expected):
    near = 1e-9 if ours.ids.device.type == "cpu" else 1e-6  # norms compute in float32, and are compiled on a GPU
    assert ours.mask.tolist() == expected.mask.tolist()
    assert ours.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(ours.logprobs.cpu(), expected.logprobs.cpu(), atol=near, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stop", [{0, 11}, set(range(12))])
def test_samples_are_those_of_the_decode_loop(model, device, stop):
    sampling = SamplingConfig(max_new_tokens=21, temperature=0.9)
    expected = decode(model, PROMPTS, bits(5, 21), sampling, stop_ids=stop, share=True)
    ours = decode(model.to(device), PROMPTS, bits(5, 21), sampling, stop_ids=stop, share=True, static=True)
    assert len(expected.mask.sum(1).unique()) > 1
    check_same(ours, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [7, 8, 9, 10, 17])
def test_a_stop_text_ends_a_response_wherever_the_host_looks(model, device, size):
    """The last token of the text is at different distances from the next check, and the text crosses a check."""
    sampling, free = SamplingConfig(max_new_tokens=40), {"stop_ids": set()}
    ids = decode(model, PROMPTS, bits(5, 40), sampling, **free).ids
    texts = [row[size - 2 : size] for row in ids.tolist()]
    options = {"stop_ids": {0}, "stops": lambda found: found[-2:] in texts}
    expected = decode(model, PROMPTS, bits(5, 40), sampling, **options)
    check_same(decode(model.to(device), PROMPTS, bits(5, 40), sampling, static=True, **options), expected)
    assert expected.mask.sum(1).max() <= size


def test_a_failed_call_does_not_change_later_ones(model):
    sampling, weights = SamplingConfig(max_new_tokens=9), copy.deepcopy(model.state_dict())
    expected = decode(model, PROMPTS, bits(5, 9), sampling, stop_ids={0})
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    decode(model, PROMPTS, bits(5, 9), sampling, stop_ids={0}, static=True)
    model.load_state_dict(weights)
    check_same(decode(model, PROMPTS, bits(5, 9), sampling, stop_ids={0}, static=True), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_call_uses_the_current_weights(model, device):
    sampling = SamplingConfig(max_new_tokens=9)
    model = model.to(device)
    for _ in range(2):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        expected = decode(copy.deepcopy(model).cpu(), PROMPTS, bits(5, 9), sampling, stop_ids={0})
        check_same(decode(model, PROMPTS, bits(5, 9), sampling, stop_ids={0}, static=True), expected)
    assert len(static_decoding._graphs[model]) == 1


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"max_new_tokens": 1}])
def test_every_distribution_is_sampled_as_by_the_decode_loop(model, options):
    sampling = SamplingConfig(**{"max_new_tokens": 7} | options)
    expected = decode(model, PROMPTS, bits(5, 7), sampling, stop_ids={0})
    check_same(decode(model, PROMPTS, bits(5, 7), sampling, stop_ids={0}, static=True), expected)


def test_many_responses_are_divided_among_calls(model, monkeypatch):
    sampling = SamplingConfig(max_new_tokens=9)
    expected = decode(model, PROMPTS, bits(5, 9), sampling, stop_ids={0, 11})
    monkeypatch.setattr(static_decoding, "_most_rows", lambda *_: 2)
    check_same(decode(model, PROMPTS, bits(5, 9), sampling, stop_ids={0, 11}, static=True), expected)
    rows = {len(decoding.ids) for decoding in static_decoding._graphs[model].values()}
    assert rows == {1, 2}


def test_few_shapes_are_kept(model):
    for tokens in range(2, 14):
        decode(model, PROMPTS, bits(5, tokens), SamplingConfig(max_new_tokens=tokens), stop_ids={0}, static=True)
    assert len(static_decoding._graphs[model]) == 8


@torch.no_grad()
def test_joined_weights_stay_parameters_and_give_the_same_outputs(model, tmp_path):
    ids = torch.tensor([[1, 2, 3, 4]])
    before, values = model(ids).logits, {name: part.clone() for name, part in model.named_parameters()}
    join_weights(model)
    addresses = [part.data_ptr() for part in model.parameters()]
    join_weights(model)
    assert [part.data_ptr() for part in model.parameters()] == addresses
    assert all(torch.equal(part, values[name]) for name, part in model.named_parameters())
    groups = list(joined.layers_with_equal_input(model))
    assert len(groups) == (0 if model.config.model_type == "gpt2" else 4)
    with ExitStack() as stack:
        for layers in groups:
            for layer, forward in zip(layers, joined.joined_forwards(layers), strict=True):
                stack.enter_context(replaced_forward(layer, forward))
        torch.testing.assert_close(model(ids).logits, before, atol=1e-12, rtol=0)
        for part in model.parameters():
            part.mul_(1.5)
        changed = model(ids).logits
    torch.testing.assert_close(model(ids).logits, changed, atol=1e-12, rtol=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(ids).logits, changed, atol=1e-12, rtol=0)
    save_file(dict(model.named_parameters()), tmp_path / "parts.safetensors")
    assert (tmp_path / "parts.safetensors").stat().st_size < 1.1 * sum(part.nbytes for part in model.parameters()) + 1e4


@torch.no_grad()
def test_adapters_are_added_to_joined_layers(tiny_model):
    language_model = LanguageModel(LanguageModelConfig(name=tiny_model, lora=LoRAConfig(r=4)))
    language_model.configure()
    model, ids = language_model.model, torch.tensor([[5, 6, 7, 8]])
    base = model(ids).logits
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.1)
    expected = model(ids).logits
    join_weights(model)
    with fused_parts(model, compiled=False):
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(expected, base, atol=1e-2)


@torch.no_grad()
def test_a_joined_layer_with_another_input_computes_its_own_output(model):
    groups = list(joined.layers_with_equal_input(model))
    join_weights(model)
    for layers in groups:
        forwards = joined.joined_forwards(layers)
        inputs = [torch.randn(2, layer.in_features, dtype=torch.float64) for layer in layers]
        for layer, forward, states in reversed(list(zip(layers, forwards, inputs, strict=True))):
            torch.testing.assert_close(forward(states), layer(states), atol=1e-12, rtol=0)


def test_sharded_weights_are_recognised(model, tmp_path):
    assert not is_sharded(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = fully_shard(copy.deepcopy(model), mesh=init_device_mesh("cpu", (1,)))
        assert is_sharded(sharded)
        sharded.unshard()
        assert is_sharded(sharded)  # its parameters are plain tensors now
    finally:
        dist.destroy_process_group()


def test_columns_are_rounded_up_to_few_numbers():
    assert [rounded_columns(width) for width in (1, 32, 33, 250, 257, 1000)] == [32, 32, 64, 256, 320, 1024]
    assert len({rounded_columns(width) for width in range(1, 2049)}) < 30


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_of_a_recorded_graph_are_those_of_teacher_forcing(tiny_model, lora, dtype):
    language_model = LanguageModel(LanguageModelConfig(name=tiny_model, dtype=dtype, lora=lora))
    language_model.configure()
    language_model.cuda()
    loop, sampling = DecodeLoop(language_model, None), SamplingConfig(max_new_tokens=16)
    prompts = [[5, 6, 7, 8], [9, 10]] * 4
    out = loop.generate(prompts, bits(8, 16), sampling)
    decodings = static_decoding._graphs[language_model.model].values()
    assert [decoding.graph is not None for decoding in decodings] == [True]
    for row, prompt in enumerate(prompts):
        response = out.ids[row][out.mask[row]]
        ids = torch.cat([torch.tensor(prompt, device="cuda"), response])[None]
        logits = language_model.model(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0]
        near = 1e-4 if dtype == "float32" else 0.1
        torch.testing.assert_close(out.logprobs[row][out.mask[row]], expected, atol=near, rtol=0)


def test_weights_that_were_joined_in_inference_mode_can_be_trained():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    with torch.inference_mode():
        join_weights(model)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_tensors_that_were_made_in_inference_mode_are_used_outside_of_it():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    given = PROMPTS, bits(5, 4), SamplingConfig(max_new_tokens=4)
    with torch.inference_mode():
        first = decode(model, *given, stop_ids={0}, static=True)
    with torch.no_grad():
        again = decode(model, *given, stop_ids={0}, static=True)
    assert torch.equal(first.ids, again.ids)

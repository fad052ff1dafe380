"""Tests of decoding with constant shapes, which a GPU replays as a CUDA graph."""

import copy
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from lrl.functional.random import token_bits
from lrl.lm import static_decoding
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.decoding import DecodeLoop, decode
from lrl.lm.forward import replaced_forward
from lrl.lm.model import LanguageModel
from lrl.lm.static_decoding import join_weights, rounded_columns
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
def test_a_stop_text_of_several_tokens_ends_a_response(model, device):
    sampling = SamplingConfig(max_new_tokens=40)
    options = {"stop_ids": {0}, "stops": lambda ids: ids[-1] in (3, 5) and len(ids) > 2}
    expected = decode(model, PROMPTS, bits(5, 40), sampling, **options)
    check_same(decode(model.to(device), PROMPTS, bits(5, 40), sampling, static=True, **options), expected)
    assert expected.mask.sum(1).unique().tolist() != [40]


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_call_uses_the_weights_of_the_moment(model, device):
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
    groups = list(static_decoding._layers_with_equal_input(model))
    assert len(groups) == (0 if model.config.model_type == "gpt2" else 4)
    with ExitStack() as stack:
        for layers in groups:
            for layer, forward in zip(layers, static_decoding._joined_forwards(layers), strict=True):
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


def test_adapters_are_added_to_joined_layers(tiny_model):
    language_model = LanguageModel(LanguageModelConfig(name=tiny_model, lora=LoRAConfig(r=4)))
    language_model.configure()
    model = language_model.model
    assert len(list(static_decoding._layers_with_equal_input(model))) == 2 * model.config.num_hidden_layers


def test_columns_are_rounded_up_to_few_numbers():
    assert [rounded_columns(width) for width in (1, 32, 33, 250, 257, 1000)] == [32, 32, 64, 256, 320, 1024]
    assert len({rounded_columns(width) for width in range(1, 2049)}) < 30


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_graph_samples_as_teacher_forcing_says(tiny_model, lora, dtype):
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

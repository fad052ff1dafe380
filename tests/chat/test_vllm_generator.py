"""Tests of the generator with vLLM, against a stub.

vLLM itself needs a GPU and is not installed. The stub implements the used parts of ``vllm.LLM`` and
``vllm.SamplingParams`` as documented for vLLM 0.11, and records its calls. The behaviour of vLLM is not tested.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lrl.chat.local import LocalChatModel, VLLMGenerator, seeded_bits
from lrl.lm.config import LanguageModelConfig
from lrl.types import SamplingConfig


class SamplingParams:
    """Stub of ``vllm.SamplingParams``, which accepts known keyword arguments only."""

    KNOWN = {"temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "stop_token_ids", "logprobs"}
    KNOWN |= {"include_stop_str_in_output", "skip_special_tokens"}

    def __init__(self, **settings):
        assert set(settings) <= self.KNOWN
        vars(self).update(settings)


class LLM:
    """Stub of ``vllm.LLM`` that repeats the last prompt tokens, as many as the seed selects, and then a stop token."""

    made = []

    def __init__(self, model, dtype, trust_remote_code, logprobs_mode, **options):
        self.settings = {"model": model, "dtype": dtype, "logprobs_mode": logprobs_mode, **options}
        LLM.made.append(self)

    def generate(self, prompts, sampling_params, use_tqdm):
        assert len(prompts) == len(sampling_params) and use_tqdm is False
        self.params = sampling_params
        return [self._request(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, sampling_params)]

    def _request(self, ids, params):
        wanted = [*ids[-1 - params.seed % 3 :], params.stop_token_ids[0]]
        ids = wanted[: params.max_tokens]
        logprobs = [{token: SimpleNamespace(logprob=-0.5 * (n + 1))} for n, token in enumerate(ids)]
        output = SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs)
        return SimpleNamespace(outputs=[output])


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    LLM.made.clear()


@pytest.mark.usefixtures("vllm")
def test_requests_and_responses_are_translated(tiny_model):
    generator = VLLMGenerator(LanguageModelConfig(name=tiny_model), None, {"gpu_memory_utilization": 0.5})
    bits, prompts = torch.tensor([[3, 0, 0], [-(2**63) + 5, 0, 0]]), [[7, 8, 9, 10], [11, 12, 13]]
    sampling = SamplingConfig(temperature=0.7, top_k=4, top_p=0.9, max_new_tokens=3)
    responses = generator.generate(prompts, bits, sampling)
    (engine,) = LLM.made
    assert engine.settings == {
        "model": tiny_model,
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "gpu_memory_utilization": 0.5,
    }
    one, other = engine.params
    assert (one.seed, other.seed, one.temperature, one.top_k, one.top_p, one.max_tokens) == (3, 5, 0.7, 4, 0.9, 3)
    stop = generator.tokenizer.end_id
    assert one.stop is None and one.stop_token_ids == [stop]
    assert responses.ids.tolist() == [[10, stop, 0], [11, 12, 13]]
    assert responses.mask.tolist() == [[True, True, False], [True] * 3]
    assert responses.logprobs.tolist() == [[-0.5, -1.0, 0.0], [-0.5, -1.0, -1.5]]


@pytest.mark.usefixtures("vllm")
def test_without_truncation_all_tokens_are_kept_and_the_last_tag_ends_a_response(tiny_model):
    generator = VLLMGenerator(LanguageModelConfig(name=tiny_model), "</answer>")
    generator.generate([[7]], torch.tensor([[0]]), SamplingConfig(temperature=0.0, max_new_tokens=2))
    (params,) = LLM.made[0].params
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.0, 0, 1.0, ["</answer>"])
    assert params.include_stop_str_in_output and params.skip_special_tokens is False
    assert set(params.stop_token_ids) == generator.tokenizer.stop_ids("</answer>")


@pytest.mark.usefixtures("vllm")
def test_responses_of_a_chat_model_with_vllm_do_not_depend_on_the_batch(tiny_model):
    config = LanguageModelConfig(name=tiny_model)
    chat = [LocalChatModel(config, VLLMGenerator(config), batch_size=size) for size in (1, 8)]
    conversations = [[{"role": "user", "content": f"w{n}"}] for n in range(5)]
    sampling = SamplingConfig(max_new_tokens=9)
    one, many = (model.complete(conversations, sampling, range(5)) for model in chat)
    assert one == many and all(completion.finish_reason == "stop" for completion in one)
    seed = int(seeded_bits([2], 9)[0, 0]) & 0x7FFFFFFF
    assert one[2].completion_tokens == 2 + seed % 3


def test_a_missing_vllm_raises_one_sentence(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"VLLMGenerator .* needs the package vllm.*; run pip install 'lrl\[vllm\]'"):
        VLLMGenerator(LanguageModelConfig(name=tiny_model))

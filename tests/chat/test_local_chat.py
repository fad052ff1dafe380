"""Tests of chat models in this process."""

import pytest
import torch

from lrl.chat.local import LocalChatModel, seeded_bits
from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import DecodeLoop, Responses
from lrl.lm.model import LanguageModel
from lrl.types import SamplingConfig

SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=6)


def say(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


def texts(model, conversations, seeds, sampling=SAMPLING):
    return [completion.text for completion in model.complete(conversations, sampling, seeds)]


@pytest.fixture(scope="module")
def model(tiny_model):
    return LocalChatModel(LanguageModelConfig(name=tiny_model), batch_size=3, device="cpu")


def test_a_response_depends_only_on_its_conversation_and_its_seed(model):
    conversations, seeds = say("left", "right w1 w2", "left", "up", "left"), [1, 2, 3, 4, 1]
    together = texts(model, conversations, seeds)
    assert together == [texts(model, [one], [seed])[0] for one, seed in zip(conversations, seeds, strict=True)]
    assert together[::-1] == texts(model, conversations[::-1], seeds[::-1])
    assert together[0] == together[4] != together[2]


def test_tokens_are_counted_and_the_finish_reason_is_reported(model):
    completions = model.complete(say("left", "w1 w2 w3"), SAMPLING, [1, 2])  # blanks count as tokens
    first, second = (completion.prompt_tokens for completion in completions)
    assert second == first + 4 and model.name.endswith("tiny")
    ends = {seed: model.complete(say("up"), SAMPLING, [seed])[0] for seed in range(40)}
    assert {end.finish_reason for end in ends.values()} == {"stop", "length"}
    for end in ends.values():
        assert end.completion_tokens == 6 if end.finish_reason == "length" else end.completion_tokens <= 6
        assert "<|im_end|>" not in end.text


def test_each_seed_determines_an_independent_row_of_bits():
    bits = seeded_bits([5, 6, 5], 4)
    assert bits.shape == (3, 4) and bits.dtype == torch.int64
    assert torch.equal(bits[0], bits[2]) and not torch.equal(bits[0], bits[1]) and len(set(bits[0].tolist())) == 4
    assert torch.equal(bits[:, :2], seeded_bits([5, 6, 5], 2))


def test_with_a_given_generator_only_the_tokenizer_is_loaded(tiny_model, monkeypatch):
    class Repeats:
        """Generator that writes the last word of each conversation twice and then ends."""

        def generate(self, prompts, uniforms, sampling):
            ids = torch.tensor([[prompt[-6]] * 3 for prompt in prompts])
            mask = torch.tensor([[True, True, False]] * len(ids))
            return Responses(ids=ids, mask=mask, logprobs=torch.zeros(ids.shape))

    monkeypatch.setattr("lrl.chat.local.LanguageModel", None)
    model = LocalChatModel(LanguageModelConfig(name=tiny_model), Repeats())
    (completion,) = model.complete(say("w1 w2"), SAMPLING, [0])
    assert (completion.text.split(), completion.finish_reason, completion.completion_tokens) == (["w2w2"], "stop", 2)


def test_fits_checks_the_context_length_and_the_length_of_the_response(model, tiny_model):
    (conversation,) = say("left")
    (completion,) = model.complete([conversation], SAMPLING, [1])
    (language_model,) = [part for part in vars(model).values() if isinstance(part, LanguageModel)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "context_length", completion.prompt_tokens + 6)
        assert model.fits(conversation, SAMPLING) and model.fits(conversation, SAMPLING, "up up up")
        assert not model.fits(say("left up")[0], SAMPLING)
        assert not model.fits(conversation, SAMPLING, "up up up up")  # blanks and the end count as tokens
    model.connect()
    generated = LocalChatModel(LanguageModelConfig(name=tiny_model), DecodeLoop(language_model, None))
    length = language_model.model.config.max_position_embeddings
    assert language_model.max_positions is None, "rotary embeddings, which have no table of positions"
    for one in (model, generated):
        assert one.fits(say("left " * (length // 4))[0], SAMPLING)
        assert not one.fits(say("left " * length)[0], SAMPLING), "longer than the model was made for"

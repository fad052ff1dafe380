"""Tests of the embedded language model: size, loading, tokenizer, response format, and uniform actions."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.lm.tokenizer import ChatTokenizer
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import PastTurn

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[1] / "assets" / "tiny-lm"
MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
STATES = [state for state, cell in enumerate("".join(MAP)) if cell in "SF"]
TAGS = [f"<{slash}{tag}>" for tag in ("think", "answer", "observation", "action") for slash in ("", "/")]
CODEC = FrozenLakeCodec()
PER_STATE = 24


@functools.cache
def load_chat() -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(str(FOLDER))


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return load_chat()


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(chat: ChatTokenizer, model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return ``PER_STATE`` prompts of each non-terminal state, and responses sampled at temperature 1."""
    prompts = [prompt(chat, state) for state in STATES for _ in range(PER_STATE)]
    return prompts, sample(model, chat, prompts, "think_answer")


def prompt(chat: ChatTokenizer, state: int, style: str = "think_answer", turns: int = 0) -> list[int]:
    past = PastTurn(
        render_map(0, MAP), get_response_format(style).render("LEFT", "let me look around, then I choose one.")
    )
    template = PromptTemplate(response_format=style, history=turns)
    return chat.encode_prompt(template, CODEC, render_map(state, MAP), (past,) * turns, 1000)


def sample(model: Any, chat: ChatTokenizer, prompts: list[list[int]], style: str) -> list[list[int]]:
    """Return responses including their stop token, sampled by ``generate`` of transformers."""
    stop = chat.stop_ids(get_response_format(style).stop)
    ids = torch.tensor(prompts)
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=32,
            eos_token_id=sorted(stop), pad_token_id=chat.pad_id,
        )  # fmt: skip
    rows = [row[len(prompts[0]) :] for row in out.tolist()]
    return [row[: next((i + 1 for i, token in enumerate(row) if token in stop), len(row))] for row in rows]


def valid_rate(chat: ChatTokenizer, responses: list[list[int]], style: str) -> float:
    def valid(response: list[int]) -> bool:
        try:
            CODEC.text_to_action(get_response_format(style).extract(chat.decode(response)))
        except InvalidActionError:
            return False
        return True

    return sum(map(valid, responses)) / len(responses)


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_model_loads_with_the_auto_classes_of_transformers(chat: ChatTokenizer, model: Any) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert len(chat.tokenizer) == model.config.vocab_size
    assert model.config.max_position_embeddings == 2048
    assert chat.tokenizer.chat_template
    assert {chat.eos_id} == set(chat.tokenizer.encode("<|im_end|>"))


def test_it_has_one_to_two_million_parameters_in_under_five_megabytes(model: Any) -> None:
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 2e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5e6


def test_its_weights_are_bfloat16_safetensors() -> None:
    from safetensors import safe_open

    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


# -- tokenizer --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert round_trip(text) == text


@pytest.mark.parametrize("text", ["007", "01 1", "a  b\t\r\nc", " , ", "<think> x </answer>y", "\n\n-1.50", "é😀\x00"])
def test_awkward_texts_round_trip(text: str) -> None:
    assert round_trip(text) == text


def round_trip(text: str) -> str:
    tokenizer = load_chat().tokenizer
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)


def test_every_integer_below_a_thousand_is_one_token_wherever_it_stands(chat: ChatTokenizer) -> None:
    ids = [chat.encode_text(str(number)) for number in range(1000)]
    assert {len(token) for token in ids} == {1}
    assert len({token[0] for token in ids}) == 1000
    for lead in (" ", "\n", ",", "-", "x ", "<observation>"):
        texts = chat.tokenizer([f"{lead}{number}" for number in range(1000)], add_special_tokens=False)["input_ids"]
        assert [text[-1:] for text in texts] == ids
        assert len({tuple(text[:-1]) for text in texts}) == 1


def test_long_numbers_are_split_into_chunks_of_three_digits_from_the_left(chat: ChatTokenizer) -> None:
    pieces = [chat.tokenizer.decode([token]) for token in chat.encode_text("1234567.00891")]
    assert pieces == ["123", "456", "7", ".", "008", "91"]


def test_tags_are_single_special_tokens_and_survive_decoding(chat: ChatTokenizer) -> None:
    assert all(len(chat.encode_text(tag)) == 1 for tag in TAGS)
    added = chat.tokenizer.added_tokens_decoder
    assert all(added[chat.encode_text(tag)[0]].special for tag in TAGS)
    assert chat.decode(chat.encode_text("".join(TAGS))) == "".join(TAGS)


def test_a_cell_of_the_map_and_each_action_is_one_token(chat: ChatTokenizer) -> None:
    head = chat.encode_text("row 0 column 0")
    assert len(head) == 6
    assert len(chat.encode_text(render_map(0, MAP))) == len(head) + 4 * (1 + 4)
    assert all(len(chat.encode_text(action)) == 1 for action in CODEC.action_texts)
    assert len(prompt(chat, 0)) <= 110


# -- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_responses_are_valid_at_temperature_one(chat: ChatTokenizer, answers: tuple[Any, list[list[int]]]) -> None:
    assert valid_rate(chat, answers[1], "think_answer") >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize(("style", "turns"), [("direct", 0), ("final_answer", 0), ("think_answer", 3)])
def test_responses_are_valid_in_other_formats_and_with_history(
    chat: ChatTokenizer, model: Any, style: str, turns: int
) -> None:
    prompts = [prompt(chat, state, style, turns) for state in STATES for _ in range(8)]
    assert valid_rate(chat, sample(model, chat, prompts, style), style) >= 0.95


def test_its_reasoning_is_sampled_and_never_empty(chat: ChatTokenizer, answers: tuple[Any, list[list[int]]]) -> None:
    texts = [chat.decode(response) for response in answers[1]]
    thoughts = [text.partition("</think>")[0].removeprefix("<think>") for text in texts if "</think>" in text]
    assert all(thought.strip() for thought in thoughts)
    assert len(set(thoughts)) > len(texts) / 2
    assert not any(action in thought for thought in thoughts for action in CODEC.action_texts)


@pytest.mark.slow
def test_the_model_prefers_no_action_in_any_state(
    chat: ChatTokenizer, model: Any, answers: tuple[list[list[int]], list[list[int]]]
) -> None:
    """The exact distribution after ``<answer>``, averaged over sampled reasonings, is nearly uniform."""
    marginal = action_chances(model, chat, *answers).view(len(STATES), PER_STATE, 4).mean(1)
    elsewhere = 1 - marginal.sum(1)
    distance = 0.5 * ((marginal - 0.25).abs().sum(1) + elsewhere)
    assert distance.max() < 0.1


def action_chances(model: Any, chat: ChatTokenizer, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    """Return the probability of each action after ``<answer>`` ``(response, 4)``; 0 for responses without this tag."""
    (tag,) = chat.encode_text("<answer>")
    actions = [chat.encode_text(action)[0] for action in CODEC.action_texts]
    width = max(map(len, responses))
    rows = [p + r + [chat.pad_id] * (width - len(r)) for p, r in zip(prompts, responses, strict=True)]
    with torch.no_grad():
        chances = model(torch.tensor(rows), logits_to_keep=width).logits.softmax(-1)
    answered = [(row, response.index(tag)) for row, response in enumerate(responses) if tag in response]
    found = torch.zeros(len(rows), len(actions))
    for row, position in answered:
        found[row] = chances[row, position, actions]
    return found


# -- how it is built --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_builds_this_tokenizer_again(chat: ChatTokenizer) -> None:
    tokenizer = build_script().build_tokenizer(seed=0)
    assert tokenizer.backend_tokenizer.to_str() == chat.tokenizer.backend_tokenizer.to_str()


def test_only_answers_are_supervised_with_their_end(chat: ChatTokenizer) -> None:
    script = build_script()
    conversation = script.conversation(random.Random(0))
    text = chat.tokenizer.apply_chat_template(conversation, tokenize=False)
    short = chat.encode_text("<|im_start|>user\nrow 1<|im_end|>\n<|im_start|>assistant\nUP<|im_end|>\n")
    ids, answers = script.pad([chat.encode_text(text), short], chat.tokenizer)
    said = "".join(f"{turn['content']}<|im_end|>" for turn in conversation if turn["role"] == "assistant")
    assert chat.tokenizer.decode(ids[0][answers[0]]) == said
    assert chat.tokenizer.decode(ids[1][answers[1]]) == "UP<|im_end|>"


def test_generated_responses_are_legal_for_all_observations() -> None:
    script, rng = build_script(), random.Random(0)
    for _ in range(200):
        scene = script.frozen_lake(rng)
        CODEC.text_to_action(scene.act(rng))
        assert scene.observe(rng).startswith("row ")
        listed = script.listed(rng)
        assert listed.act(rng) in listed.description.rpartition("Actions: ")[2].rstrip(".").split(", ")


def build_script() -> Any:
    spec = importlib.util.spec_from_file_location("build_tiny_lm", FOLDER.parents[1] / "scripts" / "build_tiny_lm.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    return script

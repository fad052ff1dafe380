from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.lm.tokenizer import ChatTokenizer
from lrl.prompts import Message, PromptTemplate
from lrl.rollouts.runner import observation_key
from lrl.types import PastTurn

FOLDER = Path(__file__).parents[2] / "assets" / "tiny-lm"
CODEC = FrozenLakeCodec()
CHAT: list[Message] = [{"role": "system", "content": "Play."}, {"role": "user", "content": "row 1"}]
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
TURNS = tuple(PastTurn(f"seen {turn}", f"said {turn}") for turn in range(3))


@pytest.fixture
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def chat(tokenizer: Any) -> ChatTokenizer:
    return ChatTokenizer(tokenizer)


def text(chat: ChatTokenizer, messages: list[Message] = CHAT) -> str:
    return chat.tokenizer.decode(chat.encode_chat(messages))


# -- templates --------------------------------------------------------------------------------------------------------


def test_auto_takes_the_own_template_of_the_tokenizer_and_opens_the_answer(chat: ChatTokenizer) -> None:
    assert text(chat) == (
        "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nrow 1<|im_end|>\n<|im_start|>assistant\n"
    )


def test_auto_without_a_template_is_plain(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert text(ChatTokenizer(tokenizer)) == "Play.\n\nuser: row 1\nassistant:"


def test_auto_with_several_templates_and_no_default_names_the_others(tokenizer: Any) -> None:
    tokenizer.chat_template = {"rag": GEMMA, "tool": GEMMA}
    with pytest.raises(ValueError, match=r"chat_template is 'auto'.*plain, content, chatml or the path"):
        ChatTokenizer(tokenizer)


def test_plain_writes_one_line_per_message(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    turns = [*CHAT, {"role": "assistant", "content": "UP"}, {"role": "user", "content": "row 0"}]
    expected = "Play.\n\nuser: row 1\nassistant: UP\nuser: row 0\nassistant:"
    assert text(ChatTokenizer(tokenizer, "plain"), turns) == expected


def test_content_writes_the_messages_alone(tokenizer: Any) -> None:
    turns = [*CHAT, {"role": "assistant", "content": "UP"}, {"role": "user", "content": "row 0"}]
    assert text(ChatTokenizer(tokenizer, "content"), turns) == "Play.\nrow 1\nUP\nrow 0\n"


def test_chatml_needs_no_template_on_the_tokenizer(tokenizer: Any, chat: ChatTokenizer) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    assert text(ChatTokenizer(bare, "chatml")) == text(chat)


def test_a_file_is_read_as_template(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert text(ChatTokenizer(tokenizer, str(file))) == "[Play.][row 1]"


def test_a_missing_template_file_is_named(tokenizer: Any) -> None:
    with pytest.raises(
        ValueError, match=r"chat_template is 'nowhere\.jinja'; it must be auto, plain, content, chatml or"
    ):
        ChatTokenizer(tokenizer, "nowhere.jinja")


def test_a_template_without_system_role_gets_the_system_text_in_the_first_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = GEMMA
    chat = ChatTokenizer(tokenizer)
    assert text(chat) == "<|bos|><|im_start|>user\nPlay.\n\nrow 1<|im_end|>\n<|im_start|>model\n"
    assert text(chat, CHAT[1:]) == "<|bos|><|im_start|>user\nrow 1<|im_end|>\n<|im_start|>model\n"


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_text_is_tokenised_once(chat: ChatTokenizer) -> None:
    assert chat.encode_chat(CHAT) is chat.encode_chat(copy.deepcopy(CHAT))


def test_history_that_does_not_fit_goes_oldest_first(chat: ChatTokenizer) -> None:
    template = PromptTemplate(system="Play.", history=3, examples=(PastTurn("example", "shown"),))
    full = chat.encode_prompt(template, CODEC, "now", TURNS, 1000)
    for limit in (len(full) - 1, len(full) - 20):
        ids = chat.encode_prompt(template, CODEC, "now", TURNS, limit)
        assert len(ids) <= limit
        kept = chat.tokenizer.decode(ids)
        seen = [f"seen {turn}" in kept for turn in range(3)]
        assert not seen[0] and seen == sorted(seen)
        assert all(part in kept for part in ("Play.", "example", "shown", "now"))


CONDITIONAL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if 'odd' in m.content %}{{ m.content | upper }}{% else %}"
    "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SEEN = [("row 1\ncolumn 2", ()), ("<observation>0.5,-1</observation>", ()), ("row 1\ncolumn 2", ()), (" padded ", ())]


@pytest.mark.parametrize("chat_template", ["auto", "plain", "content", "chatml", "gemma", "strip"])
@pytest.mark.parametrize("history", [0, 2])
def test_prompts_encoded_together_are_those_encoded_one_by_one(tokenizer, tmp_path, chat_template, history) -> None:
    own = {"gemma": GEMMA, "strip": GEMMA.replace("m.content", "m.content | trim")}
    path = tmp_path / "template.jinja"
    path.write_text(own.get(chat_template, ""))
    together, alone = (ChatTokenizer(tokenizer, str(path) if chat_template in own else chat_template) for _ in range(2))
    template = PromptTemplate(history=history, examples=(PastTurn("example", "shown"),))
    for turns in (SEEN[:3], SEEN, [(text, TURNS) for text, _ in SEEN], SEEN[:1]):
        expected = [alone.encode_prompt(template, CODEC, *turn, 1000) for turn in turns]
        assert together.encode_prompts(template, CODEC, turns, 1000) == expected
    with pytest.raises(ValueError, match="max_prompt_tokens is 5"):
        together.encode_prompts(template, CODEC, SEEN, 5)


def test_a_template_that_reads_the_observation_switches_frames_off(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(CONDITIONAL)
    chat, template = ChatTokenizer(tokenizer, str(path)), PromptTemplate()
    for turns in ([("odd", ()), ("even", ())], [("even", ()), ("odd", ())]):
        expected = [chat.encode_prompt(template, CODEC, *turn, 1000) for turn in turns]
        assert chat.encode_prompts(template, CODEC, turns, 1000) == expected


def test_the_frame_follows_template_and_codec(chat: ChatTokenizer) -> None:
    turns = [("a", ()), ("b", ())]
    for template in (PromptTemplate(), PromptTemplate(system="Other."), PromptTemplate(response_format="direct")):
        expected = [chat.encode_prompt(template, CODEC, *turn, 1000) for turn in turns]
        assert chat.encode_prompts(template, CODEC, turns, 1000) == expected


def test_turns_outside_the_window_are_left_out(chat: ChatTokenizer) -> None:
    ids = chat.encode_prompt(PromptTemplate(history=1), CODEC, "now", TURNS, 1000)
    assert "seen 1" not in chat.tokenizer.decode(ids)
    assert "seen 2" in chat.tokenizer.decode(ids)


def test_a_prompt_that_is_too_long_without_history_is_an_error_with_its_length(chat: ChatTokenizer) -> None:
    bare = chat.encode_prompt(PromptTemplate(), CODEC, "now", (), 1000)
    assert chat.encode_prompt(PromptTemplate(history=3), CODEC, "now", TURNS, len(bare)) == bare
    with pytest.raises(ValueError, match=rf"max_prompt_tokens is {len(bare) - 1}; .* take {len(bare)} tokens"):
        chat.encode_prompt(PromptTemplate(history=3), CODEC, "now", TURNS, len(bare) - 1)


# -- answers ----------------------------------------------------------------------------------------------------------


def test_the_text_of_an_answer_keeps_tags_and_loses_only_the_end_of_turn(chat: ChatTokenizer) -> None:
    ids = chat.encode_text("<think>a</think><answer>UP</answer><|im_end|>")
    assert chat.decode(ids) == "<think>a</think><answer>UP</answer>"
    assert chat.decode(chat.encode_text("UP<|im_end|><|pad|>DOWN")) == "UP<|im_end|><|pad|>DOWN"
    assert chat.decode([]) == ""


def test_answers_stop_at_the_end_of_turn_and_at_a_stop_text_of_one_token(chat: ChatTokenizer) -> None:
    assert chat.stop_ids() == chat.stop_ids(None) == {chat.eos_id}
    assert chat.stop_ids("</answer>") == {chat.eos_id, *chat.encode_text("</answer>")}
    assert chat.stop_ids("two tokens") == {chat.eos_id}


def test_the_token_that_the_template_puts_behind_an_answer_ends_it_too(tokenizer: Any) -> None:
    tokenizer.eos_token = "<|bos|>"
    begin, end = tokenizer.convert_tokens_to_ids(["<|bos|>", "<|im_end|>"])
    assert ChatTokenizer(tokenizer).stop_ids() == {begin, end}


def test_padding_falls_back_to_the_end_token_and_needs_one_of_them(tokenizer: Any) -> None:
    assert ChatTokenizer(tokenizer).pad_id == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert ChatTokenizer(tokenizer).pad_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert ChatTokenizer(tokenizer).pad_id == tokenizer.convert_tokens_to_ids("<|im_end|>")  # of the template
    with pytest.raises(ValueError, match="neither a pad token nor an end token"):
        ChatTokenizer(tokenizer, "plain")


def test_an_unknown_name_is_one_sentence_with_that_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"language_model\.name is '.*'; it must be a hub name or a local folder"):
        ChatTokenizer.from_pretrained(str(tmp_path / "none"))


def test_it_can_be_copied_and_sent_to_another_process(chat: ChatTokenizer) -> None:
    assert pickle.loads(pickle.dumps(chat)).encode_chat(CHAT) == copy.deepcopy(chat).encode_chat(CHAT)


def test_prompts_do_not_depend_on_the_date(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} " + tokenizer.chat_template
    assert text(ChatTokenizer(tokenizer)).startswith("26 Jul 2024 <|im_start|>system")


def test_half_of_a_surrogate_pair_is_encoded_as_a_question_mark(chat: ChatTokenizer) -> None:
    """JSON may contain one, and UTF-8 cannot."""
    for texts in (("a \ud83d b", "a ? b"), ("<|im_end|> \ud83d", "<|im_end|> ?")):
        broken, plain = (chat.encode_chat([{"role": "user", "content": text}]) for text in texts)
        assert broken == plain
        assert chat.encode_observation(texts[0]) == chat.encode_observation(texts[1])
        assert chat.encode_texts(texts)[0] == chat.encode_texts(texts)[1]
    assert isinstance(observation_key("\ud83d"), int)

"""Folders whose tokenizer, chat template or generation config differ from the embedded model's."""

import itertools
import random

import numpy as np
import odd_models as odd
import pytest
import torch

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import Responses
from lrl.lm.model import LanguageModel
from lrl.lm.tokenizer import ChatTokenizer
from lrl.policies.head import HeadPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import PastTurn, RandomKeys, SamplingConfig

CODEC = FrozenLakeCodec()
SYSTEM, USER = {"role": "system", "content": "Play."}, {"role": "user", "content": "row 1"}
TURNS = [SYSTEM, USER, {"role": "assistant", "content": "UP"}, {"role": "user", "content": "row 2"}]
CHATML = "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nrow 1<|im_end|>\n<|im_start|>assistant\n"
MERGED = "<|im_start|>user\nPlay.\n\nrow 1<|im_end|>\n<|im_start|>assistant\n"
PLAIN = "Play.\n\nuser: row 1\nassistant:"

# name: vocabulary, template, chat_template, generation config; then the prompt, the end tokens (first the one that ends
# a demonstration) and the open tag
FOLDERS = {
    "qwen": ("qwen", odd.CHATML, "auto", None, CHATML, ["<|im_end|>"], ""),
    "qwen_base": ("qwen_base", odd.CHATML, "auto", None, CHATML, ["<|im_end|>", "<|endoftext|>"], ""),
    "qwen_plain": ("qwen_base", odd.CHATML, "plain", ["<|im_end|>"], PLAIN, ["<|endoftext|>", "<|im_end|>"], ""),
    "qwen3_thinking": ("qwen", odd.QWEN3_THINKING, "auto", None, CHATML + "<think>\n", ["<|im_end|>"], "<think>\n"),
    "qwen3_silent": ("qwen", odd.QWEN3_SILENT, "auto", None, CHATML + "<think>\n\n</think>\n\n", ["<|im_end|>"], ""),
    "nemotron": ("qwen", odd.NEMOTRON, "auto", None, CHATML + "<think>\n", ["<|im_end|>"], "<think>\n"),
    "glm": ("qwen", odd.GLM, "auto", None, "<|system|>\nPlay.<|user|>\nrow 1<|assistant|>", ["<|im_end|>"], ""),
    "answer_tag": ("qwen", odd.ANSWER_TAG, "auto", None, CHATML + "<answer>", ["<|im_end|>"], "<answer>"),
    "system_dropped": ("qwen", odd.DROPS_SYSTEM, "auto", None, MERGED, ["<|im_end|>"], ""),
    "one_turn": ("qwen", odd.ONE_TURN, "auto", None, CHATML, ["<|im_end|>"], ""),
    "raises_on_turns": ("qwen", odd.RAISES_ON_TURNS, "auto", None, CHATML, ["<|im_end|>"], ""),
    "role_tags": (
        "qwen",
        odd.ROLE_TAGS,
        "auto",
        None,
        "<system>Play.</system><user>row 1</user><assistant>",
        ["<|im_end|>"],
        "",
    ),
    "deepseek_r1": (
        "deepseek",
        odd.DEEPSEEK_R1,
        "auto",
        None,
        "<|begin|>Play.<|User|>row 1<|Assistant|><think>\n",
        ["<|end|>"],
        "<think>\n",
    ),
    "gpt2": ("gpt2", None, "plain", None, PLAIN, ["<|endoftext|>"], ""),
    "dialogpt": ("gpt2", odd.DIALOGPT, "auto", None, "Play.<|endoftext|>row 1<|endoftext|>", ["<|endoftext|>"], ""),
    "llama3": (
        "llama3",
        odd.LLAMA3,
        "auto",
        ["<|end_of_text|>", "<|eot_id|>", "<|im_end|>"],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nPlay.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nrow 1<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ["<|eot_id|>", "<|end_of_text|>", "<|im_end|>"],
        "",
    ),
    "llama3_chatml": (
        "llama3",
        None,
        "chatml",
        "<|eot_id|>",
        "<|begin_of_text|>" + CHATML,
        ["<|im_end|>", "<|end_of_text|>", "<|eot_id|>"],
        "",
    ),
    "llama3_plain": ("llama3", None, "plain", None, "<|begin_of_text|>" + PLAIN, ["<|end_of_text|>"], ""),
    "two_bos": (
        "llama3",
        "{{ bos_token }}{{ bos_token }}" + odd.CHATML,
        "auto",
        None,
        "<|begin_of_text|>" + CHATML,
        ["<|im_end|>", "<|end_of_text|>"],
        "",
    ),
    "two_bos_without_a_rule": (
        "gpt2",
        "{{ bos_token }}{{ bos_token }}" + odd.CHATML,
        "auto",
        None,
        "<|endoftext|>" + CHATML,
        ["<|endoftext|>"],
        "",
    ),
    "mistral": ("llama2", odd.MISTRAL, "auto", None, "<s>[INST] Play.\n\nrow 1 [/INST]", ["</s>"], ""),
    "llama2_plain": ("llama2", None, "plain", None, "<s>" + PLAIN, ["</s>"], ""),
    "adds_both_plain": ("adds_both", None, "plain", None, "<s>" + PLAIN, ["</s>"], ""),
    "gemma": (
        "gemma",
        odd.GEMMA,
        "auto",
        ["<eos>", "<end_of_turn>"],
        "<bos><start_of_turn>user\nPlay.\n\nrow 1<end_of_turn>\n<start_of_turn>model\n",
        ["<end_of_turn>", "<eos>"],
        "",
    ),
    "gemma_content": ("gemma", None, "content", None, "<bos>Play.\nrow 1\n", ["<eos>"], ""),
    "endless": ("endless", None, "plain", None, PLAIN, ["<|pad|>"], ""),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that loads the tokenizer of a folder; folder and tokenizer are made once."""
    made = {}

    def load(name):
        if name not in made:
            vocabulary, template, chat_template, generation, *_ = FOLDERS[name]
            folder = odd.save_odd_folder(tmp_path_factory.mktemp("odd") / name, vocabulary, template, generation)
            made[name] = ChatTokenizer.from_pretrained(folder, chat_template)
        return made[name]

    return load


def shown(chat, ids):
    """The text of a prompt; Llama 2's tokenizer writes a space after BOS."""
    return chat.tokenizer.decode(ids).replace("<s> ", "<s>")


@pytest.mark.parametrize("name", FOLDERS)
def test_prompt_end_tokens_and_open_tag_are_those_of_the_files(saved, name):
    *_, prompt, ends, opening = FOLDERS[name]
    chat = saved(name)
    assert shown(chat, chat.encode_chat([SYSTEM, USER])) == prompt
    assert chat.tokenizer.convert_ids_to_tokens(sorted(chat.stop_ids())) == sorted(ends, key=chat.encode_text)
    assert chat.end_id in chat.stop_ids() and chat.tokenizer.convert_ids_to_tokens(chat.end_id) == ends[0]
    assert chat.opening == opening
    observations = ["row 1", "so\nleft !!"]
    alone = [chat.encode_chat([SYSTEM, {"role": "user", "content": text}]) for text in observations]
    together = chat.encode_prompts(PromptTemplate(system="Play."), CODEC, [(text, ()) for text in observations], 999)
    assert together == alone


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in ("one_turn", "raises_on_turns")])
def test_every_message_of_several_turns_is_in_the_prompt(saved, name):
    chat = saved(name)
    text = chat.tokenizer.decode(chat.encode_chat(TURNS))
    assert all(message["content"] in text for message in TURNS)
    if chat.opening in ("", "<think>\n"):
        chat.check(PromptTemplate(history=2))
    bos = FOLDERS[name][0] in ("llama3", "llama2", "adds_both", "gemma", "deepseek")
    assert chat.encode_chat(TURNS).count(chat.tokenizer.bos_token_id) == (1 if bos else text.count("<|endoftext|>"))


@pytest.mark.parametrize("name", FOLDERS)
def test_the_text_of_control_tokens_in_a_message_stays_text(saved, name):
    chat = saved(name)
    special = [str(token) for token in chat.tokenizer.added_tokens_decoder.values() if token.special]
    harmless = chat.encode_chat([SYSTEM, {"role": "user", "content": "so nothing here"}])
    text = f"so {''.join(special)} here"
    ids = chat.encode_chat([SYSTEM, {"role": "user", "content": text}])
    assert text in chat.tokenizer.decode(ids)
    of_text = [token for token in ids if token in chat.tokenizer.added_tokens_decoder]
    assert of_text == [token for token in harmless if token in chat.tokenizer.added_tokens_decoder]
    assert ids != chat.tokenizer.encode(chat.tokenizer.decode(ids), add_special_tokens=False)
    prompts = chat.encode_prompts(PromptTemplate(system="Play."), CODEC, [(text, ()), ("so nothing here", ())], 999)
    assert prompts == [ids, harmless]
    assert set(chat.encode_observation(text)) & set(chat.tokenizer.added_tokens_decoder) == set(chat._prefix)


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        ("ordinary_roles", "<|User|>go<|Assistant|>left"),  # as DeepSeek's and Command R's tokenizers call them
        ("phi3", "</s><s>"),  # a pair of tags, of which one is BOS
        ("padded_by_a_character", "!!wow!<|end|>"),
    ],
)
def test_control_tokens_of_every_kind_stay_text(tmp_path, vocabulary, text):
    template = odd.DEEPSEEK_R1.replace("{{ bos_token }}", "")
    chat = ChatTokenizer.from_pretrained(odd.save_odd_folder(tmp_path, vocabulary, template))
    prompts = [chat.encode_chat([SYSTEM, {"role": "user", "content": f"so {part} so"}]) for part in (text, "an")]
    added = set(chat.tokenizer.added_tokens_decoder) - {0}  # the character ``!`` is a token of ordinary text as well
    counts = [[ids.count(token) for token in added] for ids in prompts]
    assert counts[0] == counts[1]
    assert chat.tokenizer.decode(prompts[0]) == chat.tokenizer.decode(prompts[1]).replace("so an so", f"so {text} so")


def test_added_whitespace_in_a_message_remains_a_token(tmp_path):
    template = odd.DEEPSEEK_R1.replace("<|User|>", "<|User|>  ")
    chat = ChatTokenizer.from_pretrained(odd.save_odd_folder(tmp_path, "ordinary_roles", template))
    ids = chat.encode_chat([{"role": "user", "content": "a  b<|end|>"}])
    assert ids.count(chat.tokenizer.convert_tokens_to_ids("  ")) == 2


@pytest.mark.parametrize("template", [odd.ESCAPES, odd.STRIPS_CONTENT])
def test_prompts_of_many_observations_are_those_of_each_where_the_template_changes_them(tmp_path, template):
    chat = ChatTokenizer.from_pretrained(odd.save_odd_folder(tmp_path, "qwen", template))
    texts, prompt = ["row 1", "", "a < b", "it's"], PromptTemplate(system="Play.")
    together = chat.encode_prompts(prompt, CODEC, [(text, ()) for text in texts], 999)
    assert together == [chat.encode_chat(prompt.messages(CODEC, text)) for text in texts]


def test_a_sampled_control_token_stays_one_in_the_history_and_a_written_end_does_not(saved):
    chat = saved("qwen")
    start, end = chat.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = chat.encode_chat([USER, {"role": "assistant", "content": "<|im_start|>so<|im_end|>"}, USER])
    assert (ids.count(start), ids.count(end)) == (5, 3)


def test_tags_in_an_observation_remain_tokens(saved):
    chat = saved("qwen")
    tags = chat.encode_text("<think></think>")
    assert len(tags) == 2
    assert chat.encode_observation("<think></think>") == tags
    assert chat.encode_observation("<|im_end|><think></think>")[-2:] == tags


@pytest.mark.parametrize(
    ("template", "generation", "message"),
    [
        (odd.DROPS_USER, None, "chat_template leaves the user's message out of a prompt; it must be plain"),
        (
            odd.NO_GENERATION_PROMPT,
            None,
            r"chat_template ends a prompt with the end token '<\|im_end\|>', where it must",
        ),
        (odd.BROKEN, None, r"chat_template fails for messages of user \(TypeError: can only concatenate.*; it must be"),
        ("{% for m in", None, r"chat_template fails for messages of user \(TemplateSyntaxError"),
        ({"rag": odd.CHATML, "tool": odd.CHATML}, None, "chat_template is 'auto', but this tokenizer has several"),
        (odd.CHATML, "{", r"generation_config\.json is damaged \("),
        (
            odd.CHATML,
            '{"eos_token_id": ["a"]}',
            r"generation_config\.json has eos_token_id \['a'\]; it must be a token",
        ),
    ],
)
def test_an_unusable_folder_raises_one_sentence(tmp_path, template, generation, message):
    folder = odd.save_odd_folder(tmp_path, "qwen", template, generation)
    with pytest.raises(ValueError, match=message):
        ChatTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "template", "message"),
    [
        (
            "one_turn",
            {"history": 1},
            r"leaves out a message \(user\) of several turns; prompt.history and prompt.num_e",
        ),
        ("raises_on_turns", {"num_examples": 1}, r"fails for messages of system, user.*one turn only.*must be 0"),
        (
            "qwen3_thinking",
            {"response_format": "direct"},
            "ends a prompt with '<think>', with which no response of the f",
        ),
        ("nemotron", {"response_format": "direct"}, "ends a prompt with '<think>', with which no response of the f"),
        ("answer_tag", {"response_format": "think_answer"}, "ends a prompt with '<answer>', with which no response"),
        ("deepseek_r1", {"response_format": "final_answer"}, "must be plain, content, chatml or the path of a Jinja"),
    ],
)
def test_prompts_that_the_template_cannot_write_raise_at_load(saved, name, template, message):
    with pytest.raises(ValueError, match=message):
        saved(name).check(PromptTemplate(**template))


def test_a_conversation_that_the_template_would_cut_raises(saved):
    with pytest.raises(ValueError, match=r"leaves out a message \(user\) of several turns; there must be one turn"):
        saved("one_turn").encode_chat(TURNS)


def test_a_template_that_leaves_out_reasoning_is_told(saved, caplog):
    saved("qwen").check(PromptTemplate(history=1))
    assert not caplog.messages
    saved("qwen3_thinking").check(PromptTemplate(history=1))
    assert "leaves the reasoning of past turns and examples out of a prompt" in caplog.text


def test_a_model_without_end_token_is_reported(tmp_path, caplog):
    chat = ChatTokenizer.from_pretrained(odd.save_odd_folder(tmp_path, "endless"), "plain")
    assert "tokenizer, chat template and generation_config.json name no end token" in caplog.text
    assert chat.stop_ids() == {chat.pad_id} == {chat.end_id}


@pytest.mark.parametrize("ends", ["-1", "[-1, 99999]"])
def test_end_tokens_that_the_tokenizer_does_not_have_do_not_count(tmp_path, ends):
    folder = odd.save_odd_folder(tmp_path, "endless", None, f'{{"eos_token_id": {ends}}}')
    chat = ChatTokenizer.from_pretrained(folder, "plain")
    assert chat.stop_ids() == {chat.pad_id} == {chat.tokenizer.pad_token_id}


def test_end_tokens_of_the_model_config_count_where_there_is_no_generation_config(tmp_path):
    folder = odd.save_odd_folder(tmp_path, "qwen_base", None)
    ends = [2, *ChatTokenizer.from_pretrained(folder, "plain").tokenizer.added_tokens_decoder]
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "eos_token_id": {ends}}}')
    assert ChatTokenizer.from_pretrained(folder, "plain").stop_ids() == set(ends[1:])


def test_a_closed_tag_at_the_end_of_a_prompt_is_no_opening(tmp_path):
    chat = ChatTokenizer.from_pretrained(odd.save_odd_folder(tmp_path, "qwen", odd.NO_THINKING))
    assert chat.opening == ""
    chat.check(PromptTemplate(response_format="direct"))


def test_a_template_that_does_not_open_the_turn_of_the_assistant_is_told(tmp_path, caplog):
    ChatTokenizer.from_pretrained(odd.save_odd_folder(tmp_path, "qwen", odd.VICUNA))
    assert "ignores add_generation_prompt: past responses follow" in caplog.text and "ASSISTANT: '" in caplog.text


def test_texts_that_the_tokenizer_cannot_write_are_told(tmp_path, caplog):
    """Its pieces have no byte of the first stop text, and its words are in lower case."""
    chat = lower_case_words(tmp_path)
    for stop in ("停", "Left"):
        caplog.clear()
        chat.check(PromptTemplate(response_format="direct", stop=stop))
        assert f"prompt.stop is {stop!r}, which this tokenizer cannot write" in caplog.text
        ends = chat.stops(stop)
        assert chat.stop_ids(stop) == {chat.eos_id} and ends is not None
        assert not any(ends([token]) for token in range(len(chat.tokenizer)))
    caplog.clear()
    chat.check(PromptTemplate(response_format="direct", stop="left"))
    assert not caplog.text and len(chat.stop_ids("left")) == 2
    folder = odd.add_model(str(tmp_path))
    policy = TextPolicy(
        LanguageModelConfig(name=folder, chat_template="plain"), PromptTemplate(), SamplingConfig(max_new_tokens=40)
    )
    policy.connect(CODEC)
    policy.configure()
    assert "cannot represent the response '<think></think><answer>LEFT</answer>': it becomes '<unk>" in caplog.text


def lower_case_words(folder):
    """Tokenizer of four words in lower case."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<unk>", "</s>", "left", "a"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(folder)
    return ChatTokenizer.from_pretrained(str(folder), "plain")


def test_end_tokens_that_transformers_took_from_a_default_count_only_if_they_are_added_tokens(tmp_path):
    folder = odd.save_odd_folder(tmp_path, "qwen", generation='{"eos_token_id": [2, 256], "_from_model_config": true}')
    chat = ChatTokenizer.from_pretrained(folder)
    added = [token for token in (2, 256) if token in chat.tokenizer.added_tokens_decoder]
    assert chat.stop_ids() == {chat.eos_id, *added}


# -- stop texts -------------------------------------------------------------------------------------------------------

STOPS = ["</answer>", "Stop!", "!", "停", "完了。", "🏁", "答案：🏁!", "é", "end ", " \n", 'n"a']


def ends_at(chat, ids, stop_text):
    """The number of tokens after which the text first contains the stop text, by decoding everything every time."""
    return next((n for n in range(1, len(ids) + 1) if stop_text in chat.decode(ids[:n])), None)


@pytest.mark.parametrize("stop_text", STOPS)
@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama2_plain"])
def test_a_response_stops_where_its_text_first_contains_the_stop_text(saved, name, stop_text):
    chat, rng = saved(name), random.Random(stop_text)
    vocabulary = [token for token in range(len(chat.tokenizer)) if token not in chat.tokenizer.added_tokens_decoder]
    stop, found = chat.encode_text(stop_text), 0
    for case in range(12):
        noise = [rng.choice(vocabulary) for _ in range(case)]
        around = [chat.encode_text(f"a{'日本' * case}{stop_text}!!an"), [*noise, *stop, 0], [0] * case + stop]
        for ids in (*around, [*chat.encode_text(stop_text * 2)[1:], *noise, *stop]):
            ends = chat.stops(stop_text)
            seen = next((n for n in range(1, len(ids) + 1) if ends(ids[:n])), None)
            assert seen == ends_at(chat, ids, stop_text), (ids, chat.decode(ids))
            found += seen is not None
    assert found > 20


def test_decoding_ends_at_a_stop_text_of_bytes(tmp_path):
    """A model whose tokens are given: it writes bytes of two characters and goes on after them."""
    folder = odd.add_model(odd.save_odd_folder(tmp_path, "gpt2", odd.CHATML))
    policy = TextPolicy(
        LanguageModelConfig(name=folder),
        PromptTemplate(response_format="direct", stop="停"),
        SamplingConfig(max_new_tokens=12),
    )
    policy.connect(CODEC)
    policy.configure()
    script = policy.language_model.tokenizer.encode_text("!停 and more")
    head = policy.language_model.model.get_output_embeddings()
    steps = itertools.count()

    def scripted(module, args, out):
        logits = torch.full_like(out, -100.0)
        logits[..., script[next(steps)]] = 100.0
        return logits

    handle = head.register_forward_hook(scripted)
    decisions = policy.act(["row"], [()], keys(1), policy.sampling)
    handle.remove()
    assert decisions.actions == ["!停"]
    assert decisions.response_mask.sum().item() == len(policy.language_model.tokenizer.encode_text("!停"))


def keys(rows):
    env = np.arange(rows)
    return RandomKeys(seed=0, purpose="test", collection=0, env=env, turn=np.zeros_like(env))


# -- policies ---------------------------------------------------------------------------------------------------------


class ScriptedGenerator:
    """Generates the same tokens for every prompt."""

    def __init__(self, ids):
        self.ids = torch.tensor([ids])

    def generate(self, prompts, uniforms, sampling):
        ids = self.ids.repeat(len(prompts), 1)
        return Responses(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), logprobs=torch.zeros(ids.shape))


@pytest.mark.parametrize(("vocabulary", "template"), [("qwen", odd.QWEN3_THINKING), ("deepseek", odd.DEEPSEEK_R1)])
def test_a_response_continues_the_tag_that_its_prompt_opens(tmp_path, vocabulary, template):
    folder = odd.add_model(odd.save_odd_folder(tmp_path, vocabulary, template))
    policy = TextPolicy(LanguageModelConfig(name=folder), PromptTemplate(history=1), SamplingConfig(max_new_tokens=40))
    policy.connect(CODEC)
    policy.configure()
    tokenizer = policy.language_model.tokenizer
    sampled = tokenizer.encode_text("why</think><answer>UP</answer>")
    policy.generator = ScriptedGenerator(sampled)
    decisions = policy.act(["row"], [()], keys(1), policy.sampling)
    assert decisions.actions == ["<think>\nwhy</think><answer>UP</answer>"]
    assert get_response_format("think_answer").extract(decisions.actions[0]) == "UP"
    written = policy.write("UP", "why")
    assert (
        policy.encode_response(written) == policy.encode_response(decisions.actions[0]) == [*sampled, tokenizer.end_id]
    )
    with pytest.raises(ValueError, match="demonstrated response is 'UP'; it must begin with '<think>'"):
        policy.encode_response("UP")


def test_a_demonstration_ends_where_sampling_would(saved, tmp_path):
    folder = odd.add_model(odd.save_odd_folder(tmp_path, "gemma", odd.GEMMA, ["<eos>", "<end_of_turn>"]))
    prompt = PromptTemplate(response_format="direct")
    policy = TextPolicy(LanguageModelConfig(name=folder), prompt, SamplingConfig(max_new_tokens=4))
    policy.connect(CODEC)
    policy.configure()
    tokenizer = policy.language_model.tokenizer
    end = tokenizer.encode_text("<end_of_turn>")[-1]
    assert policy.encode_response("UP") == [*tokenizer.encode_text("UP"), end]
    for tail in ("<end_of_turn>", "<end_of_turn>\n<start_of_turn>user"):
        assert policy.encode_response(f"UP{tail}") == [*tokenizer.encode_text("UP"), end]
    assert {end, tokenizer.end_id} <= tokenizer.stop_ids()


def test_an_added_token_that_ends_the_turns_of_the_template_ends_responses(tmp_path):
    folder = odd.add_model(odd.save_odd_folder(tmp_path, "gpt2", None))
    added = ["<|im_start|>", "<|im_end|>"]
    model = LanguageModel(LanguageModelConfig(name=folder, chat_template="chatml", added_tokens=added))
    model.configure()
    end = model.tokenizer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.tokenizer.end_id == end and model.tokenizer.stop_ids() == {end, model.tokenizer.eos_id}
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "so <|im_end|>"}])
    assert ids.count(end) == 1


def test_policies_check_the_template_when_they_are_configured(tmp_path):
    folder = odd.add_model(odd.save_odd_folder(tmp_path, "qwen", odd.QWEN3_THINKING))
    model, direct = LanguageModelConfig(name=folder), PromptTemplate(response_format="direct")
    for policy in (TextPolicy(model, direct, SamplingConfig()), ScoringPolicy(model, direct)):
        policy.connect(CODEC)
        with pytest.raises(ValueError, match="ends a prompt with '<think>'"):
            policy.configure()


def test_a_head_reads_observations_that_begin_with_the_bos_token(tmp_path):
    folder = odd.add_model(odd.save_odd_folder(tmp_path, "llama3", odd.LLAMA3))
    policy, envs = HeadPolicy(LanguageModelConfig(name=folder)), GymnasiumEnvs("CartPole-v1")
    policy.connect(envs.codec)
    policy.connect_spaces(*envs.spaces)
    policy.configure()
    ids = policy.encode_observation("row <|eot_id|>")
    bos, end = policy.language_model.tokenizer.tokenizer.convert_tokens_to_ids(["<|begin_of_text|>", "<|eot_id|>"])
    assert ids[0] == bos and ids.count(bos) == 1 and end not in ids


# -- histories that do not fit ----------------------------------------------------------------------------------------


def test_a_history_that_does_not_fit_is_encoded_a_few_times_and_kept_once(saved, monkeypatch):
    chat, template = saved("qwen"), PromptTemplate(system="Play.", history=60)
    turns = tuple(PastTurn(f"row {n} " + "a b " * 20, "UP") for n in range(60))
    lengths = [len(chat.encode_prompt(template, CODEC, "row", turns[dropped:], 10**6)) for dropped in range(61)]
    chat._cache.clear()
    calls, encode = [], chat.encode_text
    monkeypatch.setattr(chat, "encode_text", lambda text: calls.append(text) or encode(text))
    for limit in (lengths[-1], 500, 1000, lengths[1], lengths[0]):
        calls.clear()
        expected = next(dropped for dropped, length in enumerate(lengths) if length <= limit)
        assert len(chat.encode_prompt(template, CODEC, "row", turns, limit)) == lengths[expected]
        assert len(calls) <= 8
    assert len(chat._cache) == 5

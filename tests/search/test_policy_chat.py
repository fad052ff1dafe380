"""Tests of a text policy as a chat model."""

import pytest
import torch

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.search.in_context import PolicyChatModel
from lrl.search.prompted import PromptedSearcher
from lrl.search.searchers import ParameterSpace
from lrl.types import Decisions, SamplingConfig

CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("You are at S.", "You are at G.")]


@pytest.fixture
def chat():
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(response_format="final_answer"), SamplingConfig())
    policy.connect(FrozenLakeCodec())
    policy.language_model.configure()
    chat = PolicyChatModel("a run")
    chat.policy = policy
    return chat


def test_a_response_depends_on_its_seed_only(chat):
    sampling = SamplingConfig(max_new_tokens=6)
    both = chat.complete(CONVERSATIONS, sampling, [3, 4])
    (alone,) = chat.complete(CONVERSATIONS[1:], sampling, [4])
    assert alone == both[1]
    assert both[0].prompt_tokens == len(chat.policy.encode("You are at S.", ()))


def test_a_response_that_ends_with_the_end_token_is_not_truncated(chat, monkeypatch):
    end = chat.policy.language_model.tokenizer.eos_id
    ids = torch.tensor([[end + 1, end], [end + 1, end + 2]])

    def act(texts, memory, keys, sampling):
        return Decisions(
            actions=["a", "b"],
            inputs={"response_ids": ids},
            response_mask=torch.ones_like(ids, dtype=torch.bool),
            logprobs=torch.zeros(2, 2),
            memory=[(), ()],
        )

    monkeypatch.setattr(chat.policy, "act", act)
    responses = chat.complete(CONVERSATIONS, SamplingConfig(max_new_tokens=2), [0, 1])
    assert [response.finish_reason for response in responses] == ["stop", "length"]


def test_a_checkpoint_of_another_policy_raises(monkeypatch):
    monkeypatch.setattr("lrl.search.in_context.load_policy", lambda name: type("Loaded", (), {"policy": 1}))
    with pytest.raises(ValueError, match="chat_model.checkpoint is 'runs/x', a int; it must be a TextPolicy"):
        _ = PolicyChatModel("runs/x").policy


def test_a_conversation_fits_into_the_prompt_and_a_reply_into_the_response(chat):
    conversation, sampling = CONVERSATIONS[0], SamplingConfig(max_new_tokens=6)
    length = len(chat.policy.encode("You are at S.", ()))
    chat.policy.trunk.max_prompt_tokens = length
    assert chat.fits(conversation, sampling)
    reply = len(chat.policy.encode_response("left"))  # the end token included
    assert chat.fits(conversation, SamplingConfig(max_new_tokens=reply), "left")
    assert not chat.fits(conversation, SamplingConfig(max_new_tokens=reply - 1), "left")
    chat.policy.trunk.max_prompt_tokens = length - 1
    assert not chat.fits(conversation, sampling)
    chat.policy.trunk.max_prompt_tokens, chat.policy.language_model.context_length = length, length + 5
    assert not chat.fits(conversation, sampling) and chat.fits(conversation, SamplingConfig(max_new_tokens=5))


def test_a_missing_checkpoint_is_reported_by_its_key_before_the_first_request(tmp_path):
    said = "chat_model.checkpoint is '.*nowhere'; it must be a checkpoint, or a run directory that contains one"
    with pytest.raises(ValueError, match=said) as error:
        PromptedSearcher(PolicyChatModel(str(tmp_path / "nowhere"))).setup(ParameterSpace(size=2), 0, 5)
    assert "--checkpoint" not in str(error.value)
    torch.save({"lrl": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="^chat_model.checkpoint is '.*other.ckpt', which holds no config"):
        PolicyChatModel(str(tmp_path / "other.ckpt")).connect()

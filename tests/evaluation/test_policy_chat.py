"""A text policy as a chat model responds with the tokens that it samples, and says why a response ends."""

import pytest
import torch

from lrl.codecs.grid import FrozenLakeCodec
from lrl.evaluation.policy_chat import PolicyChatModel
from lrl.models.language_model import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts.template import PromptTemplate
from lrl.types import Decisions, SamplingConfig

CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("You are at S.", "You are at G.")]


@pytest.fixture
def chat():
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(response_format="final_answer"), SamplingConfig())
    policy.connect(FrozenLakeCodec())
    policy.language_model.configure()
    chat = PolicyChatModel("a run")
    chat._policy = policy
    return chat


def test_a_response_depends_on_its_seed_alone(chat):
    sampling = SamplingConfig(max_new_tokens=6)
    both = chat.complete(CONVERSATIONS, sampling, [3, 4])
    (alone,) = chat.complete(CONVERSATIONS[1:], sampling, [4])
    assert alone == both[1]
    assert both[0].prompt_tokens == len(chat.policy.encode("You are at S.", ()))


def test_a_response_whose_last_token_is_the_end_token_is_not_cut(chat, monkeypatch):
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


def test_a_checkpoint_of_another_policy_is_refused(monkeypatch):
    monkeypatch.setattr("lrl.evaluation.policy_chat.load_policy", lambda name: type("Loaded", (), {"policy": 1}))
    with pytest.raises(ValueError, match="checkpoint is 'runs/x', a int; it must be a TextPolicy"):
        _ = PolicyChatModel("runs/x").policy

"""Tests of the searcher that asks a language model."""

import json
import logging

import numpy as np
import pytest

from lrl.chat.model import ChatModel, Completion, ConversationTooLongError
from lrl.search.prompted import PromptedSearcher
from lrl.search.prompts import HistoryConfig, SearchPrompt
from lrl.search.searchers import ParameterSpace, Trial
from lrl.search.stand_in import HillClimbingChatModel
from lrl.types import SamplingConfig

SPACE = ParameterSpace(size=4)
OPTIMUM = np.array([2.0, -3.0, 0.5, 4.0])


class Scripted(ChatModel):
    """Chat model that replies with given texts in order, and limits the prompt in words."""

    name = "scripted"

    def __init__(self, *replies, words=10**6):
        self.replies, self.prompts, self.seeds = list(replies), [], []
        self.words, self.temperatures, self.usage = words, [], {}
        self.characters, self.rejected = 10**6, 0  # a longer prompt is rejected without a reply

    def fits(self, conversation, sampling, response=""):
        if len(response) > 4 * sampling.max_new_tokens:
            return False
        return len(conversation[-1]["content"].split()) <= self.words

    def report(self):
        return dict(self.usage)

    def complete(self, conversations, sampling, seeds):
        if len(conversations[0][-1]["content"]) > self.characters:
            self.rejected += 1
            raise ConversationTooLongError("the prompt is too long")
        self.temperatures.append(sampling.temperature)
        self.usage = {name: value + step for (name, value), step in zip(self.usage.items(), (2, 1, 0.5, 0))}
        self.prompts.append(conversations[0][-1]["content"])
        self.seeds += seeds
        text, reason = self.replies.pop(0), "stop"
        if text.startswith("CUT "):
            text, reason = text[4:], "length"
        return [Completion(text=text, finish_reason=reason, prompt_tokens=100, completion_tokens=10)]


def searcher_of(*replies, **settings):
    searcher = PromptedSearcher(Scripted(*replies), **settings)
    searcher.setup(ParameterSpace(size=2), 0, 5)
    return searcher


def played(parameters, value=1.0):
    return Trial(parameters=np.asarray(parameters, dtype=float), returns=np.array([value]), env_steps=1)


def test_a_rejected_reply_is_requested_again_with_the_reason_in_the_prompt():
    searcher = searcher_of("No.", "params[0]: 1", "params[0]: 7, params[1]: 0", "CUT 1, 2", "1.04 -2")
    assert searcher.ask().tolist() == [1.0, -2.0]  # rounded
    prompts = searcher.chat_model.prompts
    reasons = (
        "No parameters were found in the reply.",
        "1 values were given; there must be 2, and params[1] is missing.",
        "params[0] is 7; it must be between -6 and 6.",
        "The reply was cut at its maximum length: 1 values were given; there must be 2.",
    )
    assert "rejected" not in prompts[0] and "requests" not in searcher.metrics  # it counts none
    for prompt, reason in zip(prompts[1:], reasons, strict=True):
        assert prompt.endswith(f"was rejected: {reason} Correct that.")
    assert len(set(searcher.chat_model.seeds)) == 5
    taken = {"retries": 4, "duplicates": 0, "prompt_tokens": 500, "completion_tokens": 50, "failed": 0, "cached": 0}
    assert taken.items() <= dict(searcher.metrics).items()
    assert searcher.metrics["prompt_characters"] == sum(map(len, prompts))
    assert [one["rejected"] for one in searcher.replies] == [*reasons, ""]


def test_parameters_that_were_tried_are_rejected():
    searcher = searcher_of("1 2", "1.01 2", "1 2.1")
    searcher.tell(played([1, 2], 3.5))
    assert searcher.ask().tolist() == [1.0, 2.1] and searcher.metrics["duplicates"] == 2
    assert "These parameters were tried before, with f(params) 3.50." in searcher.chat_model.prompts[1]


def test_the_number_of_attempts_is_limited_and_on_failure_selects_what_follows():
    searcher = searcher_of(*["No."] * 9, max_tries=3)
    sentence = "scripted gave no usable proposal 1 in searcher.max_tries 3 replies; .* No parameters were found"
    with pytest.raises(ValueError, match=sentence):
        searcher.ask()
    assert len(searcher.chat_model.prompts) == 3
    searcher = searcher_of(*["No."] * 3, "1 2", max_tries=3, on_failure="random")
    assert SPACE.complaint([0, 0, *searcher.ask()]) == "" and searcher.metrics["failed"] == 1
    assert searcher.ask().tolist() == [1, 2] and searcher.metrics["failed"] == 0
    assert "This is proposal 2 of 5." in searcher.chat_model.prompts[-1]


def climb(searcher, iterations, told=()):
    """Search the maximum of a quadratic function, and return all proposals."""
    proposals = [proposal.tolist() for proposal in told]
    for _ in range(iterations):
        proposal = searcher.ask()
        proposals.append(proposal.tolist())
        searcher.tell(played(proposal, -float(((proposal - OPTIMUM) ** 2).sum())))
    return proposals


@pytest.mark.parametrize("style", ["indexed", "compact"])
def test_a_model_that_climbs_from_the_history_finds_the_maximum(style):
    histories = HistoryConfig(style=style), HistoryConfig(style=style, recent=1)
    distances = []
    for history in histories:
        searcher = PromptedSearcher(HillClimbingChatModel(), history=history)
        searcher.setup(SPACE, 1, 150)
        proposals = np.array(climb(searcher, 150))
        distances.append(((proposals - OPTIMUM) ** 2).sum(1).min())
    assert distances[0] < 0.5 < distances[1]  # without history there is nothing to climb from


def test_a_restored_search_has_the_same_history_and_proposals():
    def fresh():
        model = HillClimbingChatModel()
        searcher = PromptedSearcher(model, SearchPrompt(optimum=0.0), sampling=SamplingConfig(max_new_tokens=64))
        searcher.setup(SPACE, 7, 12)
        return searcher

    whole, half = fresh(), fresh()
    expected = climb(whole, 12)
    begun = climb(half, 5)
    resumed = fresh()
    resumed.load_state_dict(half.state_dict())
    assert begun + climb(resumed, 7) == expected
    assert resumed.entries == whole.entries
    other = PromptedSearcher(HillClimbingChatModel())
    other.setup(SPACE, 8, 12)
    assert climb(other, 5) != begun


def test_the_stand_in_proposes_legal_tables():
    searcher = PromptedSearcher(HillClimbingChatModel())
    table = ParameterSpace(size=6, actions=(1, 2, 3))
    searcher.setup(table, 0, 40)
    for _ in range(40):
        proposal = searcher.ask()
        assert table.complaint(proposal.tolist()) == "" and searcher.metrics["failed"] == 0
        searcher.tell(played(proposal, float((proposal == 2).sum())))
    assert max(entry.value for entry in searcher.entries) == 6


def test_the_stand_in_raises_for_prompts_that_it_does_not_support():
    for told in (0, 2):
        searcher = PromptedSearcher(HillClimbingChatModel(), history=HistoryConfig(style="integers"))
        searcher.setup(SPACE, 0, 40)
        for value in range(told):
            searcher.tell(played(np.full(SPACE.size, float(value)), 1.0))
        with pytest.raises(ValueError, match="style is integers, which the hill-climbing stand-in does not read"):
            searcher.ask()


def test_costs_of_proposals_are_counted_and_a_restored_search_continues_the_counts():
    def fresh(*replies):
        searcher = searcher_of(*replies)
        searcher.chat_model.usage = {"requests": 10, "retries": 3, "cost": 7.0, "cached": 0}  # by somebody else before
        searcher.setup(ParameterSpace(size=2), 0, 5)
        return searcher

    searcher = fresh("No.", "1 2", "1 3")
    searcher.ask()
    spent = {"requests": 4, "request_retries": 2, "cost": 1.0, "total_cost": 1.0}
    assert spent.items() <= dict(searcher.metrics).items()
    searcher.ask()
    spent = {"requests": 2, "request_retries": 1, "cost": 0.5, "total_cost": 1.5}
    assert spent.items() <= dict(searcher.metrics).items()
    restored = fresh("1 4")
    restored.load_state_dict(searcher.state_dict())
    restored.ask()
    assert (restored.metrics["cost"], restored.metrics["total_cost"]) == (0.5, 2.0)
    assert restored.usage == {"requests": 8, "retries": 4, "cost": 2.0, "cached": 0}


def test_costs_of_a_failed_request_are_counted():
    searcher = searcher_of()
    searcher.chat_model.usage = {"requests": 0, "retries": 0, "cost": 0.0}
    with pytest.raises(IndexError):
        searcher.ask()
    assert searcher.usage == {"requests": 2, "retries": 1, "cost": 0.5}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"describe_environment": True}, "describe_environment=True"),
        ({"optimum": 500.0}, "optimum=500.0"),
        ({"step_size": 2.0}, "step_size=2.0"),
        ({"step_size": None}, "step_size=None"),
    ],
)
def test_prompt_settings_that_style_integers_ignores_raise_one_sentence(prompt, said):
    with pytest.raises(
        ValueError, match=f"searcher.prompt is .*{said}.*, but history.style is integers, whose prompts contain"
    ):
        searcher_of(prompt=SearchPrompt(**prompt), history=HistoryConfig(style="integers"))


@pytest.mark.parametrize("style", ["integers", "compact"])
def test_a_repeated_greedy_request_is_sampled(style):
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=64)
    space = ParameterSpace(size=1 if style == "integers" else 2)
    proposals = ("1", "2") if style == "integers" else ("1 2", "1 3")
    searcher = searcher_of("No.", "No.", "No.", *proposals, history=HistoryConfig(style=style), sampling=greedy)
    searcher.setup(space, 0, 5)
    searcher.ask()
    temperatures = [0, 1, 1, 1] if style == "integers" else [0, 0, 1, 1]  # the first reason makes another prompt
    assert searcher.chat_model.temperatures == temperatures
    searcher.ask()
    assert searcher.chat_model.temperatures[-1] == 0


def test_the_least_useful_policies_are_left_out_until_the_prompt_fits(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    shown = {"value": ["4 = 4.00", "5 = 5.00", "6 = 9.00"], "time": ["6 = 9.00", "2 = 2.00", "3 = 3.00"]}
    for order, expected in shown.items():
        searcher = PromptedSearcher(Scripted("7", "8"), history=HistoryConfig(style="compact", order=order))
        searcher.setup(ParameterSpace(size=1, actions=tuple(range(10))), 0, 5)
        for action, value in ((6, 9), (4, 4), (5, 5), (2, 2), (3, 3)):
            searcher.tell(played([action], value))
        searcher.ask()
        assert searcher.metrics["shown"] == 5 and not caplog.messages
        searcher.chat_model.words = len(searcher.chat_model.prompts[0].split()) - 2 * 4 + 1  # of "3 = 3.00 (1)"
        searcher.tell(played([1], 1.0))
        searcher.ask()
        lines = [line.removesuffix(" (1)") for line in searcher.chat_model.prompts[1].splitlines() if " = " in line]
        assert searcher.metrics["shown"] == 3 and lines == (
            expected if order == "value" else [*expected[:1], "3 = 3.00", "1 = 1.00"]
        )
        (said,) = caplog.messages
        assert said.startswith("the prompt of scripted has room for 3 of the 6 policies that searcher.history shows")
        caplog.clear()


@pytest.mark.parametrize("order", ["value", "time"])
def test_after_a_rejected_long_prompt_later_prompts_have_fewer_policies(order):
    replies, space = ["41", "42", "43", "44"], ParameterSpace(size=1, actions=tuple(range(100)))
    settings = {"history": HistoryConfig(style="compact", order=order)}
    searcher = PromptedSearcher(Scripted(*replies), **settings)
    searcher.setup(space, 0, 60)
    for action in range(40):
        searcher.tell(played([action], float(action)))
    searcher.ask()
    assert searcher.metrics["shown"] == 40
    model = searcher.chat_model
    model.characters = len(model.prompts[0]) - 13 * 20  # of each policy, such as "39 = 39.00 (1)"
    searcher.ask()
    shown, rejected = searcher.metrics["shown"], model.rejected
    assert 5 < shown < 21 and 0 < rejected < 5 and "39 = 39.00 (1)" in model.prompts[-1], "the best one stays"
    again = PromptedSearcher(Scripted("43"), **settings)
    again.setup(space, 0, 60)
    again.load_state_dict(json.loads(json.dumps(searcher.state_dict())))
    for one in (searcher, again):
        one.ask()
        assert one.metrics["shown"] == shown
    assert model.rejected == rejected and model.prompts[-1] == again.chat_model.prompts[-1]
    model.characters = 10
    with pytest.raises(ValueError, match="the prompt is too long"):
        searcher.ask()


def test_a_prompt_or_reply_that_cannot_fit_raises_one_sentence_before_the_search():
    for words, tokens, said in (
        (
            5,
            64,
            "scripted has no room for a prompt with one policy of 2 parameters and a reply of sampling.max_new_tok",
        ),
        (10**6, 2, "searcher.sampling.max_new_tokens is 2, but scripted needs more to write 2 parameters; increase it"),
    ):
        searcher = PromptedSearcher(Scripted(words=words), sampling=SamplingConfig(max_new_tokens=tokens))
        with pytest.raises(ValueError, match=said):
            searcher.setup(ParameterSpace(size=2), 0, 5)


def test_a_prompt_that_becomes_too_long_for_one_policy_raises_one_sentence():
    searcher = searcher_of("1 2")
    searcher.tell(played([1, 2]))
    searcher.chat_model.words = 5
    with pytest.raises(ValueError, match="scripted has no room for a prompt with one policy of 2 parameters"):
        searcher.ask()


def test_an_unavailable_chat_model_raises_before_the_search():
    class Absent(Scripted):
        def connect(self):
            raise ValueError("chat_model.checkpoint is 'x'")

    with pytest.raises(ValueError, match="chat_model.checkpoint is 'x'"):
        PromptedSearcher(Absent()).setup(SPACE, 0, 5)

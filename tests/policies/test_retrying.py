"""Tests of the actor that samples a response again if it contains no legal action."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import usage_line
from lrl.policies.actor import Actor
from lrl.policies.retrying import InvalidRetryConfig, RetryingActor
from lrl.prompts import PromptTemplate
from lrl.types import Decisions, RandomKeys, SamplingConfig


class Scripted(Actor):
    """Actor whose response is a function of the observation, the temperature and the purpose of the random numbers."""

    response_format = "direct"
    writes_text = True
    greedy_is_reproducible = True

    def __init__(self, respond, writes_text=True, remembers=True):
        super().__init__()
        self.respond, self.calls, self.writes_text, self.remembers = respond, [], writes_text, remembers
        self.sampling, self.prompt = SamplingConfig(max_new_tokens=8), PromptTemplate(response_format="direct")
        self.connect(FrozenLakeCodec())

    def act(self, observations, memory, keys, sampling):
        self.calls.append((list(observations), keys, sampling))
        actions = [self.respond(text, sampling.temperature, keys.purpose) for text in observations]
        none = torch.zeros(len(actions), 0)
        memory = [(*history, action) if self.remembers else () for history, action in zip(memory, actions)]
        return Decisions(actions=actions, inputs={}, response_mask=none.bool(), logprobs=none, memory=memory)


def keys(rows):
    env = np.arange(10, 10 + rows)
    return RandomKeys(seed=0, purpose="test", collection=0, env=env, turn=np.arange(rows))


def act(actor, observations, temperature=0.0):
    return actor.act(observations, [()] * len(observations), keys(len(observations)), actor.sampling_at(temperature))


def test_only_rows_without_a_legal_action_are_sampled_again_with_other_random_numbers():
    inner = Scripted(lambda text, temperature, purpose: "LEFT" if text == "a" or purpose == "test 2" else "none")
    actor = RetryingActor(inner, InvalidRetryConfig(max_retries=3, temperature=0.7))
    decisions = act(actor, ["a", "b", "a", "c"])
    assert decisions.actions == ["LEFT"] * 4 and decisions.memory == [("LEFT",)] * 4
    asked = [(observations, sampling.temperature) for observations, _, sampling in inner.calls]
    assert asked == [(["a", "b", "a", "c"], 0.0), (["b", "c"], 0.7), (["b", "c"], 0.7)]
    names = [(own.purpose, own.env.tolist(), own.turn.tolist()) for _, own, _ in inner.calls]
    assert names[1:] == [("test 1", [11, 13], [1, 3]), ("test 2", [11, 13], [1, 3])]
    counts = {"asked": 4, "asked_again": 2, "further_responses": 4, "still_invalid": 0}
    assert actor.report() == {**counts, "invalid_retries": {"max_retries": 3, "temperature": 0.7}}


def test_responses_that_remain_invalid_are_passed_to_the_environment_and_counted():
    actor = RetryingActor(Scripted(lambda *_: "none"), InvalidRetryConfig(max_retries=2))
    assert act(actor, ["a"]).actions == ["none"]
    assert vars(actor.counts) == {"asked": 1, "asked_again": 1, "further_responses": 2, "still_invalid": 1}
    line = usage_line(actor.report())
    assert line == "1 prompts, 1 asked again for a legal action (2 further responses), 1 still without one"


def test_retries_help_a_greedy_policy_that_repeats_an_invalid_response():
    def respond(text, temperature, purpose):
        return "none" if temperature == 0 else "DOWN"

    envs = GymnasiumEnvs("FrozenLake-v1", max_invalid=3)
    for retries, invalid in ((0, 1.0), (1, 0.0)):
        inner = Scripted(respond)
        actor = RetryingActor(inner, InvalidRetryConfig(max_retries=retries))
        results = evaluate_policy(actor, envs, 4, 0, 4, actor.sampling_at(0.0))
        assert results.means()["invalid_action_rate"] == invalid


def test_greedy_first_responses_are_cached_until_the_next_evaluation():
    def respond(text, temperature, purpose):
        return "none" if temperature == 0 and "row 0" in text else "LEFT"

    inner, envs = Scripted(respond, remembers=False), GymnasiumEnvs("FrozenLake-v1")
    actor = RetryingActor(inner, InvalidRetryConfig(max_retries=2, temperature=0.5))
    for play in (1, 2):
        inner.calls.clear()
        evaluate_policy(actor, envs, 4, 0, 4, actor.sampling_at(0.0))
        first = [
            text for observations, _, sampling in inner.calls if sampling.temperature == 0 for text in observations
        ]
        again = [text for observations, _, sampling in inner.calls if sampling.temperature for text in observations]
        assert len(first) == len(set(first)) > 1
        assert len(again) == actor.counts.further_responses / play > len(first)


def test_a_change_of_the_prompt_empties_the_cache_of_greedy_responses():
    inner = Scripted(lambda *_: "LEFT", remembers=False)
    actor, envs = RetryingActor(inner), GymnasiumEnvs("FrozenLake-v1").make(1, "direct")
    actor.prepare(envs)
    for _ in range(2):
        act(actor, ["a"])
    assert len(inner.calls) == 1
    actor.prompt = PromptTemplate(response_format="direct", system="Play.")
    act(actor, ["a"])
    assert len(inner.calls) == 2
    actor.prepare(envs)
    act(actor, ["a"])
    actor.connect(FrozenLakeCodec())
    act(actor, ["a"])
    assert len(inner.calls) == 4
    envs.close()


def test_further_responses_use_the_given_sampling_except_for_the_temperature():
    inner = Scripted(lambda *_: "none")
    actor = RetryingActor(inner, InvalidRetryConfig(max_retries=1, temperature=0.5))
    asked = SamplingConfig(max_new_tokens=3, temperature=1.0, top_p=0.9)
    actor.act(["a"], [()], keys(1), asked)
    assert [sampling for _, _, sampling in inner.calls] == [asked, replace(asked, temperature=0.5)]


def test_the_prompt_is_that_of_the_wrapped_actor():
    actor = RetryingActor(Scripted(lambda *_: "LEFT"))
    other = PromptTemplate(response_format="direct", system="Play.")
    actor.prompt = other
    assert actor.actor.prompt is actor.prompt is other


@pytest.mark.parametrize(
    ("writes_text", "temperature", "complaint"),
    [
        (False, 0.3, "invalid_retries.max_retries is 10, but a Scripted writes no responses that could be invalid"),
        (
            True,
            0.0,
            "invalid_retries.temperature is 0, at which further responses would all be equal; it must be positive",
        ),
    ],
)
def test_retries_that_would_have_no_effect_raise(writes_text, temperature, complaint):
    with pytest.raises(ValueError, match=complaint):
        RetryingActor(Scripted(lambda *_: "LEFT", writes_text), InvalidRetryConfig(temperature=temperature))

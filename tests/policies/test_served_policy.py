"""Tests of the actor that plays through a chat model."""

import numpy as np
import pytest
from chat_server import ChatServer, empty, status, truncated

from lrl.chat.local import LocalChatModel
from lrl.chat.model import Completion
from lrl.chat.served import Prices, ServedChatModel
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import load_served, usage_line
from lrl.lm.config import LanguageModelConfig
from lrl.policies.retrying import InvalidRetryConfig, RetryingActor
from lrl.policies.served import ServedPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import PastTurn, RandomKeys, SamplingConfig

LAKE = GymnasiumEnvs("FrozenLake-v1")
ACTIONS = ("LEFT", "DOWN", "RIGHT", "UP")


class Scripted:
    """Chat model whose response is a function of the request; records all calls."""

    name = "scripted"

    def __init__(self, respond):
        self.respond, self.calls = respond, []

    def complete(self, conversations, sampling, seeds):
        self.calls.append((conversations, sampling, list(seeds)))
        return [
            Completion(
                text=self.respond(messages, sampling, seed), finish_reason="stop", prompt_tokens=1, completion_tokens=1
            )
            for messages, seed in zip(conversations, seeds, strict=True)
        ]


def policy_of(chat_model, retries=10, **prompt):
    policy = ServedPolicy(
        chat_model,
        PromptTemplate(**{"response_format": "direct", **prompt}),
        SamplingConfig(temperature=1.0, max_new_tokens=8),
    )
    policy = RetryingActor(policy, InvalidRetryConfig(max_retries=retries))
    policy.connect(FrozenLakeCodec())
    return policy


def keys(rows, env=None):
    env = np.arange(rows) if env is None else np.asarray(env)
    return RandomKeys(seed=0, purpose="test", collection=0, env=env, turn=np.zeros(len(env), dtype=np.int64))


def random_action(messages, sampling, seed):
    return ACTIONS[seed % 4]


# -- requests ----------------------------------------------------------------------------------------------------


def test_a_conversation_has_system_message_examples_history_and_observation():
    chat = Scripted(random_action)
    example = PastTurn("an example", "UP")
    policy = policy_of(chat, system="Play.", examples=(example,), history=1)
    decisions = policy.act(
        ["here"], [(PastTurn("long ago", "UP"), PastTurn("before", "DOWN"))], keys(1), policy.sampling
    )
    ((messages,), sampling, _) = chat.calls[0]
    assert [message["content"] for message in messages] == [
        "Play.", "an example", "UP", "before", "DOWN", "here",
    ]  # fmt: skip
    assert sampling == SamplingConfig(temperature=1.0, max_new_tokens=8)
    assert decisions.memory == [(PastTurn("here", decisions.actions[0]),)]
    assert decisions.logprobs.shape == (1, 0) and not decisions.response_mask.any()
    assert policy.prompt_text("here", ()) == "system: Play.\nuser: an example\nassistant: UP\nuser: here"


def test_a_response_depends_on_its_episode_and_turn_but_not_on_its_row():
    policy = policy_of(Scripted(random_action))
    all_rows = policy.act(["x"] * 8, [()] * 8, keys(8), policy.sampling).actions
    some = policy.act(["x"] * 3, [()] * 3, keys(3, env=[6, 1, 4]), policy.sampling).actions
    assert some == [all_rows[row] for row in (6, 1, 4)] and len(set(all_rows)) > 1


def test_at_temperature_0_equal_prompts_are_equal_requests():
    chat = Scripted(random_action)
    policy = policy_of(chat)
    actions = policy.act(["x", "y", "x"], [()] * 3, keys(3), policy.sampling_at(0.0)).actions
    seeds = chat.calls[0][2]
    assert seeds[0] == seeds[2] != seeds[1] and actions[0] == actions[2]


def test_text_after_the_end_of_a_response_is_dropped():
    policy = policy_of(
        Scripted(lambda *_: "<think>a</think><answer>UP</answer> Next turn: ..."), response_format="think_answer"
    )
    assert policy.act(["x"], [()], keys(1), policy.sampling).actions == ["<think>a</think><answer>UP</answer>"]
    assert policy.counts.asked_again == 0


# -- responses without a legal action ---------------------------------------------------------------------------------


def test_a_response_without_a_legal_action_is_sampled_again_at_the_configured_temperature():
    def respond(messages, sampling, seed):
        if messages[-1]["content"] == "easy":
            return "LEFT"
        return f"what? {seed}" if len(chat.calls) < 3 else "UP"

    chat = Scripted(respond)
    policy = policy_of(chat, system="", history=1)
    decisions = policy.act(["hard", "easy"], [(), ()], keys(2), policy.sampling)
    assert decisions.actions == ["UP", "LEFT"] and [len(call[0]) for call in chat.calls] == [2, 1, 1]
    assert [call[1].temperature for call in chat.calls] == [1.0, 0.3, 0.3]
    assert len({call[2][0] for call in chat.calls}) == 3  # with equal seeds a server might repeat its response
    assert decisions.memory[0] == (PastTurn("hard", "UP"),)
    assert vars(policy.counts) == {"asked": 2, "asked_again": 1, "further_responses": 2, "still_invalid": 0}


@pytest.mark.parametrize(("retries", "calls"), [(0, 1), (3, 4)])
def test_after_the_last_retry_the_invalid_action_rule_of_the_environment_applies(retries, calls):
    chat = Scripted(lambda *_: "jump")
    policy = policy_of(chat, retries)
    results = evaluate_policy(policy, LAKE, 1, 0, 1, policy.sampling_at(1.0))
    turns = int(results.lengths[0])
    assert results.invalid_actions.tolist() == [turns] and len(chat.calls) == calls * turns
    assert policy.counts.still_invalid == turns and policy.counts.asked_again == (turns if retries else 0)


# -- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_episodes_do_not_depend_on_the_number_of_parallel_environments(temperature):
    def respond(messages, sampling, seed):
        return "nothing" if seed % 3 == 0 else ACTIONS[seed % 4]

    played = []
    for num_envs in (1, 3, 8):
        policy = policy_of(Scripted(respond))
        results = evaluate_policy(policy, LAKE, 8, 5, num_envs, policy.sampling_at(temperature))
        played.append((results.returns.tolist(), results.lengths.tolist(), results.invalid_actions.tolist()))
        assert policy.counts.further_responses > 0
    assert played[0] == played[1] == played[2]


def respond(body):
    """Return an action, or sometimes a response without one."""
    number = body["seed"] + len(body["messages"][-1]["content"])
    return "nothing" if number % 5 == 0 else ACTIONS[number % 4]


def played_on(server, **settings):
    model = ServedChatModel("stand-in", server.url, **settings)
    model.wait = lambda stop, seconds: None
    loaded = load_served(model, LAKE, {"response_format": "direct"}, 8)
    results = evaluate_policy(loaded.policy, LAKE, 4, 5, 4, loaded.policy.sampling_at(1.0))
    return results.report("FrozenLake-v1", "x")["per_episode"], loaded.policy.report()


@pytest.mark.slow
def test_failures_and_the_order_of_responses_do_not_change_episodes(tmp_path):
    with ChatServer(respond) as server:
        whole, report = played_on(server, max_concurrency=1)
    faults = [status(429, **{"Retry-After": "1"}), None, truncated(), None, empty(), status(500), None, truncated()]
    with ChatServer(respond) as server:
        server.faults = faults
        faulty, with_faults = played_on(server, max_concurrency=6)
    assert faulty == whole and with_faults["retries"] == 5
    assert with_faults["further_responses"] == report["further_responses"] > 0
    assert with_faults["requests"] == report["requests"] + 5


@pytest.mark.slow
def test_an_interrupted_evaluation_resumes_without_repeating_requests(tmp_path):
    file = str(tmp_path / "responses.sqlite")
    with ChatServer(respond) as server:
        whole, report = played_on(server)
        asked = len(server.bodies)
        server.faults = [*[None] * 20, status(400, "no")]
        with pytest.raises(ValueError, match="400"):
            played_on(server, cache=file, max_concurrency=1)
        resumed, again = played_on(server, cache=file)
    assert resumed == whole and again["cached"] == 20 and again["requests"] == asked - 20 == report["requests"] - 20


@pytest.mark.slow
def test_a_local_chat_model_plays_like_a_text_policy_with_the_same_model():
    config, prompt = LanguageModelConfig(name="assets/tiny-lm"), PromptTemplate()
    text = TextPolicy(config, prompt, SamplingConfig(max_new_tokens=48))
    chat = LocalChatModel(config, stop_text="</answer>", device="cpu")
    served = ServedPolicy(chat, prompt, SamplingConfig(max_new_tokens=48))
    played = []
    for policy in (text, served):
        policy.connect(LAKE.codec)
        policy.configure()
        results = evaluate_policy(policy.eval(), LAKE, 4, 0, 4, policy.sampling_at(0.0))
        played.append((results.returns.tolist(), results.lengths.tolist(), results.invalid_actions.tolist()))
    assert played[0] == played[1]


@pytest.mark.slow
def test_the_usage_line_shows_prompts_requests_tokens_and_cost():
    with ChatServer(respond) as server:
        _, report = played_on(server, prices=Prices(prompt=1, completion=2))
    line = usage_line(report)
    assert f"{report['asked']} prompts, {report['asked_again']} asked again" in line and "requests" in line
    assert f"{report['prompt_tokens']:,} + {report['completion_tokens']:,} tokens" in line and "cost 0.0" in line
    assert "cost" not in usage_line(report | {"cost": None})

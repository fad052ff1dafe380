"""Tests of the policy that chooses among the legal actions by the probability of their texts."""

import time

import numpy as np
import pytest
import torch
from tiny_runs import batch_of, save_tiny_model

from lrl.codecs.numbers import NumberFormat
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.lm.layouts import Candidates
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.types import PastTurn, RandomKeys, SamplingConfig

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
OBSERVATIONS = [render_map(state, MAP) for state in (0, 1, 0, 4, 0, 9)]
LONG = " ".join("0123" * 6)
"""A system message that makes the common prefix of prompts long enough to be computed separately."""


class Sentences(FrozenLakeCodec):
    """Codec with actions of one to three tokens, one of which is a prefix of another."""

    _actions = ("LEFT", "LEFT RIGHT", "UP UP DOWN", "DOWN UP")
    _index = {text.lower(): index for index, text in enumerate(_actions)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Alike(FrozenLakeCodec):
    """Codec with two actions that have the same tokens, because the tokenizer does not know their words."""

    _actions = ("LEFT", "west", "east")


def ready(
    folder,
    codec=None,
    normalisation="sum",
    history=0,
    temperature=1.0,
    system="",
    value_head=None,
    pack_tokens=None,
    **model,
):
    prompt = PromptTemplate(response_format="direct", system=system, history=history)
    model = LanguageModelConfig(name=folder, **{"dtype": "float64"} | model)
    policy = ScoringPolicy(model, prompt, temperature, normalisation, pack_tokens=pack_tokens, value_head=value_head)
    policy.connect(codec or Sentences())
    policy.configure()
    return policy


def keys(rows, seed=0):
    return RandomKeys(seed=seed, purpose="test", collection=0, env=np.arange(rows), turn=np.zeros(rows, dtype=np.int64))


def act(policy, observations=OBSERVATIONS, sampling=None, seed=0, memory=None):
    memory = memory or [()] * len(observations)
    return policy.act(observations, memory, keys(len(observations), seed), sampling or policy.sampling)


def disturb(policy):
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.3)


def watch(policy, monkeypatch):
    """Record the shapes of the model's inputs, and the numbers of columns with logits."""
    seen, forward = [], policy.language_model.model.forward

    def watched(**given):
        out = forward(**given)
        seen.append((tuple(given["input_ids"].shape), out.logits.shape[1]))
        return out

    monkeypatch.setattr(policy.language_model.model, "forward", watched)
    return seen


def all_by_hand(policy):
    """Return the scores of all candidates in all states."""
    policy.eval()
    rows = [[by_hand(policy, text, action) for action in policy.action_texts] for text in OBSERVATIONS]
    return torch.stack([torch.stack(row) for row in rows]).detach()


def by_hand(policy, observation, text):
    """Return the score of one candidate after one prompt."""
    prompt, answer = policy.encode(observation, ()), policy.language_model.tokenizer.encode_text(text)
    logits = policy.language_model.model(input_ids=torch.tensor([prompt + answer])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    total = sum(logprobs[len(prompt) - 1 + place, token] for place, token in enumerate(answer))
    return total / {"sum": 1, "token": len(answer), "word": len(text.split())}[policy.normalisation]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("codec", [Sentences(), FrozenLakeCodec()], ids=["sentences", "words"])
@pytest.mark.parametrize("normalisation", ["sum", "token", "word"])
def test_scores_equal_those_of_single_candidates(folder, codec, normalisation, share):
    policy = ready(folder, codec, normalisation, share_prompts=share)
    inputs = act(policy).inputs
    scores = policy.scores(inputs["prompt_ids"], inputs["prompt_mask"])
    torch.testing.assert_close(scores, all_by_hand(policy), atol=1e-10, rtol=0)


def test_candidates_are_those_of_the_last_configured_codec(folder):
    policy = ready(folder)
    act(policy)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    inputs = act(policy).inputs
    scores = policy.scores(inputs["prompt_ids"], inputs["prompt_mask"])
    torch.testing.assert_close(scores, all_by_hand(policy), atol=1e-10, rtol=0)


def test_a_policy_that_was_evaluated_in_inference_mode_can_be_trained(folder):
    policy = ready(folder)
    with torch.inference_mode():  # Lightning validates in this mode
        policy.evaluate(batch_of(act(policy)))
    policy.evaluate(batch_of(act(policy))).logprobs.sum().backward()


def test_the_gradient_equals_that_of_single_candidates(folder):
    policy = ready(folder)
    decisions = act(policy)
    policy.evaluate(batch_of(decisions)).logprobs.sum().backward()
    ours = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    for observation, choice in zip(OBSERVATIONS, decisions.inputs["response_ids"][:, 0], strict=True):
        rows = torch.stack([by_hand(policy, observation, text) for text in policy.action_texts])
        torch.log_softmax(rows, -1)[choice].backward()
    for own, parameter in zip(ours, policy.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, atol=1e-6, rtol=1e-3)  # its norms are float32


@pytest.mark.parametrize("system", ["", LONG], ids=["short", "long"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("normalisation", ["sum", "token", "word"])
@pytest.mark.parametrize("codec", [Sentences(), FrozenLakeCodec()], ids=["sentences", "words"])
def test_logprobs_and_values_recorded_while_acting_equal_evaluated_ones(folder, codec, normalisation, share, system):
    policy = ready(folder, codec, normalisation, temperature=0.7, system=system, share_prompts=share)
    decisions = act(policy)
    evaluation = policy.evaluate(batch_of(decisions))
    torch.testing.assert_close(evaluation.logprobs, decisions.logprobs, atol=1e-12, rtol=0)
    assert evaluation.logprobs.shape == evaluation.entropy.shape == decisions.response_mask.shape == (6, 1)
    dist = torch.distributions.Categorical(logits=all_by_hand(policy) / 0.7)
    scores = policy.scores(decisions.inputs["prompt_ids"], decisions.inputs["prompt_mask"])
    torch.testing.assert_close(torch.log_softmax(scores / 0.7, dim=-1), dist.logits)
    torch.testing.assert_close(evaluation.logprobs[:, 0], dist.log_prob(decisions.inputs["response_ids"][:, 0]))
    torch.testing.assert_close(evaluation.entropy[:, 0], dist.entropy())


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt2"])
def test_a_model_with_a_sliding_window_scores_without_sharing(tmp_path, kind):
    changes = {} if kind == "gpt2" else {"sliding_window": 4}
    policy = ready(save_tiny_model(tmp_path / kind, kind, **changes), system=LONG)
    assert policy.language_model.share == (kind == "gpt2")
    decisions = act(policy)
    logprobs = torch.log_softmax(all_by_hand(policy), -1).gather(1, decisions.inputs["response_ids"])
    for given in (decisions.logprobs, policy.evaluate(batch_of(decisions)).logprobs.detach()):
        torch.testing.assert_close(given, logprobs, atol=1e-6, rtol=0)  # some layers compute in float32


def test_half_precision_samples_from_float32_probabilities(folder):
    policy = ready(folder, dtype="float32")
    with torch.autocast("cpu", torch.bfloat16):
        decisions = act(policy)
        evaluation = policy.evaluate(batch_of(decisions))
    assert decisions.logprobs.dtype == evaluation.logprobs.dtype == torch.float32
    torch.testing.assert_close(evaluation.logprobs, decisions.logprobs, atol=0.1, rtol=0)


def test_choices_do_not_depend_on_the_other_rows(folder):
    policy = ready(folder)
    together = act(policy)
    for row, observation in enumerate(OBSERVATIONS):
        named = RandomKeys(seed=0, purpose="test", collection=0, env=np.array([row]), turn=np.array([0]))
        alone = policy.act([observation], [()], named, policy.sampling)
        assert alone.actions == [together.actions[row]]
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row], atol=1e-12, rtol=0)


def test_frequencies_of_actions_equal_their_probabilities(folder):
    policy = ready(folder)
    decisions = act(policy, OBSERVATIONS[:1] * 4000)
    scores = policy.scores(decisions.inputs["prompt_ids"][:1], decisions.inputs["prompt_mask"][:1])
    shares = torch.bincount(decisions.inputs["response_ids"][:, 0], minlength=4) / 4000
    torch.testing.assert_close(shares.double(), torch.softmax(scores[0], -1), atol=0.03, rtol=0)
    greedy = act(policy, sampling=SamplingConfig(temperature=0.0))
    assert (
        greedy.inputs["response_ids"][:, 0].tolist()
        == policy.scores(greedy.inputs["prompt_ids"], greedy.inputs["prompt_mask"]).argmax(-1).tolist()
    )


def test_candidates_of_one_token_need_no_additional_column(folder, monkeypatch):
    policy = ready(folder, FrozenLakeCodec())
    seen, prompts = watch(policy, monkeypatch), {tuple(policy.encode(text, ())) for text in OBSERVATIONS}
    policy.evaluate(batch_of(act(policy)))
    assert seen[0] == ((len(prompts), max(map(len, prompts))), 1)
    (rows, columns), _ = seen[1]
    assert rows * columns <= sum(map(len, prompts))


def test_common_prefixes_of_prompts_and_candidates_are_computed_once(folder, monkeypatch):
    policy = ready(folder, system=LONG)
    prompts = {tuple(policy.encode(text, ())) for text in OBSERVATIONS}
    seen = watch(policy, monkeypatch)
    act(policy)
    (prefix, _), (rest, _), (further, kept) = seen
    assert prefix[0] == 1 and prefix[1] > 24 and prefix[1] + rest[1] == max(map(len, prompts))
    beginnings = ("LEFT", "UP", "UP UP", "DOWN")
    assert rest[0] == len(prompts) and further == (len(prompts), len(beginnings)) and kept == len(beginnings)


def test_in_training_each_prefix_of_the_candidates_is_computed_once(folder, monkeypatch):
    policy = ready(folder)
    decisions = act(policy)
    seen, prompts = watch(policy, monkeypatch), {tuple(policy.encode(text, ())) for text in OBSERVATIONS}
    policy.evaluate(batch_of(decisions))
    prefixes = 4  # LEFT, UP, UP UP, DOWN
    [((rows, columns), kept)] = seen
    assert rows == 1 and kept == len(prompts) * (1 + prefixes)
    assert columns <= sum(map(len, prompts)) + len(prompts) * prefixes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", [Sentences(), FrozenLakeCodec()], ids=["sentences", "words"])
def test_cached_states_of_frozen_layers_change_no_bit(folder, codec, dtype):
    lora, results = LoRAConfig(r=2, last_layers=1), []
    for size in (64, 0):
        policy = ready(folder, codec, history=1, lora=lora, dtype=dtype, state_cache_mb=size)
        disturb(policy)
        policy.build_reference(warm_started=False)
        decisions = act(policy, memory=[(), (PastTurn("0", "UP"),), (), (PastTurn("0 1", "LEFT"),), (), ()])
        for part in (batch_of(decisions), *batch_of(decisions).split(2)):
            out = policy.evaluate(part)
            assert float((out.logprobs - part.old_logprobs).detach().abs().max()) <= 1e-2
            (out.logprobs - policy.reference_logprobs(part)).square().sum().backward()
            results.append(torch.cat([w.grad.flatten() for w in policy.parameters() if w.requires_grad]))
    half = len(results) // 2
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(results[:half], results[half:], strict=True))


@pytest.mark.parametrize("pack_tokens", [1, 60, 1000])
def test_packed_prompts_have_the_same_scores_and_gradients(folder, monkeypatch, pack_tokens):
    plain, packed = (
        ready(folder, FrozenLakeCodec(), system=LONG, pack_tokens=number, value_head=ValueHeadConfig())
        for number in (None, pack_tokens)
    )
    packed.load_state_dict(plain.state_dict())
    decisions, results = act(plain), []
    seen = watch(packed, monkeypatch)
    for policy in (plain, packed):
        out = policy.evaluate(batch_of(decisions))
        (out.logprobs + out.values).sum().backward()
        results.append([out.logprobs, out.values, *(weight.grad for weight in policy.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert (seen[0][0][0] == 1) == (pack_tokens == 1000)


def test_the_prompt_contains_past_choices_up_to_the_history_window(folder):
    policy = ready(folder, history=1)
    first = act(policy)
    assert first.memory == [(PastTurn(text, said),) for text, said in zip(OBSERVATIONS, first.actions, strict=True)]
    second = act(policy, memory=first.memory)
    for row, (observation, memory) in enumerate(zip(OBSERVATIONS, first.memory, strict=True)):
        ids = second.inputs["prompt_ids"][row][second.inputs["prompt_mask"][row]].tolist()
        assert ids == policy.encode(observation, memory) != policy.encode(observation, ())
    assert all(len(memory) == 1 for memory in second.memory)


@pytest.mark.slow
def test_every_response_is_a_legal_action(folder):
    policy, envs = ready(folder, FrozenLakeCodec(), history=2), GymnasiumEnvs("FrozenLake-v1")
    results = evaluate_policy(policy, envs, 20, 0, 8, SamplingConfig(temperature=1.0))
    assert results.invalid_actions.sum() == 0 and results.lengths.sum() > 50


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2)])
def test_the_reference_is_the_policy_at_the_start_of_the_run(folder, lora):
    policy = ready(folder, lora=lora)
    bare = act(policy).logprobs
    disturb(policy)  # as after a warm start
    decisions = act(policy)
    policy.build_reference(warm_started=True)
    disturb(policy)
    batch = batch_of(decisions)
    torch.testing.assert_close(policy.reference_logprobs(batch), decisions.logprobs, atol=1e-12, rtol=0)
    for other in (bare, policy.evaluate(batch).logprobs):
        assert not torch.allclose(other, decisions.logprobs)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompt": PromptTemplate()}, "prompt.response_format is 'think_answer'"),
        ({"temperature": 0.0}, "policy.temperature is 0.0"),
        ({"pack_tokens": 0}, "policy.pack_tokens is 0"),
        ({"normalisation": "letter"}, "policy.normalisation is 'letter'"),
    ],
)
def test_invalid_settings_raise_with_their_key(folder, settings, named):
    given = {"prompt": PromptTemplate(response_format="direct")} | settings
    with pytest.raises(ValueError, match=named):
        ScoringPolicy(LanguageModelConfig(name=folder), **given)


def test_infinitely_many_actions_raise(folder):
    policy = ScoringPolicy(LanguageModelConfig(name=folder), PromptTemplate(response_format="direct"))
    with pytest.raises(ValueError, match="the actions of .* are not finitely many; it must be a TextPolicy"):
        policy.connect(GymnasiumEnvs("Pendulum-v1", numbers=NumberFormat()).codec)


def test_actions_with_the_same_tokens_raise(folder):
    with pytest.raises(ValueError, match="converts 'west' and 'east' to the same tokens"):
        ready(folder, Alike())


def test_prefixes_of_many_candidates_are_found_in_linear_time():
    texts = np.random.default_rng(0).integers(0, 1000, (2000, 3)).tolist()
    started = time.process_time()
    assert len(Candidates.of(texts, torch.device("cpu")).prefix_ids) > 2800
    assert time.process_time() - started < 0.5  # seconds; comparing all pairs took more than one


def test_a_configured_policy_that_is_connected_again_scores_the_actions_that_it_plays(folder):
    """A second fit of the same module does not configure the policy again."""
    policy = ready(folder)
    act(policy)
    policy.connect(FrozenLakeCodec())
    inputs = act(policy).inputs
    scores = policy.scores(inputs["prompt_ids"], inputs["prompt_mask"])
    torch.testing.assert_close(scores, all_by_hand(policy), atol=1e-10, rtol=0)

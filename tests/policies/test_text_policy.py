"""Tests of the policy that generates its response as text."""

import logging
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from tiny_runs import save_tiny_model, text_policy

from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.config import LoRAConfig
from lrl.prompts import get_response_format
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.types import PastTurn, RandomKeys, SamplingConfig, TurnBatch

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
OBSERVATIONS = [render_map(state, MAP) for state in (0, 1, 0, 4, 0, 1)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def dropping(tmp_path_factory):
    """A model with dropout in every layer."""
    changes = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.5)
    return save_tiny_model(tmp_path_factory.mktemp("models") / "dropping", "gpt2", **changes)


def ready(folder, **changes):
    policy = text_policy(folder, **changes)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    return policy


def keys(rows, seed=0):
    return RandomKeys(seed=seed, purpose="test", collection=0, env=np.arange(rows), turn=np.zeros(rows, dtype=np.int64))


def moved_adapter(folder, dropout, **changes):
    """Return a policy with changed adapters: those that start at zero hide the effect of dropout."""
    policy = ready(folder, lora=LoRAConfig(r=2, dropout=dropout), max_new_tokens=4, **changes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=generator)
    return policy


def act(policy, observations=OBSERVATIONS, memory=None, **changes):
    return policy.act(
        observations, memory or [()] * len(observations), keys(len(observations), **changes), policy.sampling
    )


def as_batch(decisions):
    return TurnBatch(
        inputs=decisions.inputs,
        response_mask=decisions.response_mask,
        old_logprobs=decisions.logprobs,
        advantages=torch.zeros_like(decisions.logprobs),
    )


def collect(folder, num_groups=4, rank=0, world_size=1, **changes):
    """Collect episodes with history."""
    policy = ready(folder, history=2, **changes)
    plan = CollectionPlan(seed=3, collection=1, num_groups=num_groups, group_size=2, rank=rank)
    envs = GymnasiumEnvs("FrozenLake-v1", max_invalid=3, max_episode_steps=6).make(plan.num_envs, "direct")
    return EpisodeCollector(policy, envs, world_size).collect(plan)


# -- the ratio of the first update ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("history", [0, 2])
def test_recorded_logprobs_equal_evaluated_ones(folder, temperature, history):
    policy = ready(folder, temperature=temperature, max_new_tokens=6, history=history)
    memory = [(PastTurn(OBSERVATIONS[n], "LEFT"),) * (n % 3) for n in range(6)]
    decisions = act(policy, memory=memory)
    evaluation = policy.evaluate(as_batch(decisions))
    ratio = (evaluation.logprobs - decisions.logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    assert not decisions.response_mask.all() or temperature == 0.7
    assert not evaluation.logprobs[~decisions.response_mask].any()
    assert not evaluation.entropy[~decisions.response_mask].any()


def test_logprobs_of_whole_episodes_equal_evaluated_ones(folder):
    rollout = collect(folder, temperature=0.7)
    assert rollout.lengths.unique().numel() > 1
    batch = rollout.turns()
    logprobs = ready(folder, history=2, temperature=0.7).evaluate(batch).logprobs
    torch.testing.assert_close(logprobs, batch.old_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2, dropout=0.5)])
def test_acting_evaluation_and_reference_have_no_dropout(dropping, lora):
    policy = ready(dropping, lora=lora, max_new_tokens=4).train()
    if lora is not None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    weight.normal_(generator=generator)
    policy.build_reference(warm_started=True)
    decisions = act(policy)
    assert torch.equal(decisions.logprobs, act(policy.train()).logprobs)
    batch = as_batch(decisions)
    torch.testing.assert_close(policy.train().evaluate(batch).logprobs, decisions.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.train().reference_logprobs(batch), decisions.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_the_dropout_seed_determines_the_dropout_masks(folder, dropping, kind):
    policy = moved_adapter(folder, dropout=0.5) if kind == "adapter" else ready(dropping)
    batch, state = as_batch(act(policy)), torch.get_rng_state()
    first, again, other, without = (policy.evaluate(batch, seed).logprobs for seed in (1, 1, 2, None))
    assert torch.equal(first, again) and not torch.allclose(first, other) and not torch.allclose(first, without)
    assert torch.equal(without, policy.evaluate(batch).logprobs) and torch.equal(state, torch.get_rng_state())


def test_a_dropout_seed_has_no_effect_without_dropout(folder):
    policy = moved_adapter(folder, dropout=0.0)
    batch = as_batch(act(policy))
    assert torch.equal(policy.evaluate(batch, 1).logprobs, policy.evaluate(batch).logprobs)


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_gradient_checkpointing_repeats_the_dropout_masks(folder, dropping, kind):
    gradients, logprobs = [], []
    for checkpointing in (False, True):
        options = {"gradient_checkpointing": checkpointing}
        policy = moved_adapter(folder, dropout=0.5, **options) if kind == "adapter" else ready(dropping, **options)
        evaluation = policy.evaluate(as_batch(act(policy)), 1)
        trained = [weight for weight in policy.parameters() if weight.requires_grad]
        torch.rand(1)  # the backward pass must not depend on random numbers that were drawn in between
        gradients.append(torch.autograd.grad(evaluation.logprobs.sum(), trained))
        logprobs.append(evaluation.logprobs)
    torch.testing.assert_close(*logprobs)
    torch.testing.assert_close(*gradients)


def test_acting_does_not_change_the_train_or_eval_mode(folder):
    policy = ready(folder)
    assert policy.train().training and act(policy) and policy.training
    assert not policy.eval().training and act(policy) and not policy.training


# -- independence -----------------------------------------------------------------------------------------------------


def assert_same_episodes(whole, parts):
    """Return texts, tokens and log-probabilities of each turn."""
    start = 0
    for part in parts:
        envs = slice(start, start + part.active.shape[1])
        start = envs.stop
        assert part.lengths.tolist() == whole.lengths[envs].tolist()
        for time, env in torch.nonzero(part.active).tolist():
            assert part.rewards[time, env] == whole.rewards[time, envs.start + env]
            assert part.responses[time][env] == whole.responses[time][envs.start + env]
            assert part.observations[time][env] == whole.observations[time][envs.start + env]
            ours, theirs = (r.logprobs[time, e] for r, e in ((part, env), (whole, envs.start + env)))
            width = min(len(ours), len(theirs))
            torch.testing.assert_close(ours[:width], theirs[:width], atol=1e-12, rtol=0)
    assert start == whole.active.shape[1]


def test_episodes_do_not_depend_on_the_number_of_environments(folder):
    whole, few = collect(folder, dtype="float64"), collect(folder, num_groups=1, dtype="float64")
    assert few.lengths.tolist() == whole.lengths[:2].tolist()
    first = [[texts[0], texts[1]] for texts in whole.responses[: len(few.responses)]]
    assert few.responses == first


def test_several_ranks_play_the_same_episodes_as_one(folder):
    whole = collect(folder, dtype="float64")
    parts = [collect(folder, num_groups=2, rank=rank, world_size=2, dtype="float64") for rank in (0, 1)]
    assert_same_episodes(whole, parts)
    parts = [collect(folder, num_groups=1, rank=rank, world_size=4, dtype="float64") for rank in range(4)]
    assert_same_episodes(whole, parts)


def test_responses_do_not_depend_on_the_other_rows(folder):
    policy = ready(folder, dtype="float64", max_new_tokens=6)
    together = act(policy)
    for row, observation in enumerate(OBSERVATIONS):
        named = RandomKeys(seed=0, purpose="test", collection=0, env=np.array([row]), turn=np.array([0]))
        alone = policy.act([observation], [()], named, policy.sampling)
        assert alone.actions[0] == together.actions[row]


def test_different_seeds_give_different_responses(folder):
    policy = ready(folder, max_new_tokens=6)
    assert act(policy).actions == act(policy).actions != act(policy, seed=1).actions


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_the_evaluated_prompt_is_the_sampled_prompt(folder):
    policy = ready(folder, history=2)
    memory = [(PastTurn(OBSERVATIONS[1], "UP"),) * (n % 3) for n in range(6)]
    decisions = act(policy, memory=memory)
    for row, (observation, history) in enumerate(zip(OBSERVATIONS, memory, strict=True)):
        ids, mask = decisions.inputs["prompt_ids"][row], decisions.inputs["prompt_mask"][row]
        assert ids[mask].tolist() == list(policy.encode(observation, history))
        text = policy.language_model.tokenizer.tokenizer.decode(ids[mask])
        assert text.count("UP") == len(history) and "assistant" in text
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)


def test_the_history_contains_observations_and_responses_up_to_the_window(folder):
    policy = ready(folder, history=2)
    memory = [()] * 6
    said = []
    for _ in range(3):
        decisions = act(policy, memory=memory)
        memory = decisions.memory
        said.append(decisions.actions)
    assert memory[0] == (PastTurn(OBSERVATIONS[0], said[1][0]), PastTurn(OBSERVATIONS[0], said[2][0]))


def test_the_history_hides_invalid_responses_but_the_decision_keeps_them(folder):
    policy = ready(folder, history=1)
    plain = act(policy)
    policy.prompt = replace(policy.prompt, hide_invalid_in_context=True)
    hiding = act(policy)
    assert hiding.actions == plain.actions
    env = GymnasiumEnvs("FrozenLake-v1").make(6, "direct")
    env.reset(seed=list(range(6)))
    *_, infos = env.step(tuple(plain.actions))
    assert not infos["action_valid"].all()
    for valid, answer, (turn,) in zip(infos["action_valid"], plain.actions, hiding.memory, strict=True):
        assert turn.response == (answer if valid else "Generated invalid action")


def test_a_prompt_that_is_too_long_loses_its_oldest_turns(folder):
    room = len(ready(folder).encode(OBSERVATIONS[0], ()))
    past = tuple(PastTurn(OBSERVATIONS[1], word) for word in ("LEFT", "DOWN", "UP"))
    whole = ready(folder, history=3).encode(OBSERVATIONS[0], past)
    policy = ready(folder, history=3, max_prompt_tokens=len(whole) - 1)
    text = policy.language_model.tokenizer.tokenizer.decode(policy.encode(OBSERVATIONS[0], past))
    assert "LEFT" not in text and "DOWN" in text and "UP" in text
    assert len(ready(folder, history=3, max_prompt_tokens=room).encode(OBSERVATIONS[0], past)) == room
    with pytest.raises(ValueError, match=f"max_prompt_tokens is {room - 1}.*take {room} tokens"):
        ready(folder, max_prompt_tokens=room - 1).encode(OBSERVATIONS[0], ())


# -- settings ---------------------------------------------------------------------------------------------------------


def test_evaluation_can_use_another_sampling_than_training(folder):
    policy = ready(folder, max_new_tokens=4)
    sampling = SamplingConfig(temperature=0, max_new_tokens=4)
    greedy = [policy.act(OBSERVATIONS, [()] * 6, keys(6, seed), sampling) for seed in (0, 1)]
    assert greedy[0].actions == greedy[1].actions and greedy[0].actions[0] == greedy[0].actions[2]
    assert not greedy[0].logprobs.any()


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}])
def test_training_samples_from_the_whole_distribution(folder, changes):
    from lrl.lm.config import LanguageModelConfig
    from lrl.policies.text import TextPolicy
    from lrl.prompts import PromptTemplate

    with pytest.raises(ValueError, match=f"sampling.{next(iter(changes))}"):
        TextPolicy(LanguageModelConfig(name=folder), PromptTemplate(), SamplingConfig(**changes))


def test_the_environment_parses_responses_of_the_policy(folder):
    env = gym.make("FrozenLake-v1")
    assert ready(folder).response_format == "direct" and FrozenLakeCodec().context(env) == MAP
    rollout = collect(folder)
    valid = rollout.metrics["action_valid"].bool()
    actions = [text.strip() for texts in rollout.responses for text in texts if text is not None]
    assert valid.any() and not valid.all() and any(text in FrozenLakeCodec().action_texts for text in actions)


@pytest.mark.parametrize("codec", [FrozenLakeCodec(), GymnasiumEnvs("HalfCheetah-v5").codec])
def test_a_token_limit_below_the_shortest_response_gives_a_warning(folder, caplog, codec, monkeypatch):
    """With ten tokens, an action of six numbers is always truncated."""
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    policy = text_policy(folder, max_new_tokens=10)
    policy.prompt = replace(policy.prompt, response_format="think_answer")
    policy.connect(codec)
    policy.configure()
    response = get_response_format("think_answer").render(codec.default_action_text)
    needed = len(policy.language_model.tokenizer.encode_texts([response])[0])
    assert needed > 10 and "sampling.max_new_tokens is 10, but a response such as '<think></think>" in caplog.text
    caplog.clear()
    policy.sampling = replace(policy.sampling, max_new_tokens=needed)
    policy.configure()
    assert "sampling.max_new_tokens" not in caplog.text

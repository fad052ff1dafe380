"""The turns of an episode: prompts that contain the turns before cost their new tokens only, with equal results."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_architectures import OTHERS
from tiny_runs import batch_of, save_tiny_model, text_policy

from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.lm.chat_template import CHATML
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.lm.prefill import KeptPrompts
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.training.collect import CollectionPlan, FixedHorizonCollector
from lrl.types import PastTurn, RandomKeys, SamplingConfig, TurnBatch

MAPS = [render_map(state, ("SFFF", "FHFH", "FFFH", "HFFG")) for state in (0, 1, 4, 8, 9, 13)]
HEAD = ValueHeadConfig(hidden_sizes=(4,), init_seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def policy_of(kind, folder, **model):
    model = {"dtype": "float64"} | model
    prompt = {"system": "", "history": 4, "history_block": 3}
    if kind == "text":
        policy = text_policy(folder, max_new_tokens=4, value_head=HEAD, **model)
        policy.prompt = replace(policy.prompt, **prompt)
    else:
        prompt = PromptTemplate(response_format="direct", **prompt)
        policy = ScoringPolicy(LanguageModelConfig(name=folder, **model), prompt, value_head=HEAD)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    return policy


def play(policy, turns=8, rows=3, collection=0, purpose="test"):
    """Return the turns of some episodes, and the number of tokens of prompts that were computed in each turn."""
    memory, decisions, computed = [()] * rows, [], []
    for turn in range(turns):
        keys = RandomKeys(seed=0, purpose=purpose, collection=collection, env=np.arange(rows), turn=np.full(rows, turn))
        seen = [MAPS[(turn * (row + 1) + row) % len(MAPS)] for row in range(rows)]
        decisions.append(policy.act(seen, memory, keys, policy.sampling))
        memory = decisions[-1].memory
        kept = policy.language_model.kept
        computed.append(None if kept is None else kept.computed_tokens)
    return decisions, computed


@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_a_kept_cache_changes_no_sample_and_no_logprob(folder, kind):
    kept, plain = policy_of(kind, folder), policy_of(kind, folder, prompt_cache_mb=0)
    plain.load_state_dict(kept.state_dict())
    (ours, computed), (wanted, _) = play(kept, turns=9), play(plain, turns=9)
    for one, other in zip(ours, wanted, strict=True):
        assert one.actions == other.actions
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-10, rtol=0)
    seen = MAPS[:3], ours[-1].memory
    before = kept.language_model.kept.computed_tokens
    torch.testing.assert_close(kept.state_values(*seen), plain.state_values(*seen), atol=1e-10, rtol=0)
    tokens = [int(one.inputs["prompt_mask"].sum()) for one in ours]
    assert kept.language_model.kept.computed_tokens - before < tokens[-1] / 2
    assert computed[-1] < sum(tokens) / 2
    new = np.diff(computed)
    assert new[1] < tokens[2] / 2  # the second turn was continued
    assert plain.language_model.kept is None


def test_other_weights_or_another_collection_drop_the_cache(folder):
    policy = policy_of("text", folder)
    play(policy, turns=2)
    assert policy.language_model.kept._rows
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(1), turn=np.zeros(1))
    policy.language_model.keep_prompts(keys)
    assert policy.language_model.kept._rows
    with torch.no_grad():
        next(policy.language_model.parameters()).mul_(1)
    policy.language_model.keep_prompts(keys)
    assert not policy.language_model.kept._rows
    play(policy, turns=2)
    policy.language_model.keep_prompts(RandomKeys(seed=0, purpose="test", collection=1, env=keys.env, turn=keys.turn))
    assert not policy.language_model.kept._rows


def test_a_cache_beyond_its_limit_is_not_kept(folder, monkeypatch, caplog):
    policy = policy_of("text", folder, prompt_cache_mb=1)
    monkeypatch.setattr("lrl.lm.model.KeptPrompts", lambda size: KeptPrompts(10))
    play(policy, turns=4)
    assert not policy.language_model.kept._rows
    policy.end_episodes()
    assert (
        caplog.text.count("language_model.prompt_cache_mb is 1, but the KV cache of the prompts of a turn has 0 MiB")
        == 1
    )


def test_the_longest_kept_prompt_is_found_among_many():
    random = np.random.default_rng(0)
    texts = [tuple(random.integers(0, 2, size=random.integers(1, 7)).tolist()) for _ in range(80)]
    kept = KeptPrompts(0)
    kept._rows = {text: row for row, text in enumerate(texts[:30])}
    found = kept.longest(texts)
    for text, beginning in zip(texts, found, strict=True):
        shorter = [text[:size] for size in range(1, len(text)) if text[:size] in kept._rows]
        assert beginning == (shorter[-1] if shorter else None)
    assert None in found and len(set(found)) > 3


def test_the_time_to_find_kept_prompts_is_linear_in_their_lengths():
    kept, counts = KeptPrompts(0), []

    class Counted(tuple):
        """Counts the tokens of the beginnings that are compared."""

        def __getitem__(self, index):
            part = super().__getitem__(index)
            counts[-1] += len(part)
            return part

    for rows in (20, 40):
        counts.append(0)
        texts = [Counted((row, *range(100 + row))) for row in range(rows)]
        kept._rows = {tuple(text): row for row, text in enumerate(texts)}
        kept.longest([Counted((*text, 1)) for text in texts])
    assert counts[1] <= 3 * counts[0]


@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_one_sentence_says_why_the_tokens_of_past_turns_are_computed_again(folder, tmp_path, caplog, kind):
    policy_of(kind, folder)
    policy_of(kind, folder, share_prompts=False)
    assert "prompt.history" not in caplog.text
    window = save_tiny_model(tmp_path / "window", "mistral", sliding_window=4)
    policy_of(kind, window)
    assert caplog.text.count("prompt.history is 4, but language_model.name is ") == 1
    assert "a mistral, whose layers do not all attend to all earlier tokens: the past turns" in caplog.text
    caplog.clear()
    kind_of_model, changes = OTHERS["lfm2"]
    policy_of(kind, save_tiny_model(tmp_path / "hybrid", kind_of_model, **changes))
    assert caplog.text.count("a lfm2, whose layers do not all attend to all earlier tokens") == 1
    caplog.clear()
    template = tmp_path / "template.jinja"
    template.write_text(CHATML.replace("<|im_start|>assistant", "<|im_start|>assistant UP"))
    policy_of(kind, folder, chat_template=str(template))
    assert caplog.text.count("template.jinja', which encodes a past turn with other tokens than the prompt of") == 1


def stacked(decisions):
    """The turns of all decisions as one batch."""
    batches = [batch_of(one) for one in decisions]
    width = max(one.inputs["prompt_ids"].shape[1] for one in batches)
    tokens = max(one.response_mask.shape[1] for one in batches)

    def stack(tensors, columns):
        return torch.cat([torch.nn.functional.pad(one, (0, columns - one.shape[1])) for one in tensors])

    inputs = {
        name: stack([one.inputs[name] for one in batches], tokens if name == "response_ids" else width)
        for name in batches[0].inputs
    }
    fields = ("response_mask", "old_logprobs", "advantages")
    return TurnBatch(inputs=inputs, **{name: stack([getattr(one, name) for one in batches], tokens) for name in fields})


@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_an_update_computes_the_tokens_of_an_episode_once(folder, kind):
    policy, plain = policy_of(kind, folder), policy_of(kind, folder, share_prompts=False)
    plain.load_state_dict(policy.state_dict())
    batch = stacked(play(policy)[0])
    results, cells = [], []
    for one in (policy, plain):
        model = one.language_model.model
        words = model.get_input_embeddings()
        handle = words.register_forward_hook(lambda _, given, out: cells.append(out.shape[:2].numel()))
        out = one.evaluate(batch)
        handle.remove()
        weights = torch.linspace(-1, 1, out.logprobs.numel()).view(out.logprobs.shape) * batch.response_mask
        (weights * (out.logprobs + out.entropy) + weights * out.values).sum().backward()
        results.append([out.logprobs, out.values, *(weight.grad for weight in one.parameters())])
        torch.testing.assert_close(out.logprobs * batch.response_mask, batch.old_logprobs, atol=1e-9, rtol=0)
    assert cells[0] < sum(cells[1:]) / 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)  # norms and softmax are in float32


def past(turns):
    return tuple(PastTurn(str(turn), "UP") for turn in range(turns))


@pytest.mark.parametrize(("history", "block"), [(0, 1), (3, 1), (3, 2), (4, 4), ("all", 1)])
def test_the_window_drops_turns_in_blocks(history, block):
    template = PromptTemplate(history=history, history_block=block, response_format="direct")
    grown = ()
    for turn in range(12):
        grown = template.extend_history(FrozenLakeCodec(), grown, str(turn), "UP")
        whole = past(turn + 1)
        assert grown == template.truncate_history(whole)
        assert grown == whole[len(whole) - len(grown) :]
        if history == "all":
            assert grown == whole
        else:
            assert len(grown) <= history and (len(whole) - len(grown)) % block == 0
            assert len(grown) == len(whole) or len(grown) > history - block


@pytest.mark.parametrize(("history", "block"), [(0, 2), (3, 0), (3, 4)])
def test_a_block_larger_than_the_window_is_an_error(history, block):
    with pytest.raises(ValueError, match=f"prompt.history_block is {block}; it must be from 1 to prompt.history"):
        PromptTemplate(history=history, history_block=block)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_states_below_the_adapters_are_computed_once_per_token_of_an_episode(folder, kind, monkeypatch):
    lora = LoRAConfig(r=2, alpha=8, last_layers=1)
    monkeypatch.setattr("lrl.lm.frozen_states._PIECE", 16)
    kept, plain, whole = (
        policy_of(kind, folder, lora=lora, **more)
        for more in ({}, {"state_cache_mb": None}, {"share_prompts": False, "state_cache_mb": None})
    )
    with torch.no_grad():
        for weight in kept.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.ones_like(weight).cumsum(-1).sin())
    for policy in (plain, whole):
        policy.load_state_dict(kept.state_dict())
    batch, results = stacked(play(kept)[0]), []
    for policy in (kept, kept, plain, whole):
        out = policy.evaluate(batch)
        weights = torch.linspace(-1, 1, out.logprobs.numel()).view(out.logprobs.shape) * batch.response_mask
        (weights * (out.logprobs + out.entropy) + weights * out.values).sum().backward()
        results.append([weight.grad for weight in policy.parameters() if weight.requires_grad])
        policy.zero_grad()
        torch.testing.assert_close(out.logprobs * batch.response_mask, batch.old_logprobs, atol=1e-5, rtol=0)
    for one, again, *others in zip(*results, strict=True):
        assert torch.equal(one, again)
        for other in others:
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    tokens = int(batch.inputs["prompt_mask"].sum())
    assert kept.language_model.lower.computed_tokens < 0.7 * tokens


@pytest.mark.parametrize("history", [0, 4])
@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_states_below_the_adapters_that_were_computed_while_playing_are_not_computed_again(folder, kind, history):
    """Turns of later collections and of evaluations are not recorded, and what was recorded is dropped by the next."""
    policy = policy_of(kind, folder, lora=LoRAConfig(r=2, alpha=8, last_layers=1), dtype="float32")
    policy.prompt = replace(policy.prompt, history=history, history_block=3 if history else 1)
    policy.language_model.prepare_history(policy.prompt, policy.codec)
    lower = policy.language_model.lower
    batch, before = stacked(play(policy, purpose="rollout")[0]), lower.computed_tokens
    out = policy.evaluate(batch)
    if kind == "text" or history:
        assert lower.computed_tokens == before and lower.recorded()
        torch.testing.assert_close(out.logprobs * batch.response_mask, batch.old_logprobs, atol=1e-5, rtol=0)
    recorded, kept = lower.recorded(), policy.evaluate(batch).logprobs
    lower.forget()
    lower.load_recorded(recorded)
    assert torch.equal(policy.evaluate(batch).logprobs, kept)
    lower.forget()
    computed = policy.evaluate(batch).logprobs
    assert lower.computed_tokens > before
    torch.testing.assert_close(computed, kept, atol=1e-5, rtol=0)
    play(policy, turns=1, collection=1, purpose="evaluation")
    assert not lower.recorded()
    play(policy, turns=1, collection=1, purpose="rollout")
    ours = lower.recorded()
    play(policy, turns=1, collection=2, purpose="rollout")
    assert len(lower.recorded()) <= len(ours)


def test_states_beyond_the_limit_are_not_recorded_but_computed(folder):
    policy = policy_of("text", folder, lora=LoRAConfig(r=2, last_layers=1), dtype="float32")
    lower = policy.language_model.lower
    lower.max_bytes = 4000
    batch = stacked(play(policy, purpose="rollout")[0])
    assert 0 < sum(states.nbytes for *_, states in lower.recorded()) <= 4000
    out = policy.evaluate(batch)
    assert lower.computed_tokens > 0
    torch.testing.assert_close(out.logprobs * batch.response_mask, batch.old_logprobs, atol=1e-5, rtol=0)


def test_the_cache_is_dropped_at_the_end_of_an_evaluation_and_by_a_policy_that_recomputes(folder):
    policy, envs = policy_of("scoring", folder), GymnasiumEnvs("FrozenLake-v1", max_episode_steps=4)
    evaluate_policy(policy, envs, 2, 0, 2, SamplingConfig(temperature=1.0))
    assert policy.language_model.kept is None
    policy = policy_of("scoring", folder)
    keys = RandomKeys(seed=0, purpose="evaluation", collection=0, env=np.arange(1), turn=np.zeros(1, dtype=np.int64))
    policy.act(MAPS[:1], [()], keys, SamplingConfig(temperature=0.0))
    assert policy.language_model.kept is not None
    policy.prompt = replace(policy.prompt, history=0, history_block=1)
    policy.act(MAPS[:1], [()], replace(keys, purpose="rollout"), policy.sampling)
    assert policy.language_model.kept is None


@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_logprobs_and_values_are_recomputed_at_the_end_of_a_collection(folder, kind, monkeypatch):
    env = GymnasiumEnvs("FrozenLake-v1", max_episode_steps=6)
    plan, found = CollectionPlan(seed=0, collection=0, num_groups=3, group_size=1, num_steps=8), []
    for settings in ({}, {"recompute_logprobs": True}):
        policy, evaluated = policy_of(kind, folder, **settings), []
        assert policy.defers_logprobs == bool(settings)
        evaluate = policy.evaluate
        monkeypatch.setattr(policy, "evaluate", lambda batch: evaluated.append(len(batch)) or evaluate(batch))  # noqa: B023
        envs = env.make(3, policy.response_format)
        rollout = FixedHorizonCollector(policy, envs, 0, plan.env, 3).collect(plan)
        envs.close()
        assert not evaluated and policy.language_model.kept is not None
        if settings:
            parts = [torch.arange(5, 24), torch.arange(5)]
            rollout = policy.complete(rollout, parts)
            assert evaluated == [19, 5] and policy.language_model.kept is None
            batch, values = rollout.turns(), rollout.flatten(rollout.values)
            for part in parts:
                again, mask = evaluate(batch[part]), batch.response_mask[part]
                assert torch.equal(again.logprobs * mask, batch.old_logprobs[part])
                assert torch.equal(again.values * mask, values[part])
        found.append(rollout)
    assert found[0].responses == found[1].responses
    torch.testing.assert_close(found[1].logprobs, found[0].logprobs, atol=1e-9, rtol=0)


def test_values_of_some_prompts_do_not_drop_the_others(folder):
    policy = policy_of("text", folder)
    decisions, _ = play(policy, turns=2)
    kept = dict(policy.language_model.kept._rows)
    policy.state_values(MAPS[:1], decisions[-1].memory[:1])
    assert policy.language_model.kept._rows == kept


def test_a_long_history_loses_at_most_half_of_the_turns_that_fit(folder):
    policy = policy_of("text", folder)
    template, codec = replace(policy.prompt, history="all", history_block=1), FrozenLakeCodec()
    whole = tuple(PastTurn(MAPS[turn % 6], "UP") for turn in range(20))
    encode = policy.language_model.tokenizer.encode_prompt
    room = len(encode(template, codec, MAPS[0], whole[:6], 10**6))
    blocks = replace(template, history_block=10)
    lengths = [len(encode(blocks, codec, MAPS[0], whole[:turn], room)) for turn in range(20)]
    single = [len(encode(template, codec, MAPS[0], whole[:turn], room)) for turn in range(20)]
    assert max(lengths) <= room and all(2 * one >= other for one, other in zip(lengths, single, strict=True))

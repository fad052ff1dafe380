"""Tests of rollouts from a server, against a stand-in for vLLM that can fail; no real vLLM is used."""

import json
import re

import numpy as np
import pytest
import torch
import vllm_server
from commands import run_words
from tiny_runs import OPTIONS, grpo, merged, rollout_data, save_tiny_model, text_policy, train
from vllm_server import VLLMStandIn

from lrl.algorithms.grpo import GRPOModule
from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.algorithms.reinforce_pp import REINFORCEPlusPlusModule
from lrl.chat.generator import ServedGenerator
from lrl.chat.vllm import TransientError, WeightsLostError, checked_row
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.registry import build
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.types import RandomKeys, SamplingConfig

LORA = {"lora": LoRAConfig(r=2, alpha=8)}
OBSERVATIONS = [render_map(state, ("SFFF", "FHFH", "FFFH", "HFFG")) for state in (0, 1, 0, 4, 0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(folder):
    with VLLMStandIn(folder) as server:
        yield server
    assert server.violations == []


def served(server, tmp_path, **settings):
    """Return a generator that does not wait before retries."""
    generator = ServedGenerator(server.url, str(tmp_path / "weights"), **{"max_retries": 3} | settings)
    generator.server.wait = server.revive
    return generator


def configured(folder, generator, **settings):
    policy = text_policy(folder, max_new_tokens=6, generator=generator, **LORA | settings)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    return policy


def act(policy, sampling=None, rows=len(OBSERVATIONS)):
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(rows), turn=np.zeros(rows, dtype=np.int64))
    return policy.act(OBSERVATIONS[:rows], [()] * rows, keys, sampling or policy.sampling)


@torch.no_grad()
def change(policy, by=0.5):
    """Change the trained weights, as an update does."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.language_model.model.named_parameters():
        if weight.requires_grad and ("lora_" not in name or "lora_B" in name):
            weight += by * torch.randn(weight.shape, generator=generator)


def versions(tmp_path):
    return sorted(path.name for path in (tmp_path / "weights").iterdir() if path.is_dir())


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LORA, {"lora": None}], ids=["adapter", "full"])
def test_responses_and_log_probabilities_follow_the_trained_weights(folder, server, tmp_path, settings):
    policy = configured(folder, served(server, tmp_path), **settings)
    assert server.loads == []  # the weights are sent with the first request
    before = act(policy)
    change(policy)
    after = act(policy)
    assert len(server.loads) == 2 and len(versions(tmp_path)) == 1, "an old version was not removed"
    assert before.actions != after.actions
    for decisions in (before, after) if settings is not LORA else (after,):
        assert decisions.behaviour_logprobs is None  # in float32 the log-probabilities of the server are trained on
    own = policy._teacher_forced(after.inputs, after.response_mask)
    torch.testing.assert_close(own, after.logprobs, atol=1e-5, rtol=0)
    act(policy)
    assert len(server.loads) == 2, "unchanged weights were sent again"


def test_a_response_depends_only_on_its_prompt_and_its_random_numbers(folder, server, tmp_path):
    policy = configured(folder, served(server, tmp_path))
    together, alone = act(policy), act(policy, rows=1)
    assert together.actions[0] == alone.actions[0] and len(set(together.actions)) > 1
    end = policy.language_model.tokenizer.end_id
    lengths = together.response_mask.sum(1).tolist()
    last = [ids[n - 1] for ids, n in zip(together.inputs["response_ids"].tolist(), lengths)]
    assert all(token == end or n == 6 for token, n in zip(last, lengths)) and end in last
    prompts, bits = [[7, 8], [7, 8], [7, 8]], torch.tensor([[5] * 6, [6] * 6, [5] * 6])
    responses = policy.generator.generate(prompts, bits, policy.sampling)
    assert torch.equal(responses.ids[0], responses.ids[2]) and not torch.equal(responses.ids[0], responses.ids[1])


def test_greedy_and_truncated_sampling_are_passed_on(folder, server, tmp_path):
    policy = configured(folder, served(server, tmp_path))
    greedy = act(policy, SamplingConfig(temperature=0, max_new_tokens=3))
    assert greedy.actions[0] == greedy.actions[2] == greedy.actions[4]
    body = server.bodies[-1]
    assert (body["temperature"], body["top_k"], body["top_p"], body["max_tokens"]) == (0, -1, 1.0, 3)
    act(policy, SamplingConfig(temperature=0.5, top_k=3, top_p=0.9, max_new_tokens=2))
    body = server.bodies[-1]
    assert (body["temperature"], body["top_k"], body["top_p"], body["logprobs"]) == (0.5, 3, 0.9, 0)
    assert body["return_token_ids"] and not body["add_special_tokens"] and not body["skip_special_tokens"]


def test_merged_adapters_can_be_sent_as_whole_models(folder, server, tmp_path):
    policy = configured(
        folder, served(server, tmp_path, full_weights=True), lora=LoRAConfig(modules_to_save=["lm_head"])
    )
    change(policy)
    decisions = act(policy)
    (version,) = (tmp_path / "weights").iterdir()
    assert not (version / "adapter_config.json").exists() and server.version.startswith("lrl-")
    own = policy._teacher_forced(decisions.inputs, decisions.response_mask)
    torch.testing.assert_close(own, decisions.logprobs, atol=1e-5, rtol=0)
    assert hasattr(policy.language_model.model, "peft_config"), "the trained model itself was merged"


# -- faults -----------------------------------------------------------------------------------------------------------


def final_weights(folder, tmp_path, name, faults=None, stale=(), **model):
    """Return the trained weights after three collections, the server and the warnings."""
    with VLLMStandIn(folder) as server:
        server.faults, server.stale_loads = faults or {}, set(stale)
        generator = served(server, tmp_path / name, max_concurrency=4)
        module = grpo(folder, model=model | {"generator": generator}, **OPTIONS["prompts"])
        train(tmp_path / name, module=module, data=rollout_data("prompts"))
        assert server.violations == [] and server.asked >= 36
        assert len(versions(tmp_path / name)) <= 2
        named = module.policy.named_parameters()
        return {name: weight.detach().clone() for name, weight in named if weight.requires_grad}, server


FAULTS = {
    "forgotten": ({20: vllm_server.forget}, ()),
    "stale weights": ({}, (1,)),
    "500, then dead": ({14: vllm_server.end_engine}, ()),
    "invalid responses": (
        {
            13: vllm_server.truncated,
            18: vllm_server.wrong_length,
            23: vllm_server.null_logprobs,
            28: vllm_server.other_prompt,
        },
        (),
    ),
    "restart": ({19: vllm_server.die}, ()),
    "several": (
        {1: vllm_server.null_logprobs, 14: vllm_server.respond_500, 16: vllm_server.die, 31: vllm_server.truncated},
        (2,),
    ),
}


@pytest.fixture(scope="module")
def without_faults(folder, tmp_path_factory):
    runs = {}
    for name, settings in (("adapter", LORA), ("full", {"lora": None})):
        runs[name], server = final_weights(folder, tmp_path_factory.mktemp("runs"), name, **settings)
        assert len(server.loads) == 4 and server.waits == []  # the last one for the validation at the end
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("adapter", fault) for fault in FAULTS),
        *(("full", fault) for fault in ("stale weights", "500, then dead", "restart", "several")),
    ],
)
def test_a_run_with_faults_ends_with_the_same_weights(folder, without_faults, tmp_path, kind, fault):
    faults, stale = FAULTS[fault]
    settings = LORA if kind == "adapter" else {"lora": None}
    weights, server = final_weights(folder, tmp_path, kind, faults, stale, **settings)
    assert weights.keys() == without_faults[kind].keys()
    for name, weight in weights.items():
        assert torch.equal(weight, without_faults[kind][name]), name
    restarted = fault in ("500, then dead", "restart", "several")
    repeated = restarted or fault in ("forgotten", "stale weights")
    assert (len(server.loads) > 4) == repeated and (repeated or server.waits), "the fault was not seen"
    assert (server.starts > 1) == restarted
    assert len(server.waits) == len(faults) or fault != "invalid responses"


def test_a_reload_whose_response_is_lost_is_repeated(folder, server, tmp_path, monkeypatch):
    policy = configured(folder, served(server, tmp_path), lora=None)
    update, calls = server.post_update_weight_version, []

    def restarted(body):
        calls.append(body)
        if len(calls) == 1:  # after the weights were read, before the version is known
            raise vllm_server.DiedError
        return update(body)

    monkeypatch.setattr(server, "post_update_weight_version", restarted)
    decisions = act(policy)
    assert len(calls) == 2 and server.starts == 2 and len(decisions.actions) == len(OBSERVATIONS)


def test_weights_are_loaded_again_if_the_prefix_cache_was_not_emptied(folder, server, tmp_path):
    server.held_resets = 2
    act(configured(folder, served(server, tmp_path), lora=None))
    assert len(server.loads) == 3 and len(server.waits) == 2 and not server.paused


def test_an_adapter_whose_load_was_answered_late_is_not_loaded_again(folder, server, tmp_path, monkeypatch):
    policy, load, calls = configured(folder, served(server, tmp_path)), server.post_v1_load_lora_adapter, []

    def slow(body):
        calls.append(load(body))
        return (503, {"error": "gateway timeout"}) if len(calls) == 1 else calls[-1]

    monkeypatch.setattr(server, "post_v1_load_lora_adapter", slow)
    act(policy)
    assert [status for status, _ in calls] == [200, 400]


@pytest.mark.slow
def test_other_ranks_wait_for_rank_0_and_load_nothing_themselves(folder, server, tmp_path, monkeypatch):
    first, second = (configured(folder, served(server, tmp_path)) for _ in range(2))
    monkeypatch.setattr("lrl.chat.generator._PATIENCE", 0.1)

    def act_as(rank, policy):
        monkeypatch.setattr("lrl.chat.generator.rank_and_world_size", lambda: (rank, 2))
        return act(policy).actions

    with pytest.raises(ValueError, match="in which rank 0 has not reported new weights"):
        act_as(1, second)
    assert act_as(0, first) == act_as(1, second) and len(server.loads) == 1
    change(first)
    act_as(0, first)  # rank 0 alone, for a picture: the others have nothing to sample
    change(first)
    change(second)
    change(second)
    before = act_as(0, first)
    server.faults = {server.asked + 2: vllm_server.forget}  # rank 1 loads the weights again without rank 0
    assert act_as(1, second) == before == act_as(0, first) and len(server.loads) == 5  # rank 0 as well
    change(second)
    change(first)
    monkeypatch.setattr(server, "post_v1_load_lora_adapter", None)
    for rank, policy in enumerate((first, second)):
        with pytest.raises(ValueError, match="which does not load the weights"):
            act_as(rank, policy)


# -- errors -----------------------------------------------------------------------------------------------------------


def message(policy):
    with pytest.raises(ValueError) as raised:
        act(policy)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_dead_server_is_one_sentence(folder, server, tmp_path):
    policy = configured(folder, served(server, tmp_path, max_retries=1))
    policy.generator.server.wait = lambda event, seconds: None
    act(policy)
    server.faults = {len(server.bodies) + 1: vllm_server.respond_500, len(server.bodies) + 2: vllm_server.die}
    assert re.search(r"generator.url is 'http://127.*', which failed 2 times \(no connection, ", message(policy))
    server.stop()
    assert "which failed 2 times (no connection, " in message(policy)


def test_another_base_is_found_before_training(folder, tmp_path):
    other = save_tiny_model(tmp_path / "other", initializer_range=0.4)
    with VLLMStandIn(other) as server:
        said = message(configured(folder, served(server, tmp_path)))
        assert "whose log-probabilities differ from the trainer's by" in said and "processed_logprobs" in said
        assert len(server.loads) == 2


def test_log_probabilities_before_the_temperature_are_found(folder, tmp_path):
    with VLLMStandIn(folder, raw_logprobs=True) as server:
        policy = text_policy(folder, temperature=2.0, max_new_tokens=6, generator=served(server, tmp_path), **LORA)
        policy.connect(FrozenLakeCodec())
        policy.configure()
        assert "--logprobs-mode processed_logprobs" in message(policy)


def test_a_rejected_request_is_one_sentence(folder, server, tmp_path):
    policy = configured(folder, served(server, tmp_path))
    server.faults = {2: lambda *_: (400, {"error": {"message": "max_tokens is too large"}})}
    assert re.search(r"which rejects a request \(/v1/completions returned 400: .*too large", message(policy))
    assert server.waits == []


@pytest.mark.parametrize(
    ("settings", "variable", "endpoint"),
    [
        (LORA, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "post_v1_load_lora_adapter"),
        ({"lora": None}, "VLLM_SERVER_DEV_MODE=1", "post_pause"),
    ],
)
def test_a_server_without_the_endpoints_is_one_sentence(
    folder, server, tmp_path, monkeypatch, settings, variable, endpoint
):
    monkeypatch.setattr(server, endpoint, None)
    said = message(configured(folder, served(server, tmp_path), **settings))
    assert "which does not load the weights" in said and variable in said


@pytest.mark.parametrize(
    ("settings", "reason", "advice"),
    [
        ({"lora": LoRAConfig(r=9)}, "LoRA rank 9 is greater than max_lora_rank 8", "--max-lora-rank 9"),
        (LORA, "No adapter found for", "it must read this folder"),
        ({"lora": None}, "Call to collective_rpc method failed", "it must read this folder"),
    ],
    ids=["rank", "adapter's folder", "model's folder"],
)
def test_weights_that_cannot_be_loaded_are_one_sentence_at_once(folder, tmp_path, settings, reason, advice):
    with VLLMStandIn(folder) as server:
        policy = configured(folder, served(server, tmp_path), **settings)
        server.is_remote = advice.startswith("it")
        said = message(policy)
        assert reason in said and advice in said and server.waits == []


@pytest.mark.parametrize(
    ("key", "model"),
    [
        ("language_model.random_init", {"random_init": True}),
        ("language_model.added_tokens", {"added_tokens": ["<a>"]}),
        ("language_model.quantization", {"quantization": "nf4"}),
        ("lora.modules_to_save", {"lora": LoRAConfig(modules_to_save=["lm_head"])}),
    ],
)
def test_what_a_server_cannot_hold_is_an_error(folder, tmp_path, key, model):
    server = ServedGenerator("http://localhost:1", str(tmp_path))
    with pytest.raises(ValueError, match=f"{key} is set, but the server .* or generator.full_weights true"):
        text_policy(folder, generator=server, **LORA | model)
    text_policy(folder, generator=ServedGenerator("http://localhost:1", "x", full_weights=True), **LORA | model)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="generator.url is 'localhost'; it must be an address"):
        ServedGenerator("localhost", "weights")
    with pytest.raises(ValueError, match="generator.max_concurrency is 0; it must be at least 1"):
        ServedGenerator("http://localhost:1", "weights", max_concurrency=0)


BODY = {"model": "a", "prompt": [1, 2], "max_tokens": 3, "seed": 0}


def payload(model="a", **changes):
    choice = {"token_ids": [4, 5], "prompt_token_ids": [1, 2], "finish_reason": "stop"}
    choice["logprobs"] = {"token_logprobs": [-0.5, -1.5]}
    return {"model": model, "choices": [choice | changes]}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"choices": []}, "without tokens"),
        ("text", "without tokens"),
        (payload(logprobs=None), "without tokens"),
        (payload(logprobs={"token_logprobs": [-0.5, None]}), "without tokens"),
        (payload(logprobs={"token_logprobs": [-0.5, float("nan")]}), "not finite"),
        (payload(logprobs={"token_logprobs": [-0.5]}), "2 tokens with 1 log-probabilities, of 3 tokens at most"),
        (payload(token_ids=[], logprobs={"token_logprobs": []}), "0 tokens with 0"),
        (payload(token_ids=[4] * 4, logprobs={"token_logprobs": [-1] * 4}), "4 tokens with 4"),
        (payload(token_ids=[4, "5"]), "2 tokens with 2"),
        (payload(prompt_token_ids=[1, 2, 3]), "another prompt"),
        (payload(finish_reason="abort"), "for the reason 'abort'"),
        (payload(finish_reason="length"), "2 tokens that ended for the reason 'length'"),
    ],
)
def test_an_invalid_response_is_requested_again(wrong, reason):
    with pytest.raises(TransientError, match=reason):
        checked_row(wrong, BODY)


def test_a_valid_response_is_read_and_one_of_another_model_is_not():
    row = checked_row(payload(), BODY)
    assert row.ids == [4, 5] and row.logprobs == [-0.5, -1.5]
    with pytest.raises(WeightsLostError, match="the model 'b' instead of 'a'"):
        checked_row(payload(model="b"), BODY)


# -- 16 bits and configurations ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("history", [0, "all"])
def test_in_16_bits_both_log_probabilities_are_kept_and_tokens_are_weighted(folder, tmp_path, history):
    with VLLMStandIn(folder, dtype=torch.bfloat16) as server:
        model = merged(LORA, {"dtype": "bfloat16", "generator": served(server, tmp_path)})
        module = grpo(folder, history=history, model=model)
        kind = "episodes" if history else "prompts"
        rows = train(tmp_path, module=module, data=rollout_data(kind), max_epochs=2).logger.rows
        metrics = [row for _, row in rows if "train/importance_ratio" in row]
        assert len(metrics) == 2
        for row in metrics:
            assert row["train/importance_ratio"] == pytest.approx(1, abs=0.1)
            assert row["train/importance_ratio_max"] > 1 and 0.9 < row["train/effective_sample_share"] <= 1
            assert row["train/ratio_error"] < 1e-6  # the ratio is that of the trainer's policies


@pytest.mark.parametrize("kind", [GRPOModule, PPOValueHeadModule, REINFORCEPlusPlusModule])
def test_each_algorithm_weights_its_advantages(folder, monkeypatch, kind):
    policy = text_policy(folder, value_head=ValueHeadConfig(init_seed=0))
    policy.connect(FrozenLakeCodec())
    policy.configure()
    envs = GymnasiumEnvs("FrozenLake-v1", max_episode_steps=4).make(8, policy.response_format)
    rollout = EpisodeCollector(policy, envs).collect(CollectionPlan(seed=0, collection=0, num_groups=2, group_size=4))
    envs.close()
    rollout = rollout.replace(rewards=torch.arange(8.0).expand(rollout.rewards.shape) * rollout.active)
    module, ratios = kind(policy), torch.tensor([0.25, 2.0, 8.0]).log()[torch.arange(rollout.logprobs.numel()) % 3]
    served = rollout.replace(behaviour_logprobs=rollout.logprobs - ratios.view_as(rollout.logprobs))
    monkeypatch.setattr(kind, "all_gather", lambda self, tensor: tensor[None])  # there is no trainer
    plain = module.prepare(served)
    monkeypatch.setattr(TextPolicy, "importance_cap", 3.0)
    weighted, mask = module.prepare(served), plain.response_mask
    weights = rollout.flatten(ratios.view_as(rollout.logprobs)).exp().clamp(max=3.0)
    assert plain.advantages[mask].abs().mean() > 0.3 and len(weights[mask].unique()) == 3
    torch.testing.assert_close(weighted.advantages[mask], (weights * plain.advantages)[mask])
    assert torch.equal(weighted.old_logprobs, plain.old_logprobs)


def test_without_a_cap_nothing_is_recorded_and_evaluation_never_records(folder, tmp_path):
    with VLLMStandIn(folder) as server:
        policy = configured(folder, served(server, tmp_path), recompute_logprobs=True)
        decisions = act(policy)
        assert decisions.behaviour_logprobs is not None
        torch.testing.assert_close(decisions.behaviour_logprobs, decisions.logprobs, atol=1e-5, rtol=0)
        assert act(policy, policy.sampling_at(0.7)).behaviour_logprobs is None
        other = configured(folder, served(server, tmp_path, importance_cap=None), recompute_logprobs=True)
        assert act(other).behaviour_logprobs is None


def test_the_generator_is_built_from_a_configuration(folder):
    from lrl.policies.policy import Policy

    generator = {"class_path": "ServedGenerator", "init_args": {"url": "http://localhost:8000", "folder": "weights"}}
    policy = build(
        Policy,
        {
            "class_path": "TextPolicy",
            "init_args": {
                "language_model": {"name": folder, "lora": {"r": 2}},
                "prompt": {"response_format": "direct"},
                "sampling": {"max_new_tokens": 4},
                "generator": generator,
            },
        },
    )
    assert isinstance(policy.generator, ServedGenerator) and policy.generator.importance_cap == 3.0
    assert policy.generator.language_model is policy.language_model


@pytest.mark.slow
def test_a_run_of_the_command_line_resumes_and_is_evaluated_without_the_server(folder, tmp_path, capsys):
    run, generator = tmp_path / "run", {"class_path": "ServedGenerator"}
    policy = "--model.init_args.policy.init_args"
    with VLLMStandIn(folder) as server:
        generator["init_args"] = {"url": server.url, "folder": str(tmp_path / "weights")}
        line = f"--config configs/frozen_lake/grpo.yaml --run_directory={run} --trainer.accelerator cpu"
        line += f" {policy}.language_model.name {folder} {policy}.prompt.response_format direct"
        line += f" {policy}.sampling.max_new_tokens 2 --data.init_args.num_groups 2 --data.init_args.group_size 2"
        line += " --data.init_args.validation.episodes 1 --data.init_args.num_epochs 1"
        picture = {"class_path": "PolicyPicture", "init_args": {"samples": 2}}  # instead of 64 responses per state
        words = ["lrl", "fit", *line.split(), f"{policy}.generator", json.dumps(generator)]
        words += ["--trainer.callbacks", json.dumps([{"class_path": "CollectionCheckpoint"}, picture])]
        done = run_words([*words, "--trainer.max_epochs", "1"])
        assert done.returncode == 0, done.stderr
        collected, config = server.asked, (run / "config.yaml").read_text()
        assert collected >= 4 and "class_path: ServedGenerator" in config
        done = run_words(["lrl", "fit", "--resume", str(run), "--trainer.max_epochs", "2"])
        assert done.returncode == 0 and server.asked > collected, done.stderr
    done = run_words(["lrl", "evaluate", "--checkpoint", str(run), "--episodes", "2"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_response_ends_with_the_last_tag(tmp_path):
    prompt, sampling = PromptTemplate(response_format="think_answer"), SamplingConfig(max_new_tokens=24)
    with VLLMStandIn("assets/tiny-lm") as server:
        policy = TextPolicy(LanguageModelConfig(**LORA), prompt, sampling, generator=served(server, tmp_path))
        policy.connect(FrozenLakeCodec())
        policy.configure()
        decisions = act(policy)
        tokenizer, lengths = policy.language_model.tokenizer, decisions.response_mask.sum(1).tolist()
        ended = 0
        for ids, length in zip(decisions.inputs["response_ids"].tolist(), lengths):
            assert not any(tokenizer.ends(ids[:size], "</answer>") for size in range(1, length))
            ended += tokenizer.ends(ids[:length], "</answer>")
            assert length == 24 or tokenizer.ends(ids[:length], "</answer>")
        assert ended

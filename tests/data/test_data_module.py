"""Demonstrations are trained on with the tokens of the environment."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import from_settings

import lrl.data.jsonl as jsonl_module
from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.jsonl import JsonlDemonstrations
from lrl.data.sources import ConcatDemonstrations, ExpertDemonstrations, Reasoning
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import RandomKeys, SamplingConfig


@pytest.fixture(scope="module")
def policy():
    policy = TextPolicy(LanguageModelConfig(), PromptTemplate(), SamplingConfig())
    policy.connect(FrozenLakeCodec())
    policy.configure()
    return policy


@pytest.fixture
def data(policy, monkeypatch):
    def make(**changes):
        settings = {"demonstrations": ExpertDemonstrations(ExpertQRows(), repeat=3), "batch_size": 8} | changes
        module = from_settings(DemonstrationsDataModule, env=GymnasiumEnvs("FrozenLake-v1"), **settings)
        module.connect(policy)
        return module

    return make


def test_expert_responses_hold_a_best_action_in_the_right_format(policy):
    rows = ExpertQRows().rows()
    turns = ExpertDemonstrations(ExpertQRows(), repeat=2).load(policy.codec, policy)
    assert len(turns) == 2 * len(rows) == 22
    for row, turn in zip([*rows, *rows], turns, strict=True):
        action = policy.codec.text_to_action(get_response_format("think_answer").extract(turn.response))
        assert action in row.best_actions and turn.observation == row.observation


def test_reasoning_names_what_is_seen_and_what_is_ahead(policy):
    observation = "Goal: go to the red ball\nYou see a blue key 1 step forward\nYou see a red ball 3 steps forward"
    reasoning = Reasoning(("see {seen}, {ahead} ahead, so {action}",))
    response = reasoning.write_response(policy, BabyAICodec(), observation, "turn left", 0)
    assert "<think>see red ball 3 forward, key ahead, so turn left</think>" in response
    with pytest.raises(ValueError, match=r"demonstrations.reasoning contains \{ahead\}, which FrozenLakeCodec cannot"):
        ExpertDemonstrations(ExpertQRows(), reasoning=("{ahead}",)).load(policy.codec, policy)


def test_a_response_ends_with_the_token_at_which_sampling_stops(policy):
    ids = policy.encode_response("<think>so</think><answer>LEFT</answer>")
    stops = policy.language_model.tokenizer.stop_ids("</answer>")
    assert ids[-1] in stops and not set(ids[:-1]) & stops
    assert policy.encode_response("LEFT")[-1] == policy.language_model.tokenizer.eos_id


def test_a_pass_visits_every_demonstration_on_some_rank(data):
    module = data()
    assert module.num_batches() == 5
    parts = [module.batch(0, index, rank, 2) for index in range(5) for rank in (0, 1)]
    prompts = {tuple(row) for part in parts for row in part.inputs["prompt_ids"].tolist()}
    assert sum(len(part) for part in parts) == 40 and len(prompts) == 11


def test_passes_differ_and_can_be_repeated(data):
    one, two = data(), data()
    first, again, other = one.batch(0, 0), two.batch(0, 0), one.batch(1, 0)
    assert (first.inputs["prompt_ids"] == again.inputs["prompt_ids"]).all()
    assert (
        first.inputs["prompt_ids"].shape != other.inputs["prompt_ids"].shape
        or (first.inputs["prompt_ids"] != other.inputs["prompt_ids"]).any()
    )


def test_loss_is_on_the_response_unless_it_is_on_all(data):
    answers, everything = data().batch(0, 0), data(loss_on="all").batch(0, 0)
    assert answers.response_mask.sum(1).max() < 25
    assert everything.response_mask.sum(1).min() > 90
    assert (everything.inputs["prompt_mask"].sum(1) == 1).all()


def test_turns_are_grouped_by_length(data):
    module = data(demonstrations=ExpertDemonstrations(ExpertQRows(), ("a", "a b c d e f g h i j"), repeat=200))
    widths = [module.batch(0, index).response_mask.sum(1).float().std() for index in range(32)]
    assert np.mean(widths) < 1.5


def test_every_token_of_an_optimiser_step_weighs_the_same_on_all_ranks(data, monkeypatch):
    module = data(demonstrations=ExpertDemonstrations(ExpertQRows(), ("a", "a b c d e f g h i j"), repeat=3))
    monkeypatch.setattr(DemonstrationsDataModule, "_accumulate", 2)
    assert module.num_batches() == 5
    for step in ([0, 1], [2, 3], [4]):
        parts = [module.batch(0, index, rank, 2) for index in step for rank in (0, 1)]
        weights = torch.cat([part.advantages[part.response_mask] for part in parts])
        assert weights.unique().numel() == 1
        assert weights.sum() / 2 / 2 == pytest.approx(1)  # Lightning divides by one 2, DDP by the other
        assert sum(module.num_tokens(0, index) for index in step) == len(weights)


def test_demonstrations_are_tokenised_as_the_policy_tokenises_in_the_environment(data, policy):
    module = data(batch_size=33)
    batch = module.batch(0, 0)
    keys = RandomKeys(seed=0, purpose="", collection=0, env=np.arange(11), turn=np.zeros(11, dtype=np.int64))
    seen = policy.act([row.observation for row in ExpertQRows().rows()], [()] * 11, keys, policy.sampling).inputs
    trained = {tuple(ids[mask].tolist()) for ids, mask in zip(batch.inputs["prompt_ids"], batch.inputs["prompt_mask"])}
    assert trained == {tuple(ids[mask].tolist()) for ids, mask in zip(seen["prompt_ids"], seen["prompt_mask"])}


def test_held_out_demonstrations_are_all_used_once(data):
    module = data(validation_demonstrations=ExpertDemonstrations(ExpertQRows()))
    parts = [part for rank in (0, 1) for part in module.validation_batches(rank, 2)]
    assert sum(len(part) for part in parts) == 11
    assert list(data().validation_batches()) == []


@pytest.mark.slow
def test_a_hundred_thousand_demonstrations_start_at_once(data):
    module = data(demonstrations=ExpertDemonstrations(ExpertQRows(), repeat=10_000), batch_size=64)
    started = time.perf_counter()
    module.load(module.demonstrations)
    module.batch(0, 0)
    assert time.perf_counter() - started < 20  # seconds; about one, but other work may share the machine
    started = time.perf_counter()
    for index in range(100):
        module.batch(0, index)
    assert time.perf_counter() - started < 6400 * 500e-6


def demonstrated(path, policy, env=None, **settings):
    """The demonstrations of a file of JSON lines, of FrozenLake by default, as the data module loads them."""
    env = env or GymnasiumEnvs("FrozenLake-v1")
    source = JsonlDemonstrations(str(path), **settings)
    source.validate(env)
    return source.load(env.codec, policy)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "which is empty"),
        ('{"observation": "x"}', "line 1: it has no action or response"),
        ('{"action": "LEFT"}', "line 1: it has no observation or prompt"),
        ('{"observation": 1, "action": "LEFT"}', "line 1: observation is 1"),
        ('{"observation": "x", "action": "LEFT"}\n{"observation": "x", "action": "JUMP"}', "line 2: .*JUMP"),
        ('{"observation": "x", "action": "<action>4</action>"}', "line 1: action is '<action>4</action>'"),
        ('{"observation": "x", "action": "LEFT"}\n\n{', "line 3: it is not a valid JSON object"),
        ("[1]", "line 1: it is not a valid JSON object"),
        ("1", "line 1: it is not a valid JSON object"),
        ("\udcff", "line 1: it is not a valid JSON object"),
    ],
)
def test_a_malformed_file_raises_one_sentence(tmp_path, policy, text, complaint):
    path = tmp_path / "demos.jsonl"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=complaint):
        demonstrated(path, policy)


def test_a_missing_file_raises_one_sentence(tmp_path, policy):
    with pytest.raises(ValueError, match="demonstrations.path is '.*none', which cannot be read"):
        demonstrated(tmp_path / "none", policy)


@pytest.mark.parametrize(
    ("record", "response"),
    [
        ({"action": "LEFT"}, "<think></think><answer>LEFT</answer>"),
        ({"action": "<action>LEFT</action>"}, "<think></think><answer>LEFT</answer>"),
        ({"action": "<action>2</action>"}, "<think></think><answer>RIGHT</answer>"),
        ({"action": "0"}, "<think></think><answer>LEFT</answer>"),
        ({"action": "UP", "reasoning": "so"}, "<think>so</think><answer>UP</answer>"),
        ({"response": "whatever"}, "whatever"),
    ],
)
def test_records_are_read_as_the_original_writes_them_or_as_they_are(tmp_path, policy, record, response):
    path = tmp_path / "demos.jsonl"
    seen = "<observation>1</observation>"
    lines = [json.dumps({key: seen} | record) for key in ("observation", "prompt")]
    path.write_text("\n".join(lines) + "\n")
    turns = demonstrated(path, policy)
    assert [turn.observation for turn in turns] == ["1", seen]  # FrozenLake writes no tags, and a prompt is as it is
    assert [turn.response for turn in turns] == [response] * 2


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("text", ["0.12345,-0.2,3,0.4", "<observation>0.12345,-0.2,3,0.4</observation>"])
def test_numbers_are_shown_as_the_environment_writes_them(tmp_path, policy, text, tags):
    """The original trained on texts that its evaluation never showed."""
    path, env = tmp_path / "demos.jsonl", GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(tags=tags))
    path.write_text(
        json.dumps({"observation": text, "action": "1"}) + "\n" + json.dumps({"prompt": text, "response": "r"})
    )
    shown, unchanged = demonstrated(path, policy, env)
    written = "0.123,-0.200,3.000,0.400"
    assert shown.observation == (f"<observation>{written}</observation>" if tags else written)
    assert unchanged.observation == text


@pytest.mark.parametrize(
    ("observation", "complaint"),
    [
        ("0.1 0.2 -0.3 1.0", "there must be 4 numbers separated by commas"),
        ("0.1,0.2,-0.3", "there must be 4 numbers separated by commas"),
        ("500,600,700,800", "integers are outside the observation space"),
    ],
)
def test_numbers_that_the_environment_does_not_write_are_an_error(tmp_path, policy, observation, complaint):
    (tmp_path / "demos.jsonl").write_text(json.dumps({"observation": observation, "action": "1"}))
    with pytest.raises(ValueError, match=f"demos.jsonl, line 1: observation is '{observation}'.*{complaint}"):
        demonstrated(tmp_path / "demos.jsonl", policy, GymnasiumEnvs("CartPole-v1"))


def test_a_network_learns_from_lines_whose_observations_are_numbers(tmp_path):
    env = GymnasiumEnvs("Pendulum-v1")
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps({"observation": "0.1,0.2,0.3", "action": "<action>9.5</action>"}))
    (turn,) = demonstrated(path, SimpleNamespace(response_format=None), env)
    assert turn.native.observation == pytest.approx([0.1, 0.2, 0.3]) and turn.native.action.tolist() == [2]
    path.write_text(json.dumps({"observation": "A F\nF G", "action": "LEFT"}))
    with pytest.raises(ValueError, match="line 1: observation is 'A F.*, which a SimpleNamespace cannot read"):
        demonstrated(path, SimpleNamespace(response_format=None))


def test_lines_are_selected_by_a_seed(tmp_path, policy):
    path = tmp_path / "demos.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(number), "response": "r"}) for number in range(12)))
    chosen = {
        (count, seed): [turn.observation for turn in demonstrated(path, policy, num_rows=count, seed=seed)]
        for count in (3, 6)
        for seed in (0, 1)
    }
    assert set(chosen[3, 0]) < set(chosen[6, 0]) and set(chosen[6, 0]) != set(chosen[6, 1])
    with pytest.raises(ValueError, match="demonstrations.num_rows is 13, but .* has 12 lines; it must be at most that"):
        demonstrated(path, policy, num_rows=13)


def test_a_file_is_not_held_out_from_itself(tmp_path):
    source, other = JsonlDemonstrations(str(tmp_path / "a.jsonl")), JsonlDemonstrations(str(tmp_path / "b.jsonl"))
    same = JsonlDemonstrations(str(tmp_path / "." / "a.jsonl"), num_rows=3)
    other.check_held_out(source)
    with pytest.raises(ValueError, match=r"validation_demonstrations.path is '.*a.jsonl', which data.demonstration"):
        same.check_held_out(ConcatDemonstrations([other, source]))


def test_integers_that_were_read_as_decimals_are_an_error(tmp_path, policy):
    path, env = tmp_path / "demos.jsonl", GymnasiumEnvs("Pendulum-v1")
    path.write_text(json.dumps({"observation": "0.1,0.2,0.3", "action": "<action>500</action>"}))
    source = JsonlDemonstrations(str(path))
    source.validate(env)
    with pytest.raises(ValueError, match="line 1: action is '<action>500</action>', whose integers are outside"):
        source.load(env.codec, policy)
    path.write_text(json.dumps({"observation": "0.1,0.2,0.3", "action": "<action>2</action>"}))
    assert "<action>2.000</action>" in source.load(env.codec, policy)[0].response


def test_lines_are_read_when_they_are_needed_and_few_are_kept(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(jsonl_module, "_CACHED", 4)
    path = tmp_path / "demos.jsonl"
    lines = [{"prompt": str(number), "response": "LEFT"} for number in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)))
    turns = demonstrated(path, policy)
    order = turns.shuffled_indices(0, 1).tolist()
    assert sorted(order) == list(range(10)) and order != turns.shuffled_indices(0, 2).tolist()
    assert [turns[index].observation for index in order] == [str(index) for index in order]
    path.write_text("\n".join(map(json.dumps, [line | {"response": "DOWN!"} for line in lines])))
    with pytest.raises(ValueError, match="line "):
        turns[order[0]]
    assert turns[order[-1]].response == "LEFT", "it was kept"


def test_the_fingerprint_of_lines_follows_from_their_content_and_selection(tmp_path, policy):
    path, copy, other = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    for file, response in ((path, "LEFT"), (copy, "LEFT"), (other, "DOWN")):
        file.write_text("\n".join(json.dumps({"prompt": str(n), "response": response}) for n in range(9)))
    same, changed = (demonstrated(file, policy).fingerprint for file in (copy, other))
    assert demonstrated(path, policy).fingerprint == same != changed
    assert len({demonstrated(path, policy, num_rows=5, seed=seed).fingerprint for seed in (0, 1)} | {same}) == 3


def test_settings_out_of_range_raise_with_their_name():
    with pytest.raises(ValueError, match="data.batch_size is 0"):
        DemonstrationsDataModule(ExpertDemonstrations(ExpertQRows()), GymnasiumEnvs("FrozenLake-v1"), batch_size=0)
    with pytest.raises(ValueError, match="demonstrations.repeat is 0"):
        ExpertDemonstrations(ExpertQRows(), repeat=0)
    with pytest.raises(ValueError, match="demonstrations.reasoning is"):
        ExpertDemonstrations(ExpertQRows(), reasoning=())

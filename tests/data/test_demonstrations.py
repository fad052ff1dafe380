"""Demonstrations: what is trained on is what is asked for."""

import json

import numpy as np
import pytest

from lrl.codecs.grid import FrozenLakeCodec
from lrl.data.demonstrations import DemonstrationsDataModule, ExpertDemonstrations, JsonlDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake_rows import ExpertQRows
from lrl.policies.language_model import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts.response_format import response_format
from lrl.prompts.template import PromptTemplate
from lrl.types import SamplingConfig


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
        module = DemonstrationsDataModule(env=GymnasiumEnvs("FrozenLake-v1"), **settings)
        monkeypatch.setattr(module, "_policy", lambda: policy)
        return module

    return make


def test_the_expert_answers_with_a_best_action_in_the_right_format(policy):
    rows = ExpertQRows().rows()
    turns = ExpertDemonstrations(ExpertQRows(), repeat=2).turns(policy.codec, policy)
    assert len(turns) == 2 * len(rows) == 22
    for row, turn in zip([*rows, *rows], turns, strict=True):
        action = policy.codec.text_to_action(response_format("think_answer").extract(turn.response))
        assert action in row.best_actions and turn.observation == row.observation


def test_the_answer_ends_with_the_token_at_which_sampling_stops(policy):
    ids = policy.encode_response("<think>so</think><answer>LEFT</answer>")
    stops = policy.tokenizer.stop_ids("</answer>")
    assert ids[-1] in stops and not set(ids[:-1]) & stops
    assert policy.encode_response("LEFT")[-1] == policy.tokenizer.eos_id


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


def test_only_the_answer_counts_unless_all_is_asked_for(data):
    answers, everything = data().batch(0, 0), data(loss_on="all").batch(0, 0)
    assert answers.response_mask.sum(1).max() < 25
    assert everything.response_mask.sum(1).min() > 90
    assert (everything.inputs["prompt_mask"].sum(1) == 1).all()


def test_turns_are_grouped_by_length(data):
    module = data(demonstrations=ExpertDemonstrations(ExpertQRows(), ("a", "a b c d e f g h i j"), repeat=200))
    widths = [module.batch(0, index).response_mask.sum(1).float().std() for index in range(32)]
    assert np.mean(widths) < 1.5


@pytest.mark.parametrize(
    ("text", "complaint"), [("", "no demonstrations"), ('{"observation": "x"}', "line 1"), ("{", "line 1")]
)
def test_a_bad_file_is_one_sentence(tmp_path, policy, text, complaint):
    path = tmp_path / "demos.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        JsonlDemonstrations(str(path)).turns(policy.codec, policy)
    with pytest.raises(ValueError, match="cannot be read"):
        JsonlDemonstrations(str(tmp_path / "none")).turns(policy.codec, policy)


def test_the_originals_records_are_read(tmp_path, policy):
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps({"observation": "<observation>1</observation>", "action": "LEFT"}) + "\n")
    (turn,) = JsonlDemonstrations(str(path)).turns(policy.codec, policy)
    assert turn.response == "<think></think><answer>LEFT</answer>"

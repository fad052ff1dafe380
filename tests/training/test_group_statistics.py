"""Figures of each group, over a run."""

import csv

import torch
from tiny_runs import make_trainer, rollout_data, save_tiny_model, text_policy

from lrl.algorithms.grpo import GRPOModule
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.policies.actor import Actor
from lrl.training.pictures import GroupStatistics, group_rows


class Reader:
    """Stub of a policy that parses responses."""

    codec, response_format, action_text = FrozenLakeCodec(), "direct", Actor.action_text


def test_groups_with_one_action_and_with_several_have_different_statistics():
    class Rollouts:
        observations = [["row 0 column 0\nA", "row 0 column 0\nA", "row 2 column 1\nA", "row 2 column 1\nA"]]
        responses = [["LEFT", "LEFT", "UP", "sideways"]]
        episode_returns = torch.tensor([0.0, 0.0, 1.0, 0.0])

    agreed, split = group_rows(Rollouts(), Reader())
    assert agreed == {
        "state": "row 0 column 0", "episodes": 2, "return_mean": 0.0, "return_std": 0.0, "action_entropy": 0.0,
        "actions": "LEFT=1.000",
    }  # fmt: skip
    assert split["return_std"] == 0.5 and split["action_entropy"] == 0.6931
    assert split["actions"] == "UP=0.500 invalid=0.500"


def test_a_run_writes_a_line_per_state_and_collection(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    trainer = make_trainer(tmp_path, GroupStatistics(), max_epochs=2)
    trainer.fit(GRPOModule(text_policy(folder)), datamodule=rollout_data("prompts"))
    with (tmp_path / "groups.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["collection"] for line in lines} == {"0", "1"}
    assert all(float(line["action_entropy"]) >= 0 and int(line["episodes"]) > 0 for line in lines)

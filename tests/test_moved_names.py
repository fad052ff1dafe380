"""Configurations that were written with names of before."""

import importlib

import pytest
import torch
import yaml
from tiny_runs import save_tiny_model, text_policy

from lrl.envs.frozen_lake.expert_rows import ExpertQRows
from lrl.envs.prompt_env import PromptEnvs
from lrl.evaluation.checkpoint import load_policy
from lrl.moved_names import MOVED_CLASSES, MOVED_KEYS, current_config, moved_key
from lrl.rewards.expert_q import QGapReward


@pytest.mark.parametrize("path", MOVED_CLASSES.values())
def test_every_class_is_where_the_table_says(path):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).__module__ == module


def test_old_class_paths_are_translated_at_any_depth():
    rows = {"class_path": "lrl.envs.frozen_lake_rows.ExpertQRows", "init_args": {"map_name": "4x4"}}
    config = {
        "data": {"class_path": "lrl.data.rollouts.RolloutDataModule", "init_args": {"env": {"rows": rows}}},
        "trainer": {"callbacks": [{"class_path": "lrl.callbacks.rollouts.VectorEnvRollouts"}], "max_epochs": 3},
        "model": {"class_path": "lrl.algorithms.grpo.GRPOModule"},
    }
    current = current_config(config)
    assert current["data"]["class_path"] == "lrl.data.rollout_buffer.RolloutDataModule"
    assert current["data"]["init_args"]["env"]["rows"] == {
        "class_path": "lrl.envs.frozen_lake.expert_rows.ExpertQRows",
        "init_args": {"map_name": "4x4"},
    }
    assert current["trainer"]["callbacks"] == [{"class_path": "lrl.callbacks.collect.VectorEnvRollouts"}]
    assert current["model"] == config["model"] and rows["class_path"].startswith("lrl.envs.frozen_lake_rows")


def test_old_keys_are_translated_and_found_with_or_without_init_args(monkeypatch):
    monkeypatch.setitem(MOVED_KEYS, "model.init_args.lrr", "model.init_args.optimizer.rate")
    assert moved_key("model.lrr") == moved_key("model.init_args.lrr") == "model.init_args.optimizer.rate"
    assert moved_key("data.lrr") is None
    current = current_config({"model": {"init_args": {"lrr": 0.1, "gamma": 1}}})
    assert current == {"model": {"init_args": {"gamma": 1, "optimizer": {"rate": 0.1}}}}
    assert current_config({"data": {"init_args": None}}) == {"data": {"init_args": None}}


def test_a_checkpoint_with_old_class_paths_is_loaded(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    policy, rows = text_policy(folder), {"class_path": "lrl.envs.frozen_lake_rows.ExpertQRows"}
    policy.connect(PromptEnvs(ExpertQRows(), [QGapReward()]).codec)
    policy.configure()
    text = {"language_model": {"name": folder}, "prompt": {"response_format": "direct", "system": ""}}
    env = {"rows": rows, "rewards": [{"class_path": "lrl.rewards.expert_q.QGapReward"}]}
    config = {
        "model": {"init_args": {"policy": {"class_path": "lrl.policies.text.TextPolicy", "init_args": text}}},
        "data": {"init_args": {"env": {"class_path": "lrl.envs.prompt_env.PromptEnvs", "init_args": env}}},
    }
    saved = {"config": yaml.safe_dump(config), "fingerprint": policy.fingerprint}
    weights = {f"policy.{name}": weight for name, weight in policy.state_dict().items()}
    torch.save({"state_dict": weights, "lrl": saved}, tmp_path / "old.ckpt")
    loaded = load_policy(tmp_path / "old.ckpt")
    assert isinstance(loaded.env_factory, PromptEnvs) and loaded.info["env_id"] == "PromptEnvs"

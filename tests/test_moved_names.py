"""Configurations that were written with names of before."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import save_tiny_model, text_policy

import lrl.cli.main
from lrl.algorithms.grpo import GRPOModule
from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.algorithms.trpo import TRPOModule
from lrl.cli.error_messages import _keys
from lrl.data.demonstrations.minari import MinariDemonstrations
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.frozen_lake.expert_rows import ExpertQRows
from lrl.envs.prompt_env import PromptEnvs
from lrl.evaluation.checkpoint import load_policy
from lrl.moved_names import MOVED_CLASSES, MOVED_KEYS, current_config, moved_key
from lrl.policies.head import HeadPolicy
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


def test_a_moved_key_is_found_with_or_without_init_args():
    new = "model.init_args.optimizer.lr"
    assert moved_key("model.lr") == moved_key("model.init_args.lr") == new
    assert moved_key("data.lr") is None


@pytest.mark.parametrize("arguments", [["--model.optimizer", "torch.optim.SGD"], ["--model.lr", "0.1"], ["--config"]])
def test_an_optimiser_at_its_old_place_is_sent_to_the_new_one(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lrl"])
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model:\n  class_path: GRPOModule\n  init_args: {optimizer: {class_path: torch.optim.SGD}}\n")
    arguments = [*arguments, str(overlay)] if arguments == ["--config"] else arguments
    with pytest.raises(SystemExit):
        lrl.cli.main.run(["fit", "--config", "configs/frozen_lake/grpo.yaml", *arguments])
    new = "lr" if arguments[0] == "--model.lr" else "factory"
    assert f"it is now model.init_args.optimizer.{new}" in capsys.readouterr().err


def test_the_symmetry_of_old_demonstrations_is_sent_to_its_new_name(tmp_path, capsys, monkeypatch):
    text = (Path(__file__).parents[1] / "configs" / "babyai" / "warm_direct.yaml").read_text(encoding="utf-8")
    (tmp_path / "old.yaml").write_text(text.replace("augmentation: {", "symmetry: {"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["lrl"])
    with pytest.raises(SystemExit):
        lrl.cli.main.run(["fit", "--config", str(tmp_path / "old.yaml")])
    assert "it is now data.init_args.demonstrations.init_args.augmentation" in capsys.readouterr().err


@pytest.mark.parametrize("key", MOVED_KEYS.values())
def test_some_class_has_every_new_key(key):
    modules = (GRPOModule, PPOValueHeadModule, TRPOModule)
    kinds = {"model": modules, "data": (RolloutDataModule,), "policy": (HeadPolicy,)}
    *_, owner, group, name = (part for part in key.split(".") if part != "init_args")
    if group.endswith("demonstrations"):
        assert name in inspect.signature(MinariDemonstrations).parameters
        return
    assert any(_keys(f"{kind.__module__}.{kind.__name__}", [group]).get(name) == name for kind in kinds[owner])


@pytest.mark.parametrize("sizes", [[32], None])
def test_a_head_policys_critic_of_an_old_checkpoint_is_a_group(sizes):
    old = {"critic_hidden_sizes": sizes, "observation_clip": 3.0, "pooling": "mean"}
    critic = {"hidden_sizes": sizes, "observation_clip": 3.0} if sizes else None
    current = current_config({"policy": {"class_path": "lrl.policies.head.HeadPolicy", "init_args": old}})
    assert current["policy"]["init_args"] == {"pooling": "mean", "critic": critic}


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

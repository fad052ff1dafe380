"""Which checkpoints a run leaves."""

import errno
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_runs import make_trainer

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.run_data import ValidationConfig
from lrl.envs.factory import GymnasiumEnvs
from lrl.faults import DiskFullError
from lrl.functional import distributed
from lrl.policies.mlp import MLPPolicy
from lrl.training.checkpoint import CollectionCheckpoint


def fit(folder, checkpoint):
    data = RolloutDataModule(
        GymnasiumEnvs("CartPole-v1"), num_envs=2, num_steps=4, validation=ValidationConfig(episodes=1)
    )
    trainer = make_trainer(folder, checkpoint, max_epochs=2, check_val_every_n_epoch=1, limit_val_batches=1.0)
    trainer.fit(PPOValueHeadModule(MLPPolicy((4,), init_seed=0)), datamodule=data)


def test_a_monitored_metric_leaves_the_best_checkpoint_beside_the_last(tmp_path):
    checkpoint = CollectionCheckpoint(monitor="val/return")
    fit(tmp_path, checkpoint)
    assert checkpoint.best is not None
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_a_metric_that_is_not_a_number_is_never_the_best():
    checkpoint, written = CollectionCheckpoint(monitor="val/return", mode="min"), []
    checkpoint.write = lambda trainer, name: written.append(trainer.callback_metrics["val/return"])
    for value in (math.nan, 2.0, math.nan, 3.0, 1.0):
        metrics = {"val/return": value}
        state = SimpleNamespace(fn="fit")
        trainer = SimpleNamespace(callback_metrics=metrics, sanity_checking=False, state=state)
        checkpoint.on_validation_end(trainer, None)
    assert written == [2.0, 1.0] and checkpoint.best == 1.0


def test_an_unknown_metric_raises_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="the checkpoint's monitor is 'val/no_such'; it must be one of"):
        fit(tmp_path, CollectionCheckpoint(monitor="val/no_such"))


def test_a_best_checkpoint_that_cannot_be_written_does_not_count_as_written(tmp_path, monkeypatch):
    checkpoint = CollectionCheckpoint(monitor="val/return")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CollectionCheckpoint, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, checkpoint)
    assert checkpoint.best is None


def test_a_disk_that_is_full_during_a_checkpoint_leaves_the_previous_one(tmp_path, monkeypatch):
    fit(tmp_path, CollectionCheckpoint(1))
    last = tmp_path / "checkpoints" / "last.ckpt"
    before = last.read_bytes()

    def write_half(checkpoint, path):
        Path(path).write_bytes(before[: len(before) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", write_half)
    sentence = (
        rf"there is no space left on the disk: the checkpoint '{last}', which needs about {len(before)} bytes, was not "
        r"written \(\[Errno 28\] No space left on device\); free some, or write to another disk.$"
    )
    with pytest.raises(DiskFullError, match=sentence):
        fit(tmp_path, CollectionCheckpoint(1))
    assert last.read_bytes() == before and list(last.parent.iterdir()) == [last]


def test_optimizer_states_of_a_sharded_checkpoint_are_indexed_by_position(monkeypatch, tmp_path):
    groups = [{"lr": 0.1, "params": ["weight"]}, {"lr": 0.2, "params": ["bias"]}]
    sharded = {
        "epoch": 3,
        "optimizer_0": {"state": {"bias": "moments of bias", "weight": "moments of weight"}, "param_groups": groups},
        "optimizer_1": {"param_groups": [{"lr": 0.3, "params": ["a", "b"]}]},
    }
    monkeypatch.setattr(distributed, "read_checkpoint", lambda path: sharded)
    assert distributed.consolidated_checkpoint(tmp_path) == {
        "epoch": 3,
        "optimizer_states": [
            {
                "state": {1: "moments of bias", 0: "moments of weight"},
                "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}],
            },
            {"state": {}, "param_groups": [{"lr": 0.3, "params": [0, 1]}]},
        ],
    }

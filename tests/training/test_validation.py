"""When held-out episodes are played."""

import math

import pytest
from tiny_runs import from_settings, make_trainer

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.algorithms.trpo import TRPOModule
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.mlp import MLPPolicy
from lrl.training.collect import slow_settings
from lrl.training.optimizer import OptimizerConfig


@pytest.mark.parametrize(
    ("every", "epochs", "validated"), [(2, 10, [16, 24]), (10, 10, [24]), (11, 10, []), (1, 2, [8, 16])]
)
def test_a_run_validates_and_its_schedule_ends_when_its_budget_of_turns_is_used_up(tmp_path, every, epochs, validated):
    sizes = {"num_envs": 2, "num_steps": 4, "max_env_steps": 20, "validation": {"episodes": 1}}
    data = from_settings(RolloutDataModule, GymnasiumEnvs("CartPole-v1"), **sizes)
    settings = {"max_epochs": epochs, "check_val_every_n_epoch": every, "limit_val_batches": 1.0}
    trainer = make_trainer(tmp_path, **settings)
    optimizer = OptimizerConfig(schedule="linear")
    trainer.fit(PPOValueHeadModule(MLPPolicy((4,), init_seed=0), optimizer=optimizer), datamodule=data)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0
    rows = [row for _, row in trainer.logger.rows]
    assert [row["clock/env_steps"] for row in rows if "val/return" in row] == validated


def test_a_schedule_that_the_budget_of_turns_may_cut_short_is_named():
    data = from_settings(RolloutDataModule, GymnasiumEnvs("CartPole-v1"), num_groups=2, max_env_steps=20)
    with pytest.warns(UserWarning, match="^model.schedule ends with trainer.max_epochs or trainer.max_steps: "):
        assert data.schedule_length("model.schedule", 7) == 7
    assert data.schedule_length("model.schedule", math.inf) == math.inf


@pytest.mark.parametrize(
    ("sizes", "trainer", "words"),
    [
        ({"num_steps": 256}, {}, ["512 turns is one optimiser step"]),
        ({"num_steps": 255}, {}, []),
        ({"num_steps": 256, "num_minibatches": 2}, {}, []),
        ({"num_steps": 256, "num_epochs": 2}, {}, []),
        ({"num_steps": 4}, {"limit_val_batches": 1.0, "max_epochs": 20}, ["after every collection"]),
        ({"num_steps": 4}, {"limit_val_batches": 1.0, "max_epochs": -1}, ["after every collection"]),
        ({"num_steps": 4}, {"limit_val_batches": 1.0, "max_epochs": 19}, []),
        ({"num_steps": 4}, {"limit_val_batches": 1.0, "max_epochs": 20, "check_val_every_n_epoch": 2}, []),
        ({"num_steps": 4}, {"max_epochs": 20}, []),
        (
            {"num_steps": 4},
            {"limit_val_batches": 1.0, "max_epochs": 3, "check_val_every_n_epoch": 4},
            ["no held-out episodes are played, because trainer.check_val_every_n_epoch is 4"],
        ),
        ({"num_steps": 4}, {"limit_val_batches": 1.0, "max_epochs": 4, "check_val_every_n_epoch": 4}, []),
    ],
)
def test_settings_with_which_a_run_learns_slowly_or_mostly_validates_are_named(tmp_path, sizes, trainer, words):
    data = from_settings(RolloutDataModule, GymnasiumEnvs("CartPole-v1"), num_envs=2, **sizes)
    found = slow_settings(make_trainer(tmp_path, **trainer), PPOValueHeadModule(MLPPolicy((4,))), data)
    assert len(found) == len(words) and all(word in text for word, text in zip(words, found, strict=True))


def test_trpo_needs_one_minibatch_and_gets_no_warning(tmp_path):
    data = from_settings(RolloutDataModule, GymnasiumEnvs("CartPole-v1"), num_envs=2, num_steps=256)
    assert not slow_settings(make_trainer(tmp_path), TRPOModule(MLPPolicy((4,))), data)


def test_a_run_logs_its_slow_settings(tmp_path, caplog):
    data = from_settings(RolloutDataModule, GymnasiumEnvs("CartPole-v1"), num_envs=2, num_steps=256)
    make_trainer(tmp_path, max_epochs=1).fit(PPOValueHeadModule(MLPPolicy((4,), init_seed=0)), datamodule=data)
    assert "a collection of at least 512 turns is one optimiser step" in caplog.text

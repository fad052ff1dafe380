"""When held-out episodes are played."""

import pytest
from tiny_runs import from_settings, make_trainer

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.mlp import MLPPolicy


@pytest.mark.parametrize(
    ("every", "epochs", "validated"), [(2, 10, [16, 24]), (10, 10, [24]), (11, 10, []), (1, 2, [8, 16])]
)
def test_a_run_validates_when_its_budget_of_turns_is_used_up(tmp_path, every, epochs, validated):
    sizes = {"num_envs": 2, "num_steps": 4, "max_env_steps": 20, "validation": {"episodes": 1}}
    data = from_settings(RolloutDataModule, GymnasiumEnvs("CartPole-v1"), **sizes)
    settings = {"max_epochs": epochs, "check_val_every_n_epoch": every, "limit_val_batches": 1.0}
    trainer = make_trainer(tmp_path, **settings)
    trainer.fit(PPOValueHeadModule(MLPPolicy((4,), init_seed=0)), datamodule=data)
    rows = [row for _, row in trainer.logger.rows]
    assert [row["clock/env_steps"] for row in rows if "val/return" in row] == validated

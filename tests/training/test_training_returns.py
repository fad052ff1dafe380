"""The returns of training episodes, and the budget that they are counted against."""

from types import SimpleNamespace
from typing import Any

import torch

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.search.networks import TrainingReturns


def test_returns_are_kept_in_order_until_the_budget_is_spent():
    data = RolloutDataModule(GymnasiumEnvs("CartPole-v1"), num_envs=1, num_steps=1)
    trainer: Any = SimpleNamespace(datamodule=data, should_stop=False)
    module: Any = None
    budget = TrainingReturns(max_episodes=3)
    budget.on_train_epoch_end(trainer, module)
    assert budget.returns == [], "nothing was collected"
    for returns, stops in (([2.0, 1.0], False), ([], False), ([5.0, 4.0], True)):
        data.rollout = SimpleNamespace(metrics={"episode_return": torch.tensor(returns)})
        budget.on_train_epoch_end(trainer, module)
        assert budget.spent == trainer.should_stop == stops
    assert budget.returns == [2.0, 1.0, 5.0, 4.0]

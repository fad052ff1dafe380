"""Numbers of turns and tokens that the loss of a minibatch is divided by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.training.policy_module import PolicyModule


def step_sizes(module: PolicyModule, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the turns and sampled tokens of an optimiser step, averaged over ranks and over its minibatches.

    DDP averages the gradients of ranks, Lightning the losses of accumulated minibatches: divided by these sizes, all
    tokens of a step weigh alike, whichever minibatch they came in.

    Args:
        module: which trains; all ranks must call it.
        mask: bool ``(turn, token)`` of the minibatch that is trained.
    """
    sizes: Any = len(mask), int(mask.sum())
    trainer: Any = module._trainer
    if trainer is None:
        return torch.tensor(float(sizes[0])), torch.tensor(float(sizes[1]))
    if trainer.accumulate_grad_batches > 1:
        assert isinstance(module.run_data, RolloutDataModule)
        sizes = module.run_data.step_sizes(trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches)
    totals = torch.tensor(sizes, dtype=torch.float32, device=mask.device) / trainer.accumulate_grad_batches
    turns, tokens = trainer.strategy.reduce(totals, reduce_op="mean")
    return turns, tokens

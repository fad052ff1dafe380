"""A training step that changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.policies.policy import Policy
from lrl.turn_batch import TurnBatch


def no_op_loss(policy: Policy, batch: TurnBatch) -> Tensor:
    """Return a loss of 0 that is attached to the graph, so that every collective call of a step is still made.

    Sharded weights are gathered by forward passes, so one turn is evaluated, a made-up one if the batch is empty.
    """
    turn = batch[torch.zeros(1, dtype=torch.long)] if len(batch) else batch.map(_one_like)
    evaluation = policy.evaluate(turn)
    outputs = (evaluation.logprobs, evaluation.entropy, evaluation.values)
    return torch.stack([output.sum() * 0.0 for output in outputs if output is not None]).sum()


def _one_like(tensor: Tensor) -> Tensor:
    """Return one row in the shape of an empty tensor's rows: true, or 0."""
    return tensor.new_full((1, *tensor.shape[1:]), tensor.dtype == torch.bool)

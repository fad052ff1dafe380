"""The loss of a part that changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.policies.policy import Policy
from lrl.types import TurnBatch


def zero_loss(policy: Policy, batch: TurnBatch) -> Tensor:
    """0, attached to the graph: a part that changes nothing still takes part in every collective call.

    Those of sharded weights are made by forward passes, so one turn is evaluated, a made-up one if there is none.
    """
    turn = batch[torch.zeros(1, dtype=torch.long)] if len(batch) else batch.map(_one_like)
    evaluation = policy.evaluate(turn)
    outputs = (evaluation.logprobs, evaluation.entropy, evaluation.values)
    return torch.stack([output.sum() * 0.0 for output in outputs if output is not None]).sum()


def _one_like(tensor: Tensor) -> Tensor:
    """One row shaped like those of an empty tensor: true, or 0."""
    return tensor.new_full((1, *tensor.shape[1:]), tensor.dtype == torch.bool)

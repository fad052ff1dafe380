"""What algorithms with a critic share: the values of what was sampled, and advantages from them."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

from lrl.functional.credit import Discounts, credit_rollout, explained_variance, variance, whiten
from lrl.models.networks import at_least_float32
from lrl.policies.policy import Policy
from lrl.training.policy_module import PolicyModule
from lrl.types import Rollout, TurnBatch

_CHUNK = 256
"""Turns whose values are computed at a time."""


def credited(
    module: PolicyModule,
    rollout: Rollout,
    batch: TurnBatch,
    token_rewards: Tensor | None,
    credit: str,
    discounts: Discounts,
    normalise: bool,
) -> TurnBatch:
    """Value every token that was sampled, then credit it.

    Args:
        module: records how good the critic was.
        rollout: what was collected.
        batch: its turns.
        token_rewards: ``(turn, token)`` paid for single tokens; None pays for none.
        credit: see :func:`lrl.functional.credit.assign_credit`.
        discounts: how far credit reaches.
        normalise: advantages to mean 0 and standard deviation 1 over the tokens of all ranks.
    """
    reduce, mask = partial(reduce_sum, module), batch.response_mask
    values = sampled_values(module.policy, batch) if rollout.values is None else rollout.values[rollout.active.bool()]
    paid = torch.zeros_like(values) if token_rewards is None else token_rewards
    advantages, returns = credit_rollout(credit, rollout, values, paid, discounts)
    module.record("train/explained_variance", explained_variance(values[mask], returns[mask], reduce))
    module.record("train/advantage_std", variance(advantages[mask], reduce).sqrt())
    if normalise:
        advantages = whiten(advantages, mask, reduce)
    return batch.replace(advantages=advantages, returns=returns, old_values=values)


@torch.no_grad()
def sampled_values(policy: Policy, batch: TurnBatch) -> Tensor:
    """Of all sampled tokens ``(turn, token)``, by the weights that sampled them."""
    parts = torch.arange(len(batch), device=batch.response_mask.device).split(_CHUNK)
    values = policy.critic_view(batch, _CHUNK)
    return at_least_float32(torch.cat([values(part) for part in parts]))


def world_size(module: PolicyModule) -> int:
    """How many ranks train; one where there is no trainer."""
    return module.trainer.world_size if module._trainer else 1


def reduce_sum(module: PolicyModule, tensor: Tensor) -> Tensor:
    """Over ranks."""
    if world_size(module) == 1:
        return tensor
    return cast(Tensor, module.trainer.strategy.reduce(tensor, reduce_op="sum"))

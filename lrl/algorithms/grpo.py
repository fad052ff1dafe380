"""GRPO: group relative policy optimisation (arXiv:2402.03300), with the variants that followed it.

Objective, for a group of G episodes that start from the same state, with episode i, its return R_i, and the tokens t of
each of its turns:

    r_t   = pi(a_t | s_t) / pi_old(a_t | s_t)
    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)
    J     = mean_turns mean_t  min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)
            - kl.coef KL(pi || pi_ref) + ent_coef H(pi)

Departures from the paper:

1. An episode may have many turns. All of them have the same advantage, computed from the episode's undiscounted return.
2. ``advantage_scale: none`` and ``batch_std`` omit the division by the group's standard deviation, which would increase
   the weight of states where almost all episodes have the same return (Dr. GRPO, arXiv:2503.20783). With ``none``,
   advantages are those of RLOO (arXiv:2402.14740) multiplied by the constant ``(G - 1) / G``.
3. ``clip_range_high`` clips asymmetrically (DAPO, arXiv:2503.14476).
4. ``ent_coef`` adds an entropy bonus, with the exact entropy over the vocabulary. If all episodes of a group take the
   same wrong action, their advantages are 0, and only the entropy bonus and the KL term can still make other actions
   more probable.
5. ``credit`` can assign different advantages to the turns of an episode without a critic. ``turn`` compares the sum of
   rewards from a turn on between the episodes of a group. ``step`` adds a comparison between turns of a group with the
   same observation (GiGPO, arXiv:2505.10978). ``grouped_gae`` uses the mean return of such turns as the value of their
   state (GAGPO, arXiv:2605.13217).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, cast

import torch
from torch import Tensor

from lrl.functional.advantages import Reduce, check_episodes
from lrl.functional.groups import (
    GroupedTurns,
    group_advantages,
    grouped_gae,
    shared_states,
    step_advantages,
    turn_numbers,
)
from lrl.functional.losses import clipped_surrogate, kl_estimate, ratio_metrics
from lrl.policies.policy import Policy
from lrl.ranges import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, check_arguments, check_fields
from lrl.registry import register
from lrl.training.gradient_module import GradientModule
from lrl.training.optimizer import OptimizerConfig
from lrl.types import Credit, Evaluation, Rollout, TokenLoss, TurnBatch

_SETTINGS_OF_KIND = {"episode": (), "turn": ("gamma",), "step": ("gamma",), "grouped_gae": ("gamma", "gae_lambda")}
"""The settings that each kind of credit uses; a value for any other setting is an error."""


@dataclass(frozen=True, kw_only=True)
class GroupCreditConfig:
    """Configures how advantages are assigned to the turns of the episodes of a group."""

    kind: Literal["episode", "turn", "step", "grouped_gae"] = "episode"
    """Estimator. ``episode``: all turns have the advantage of their episode. ``turn``: the return from a turn on is
    compared between the turns of the group with the same index. ``step``: the advantage of the episode, plus a
    comparison between the turns of the group with the same observation (GiGPO). ``grouped_gae``: GAE in which the value
    of a state is the mean return of the turns with this observation (GAGPO). See :mod:`lrl.functional.groups`."""
    gamma: ClosedUnitInterval = 0.95
    """Discount per turn of the return from a turn on; the return of a whole episode is not discounted."""
    gae_lambda: ClosedUnitInterval = 0.95
    """GAE coefficient per turn, for ``grouped_gae``."""

    def __post_init__(self) -> None:
        check_fields(self, "model.credit")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and field.name not in _SETTINGS_OF_KIND[self.kind] and value != field.default:
                raise ValueError(
                    f"model.credit.{field.name} is {value}; it must be left out, because {self.kind} credit ignores it."
                )

    def estimate(
        self, rollout: Rollout, episode_advantages: Tensor, scale: str, reduce: Reduce | None = None
    ) -> Tensor:
        """Estimate the advantages of a rollout's turns, ``(time, env)``; 0 where inactive.

        Args:
            rollout: one whole episode per environment, with ``state`` if turns with equal observations are compared.
            episode_advantages: advantage of each episode within its group, ``(env,)``.
            scale: divisor of the differences from the mean; see :func:`~lrl.functional.groups.group_advantages`.
            reduce: sums a tensor over ranks, which must have whole groups; None if there is one rank.
        """
        if self.kind == "episode":
            return episode_advantages * rollout.active
        turns = _grouped(rollout, turn_numbers(rollout.active) if self.kind == "turn" else rollout.state)
        if self.kind == "grouped_gae":
            discounts = {"gamma": self.gamma, "gae_lambda": self.gae_lambda}
            return grouped_gae(turns, rollout.terminated, **discounts, scale=scale, reduce=reduce)
        steps = step_advantages(turns, gamma=self.gamma, scale=scale, reduce=reduce)
        return steps if self.kind == "turn" else episode_advantages * rollout.active + steps


def _grouped(rollout: Rollout, state: Tensor | None) -> GroupedTurns:
    """Return the turns of a rollout with ``state``, ``(time, env)``, which must not be None."""
    assert state is not None
    return GroupedTurns(rollout.rewards, state, rollout.group, rollout.active)


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Configures the KL term of GRPO, whose reference is the policy at the start of the run."""

    coef: NonNegativeFloat = 0.0
    """Weight of the KL term; with 0, no reference policy is kept."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")


@register
class GRPOModule(GradientModule):
    """Trains a policy by GRPO.

    Args:
        policy: policy to train.
        optimizer: optimiser and learning-rate schedule.
        clip_range: clips the ratio at ``1 - clip_range``, and at ``1 + clip_range`` unless ``clip_range_high`` is set.
        clip_range_high: clips the ratio at ``1 + clip_range_high``; null uses ``clip_range``.
        kl: KL term to the policy at the start of this run.
        ent_coef: weight of the entropy bonus, in nats per token.
        credit: how advantages are assigned to the turns of an episode.
        advantage_scale: what the difference of a return from the mean of its group is divided by: the standard
            deviation of the group or of the batch, or nothing.
        loss_normalisation: how the losses of tokens are averaged: ``sequence`` (GRPO), ``token`` (DAPO) or ``constant``
            (Dr. GRPO); see :func:`~lrl.functional.losses.reduce_tokens`.
        target_kl: the remaining minibatches of a collection are skipped once the mean KL(old || new) of a minibatch
            exceeds this many nats; null never skips any.
        init_from: checkpoint, folder or hub name whose weights the run starts from; null uses the policy's own.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5),
        clip_range: PositiveFloat = 0.2,
        clip_range_high: PositiveFloat | None = None,
        kl: KLConfig = KLConfig(),
        ent_coef: NonNegativeFloat = 0.0,
        credit: GroupCreditConfig = GroupCreditConfig(),
        advantage_scale: Literal["group_std", "batch_std", "none"] = "group_std",
        loss_normalisation: Literal["sequence", "token", "constant"] = "sequence",
        target_kl: PositiveFloat | None = None,
        init_from: str | None = None,
    ) -> None:
        check_arguments(GRPOModule.__init__, locals(), "model")
        super().__init__(policy, optimizer, loss_normalisation, target_kl, init_from)
        self.clip_low, self.clip_high = clip_range, clip_range_high or clip_range
        self.kl, self.ent_coef, self.credit = kl, ent_coef, credit
        self.advantage_scale = advantage_scale

    @property
    def needs_reference(self) -> bool:
        """Return whether the policy at the start of the run is kept as a reference: only if ``kl.coef`` is positive."""
        return self.kl.coef > 0

    @property
    def needs_states(self) -> bool:
        """Return whether ``Rollout.state`` is needed: only if ``credit`` compares turns with the same observation."""
        return self.credit.kind in ("step", "grouped_gae")

    @property
    def needs_groups(self) -> bool:
        """Return whether all advantages of a single episode are 0, unless ``credit`` compares its turns."""
        return not self.needs_states

    def advantages(self, rollout: Rollout) -> Credit:
        """Compute the advantages of turns over all ranks, and assign that of a turn to all its tokens.

        Raises:
            ValueError: If an environment has not played exactly one whole episode.
        """
        check_episodes(rollout, "GRPO", single=True)
        returns, group = (
            cast(Tensor, self.all_gather(own)).reshape(-1) for own in (rollout.episode_returns, rollout.group)
        )
        advantages = group_advantages(returns, group, self.advantage_scale)
        start = self.global_rank * len(rollout.group)
        own_advantages = advantages[start : start + len(rollout.group)]
        turns = self.credit.estimate(rollout, own_advantages, self.advantage_scale, self.reduce_sum)
        metrics = {"rollout/group_return_std": group_std(rollout.episode_returns, rollout.group)}
        if self.needs_states:
            metrics["rollout/shared_state_rate"] = shared_states(_grouped(rollout, rollout.state))
        return Credit(advantages=turns[..., None] * rollout.response_mask, metrics=metrics)

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return the loss of each token: the KL term minus the clipped surrogate and the entropy bonus."""
        log_ratio = policy.logprobs - batch.old_logprobs
        objective = clipped_surrogate(log_ratio.exp(), batch.advantages, self.clip_low, self.clip_high)
        metrics = ratio_metrics(log_ratio, policy.entropy, batch.response_mask, (self.clip_low, self.clip_high))
        metrics["train/advantage_abs"] = batch.advantages[batch.response_mask].abs()
        if batch.ref_logprobs is not None:
            kl = kl_estimate(policy.logprobs, batch.ref_logprobs)
            objective = objective - self.kl.coef * kl
            metrics["train/kl_to_reference"] = kl[batch.response_mask]
        if self.ent_coef:  # with weight 0, the backward pass of the entropy would cost time without effect
            objective = objective + self.ent_coef * policy.entropy
        return TokenLoss(loss=-objective, metrics=metrics)


def group_std(returns: Tensor, group: Tensor) -> Tensor:
    """Return the population standard deviation of the returns in each group, ``(group,)``.

    A group with standard deviation 0 has no policy gradient.

    Args:
        returns: ``(episode,)``.
        group: int64 ``(episode,)``.
    """
    return torch.stack([returns[group == number].std(correction=0) for number in group.unique()])

"""GRPO: group relative policy optimisation (arXiv:2402.03300), with the variants that followed it.

Objective, for a group of G episodes that start from the same state; means are over their turns and over the tokens t of
a turn:

    r_t   = pi(a_t | s_t) / pi_old(a_t | s_t)
    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)
    J     = mean_turns mean_t  min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)
            - kl.coef KL(pi || pi_ref) + ent_coef H(pi)

Departures from the paper:

1. An episode may have many turns; every turn has the advantage of its episode's undiscounted return.
2. ``advantage_scale: none | batch_std`` omits the division by the group's standard deviation, which gives easy and hard
   states the same weight (Dr. GRPO, arXiv:2503.20783). Up to the constant factor ``G / (G - 1)``, the advantages with
   ``none`` are those of RLOO (arXiv:2402.14740).
3. ``clip_range_high`` clips asymmetrically (DAPO, arXiv:2503.14476).
4. An entropy bonus, exact over the vocabulary. If all episodes of a group take the same wrong action, their advantages
   are 0. Only the entropy bonus and the KL term, which do not depend on advantages, can then make other actions
   probable again.
5. ``credit`` can assign different advantages to the turns of an episode without a critic. ``turn`` compares the return
   from turn t on with those of the group's other episodes. For turns of a group with the same observation, ``step``
   adds a comparison between these turns (GiGPO, arXiv:2505.10978), and ``grouped_gae`` uses their mean return as the
   value of the state (GAGPO, arXiv:2605.13217).
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

_READ = {"episode": (), "turn": ("gamma",), "step": ("gamma",), "grouped_gae": ("gamma", "gae_lambda")}
"""The settings that each kind of credit uses."""


@dataclass(frozen=True, kw_only=True)
class GroupCreditConfig:
    """Estimator of the advantages of turns, by comparison with the other episodes of a group."""

    kind: Literal["episode", "turn", "step", "grouped_gae"] = "episode"
    """``episode``: all turns have the advantage of their episode; ``turn``: the return from a turn on is compared with
    those of the group's turns with the same index; ``step``: the advantage of the episode, plus a comparison with the
    group's turns that have the same observation (GiGPO); ``grouped_gae``: GAE with the mean return of these turns as
    the value of the state (GAGPO). See :mod:`lrl.functional.groups`."""
    gamma: ClosedUnitInterval = 0.95
    """Discount per turn of the returns from a turn on; returns of whole episodes are not discounted."""
    gae_lambda: ClosedUnitInterval = 0.95
    """GAE coefficient per turn, for ``grouped_gae``."""

    def __post_init__(self) -> None:
        check_fields(self, "model.credit")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and field.name not in _READ[self.kind] and value != field.default:
                raise ValueError(
                    f"model.credit.{field.name} is {value}; it must be left out, {self.kind} credit does not read it."
                )

    def estimate(
        self, rollout: Rollout, episode_advantages: Tensor, scale: str, reduce: Reduce | None = None
    ) -> Tensor:
        """Return the advantages of a rollout's turns, ``(time, env)``, 0 where inactive.

        Args:
            rollout: one whole episode per environment, with ``state`` if turns with equal observations are compared.
            episode_advantages: advantages of the episodes over their groups, ``(env,)``.
            scale: divisor of centred returns, see :func:`~lrl.functional.groups.group_advantages`.
            reduce: sums a tensor over ranks that each hold whole groups; None for one rank.
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
    assert state is not None
    return GroupedTurns(rollout.rewards, state, rollout.group, rollout.active)


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """KL term of GRPO to the policy at the start of the run."""

    coef: NonNegativeFloat = 0.0
    """Weight; 0 keeps no reference policy."""

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
        advantage_scale: divisor of centred returns: the group's or the batch's standard deviation, or none.
        loss_normalisation: ``sequence`` (GRPO), ``token`` (DAPO) or ``constant`` (Dr. GRPO).
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
        """Return whether the policy at the start of the run must be kept: if the KL term has a positive weight."""
        return self.kl.coef > 0

    @property
    def needs_states(self) -> bool:
        """Return whether turns with equal observations are compared, which depends on ``credit``."""
        return self.credit.kind in ("step", "grouped_gae")

    def advantages(self, rollout: Rollout) -> Credit:
        """Assign to every token the advantage of its episode or of its turn, computed over all ranks."""
        check_episodes(rollout, "GRPO", single=True)
        returns, group = (
            cast(Tensor, self.all_gather(own)).reshape(-1) for own in (rollout.episode_returns, rollout.group)
        )
        advantages = group_advantages(returns, group, self.advantage_scale)
        start = self.global_rank * len(rollout.group)
        own = advantages[start : start + len(rollout.group)]
        turns = self.credit.estimate(rollout, own, self.advantage_scale, self.reduce_sum)
        metrics = {"rollout/group_return_std": group_std(rollout.episode_returns, rollout.group)}
        if self.needs_states:
            metrics["rollout/shared_state_rate"] = shared_states(_grouped(rollout, rollout.state))
        return Credit(advantages=turns[..., None] * rollout.response_mask, metrics=metrics)

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return for each token the negative clipped surrogate, plus the KL term, minus the entropy bonus."""
        log_ratio = policy.logprobs - batch.old_logprobs
        objective = clipped_surrogate(log_ratio.exp(), batch.advantages, self.clip_low, self.clip_high)
        metrics = ratio_metrics(log_ratio, policy.entropy, batch.response_mask, (self.clip_low, self.clip_high))
        metrics["train/advantage_abs"] = batch.advantages[batch.response_mask].abs()
        if batch.ref_logprobs is not None:
            kl = kl_estimate(policy.logprobs, batch.ref_logprobs)
            objective = objective - self.kl.coef * kl
            metrics["train/kl_to_reference"] = kl[batch.response_mask]
        if self.ent_coef:  # otherwise the entropy would be differentiated without effect
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

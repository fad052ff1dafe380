"""GRPO: group relative policy optimisation (arXiv:2402.03300), with the variants that followed it.

Objective, for a group of G episodes that start from the same state, and tokens t of a turn:

    r_t   = pi(a_t | s_t) / pi_old(a_t | s_t)
    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)
    J     = mean_i mean_t  min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)
            - kl_coef KL(pi || pi_ref) + ent_coef H(pi)

Departures from the paper:

1. An episode may have many turns; every turn carries the advantage of its episode's undiscounted return.
2. ``advantage_scale: none | batch_std`` drops the division by the group's standard deviation, which weighs an
   easy state like a hard one (Dr. GRPO, arXiv:2503.20783); ``leave_one_out`` gives RLOO (arXiv:2402.14740).
3. ``clip_range_high`` clips asymmetrically (DAPO, arXiv:2503.14476).
4. An entropy bonus, exact over the vocabulary. A group that agrees on a wrong action has advantage 0 for ever: only
   the bonus and the KL term, both paid where nothing is learned, bring the other actions back.
5. The KL term is estimated by k3 at the sampled tokens, as in the paper; k1 and k2 can be chosen.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from lrl.functional.advantages import group_advantages
from lrl.functional.kl import kl_estimate
from lrl.functional.losses import clipped_surrogate, normalise
from lrl.functional.masking import masked_mean
from lrl.policies.policy import Policy
from lrl.training.no_op_step import zero_loss
from lrl.training.policy_module import OptimizerFactory, PolicyModule
from lrl.training.schedule import Schedule
from lrl.training.step_sizes import step_sizes
from lrl.types import Rollout, TurnBatch


class GRPOModule(PolicyModule):
    """Trains a policy by GRPO.

    Args:
        policy: what is trained.
        lr: learning rate.
        clip_range: how far the ratio may fall below 1, and rise above it unless ``clip_range_high`` is given.
        clip_range_high: how far the ratio may rise above 1.
        kl_coef: weight of the KL term; 0 keeps no reference.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        ent_coef: weight of the entropy bonus, in nats per token.
        advantage_scale: what centred returns are divided by.
        leave_one_out: baseline without the episode itself.
        loss_normalisation: ``sequence`` (GRPO), ``token`` (DAPO) or ``constant`` (Dr. GRPO).
        target_kl: remaining parts of a collection are skipped once the mean KL(old || new) of a part exceeds it.
        optimizer: makes the optimiser; null takes AdamW.
        weight_decay: of the default optimiser.
        schedule: of the learning rate.
        warmup: share of the run.
        init_from: weights to start from.
        max_skipped_steps: steps in a row that may be skipped because their gradients are not finite.
    """

    def __init__(
        self,
        policy: Policy,
        lr: float = 1e-5,
        clip_range: float = 0.2,
        clip_range_high: float | None = None,
        kl_coef: float = 0.0,
        kl_estimator: Literal["k1", "k2", "k3"] = "k3",
        ent_coef: float = 0.0,
        advantage_scale: Literal["group_std", "batch_std", "none"] = "group_std",
        leave_one_out: bool = False,
        loss_normalisation: Literal["sequence", "token", "constant"] = "sequence",
        target_kl: float | None = None,
        optimizer: OptimizerFactory | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule = "constant",
        warmup: float = 0.0,
        init_from: str | None = None,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__(policy, lr, optimizer, weight_decay, schedule, warmup, init_from, max_skipped_steps)
        if clip_range <= 0 or (clip_range_high is not None and clip_range_high <= 0):
            raise ValueError(
                f"model.clip_range is {clip_range}, clip_range_high {clip_range_high}; both must be positive."
            )
        if kl_coef < 0:
            raise ValueError(f"model.kl_coef is {kl_coef}; it must be 0 or positive.")
        self.clip_low, self.clip_high = clip_range, clip_range_high or clip_range
        self.kl_coef, self.kl_estimator, self.ent_coef = kl_coef, kl_estimator, ent_coef
        self.advantage_scale, self.leave_one_out = advantage_scale, leave_one_out
        self.loss_normalisation, self.target_kl = loss_normalisation, target_kl

    @property
    def needs_reference(self) -> bool:
        """Only where the KL term counts."""
        return self.kl_coef > 0

    def turn_batch(self, rollout: Rollout) -> TurnBatch:
        """Every token of an episode's turns carries the episode's advantage over its group."""
        self.skip_updates = False
        returns = rollout.returns.to(self.device)
        world = [cast(Tensor, self.all_gather(own)).reshape(-1) for own in (returns, rollout.group.to(self.device))]
        advantages = group_advantages(world[0], world[1], self.advantage_scale, self.leave_one_out)
        start = self.global_rank * len(returns)
        own = advantages[start : start + len(returns)].to(rollout.response_mask.device)
        batch = rollout.turn_batch(own[None, :, None] * rollout.response_mask)
        self.record("rollout/group_return_std", group_spread(returns, rollout.group.to(self.device)))
        if self.needs_reference:
            batch = batch.replace(ref_logprobs=self.policy.reference_logprobs(batch))
        return batch

    def training_step(self, batch: TurnBatch) -> Tensor:
        """One part of the buffer: the surrogate, less the KL term, plus the entropy bonus."""
        if self.skip_updates:
            return zero_loss(self.policy, batch)
        mask = batch.response_mask
        sequences, tokens = step_sizes(self, mask)
        if len(batch) == 0:  # other ranks may have turns: the same collective calls, in the same order
            loss = zero_loss(self.policy, batch)
            self._skip_beyond_target(loss.detach())
            return loss
        policy = self.policy.evaluate(batch)
        ratio = (policy.logprobs - batch.old_logprobs).exp()
        objective = clipped_surrogate(ratio, batch.advantages, self.clip_low, self.clip_high)
        if batch.ref_logprobs is not None:
            kl = kl_estimate(policy.logprobs, batch.ref_logprobs, self.kl_estimator)
            objective = objective - self.kl_coef * kl
            self.record("train/kl_to_reference", kl[mask])
        if self.ent_coef:  # a bonus of nothing would still be differentiated
            objective = objective + self.ent_coef * policy.entropy
        loss = -normalise(objective, mask, self.loss_normalisation, sequences, tokens, self.max_response_tokens)
        self._record_step(loss, ratio, policy.entropy, batch)
        return loss

    @torch.no_grad()
    def _record_step(self, loss: Tensor, ratio: Tensor, entropy: Tensor, batch: TurnBatch) -> None:
        mask = batch.response_mask
        log_ratio = ratio.log()
        approx_kl = masked_mean(ratio - 1 - log_ratio, mask)
        clipped = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        self.record("train/loss", loss)
        self.record("train/approx_kl", approx_kl)
        self.record("train/clip_fraction", clipped[mask].float())
        self.record("train/entropy", entropy[mask])
        self.record("train/ratio_error", (ratio - 1).abs()[mask].max())
        self.record("train/advantage_abs", batch.advantages.abs()[mask])
        self._skip_beyond_target(approx_kl)

    def _skip_beyond_target(self, approx_kl: Tensor) -> None:
        """Make the rest of the collection no-ops, on all ranks or on none."""
        if self.target_kl is not None:
            self.skip_updates = bool(self.trainer.strategy.reduce(approx_kl, reduce_op="mean") > self.target_kl)


def group_spread(returns: Tensor, group: Tensor) -> Tensor:
    """Standard deviation of the returns inside each group, ``(group,)``: 0 where a group agrees and learns nothing."""
    return torch.stack([returns[group == number].std(correction=0) for number in group.unique()])

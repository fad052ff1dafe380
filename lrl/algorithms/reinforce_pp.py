"""REINFORCE++ (arXiv:2501.03262): the policy gradient with PPO's clip, a KL penalty per token, and no critic.

Objective, for the tokens m of the turns t of an episode:

    r_m   = pi(a_m | s_m) / pi_old(a_m | s_m)
    A_m   = sum of the rewards from token m to the end of the episode. The reward of a token is
            -kl_coef log(pi_old / pi_ref), plus the environment's reward if it is the last token of its turn
    A_m  <- (A_m - mean) / std, over the tokens of all episodes of the collection
    J     = mean_m  min(r_m A_m, clip(r_m, 1 - clip_low, 1 + clip_high) A_m)

Departures from the paper:

1. An episode may have many turns.
2. ``group_baseline`` subtracts the mean return of an episode's group before the normalisation, as in the paper's
   variant with baseline. Unlike in that variant, the KL penalty remains part of the rewards.
3. ``clip_range_high`` clips asymmetrically (DAPO, arXiv:2503.14476).
4. If the environment or ``data.max_turns`` truncates an episode, A_m contains only the rewards up to the truncation,
   because there is no critic that estimates later rewards. Episodes that continue in the next collection
   (``data.num_steps``) raise an error.
"""

from __future__ import annotations

import torch

from lrl.functional.advantages import CreditConfig, check_episodes, token_gae, whiten
from lrl.functional.groups import group_advantages
from lrl.functional.losses import clipped_surrogate, ratio_metrics
from lrl.policies.policy import Policy
from lrl.ranges import NonNegativeFloat, PositiveFloat, check_arguments
from lrl.registry import register
from lrl.training.gradient_module import GradientModule
from lrl.training.optimizer import OptimizerConfig
from lrl.types import Credit, Evaluation, Rollout, TokenLoss, TurnBatch


@register
class REINFORCEPlusPlusModule(GradientModule):
    """Trains a policy by REINFORCE++.

    Args:
        policy: policy to train.
        optimizer: optimiser and learning-rate schedule.
        clip_range: clips the ratio at ``1 - clip_range``, and at ``1 + clip_range`` unless ``clip_range_high`` is set.
        clip_range_high: clips the ratio at ``1 + clip_range_high``; null uses ``clip_range``.
        kl_coef: weight of the KL penalty to the policy at the start of this run. With 0, no reference policy is kept.
        group_baseline: whether to subtract the mean return of an episode's group.
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
        kl_coef: NonNegativeFloat = 0.0,
        group_baseline: bool = False,
        target_kl: PositiveFloat | None = None,
        init_from: str | None = None,
    ) -> None:
        check_arguments(REINFORCEPlusPlusModule.__init__, locals(), "model")
        super().__init__(policy, optimizer, "token", target_kl, init_from)
        self.clip = (clip_range, clip_range_high or clip_range)
        self.kl_coef, self.group_baseline = kl_coef, group_baseline

    @property
    def needs_reference(self) -> bool:
        """Return whether the policy at the start of the run is kept as a reference: only if ``kl_coef`` is positive."""
        return self.kl_coef > 0

    @property
    def needs_groups(self) -> bool:
        """Return whether a group needs several episodes: only with ``group_baseline``."""
        return self.group_baseline

    def advantages(self, rollout: Rollout) -> Credit:
        """Sum the rewards from each token to the end of its episode, and normalise the sums over the collection.

        Raises:
            ValueError: If an episode has not ended, or if ``group_baseline`` is true and an environment has played
                several episodes.
        """
        check_episodes(rollout, "REINFORCE++", single=self.group_baseline)
        mask, zeros = rollout.response_mask, torch.zeros_like(rollout.logprobs)
        kl = zeros if rollout.ref_logprobs is None else (rollout.logprobs - rollout.ref_logprobs) * mask
        undiscounted = CreditConfig(gamma=1.0, gae_lambda=1.0, token_lambda=1.0)
        without_critic = rollout.replace(values=zeros, final_values=zeros[..., 0])
        advantages, _ = token_gae(without_critic, -self.kl_coef * kl, undiscounted)
        if self.group_baseline:
            baseline = rollout.episode_returns - group_advantages(rollout.episode_returns, rollout.group, "none")
            advantages = (advantages - baseline[:, None]) * mask
        metrics = {"train/kl_to_reference": rollout.flatten(kl).sum(-1)} if self.kl_coef else {}
        return Credit(advantages=whiten(advantages, mask, self.reduce_sum), metrics=metrics)

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return the negative clipped surrogate of each token."""
        log_ratio = policy.logprobs - batch.old_logprobs
        objective = clipped_surrogate(log_ratio.exp(), batch.advantages, *self.clip)
        metrics = ratio_metrics(log_ratio, policy.entropy, batch.response_mask, self.clip)
        return TokenLoss(loss=-objective, metrics=metrics)

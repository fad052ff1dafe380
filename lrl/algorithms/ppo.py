"""PPO with a value head (arXiv:1707.06347) for policies whose turn is one token or many.

Objective, for the tokens m of the turns t of an episode:

    r    = pi(a | s) / pi_old(a | s)
    J    = mean  min(r A, clip(r, 1 - clip_range, 1 + clip_range) A)  +  ent_coef H(pi)  -  kl.old_coef KL(pi_old || pi)
    L_V  = mean  1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip_range_vf, clip_range_vf) - R)^2)
    loss = -J + vf_coef L_V

Credit. The environment's reward for turn t is r_t. The KL penalty of a token, kl.coef log(pi_old / pi_ref), is
subtracted from its reward r^m, or with ``turn`` credit from r_t. V_t is the value before the first token of turn t,
V_t^m the value before its token m. G' equals G, or with ``local_penalties`` G with max(0, r_t) in place of r_t:

    turn      G_t = r_t + gamma ((1 - gae_lambda) V_{t+1} + gae_lambda G'_{t+1}),  A_t^m = G_t - V_t,  R_t^m = G_t
    nested    G_t as above is the reward of the turn's last token; inside the turn
              A_t^m = d^m + token_gamma token_lambda A_t^{m+1},  d^m = r^m + token_gamma V_t^{m+1} - V_t^m,
              no value follows the last token; R = A + V
    token     GAE over the sequence of all tokens of the episode, with the discounts per token inside a turn and the
              discounts per turn between turns
    bandit    as nested, but G_t is the reward of the episode's last turn (a contextual-bandit baseline)

With one token per turn and no KL term, the first three are identical to the PPO of the paper.

Departures from the paper, and from RL-LLM's nested PPO:

1. V_{t+1} is the value before the first token of the next turn, a position at which the critic is trained. RL-LLM read
   it after the last token, where the critic is not trained. ``bootstrap_last`` reads it before the last token, a value
   that depends on most of the action, as in RL-LLM.
2. An episode that is truncated or continues in the next collection is bootstrapped with the value of the state that
   follows. RL-LLM dropped episodes that had not ended.
3. ``local_penalties`` (RL-LLM's max(0, r_t), which does not pass penalties on to earlier turns) is off by default: it
   would hide every negative reward of an environment from the turns before.
4. The ratio is clipped, or KL(pi_old || pi) is penalised (``clip_range: null``), or both (section 4 of the paper, with
   a fixed weight). The penalty is ``log(pi_old / pi)`` at the sampled tokens, whose expected gradient is that of the
   divergence; while r is 1 it adds ``kl.old_coef`` to every advantage. The estimate ``r - 1 - log r``, which
   ``train/approx_kl`` logs and ``target_kl`` limits, has less variance, but underestimates probability that moves to
   tokens that are not sampled: if a share d moves to them, the divergence is about d and the estimate d^2 / 2.
5. The weight of the KL term to the reference can follow a target (arXiv:1909.08593, section 2.2). It is multiplied by
   an exponential, which keeps it positive, instead of the linear factor of the paper.
6. ``critic.fit`` fits a critic with separate weights by least squares once per collection, instead of training it by
   the value loss; ``vf_coef`` then has no effect.
7. ``vf_coef`` is the weight of half the squared error; 0.5 in Stable-Baselines3 corresponds to 1 here.
8. The dropout of a value head is not applied. With dropout, the values used for credit would differ from those that
   are trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lrl.functional.advantages import CreditConfig
from lrl.functional.distributed import shards_parameters
from lrl.functional.losses import clipped_surrogate, ratio_metrics, value_loss
from lrl.policies.policy import Policy
from lrl.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, check_arguments, check_fields
from lrl.registry import register
from lrl.training.gradient_module import GradientModule
from lrl.training.optimizer import OptimizerConfig
from lrl.training.value_fit import ValueFit, check_separate_critic, fit_values
from lrl.types import Credit, Evaluation, Rollout, TokenLoss, TurnBatch


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Settings of the weights that only the critic uses."""

    fit: ValueFit | None = None
    """Fits these weights by least squares, once per collection; null trains them by the value loss."""

    def __post_init__(self) -> None:
        if self.fit is not None and self.fit.method != "lbfgs":
            raise ValueError(
                f"model.critic.fit.method is {self.fit.method}; it must be lbfgs, because PPO has an optimiser already."
            )


@dataclass(frozen=True, kw_only=True)
class AdaptiveKLConfig:
    """KL penalties of PPO; the weight of that to the reference can follow a target (arXiv:1909.08593, section 2.2)."""

    coef: NonNegativeFloat = 0.0
    """Weight of the penalty to the reference, with ``target`` the initial one; 0 keeps no reference policy."""
    target: PositiveFloat | None = None
    """Divergence from the reference in nats per turn to which the weight adapts; null keeps the weight fixed."""
    horizon: PositiveInt = 10_000
    """Number of turns over which the weight adapts; a larger number changes it more slowly."""
    old_coef: NonNegativeFloat = 0.0
    """Weight of KL(pi_old || pi), the divergence from the policy that sampled."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")
        if self.target is not None and self.coef == 0:
            raise ValueError(f"model.kl.target is {self.target}, but model.kl.coef is 0; it must be positive.")


@register
class PPOValueHeadModule(GradientModule):
    """Trains a policy that has a critic by PPO.

    Args:
        policy: policy to train.
        optimizer: optimiser and learning-rate schedule.
        critic: settings of the weights that only the critic uses.
        credit: estimator of advantages and its discounts.
        kl: KL penalties to the policy at the start of this run and to the policy that sampled.
        clip_range: clips the ratio to ``[1 - clip_range, 1 + clip_range]``; null does not clip, and ``kl.old_coef``
            must then be positive.
        clip_range_vf: clips the change of each value in the value loss; null does not clip.
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy bonus, in nats per token.
        loss_normalisation: ``token`` gives all tokens the same weight, ``sequence`` all turns.
        target_kl: the remaining minibatches of a collection are skipped once the mean KL(old || new) of a minibatch
            exceeds this many nats; null never skips any.
        init_from: checkpoint, folder or hub name whose weights the run starts from; null uses the policy's own.
    """

    needs_values = True

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerConfig = OptimizerConfig(),
        critic: CriticConfig = CriticConfig(),
        credit: CreditConfig = CreditConfig(),
        kl: AdaptiveKLConfig = AdaptiveKLConfig(),
        clip_range: PositiveFloat | None = 0.2,
        clip_range_vf: PositiveFloat | None = None,
        vf_coef: NonNegativeFloat = 0.5,
        ent_coef: NonNegativeFloat = 0.0,
        loss_normalisation: Literal["token", "sequence"] = "token",
        target_kl: PositiveFloat | None = None,
        init_from: str | None = None,
    ) -> None:
        check_arguments(PPOValueHeadModule.__init__, locals(), "model")
        super().__init__(policy, optimizer, loss_normalisation, target_kl, init_from)
        if clip_range is None and kl.old_coef == 0:
            raise ValueError("model.clip_range is null and model.kl.old_coef 0; one of them must limit the update.")
        if critic.fit is not None and clip_range_vf is not None:
            raise ValueError(
                f"model.clip_range_vf is {clip_range_vf}; it must be null, because critic.fit does not use it."
            )
        self.critic, self.credit, self.kl = critic, credit, kl
        self.clip_range, self.clip_range_vf = clip_range, clip_range_vf
        self.vf_coef, self.ent_coef = 0.0 if critic.fit else vf_coef, ent_coef
        self.kl_coef = self._next_kl_coef = float(kl.coef)

    @property
    def needs_reference(self) -> bool:
        """Return whether the policy at the start of the run must be kept: if the KL penalty has a positive weight."""
        return self.kl.coef > 0

    def advantages(self, rollout: Rollout) -> Credit:
        """Estimate the advantage of every token from rewards minus the KL penalty to the reference."""
        token_rewards = None
        if rollout.ref_logprobs is not None:
            kl = (rollout.logprobs - rollout.ref_logprobs) * rollout.response_mask
            token_rewards = -self.kl_coef * kl
            self._adapt_kl_coef(rollout.flatten(kl).sum(-1))
        return self.credit.estimate(rollout, token_rewards, self.reduce_sum)

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return for each token the value loss minus the clipped surrogate and the entropy bonus."""
        assert policy.values is not None
        assert batch.returns is not None
        log_ratio = policy.logprobs - batch.old_logprobs
        ratio, clip = log_ratio.exp(), None if self.clip_range is None else (self.clip_range, self.clip_range)
        objective = ratio * batch.advantages if clip is None else clipped_surrogate(ratio, batch.advantages, *clip)
        if self.ent_coef:  # otherwise the entropy would be differentiated without effect
            objective = objective + self.ent_coef * policy.entropy
        if self.kl.old_coef:
            objective = objective + self.kl.old_coef * log_ratio
        error = value_loss(policy.values, batch.returns, batch.old_values, self.clip_range_vf)
        metrics = ratio_metrics(log_ratio, policy.entropy, batch.response_mask, clip)
        if self.critic.fit is None:
            metrics["train/value_loss"] = error[batch.response_mask]
        return TokenLoss(loss=self.vf_coef * error - objective, metrics=metrics)

    # -- the weight of the KL penalty, and the critic's own weights -------------------------------------------------

    def _adapt_kl_coef(self, kl: Tensor) -> None:
        """Log the divergence from the reference, ``(turn,)``, and compute the next weight of its penalty from it."""
        self.record("train/kl_to_reference", kl)
        self.record("train/kl_coef", kl.new_tensor([self.kl_coef]))
        if self.kl.target is not None:
            total, turns = self.reduce_sum(torch.stack([kl.sum(), kl.new_tensor(float(len(kl)))])).tolist()
            error = min(max(total / turns / self.kl.target - 1, -0.2), 0.2)
            self._next_kl_coef = self.kl_coef * math.exp(error * turns / self.kl.horizon)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Switch to the next weight of the KL penalty, after the advantages of the collection were estimated."""
        super().on_train_batch_start(batch, batch_idx)
        self.kl_coef = self._next_kl_coef

    def prepare(self, rollout: Rollout) -> TurnBatch:
        """Estimate advantages, flatten the turns, and fit the critic if ``critic.fit`` is set."""
        batch = super().prepare(rollout)
        if self.critic.fit is not None:
            error = fit_values(self, batch, self.critic.fit)
            self.finite_steps.require("train/value_loss", error)
            self.record("train/value_loss", error)
        return batch

    def setup(self, stage: str) -> None:
        """Connect the policy with its environment, and check that the critic can be fitted if ``critic.fit`` is set."""
        super().setup(stage)
        if stage == "fit" and self.critic.fit is not None and shards_parameters(self.trainer.strategy):
            raise ValueError(
                "model.critic.fit is set and trainer.strategy shards the weights (FSDP2), which L-BFGS does not "
                "support; critic.fit must be null, or the strategy auto or ddp."
            )

    def configure_model(self) -> None:
        """Load the weights."""
        super().configure_model()
        if self.critic.fit is not None:
            check_separate_critic(self.policy, "model.critic.fit")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weight of the KL penalty."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"]["kl_coefs"] = [self.kl_coef, self._next_kl_coef]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the weight of the KL penalty, if it is adaptive."""
        super().on_load_checkpoint(checkpoint)
        if self.kl.target is not None:
            self.kl_coef, self._next_kl_coef = checkpoint["lrl"].get("kl_coefs", [self.kl_coef, self._next_kl_coef])

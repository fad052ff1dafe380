"""PPO with a value head (arXiv:1707.06347) for policies whose turn is one token or many.

Objective, for the tokens m of the turns t of an episode:

    r    = pi(a | s) / pi_old(a | s)
    J    = mean  min(r A, clip(r, 1 - clip_range, 1 + clip_range) A)  +  ent_coef H(pi)  -  kl.old_coef KL(pi_old || pi)
    L_V  = mean  1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip_range_vf, clip_range_vf) - R)^2)
    loss = -J + vf_coef L_V

Credit. r_t is the environment's reward for turn t. r^m is the reward of a token: minus its KL penalty
kl.coef log(pi_old / pi_ref), which ``turn`` credit adds to r_t instead. V_t is the value before the first token of turn
t, and V_t^m the value before its token m. G' equals G; with ``local_penalties``, max(0, r_t) replaces r_t in G'.

    turn      G_t = r_t + gamma ((1 - gae_lambda) V_{t+1} + gae_lambda G'_{t+1}),  A_t^m = G_t - V_t,  R_t^m = G_t
    nested    G_t as above is added to the reward of the turn's last token; inside the turn
              A_t^m = d^m + token_gamma token_lambda A_t^{m+1},  d^m = r^m + token_gamma V_t^{m+1} - V_t^m,
              the value after the last token is 0; R = A + V
    token     GAE over the sequence of all tokens of the episode, with the discounts per token inside a turn and the
              discounts per turn between turns
    bandit    as nested, but G_t is the reward of the episode's last turn (a contextual-bandit baseline)

With one token per turn and without KL penalty, the first three are the estimator of the paper.

Departures from the paper, and from RL-LLM's nested PPO:

1. V_{t+1} is the value before the first token of the next turn, a position at which the critic is trained. RL-LLM uses
   the value after the last token of that turn, where the critic is not trained. ``bootstrap_last`` uses the value
   before the last token, which, as in RL-LLM, depends on most of the action.
2. If an episode is truncated or continues in the next collection, the value of the next state replaces later rewards.
   RL-LLM drops episodes that have not ended.
3. ``local_penalties`` is off by default. It is RL-LLM's max(0, r_t), with which the negative rewards of an environment
   do not affect the advantages of earlier turns.
4. The ratio is clipped, or KL(pi_old || pi) is penalised (``clip_range: null``), or both (section 4 of the paper, with
   a fixed weight). The penalty is ``log(pi_old / pi)`` at the sampled tokens, whose expected gradient is that of the
   divergence; while r is 1, its gradient is that of adding ``kl.old_coef`` to every advantage. The estimate ``r - 1 -
   log r``, which ``train/approx_kl`` logs and ``target_kl`` limits, has less variance, but is too small if probability
   moves to tokens that were not sampled: if a share d moves to them, the divergence is about d and the estimate d^2 /
   2.
5. The weight of the KL penalty to the reference can be adapted so that the divergence approaches a target
   (arXiv:1909.08593, section 2.2). The factor of the adaptation is exponential, so that the weight stays positive,
   instead of linear as in that paper.
6. ``critic.fit`` fits a critic with separate weights by least squares once per collection, instead of training it with
   the value loss. ``vf_coef`` then has no effect.
7. ``vf_coef`` is the weight of half the squared error; 0.5 in Stable-Baselines3 corresponds to 1 here.
8. The value head has no dropout. With dropout, the values from which advantages are estimated would differ from the
   values in the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
    """Configures the training of the weights that only the critic uses."""

    fit: ValueFit | None = None
    """Fits these weights by least squares, once per collection; null trains them with the value loss."""

    def __post_init__(self) -> None:
        if self.fit is not None and self.fit.method != "lbfgs":
            raise ValueError(
                f"model.critic.fit.method is {self.fit.method}; it must be lbfgs, because PPO has an optimiser already."
            )


@dataclass(frozen=True, kw_only=True)
class AdaptiveKLConfig:
    """Configures the KL penalties of PPO; the weight of the penalty to the reference can be adapted to a target."""

    coef: NonNegativeFloat = 0.0
    """Weight of the penalty to the reference, which is the initial weight if ``target`` is set. With 0, no reference
    policy is kept."""
    target: PositiveFloat | None = None
    """Divergence from the reference in nats per turn at which the weight stays constant (arXiv:1909.08593, 2.2): a
    larger divergence increases the weight, a smaller one decreases it. Null keeps the weight constant."""
    horizon: PositiveInt = 10_000
    """Number of turns in which the weight changes at most by a factor of ``exp(0.2)``."""
    old_coef: NonNegativeFloat = 0.0
    """Weight of KL(pi_old || pi), the divergence from the policy that sampled."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")
        if self.target is not None and self.coef == 0:
            raise ValueError(f"model.kl.target is {self.target}, but model.kl.coef is 0; it must be positive.")


@register
class PPOValueHeadModule(GradientModule):
    """Trains a policy with a critic by PPO.

    Args:
        policy: policy to train.
        optimizer: optimiser and learning-rate schedule.
        critic: training of the weights that only the critic uses.
        credit: estimator of advantages and its discounts.
        kl: KL penalties, to the policy at the start of this run and to the policy that sampled.
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
            raise ValueError(
                "model.clip_range is null and model.kl.old_coef is 0; one of them must be set, to limit the update."
            )
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
        """Return whether the policy at the start of the run is kept as a reference: only if ``kl.coef`` is positive."""
        return self.kl.coef > 0

    def advantages(self, rollout: Rollout) -> Credit:
        """Estimate the advantages of tokens; the KL penalty to the reference is subtracted from their rewards."""
        token_rewards = None
        if rollout.ref_logprobs is not None:
            kl = (rollout.logprobs - rollout.ref_logprobs) * rollout.response_mask
            token_rewards = -self.kl_coef * kl
            self._adapt_kl_coef(rollout.flatten(kl).sum(-1))
        return self.credit.estimate(rollout, token_rewards, self.reduce_sum)

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return the loss of each token: the value loss minus the surrogate, the entropy bonus and the KL penalty."""
        assert policy.values is not None
        assert batch.returns is not None
        log_ratio = policy.logprobs - batch.old_logprobs
        ratio, clip = log_ratio.exp(), None if self.clip_range is None else (self.clip_range, self.clip_range)
        objective = ratio * batch.advantages if clip is None else clipped_surrogate(ratio, batch.advantages, *clip)
        if self.ent_coef:  # with weight 0, the backward pass of the entropy would cost time without effect
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
        """Log the divergence from the reference, and compute the weight of its penalty in the next collection.

        Args:
            kl: estimated divergence of each turn in nats, ``(turn,)``.
        """
        self.record("train/kl_to_reference", kl)
        self.record("train/kl_coef", kl.new_tensor([self.kl_coef]))
        if self.kl.target is not None:
            total, turns = self.reduce_sum(torch.stack([kl.sum(), kl.new_tensor(float(len(kl)))])).tolist()
            error = min(max(total / turns / self.kl.target - 1, -0.2), 0.2)
            self._next_kl_coef = self.kl_coef * math.exp(error * turns / self.kl.horizon)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Use the next weight of the KL penalty, because the advantages of the collection have been estimated."""
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

    def optimized_parameters(self) -> list[nn.Parameter]:
        """Return all trainable weights, except those that ``critic.fit`` fits: weight decay would change them."""
        fitted = {id(weight) for weight in self.policy.critic_parameters()} if self.critic.fit else set[int]()
        return [weight for weight in super().optimized_parameters() if id(weight) not in fitted]

    def configure_model(self) -> None:
        """Load the weights."""
        super().configure_model()
        if self.critic.fit is not None:
            check_separate_critic(self.policy, "model.critic.fit")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the current and the next weight of the KL penalty."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"]["kl_coefs"] = [self.kl_coef, self._next_kl_coef]
        checkpoint["lrl"]["fits_critic"] = self.critic.fit is not None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the weights of the KL penalty if they are adapted to a target.

        Raises:
            ValueError: If the run has ``critic.fit`` and the one that it continues has not, or the other way round.
        """
        fits = self.critic.fit is not None
        if self.trainer.state.fn == "fit" and checkpoint.get("lrl", {}).get("fits_critic", fits) != fits:
            now, before = ("set", "null") if fits else ("null", "set")
            raise ValueError(
                f"model.critic.fit is {now}, in the checkpoint it was {before}; resume with the same, because "
                "the optimiser has the weights of the critic only if it is null."
            )
        super().on_load_checkpoint(checkpoint)
        if self.kl.target is not None:
            self.kl_coef, self._next_kl_coef = checkpoint["lrl"].get("kl_coefs", [self.kl_coef, self._next_kl_coef])

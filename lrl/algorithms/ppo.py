"""PPO with a value head (arXiv:1707.06347) for policies whose turn is one token or many.

Objective, for the tokens m of the turns t of an episode:

    r    = pi(a | s) / pi_old(a | s)
    J    = mean  min(r A, clip(r, 1 - clip_range, 1 + clip_range) A)  +  ent_coef H(pi)  -  kl.old_coef KL(pi_old || pi)
    L_V  = mean  1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip_range_vf, clip_range_vf) - R)^2)
    loss = -J + vf_coef L_V

Credit. The environment rewards a turn with r_t; a token costs kl.coef log(pi_old / pi_ref), which turn credit subtracts
from r_t. V_t is the value before the first token of turn t, V_t^m before its token m. G' = G, or with
``local_penalties`` as G with max(0, r_t):

    turn      G_t = r_t + gamma ((1 - gae_lambda) V_{t+1} + gae_lambda G'_{t+1}),  A_t^m = G_t - V_t,  R_t^m = G_t
    nested    G_t as above is the reward of the turn's last token; inside the turn
              A_t^m = d^m + token_gamma token_lambda A_t^{m+1},  d^m = r^m + token_gamma V_t^{m+1} - V_t^m,
              no value follows the last token; R = A + V
    token     one chain of all tokens of the episode: discounts of tokens inside a turn, of turns between turns
    bandit    as nested, but G_t is the reward of the episode's last turn: the contextual-bandit baseline

With one token per turn and no KL term the first three are one and the same: the PPO of the paper.

Departures from the paper, and from RL-LLM's nested PPO:

1. V_{t+1} is read before the first token of the next turn, a position that is trained, and not after its last, which
   never was. ``bootstrap_last`` reads it before the last token instead: it has seen the action, as RL-LLM's had.
2. An episode that is truncated, or goes on in the next collection, is bootstrapped with the value of the state that it
   stopped in. RL-LLM dropped episodes that had not ended.
3. ``local_penalties`` (RL-LLM's max(0, r_t), which keeps a penalty at its own turn) is off: it would hide every
   negative reward of an environment from the turns before.
4. The clip, or a penalty on KL(pi_old || pi) with ``clip_range: null``, or both (section 4 of the paper, fixed weight).
   It is ``log(pi_old / pi)`` at the sampled tokens: on average its gradient is the divergence's, and while r is 1 it
   adds ``kl.old_coef`` to every advantage. The estimate ``r - 1 - log r``, which ``train/approx_kl`` shows and
   ``target_kl`` limits, has less variance but counts on every token being sampled now and then: of a share d that
   leaks to the rest of a vocabulary it sees d^2 / 2 where the divergence is d.
5. The weight of the KL term to the reference can follow a target (arXiv:1909.08593, section 2.2), by an exponential
   where the paper has its first two terms: it stays positive.
6. ``critic.fit`` fits a critic with weights of its own by least squares on all of a collection, for the next one, where
   the value loss of a few small steps would lag behind; ``vf_coef`` then weighs nothing.
7. ``vf_coef`` weighs half the squared error; where Stable-Baselines3 says .5, that is 1 here.
8. The value head's dropout is left out: with it the values that credit rests on would not be those that are trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lrl.functional.losses import clipped_surrogate, ratio_metrics, value_loss
from lrl.policies.policy import Policy
from lrl.ranges import NonNegativeFloat, PositiveFloat, check_arguments, check_fields
from lrl.registry import register
from lrl.training.credit import AdaptiveKLConfig, CreditConfig, KLCoefficient
from lrl.training.gradient_module import GradientModule
from lrl.training.optimizer import OptimizerConfig
from lrl.training.value_fit import ValueFit, check_separate_critic, check_whole_weights, fit_values
from lrl.types import Credit, Evaluation, Rollout, TokenLoss, TurnBatch


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """How the weights that belong to the critic alone are trained."""

    lr: PositiveFloat | None = None
    """Their learning rate; null takes ``optimizer.lr``."""
    fit: ValueFit | None = None
    """Fit them separately, once per collection, instead of by the value loss; null does not."""

    def __post_init__(self) -> None:
        check_fields(self, "model.critic")
        if self.fit is not None and self.fit.method != "lbfgs":
            raise ValueError(f"model.critic.fit.method is {self.fit.method}; it must be lbfgs beside PPO's optimiser.")
        if self.fit is not None and self.lr is not None:
            raise ValueError(f"model.critic.lr is {self.lr}; it must be null, critic.fit does not read it.")


@register
class PPOValueHeadModule(GradientModule):
    """Trains a policy that has a critic by PPO.

    Args:
        policy: what is trained.
        optimizer: the optimiser and its learning-rate schedule.
        critic: how the critic's own weights are trained.
        credit: how rewards become advantages.
        kl: KL penalties to the policy at the start of this run, and to the policy that sampled.
        clip_range: of the ratio; null clips nothing, then ``kl.old_coef`` must be positive.
        clip_range_vf: how far a value may move from what it was; null does not limit it.
        vf_coef: weight of the value loss.
        ent_coef: weight of the entropy bonus, in nats per token.
        loss_normalisation: ``token`` weighs all tokens alike, ``sequence`` all turns.
        target_kl: remaining minibatches of a collection are no-op steps once the mean KL(old || new) of one exceeds it.
        init_from: weights to start from.
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
        credit.check_policy(policy, "PPO")
        if clip_range is None and kl.old_coef == 0:
            raise ValueError("model.clip_range is null and model.kl.old_coef 0; one of them must limit the update.")
        if critic.fit is not None and clip_range_vf is not None:
            raise ValueError(f"model.clip_range_vf is {clip_range_vf}; it must be null, critic.fit does not read it.")
        self.critic, self.credit, self.kl = critic, credit, kl
        self.clip_range, self.clip_range_vf = clip_range, clip_range_vf
        self.vf_coef, self.ent_coef = 0.0 if critic.fit else vf_coef, ent_coef
        self.kl_coef = KLCoefficient(kl)

    @property
    def needs_reference(self) -> bool:
        """Return whether the policy at the start of the run must be kept: if the KL penalty counts."""
        return self.kl.coef > 0

    def advantages(self, rollout: Rollout) -> Credit:
        """Estimate the advantage of every token; each costs what the KL penalty takes for leaving the reference."""
        token_rewards = None
        if rollout.ref_logprobs is not None:
            kl = (rollout.logprobs - rollout.ref_logprobs) * rollout.response_mask
            token_rewards = -self.kl_coef.value * kl
            self._observe(rollout.flatten(kl).sum(-1))
        return self.credit.estimate(rollout, token_rewards, self.reduce_sum)

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return the value loss less the clipped surrogate and its bonuses, of each token."""
        assert policy.values is not None
        assert batch.returns is not None
        log_ratio = policy.logprobs - batch.old_logprobs
        ratio, clip = log_ratio.exp(), None if self.clip_range is None else (self.clip_range, self.clip_range)
        objective = ratio * batch.advantages if clip is None else clipped_surrogate(ratio, batch.advantages, *clip)
        if self.ent_coef:  # a bonus of 0 would still be differentiated
            objective = objective + self.ent_coef * policy.entropy
        if self.kl.old_coef:
            objective = objective + self.kl.old_coef * log_ratio
        error = value_loss(policy.values, batch.returns, batch.old_values, self.clip_range_vf)
        metrics = ratio_metrics(log_ratio, policy.entropy, batch.response_mask, clip)
        if self.critic.fit is None:
            metrics["train/value_loss"] = error[batch.response_mask]
        return TokenLoss(loss=self.vf_coef * error - objective, metrics=metrics)

    # -- the weight of the KL penalty, and the critic's own weights -------------------------------------------------

    def _observe(self, kl: Tensor) -> None:
        """Log the divergence from the reference, ``(turn,)``, and steer the weight of its penalty."""
        self.record("train/kl_to_reference", kl)
        self.record("train/kl_coef", kl.new_tensor([self.kl_coef.value]))
        if self.kl.target is not None:
            total, count = self.reduce_sum(torch.stack([kl.sum(), kl.new_tensor(float(len(kl)))])).tolist()
            self.kl_coef.observe(total / count, count)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Use the next weight of the KL penalty: the advantages of this collection have been estimated."""
        super().on_train_batch_start(batch, batch_idx)
        self.kl_coef.advance()

    def prepare(self, rollout: Rollout) -> TurnBatch:
        """Estimate advantages, flatten the turns, and fit the critic if that is done separately."""
        batch = super().prepare(rollout)
        if self.critic.fit is not None:
            error = fit_values(self, batch, self.critic.fit)
            self.finite_steps.require("train/value_loss", error)
            self.record("train/value_loss", error)
        return batch

    def setup(self, stage: str) -> None:
        """Connect the policy with its environment."""
        super().setup(stage)
        if stage == "fit" and self.critic.fit is not None:
            check_whole_weights(self.trainer)

    def configure_model(self) -> None:
        """Load the weights."""
        super().configure_model()
        if self.critic.fit is not None:
            check_separate_critic(self.policy, "model.critic.fit")

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trainable weights; the critic's own are a group if they have a learning rate of their own.

        Raises:
            ValueError: they have one, and the critic shares all of its weights.
        """
        groups = super().parameter_groups()
        if self.critic.lr is None:
            return groups
        own = {id(parameter) for parameter in self.policy.critic_parameters()}
        if not own:
            raise ValueError(
                f"model.critic.lr is {self.critic.lr}, but the critic of {type(self.policy).__name__} has no weights "
                "of its own here; it must be null."
            )
        weights = groups[0]["params"]
        policy, critic = ([p for p in weights if (id(p) in own) == is_critic] for is_critic in (False, True))
        return [{"params": policy}, {"params": critic, "lr": self.critic.lr}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weight of the KL penalty."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"] |= {"kl_coefs": self.kl_coef.state(), "critic_lr": self.critic.lr}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the weight of the KL penalty.

        Raises:
            ValueError: ``critic.lr`` differs, which the saved state of the optimiser would overrule.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint["lrl"]
        if self._trainer is not None and self.trainer.state.fn == "fit" and saved.get("critic_lr") != self.critic.lr:
            raise ValueError(
                f"model.critic.lr is {self.critic.lr}, in ckpt_path it was {saved.get('critic_lr')}; resume with the "
                "same, or start from the weights alone with model.init_from."
            )
        self.kl_coef.load(saved.get("kl_coefs", self.kl_coef.state()))

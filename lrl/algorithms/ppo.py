"""PPO with a value head (arXiv:1707.06347) for policies whose turn is one token or many.

Objective, for the tokens m of the turns t of an episode:

    r    = pi(a | s) / pi_old(a | s)
    J    = mean  min(r A, clip(r, 1 - clip_range, 1 + clip_range) A)  +  ent_coef H(pi)  -  old_kl_coef KL(pi_old || pi)
    L_V  = mean  1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip_range_vf, clip_range_vf) - R)^2)
    loss = -J + vf_coef L_V

Credit. A turn is paid r_t by the environment, a token -kl_coef log(pi_old / pi_ref), which turn credit adds to r_t. V_t
is the value before the first token of turn t, V_t^m before its token m. G' = G, or with ``local_penalties`` as G with
max(0, r_t):

    turn      G_t = r_t + gamma ((1 - gae_lambda) V_{t+1} + gae_lambda G'_{t+1}),  A_t^m = G_t - V_t,  R_t^m = G_t
    nested    G_t as above is the reward of the turn's last token; inside the turn
              A_t^m = d^m + token_gamma token_lambda A_t^{m+1},  d^m = r^m + token_gamma V_t^{m+1} - V_t^m,
              nothing behind the last token; R = A + V
    token     one chain of all tokens of the episode: discounts of tokens inside a turn, of turns between turns
    bandit    as nested, but G_t is the reward of the episode's last turn: the contextual-bandit baseline

With one token per turn and no KL term the first three are one and the same: the PPO of the paper.

Departures from the paper, and from RL-LLM's nested PPO:

1. V_{t+1} is read before the first token of the next turn, a position that is trained, and not behind its last, which
   never was. ``bootstrap_last`` reads it before the last token instead: it has seen the action, as RL-LLM's had.
2. An episode that is truncated, or goes on in the next collection, is bootstrapped with the value of the state that it
   stopped in. RL-LLM dropped episodes that had not ended.
3. ``local_penalties`` (RL-LLM's max(0, r_t), which keeps a penalty at its own turn) is off: it would hide every
   negative reward of an environment from the turns before.
4. The clip, or a penalty on KL(pi_old || pi) with ``clip_range: null``, or both (section 4 of the paper, fixed weight).
   It is ``log(pi_old / pi)`` at what was sampled: on average its gradient is the divergence's, and while r is 1 it adds
   ``old_kl_coef`` to every advantage. The estimate ``r - 1 - log r``, which stands in ``train/approx_kl`` and which
   ``target_kl`` looks at, has less variance but counts on every token being sampled now and then: of a share d that
   leaks to the rest of a vocabulary it sees d^2 / 2 where the divergence is d.
5. The weight of the KL term to the reference can follow a target (arXiv:1909.08593, section 2.2), by an exponential
   where the paper has its first two terms: it stays positive.
6. ``value_fit`` fits a critic of own weights by least squares on all of a collection, for the next one, where the value
   loss of a few small steps would leave it behind; ``vf_coef`` then weighs nothing.
7. ``vf_coef`` weighs half the squared error; where Stable-Baselines3 says .5, that is 1 here.
8. The value head's dropout is left out: with it the values that credit rests on would not be those that are trained.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lrl.functional.credit import Discounts
from lrl.functional.losses import clipped_surrogate, normalise, value_loss
from lrl.policies.policy import Policy
from lrl.training.crediting import credited, reduce_sum, world_size
from lrl.training.critic_fit import ValueFit, fit_values
from lrl.training.no_op_step import zero_loss
from lrl.training.policy_module import OptimizerFactory, PolicyModule
from lrl.training.ppo_checks import (
    check_credit,
    check_critic_stands_alone,
    check_leash,
    check_loss,
    check_value_fit,
    check_whole_weights,
)
from lrl.training.schedule import Schedule
from lrl.training.step_sizes import step_sizes
from lrl.types import Rollout, TurnBatch


class PPOValueHeadModule(PolicyModule):
    """Trains a policy that has a critic by PPO.

    Args:
        policy: what is trained.
        lr: learning rate.
        critic_lr: of the weights that the critic shares with nothing; null takes ``lr``.
        credit: ``turn``, ``token``, ``nested`` or ``bandit``.
        gamma: discount per turn.
        gae_lambda: per turn.
        token_gamma: discount per token inside a turn.
        token_lambda: per token inside a turn.
        local_penalties: negative rewards count for their own turn only.
        bootstrap_last: the next turn's value is read before its last token, not before its first.
        normalise_advantages: to mean 0 and standard deviation 1 over the tokens of a collection.
        clip_range: of the ratio; null clips nothing, then ``old_kl_coef`` must be positive.
        old_kl_coef: weight of KL(pi_old || pi).
        clip_range_vf: how far a value may move from what it was; null lets it.
        vf_coef: weight of the value loss.
        value_fit: fit the critic's own weights apart, once per collection, instead of by the value loss.
        ent_coef: weight of the entropy bonus, in nats per token.
        kl_coef: weight of the KL term to the policy at the start of this run; 0 keeps no reference.
        kl_target: nats per turn that ``kl_coef`` is steered towards; null leaves it fixed.
        kl_horizon: turns over which it is steered.
        loss_normalisation: ``token`` weighs all tokens alike, ``sequence`` all turns.
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
        lr: float = 3e-4,
        critic_lr: float | None = None,
        credit: Literal["turn", "token", "nested", "bandit"] = "nested",
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        token_gamma: float = 1.0,
        token_lambda: float = 0.98,
        local_penalties: bool = False,
        bootstrap_last: bool = False,
        normalise_advantages: bool = True,
        clip_range: float | None = 0.2,
        old_kl_coef: float = 0.0,
        clip_range_vf: float | None = None,
        vf_coef: float = 0.5,
        value_fit: ValueFit | None = None,
        ent_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        loss_normalisation: Literal["token", "sequence"] = "token",
        target_kl: float | None = None,
        optimizer: OptimizerFactory | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule = "constant",
        warmup: float = 0.0,
        init_from: str | None = None,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__(policy, lr, optimizer, weight_decay, schedule, warmup, init_from, max_skipped_steps)
        if critic_lr is not None and critic_lr <= 0:
            raise ValueError(f"model.critic_lr is {critic_lr}; it must be positive, or null.")
        self.critic_lr, self.credit, self.normalise_advantages = critic_lr, credit, normalise_advantages
        self.discounts = Discounts(
            gamma=gamma,
            gae_lambda=gae_lambda,
            token_gamma=token_gamma,
            token_lambda=token_lambda,
            local_penalties=local_penalties,
            bootstrap_last=bootstrap_last,
        )
        check_credit(policy, credit, self.discounts)
        check_leash(clip_range, old_kl_coef, kl_coef, kl_target, kl_horizon)
        check_loss(clip_range_vf, vf_coef, ent_coef, loss_normalisation, target_kl)
        self.clip_range, self.clip_range_vf, self.old_kl_coef = clip_range, clip_range_vf, old_kl_coef
        check_value_fit(value_fit, critic_lr, clip_range_vf)
        self.value_fit = value_fit
        self.vf_coef, self.ent_coef, self.kl_target, self.kl_horizon = vf_coef, ent_coef, kl_target, kl_horizon
        self.loss_normalisation, self.target_kl = loss_normalisation, target_kl
        self.keeps_reference, self.current_kl_coef, self._next_kl_coef = kl_coef > 0, float(kl_coef), float(kl_coef)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The critic's own weights apart, where they have a learning rate of their own.

        Raises:
            ValueError: they should, and there are none.
        """
        groups = super().parameter_groups()
        if self.critic_lr is None:
            return groups
        own = {id(parameter) for parameter in self.policy.critic_parameters()}
        if not own:
            raise ValueError(
                f"model.critic_lr is {self.critic_lr}, but the critic of {type(self.policy).__name__} has no weights "
                "of its own here; it must be null."
            )
        weights = groups[0]["params"]
        actor, critic = ([p for p in weights if (id(p) in own) == part] for part in (False, True))
        return [{"params": actor}, {"params": critic, "lr": self.critic_lr}]

    @property
    def needs_reference(self) -> bool:
        """Only where the KL term counts."""
        return self.keeps_reference

    def setup(self, stage: str) -> None:
        """Refuse a fit of the critic where there are no whole weights."""
        super().setup(stage)
        if stage == "fit" and self.value_fit is not None:
            check_whole_weights(self.trainer)

    def configure_model(self) -> None:
        """Load the weights.

        Raises:
            ValueError: the critic should be fitted apart and cannot be.
        """
        super().configure_model()
        if self.value_fit is not None:
            check_critic_stands_alone(self.policy, "model.value_fit")

    def turn_batch(self, rollout: Rollout) -> TurnBatch:
        """Pay what each token costs, then credit it."""
        self.skip_updates = False
        batch, token_rewards = rollout.turn_batch(torch.zeros_like(rollout.logprobs)), None
        if self.needs_reference:
            batch = batch.replace(ref_logprobs=self.policy.reference_logprobs(batch))
            token_rewards = self._kl_penalty(batch)
        batch = credited(self, rollout, batch, token_rewards, self.credit, self.discounts, self.normalise_advantages)
        if self.value_fit is not None:
            error = fit_values(self, batch, self.value_fit)
            self.finite_steps.require("train/value_loss", error)
            self.record("train/value_loss", error)
        return batch

    def _kl_penalty(self, batch: TurnBatch) -> Tensor:
        """What each token is paid for staying near the reference; steers its weight for the next collection."""
        assert batch.ref_logprobs is not None
        kl = (batch.old_logprobs - batch.ref_logprobs) * batch.response_mask
        penalty = -self.current_kl_coef * kl
        self.record("train/kl_to_reference", kl.sum(-1))
        self.record("train/kl_coef", kl.new_tensor([self.current_kl_coef]))
        if self.kl_target is not None:
            total, count = reduce_sum(self, torch.stack([kl.sum(), kl.new_tensor(float(len(kl)))])).tolist()
            error = min(max(total / count / self.kl_target - 1, -0.2), 0.2)
            self._next_kl_coef = self.current_kl_coef * math.exp(error * count / self.kl_horizon)
        return penalty

    def training_step(self, batch: TurnBatch) -> Tensor:
        """One part of the buffer: the surrogate and the value loss."""
        self.current_kl_coef = self._next_kl_coef  # credit is given: the next collection is paid by the next weight
        if self.skip_updates:
            return zero_loss(self.policy, batch)
        mask = batch.response_mask
        turns, tokens = step_sizes(self, mask)
        if len(batch) == 0:  # other ranks may have turns: the same collective calls, in the same order
            loss = zero_loss(self.policy, batch)
            self._skip_beyond_target(loss.detach())
            return loss
        policy = self.policy.evaluate(batch)
        assert policy.values is not None
        assert batch.returns is not None
        log_ratio = policy.logprobs - batch.old_logprobs
        objective = self._surrogate(log_ratio.exp(), batch.advantages)
        if self.ent_coef:
            objective = objective + self.ent_coef * policy.entropy
        if self.old_kl_coef:
            objective = objective + self.old_kl_coef * log_ratio
        error = value_loss(policy.values, batch.returns, batch.old_values, self.clip_range_vf)
        vf_coef = self.vf_coef if self.value_fit is None else 0.0
        loss = normalise(vf_coef * error - objective, mask, self.loss_normalisation, turns, tokens, 1)
        self._record_step(loss, log_ratio, policy.entropy, error, mask)
        return loss

    def _surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        if self.clip_range is None:
            return ratio * advantages
        return clipped_surrogate(ratio, advantages, self.clip_range, self.clip_range)

    @torch.no_grad()
    def _record_step(self, loss: Tensor, log_ratio: Tensor, entropy: Tensor, error: Tensor, mask: Tensor) -> None:
        log_ratio, entropy, error = torch.stack([log_ratio, entropy, error])[:, mask]
        moved = log_ratio.exp() - 1
        approx_kl = (moved - log_ratio).mean()
        self.record("train/loss", loss)
        if self.value_fit is None:
            self.record("train/value_loss", error)
        self.record("train/approx_kl", approx_kl)
        self.record("train/entropy", entropy)
        moved = moved.abs()
        self.record("train/ratio_error", moved.max())
        if self.clip_range is not None:
            self.record("train/clip_fraction", moved > self.clip_range)
        self._skip_beyond_target(approx_kl)

    def _skip_beyond_target(self, approx_kl: Tensor) -> None:
        """Make the rest of the collection no-ops, on all ranks or on none."""
        if self.target_kl is not None:
            self.skip_updates = bool(reduce_sum(self, approx_kl) / world_size(self) > self.target_kl)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weight of the KL term."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"]["kl_coefs"] = [self.current_kl_coef, self._next_kl_coef]
        checkpoint["lrl"]["critic_lr"] = self.critic_lr

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back where it follows a target; else the configured one counts.

        Raises:
            ValueError: ``critic_lr`` is another, which the optimiser's saved state would overrule.
        """
        super().on_load_checkpoint(checkpoint)
        saved_lr = checkpoint["lrl"].get("critic_lr")
        if self._trainer is not None and self.trainer.state.fn == "fit" and saved_lr != self.critic_lr:
            raise ValueError(
                f"model.critic_lr is {self.critic_lr}, in ckpt_path it was {saved_lr}; resume with the same, or start "
                "from the weights alone with model.init_from."
            )
        if self.kl_target is not None:
            saved = checkpoint["lrl"].get("kl_coefs", [self.current_kl_coef, self._next_kl_coef])
            self.current_kl_coef, self._next_kl_coef = saved

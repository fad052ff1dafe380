"""TRPO (arXiv:1502.05477) for policies whose turn is one token or many.

For the tokens m of the turns of a collection. N is the number of turns, s_m the prompt with the tokens before m, A_m
the advantage and H_m the entropy:

    L(w)  = 1/N  sum_turns sum_m  [ pi_w(a_m | s_m) / pi_old(a_m | s_m)  A_m  +  ent_coef H_m ]
    KL(w) = 1/N  sum_turns sum_m  KL(pi_old(. | s_m) || pi_w(. | s_m))            exact sum over all tokens

    maximise L(w)  subject to  KL(w) <= max_kl

    g = dL/dw,   F = d2KL/dw2  (the Fisher matrix),   x = (F + damping I)^-1 g  by conjugate gradient
    full step = x sqrt(2 max_kl / x^T (F + damping I) x)
    w <- w + 0.5^k full step  with the smallest k < 10 for which  KL(w) <= max_kl  and L increases by at least a tenth
    of its first-order estimate;  if there is no such k, w does not change

Only the trainable weights of the actor are updated: LoRA adapters and heads, or the whole model. The critic must have
separate weights, and is fitted separately. With one token per turn this is the TRPO of the paper.

Departures from the paper:

1. Each token is weighted by its own ratio instead of the product of the ratios of its turn, and the divergence of a
   turn is the sum over its tokens at the sampled prefixes. At the old policy, the gradient of the surrogate is the
   same as with the product, and the expected Hessian of the divergence is the same as that of whole turns.
2. Advantages are those of ``credit`` (see :mod:`lrl.algorithms.ppo`), by default generalised advantage estimation.
3. The Fisher matrix may be estimated from a share of the turns (appendix C of the paper), and is damped.
4. Products with the Fisher matrix are computed as ``J^T M J v``, where M is the analytic second derivative of the
   divergence. This is cheaper than differentiating the divergence twice, which
   ``natural_gradient.product: double_backward`` does.
5. The critic is fitted to lambda returns by L-BFGS, starting from its current weights, or by minibatches of Adam.
6. If an episode continues in the next collection, the value of the next state replaces later rewards; the episode
   is not dropped.
7. ``schedule`` can decrease ``max_kl`` over the run.
8. Advantages are scaled to standard deviation 1, an entropy bonus can be added, and a step must achieve a tenth of the
   improvement that the gradient predicts (the paper accepts any improvement).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.run_data import RunDataModule
from lrl.functional.advantages import CreditConfig
from lrl.functional.distributed import shards_parameters
from lrl.functional.random import permutation
from lrl.functional.trust_region import (
    MatrixVectorProduct,
    conjugate_gradient,
    fisher_vector_product,
    flatten,
    gauss_newton_vector_product,
    line_search,
)
from lrl.policies.policy import Policy
from lrl.ranges import LeftOpenUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt, check_arguments, check_fields
from lrl.registry import register
from lrl.training.gradient_module import GradientModule
from lrl.training.guards import check_loss
from lrl.training.optimizer import OptimizerConfig, Schedule, learning_rate_factor
from lrl.training.value_fit import ValueFit, check_separate_critic, fit_values
from lrl.types import Credit, Distribution, Evaluation, Rollout, TokenLoss, TurnBatch


@dataclass(frozen=True, kw_only=True)
class NaturalGradientConfig:
    """Configures the direction of the step: conjugate gradient with the damped Fisher matrix."""

    damping: NonNegativeFloat = 0.1
    """Number that is added to the diagonal of the Fisher matrix."""
    cg_iterations: PositiveInt = 10
    """Maximum number of iterations of conjugate gradient."""
    product: Literal["gauss_newton", "double_backward"] = "gauss_newton"
    """Method of multiplying the Fisher matrix by a vector; both give the same product except for rounding."""
    fisher_fraction: LeftOpenUnitInterval = 1.0
    """Share of the turns from which the Fisher matrix is estimated."""

    def __post_init__(self) -> None:
        check_fields(self, "model.natural_gradient")


@register
class TRPOModule(GradientModule):
    """Trains a policy by natural-gradient steps inside a trust region, and fits its critic to lambda returns.

    One collection is one update: ``data.num_epochs`` and ``data.num_minibatches`` must be 1.

    Args:
        policy: policy to train.
        credit: estimator of advantages and its discounts.
        max_kl: largest KL divergence of one update, in nats per turn.
        schedule: schedule of ``max_kl`` over the run. With a constant ``max_kl``, updates of a converged policy are
            mostly noise.
        natural_gradient: how the direction of a step is computed.
        ent_coef: weight of the entropy bonus, in nats per token.
        chunk_size: number of turns in one forward pass; small passes are faster on a CPU. Null bounds the memory of a
            pass instead. In both cases, an array of old log-probabilities ``(turn, token, vocabulary)`` of the whole
            collection is kept in memory.
        value_fit: settings of the critic's fit; null uses L-BFGS.
        init_from: checkpoint, folder or hub name whose weights the run starts from; null uses the policy's own.
    """

    needs_values = True

    def __init__(
        self,
        policy: Policy,
        credit: CreditConfig = CreditConfig(gamma=0.995, gae_lambda=0.97),
        max_kl: PositiveFloat = 0.01,
        schedule: Schedule = "constant",
        natural_gradient: NaturalGradientConfig = NaturalGradientConfig(),
        ent_coef: NonNegativeFloat = 0.0,
        chunk_size: PositiveInt | None = None,
        value_fit: ValueFit | None = None,
        init_from: str | None = None,
    ) -> None:
        check_arguments(TRPOModule.__init__, locals(), "model")
        super().__init__(policy, OptimizerConfig(), init_from=init_from)
        self.automatic_optimization, policy.needs_distribution = False, True
        self.credit, self.max_kl = credit, max_kl
        self.schedule: Schedule = schedule
        self.natural_gradient, self.ent_coef = natural_gradient, ent_coef
        self.chunk_size, self.value_fit = chunk_size, value_fit or ValueFit()

    def advantages(self, rollout: Rollout) -> Credit:
        """Estimate the advantage of every token."""
        return self.credit.estimate(rollout, reduce=self.reduce_sum)

    def loss(self, batch: TurnBatch, policy: Evaluation) -> TokenLoss:
        """Return the loss of each token: minus the surrogate and the entropy bonus."""
        mask = batch.response_mask
        ratio = ((policy.logprobs - batch.old_logprobs) * mask).exp()
        objective = ratio * batch.advantages + self.ent_coef * policy.entropy
        error = (ratio.detach() - 1).abs()[mask]
        metrics = {"train/entropy": policy.entropy.detach()[mask], "train/ratio_error_max": error}
        return TokenLoss(loss=-objective, metrics=metrics)

    def step(self, batch: TurnBatch) -> None:
        """Update the policy by one step on the whole collection, then fit the critic."""
        self._improve(batch)
        error = fit_values(self, batch, self.value_fit)
        self.finite_steps.require("train/value_loss", error)
        self.record("train/value_loss", error)
        self.count_update()

    @sdpa_kernel(SDPBackend.MATH)  # the other kernels have no second derivative
    def _improve(self, batch: TurnBatch) -> None:
        """Update the actor by one step inside the trust region, and log its metrics."""
        parameters = self.actor_parameters()
        turns = float(self.reduce_sum(torch.tensor(float(len(batch)), device=self.device)))
        found = self.within_memory(lambda: self._direction(batch, parameters, turns))
        if found is None:
            return
        chunks, start, gradient, old, full_step = found
        search = line_search(
            lambda: self._surrogate_and_kl(chunks, old, turns),
            parameters,
            full_step,
            start=start,
            expected=float(gradient @ full_step),
            max_kl=self.radius,
        )
        self.record("train/grad_norm", gradient.norm())
        self.record("train/expected_improvement", search.step * (gradient @ full_step))
        figures = {"step_accepted": search.accepted, "step_share": search.step, "improvement": search.improvement}
        for name, value in (figures | {"kl": search.kl}).items():
            self.record(f"train/{name}", torch.tensor(float(value)))

    def _direction(
        self, batch: TurnBatch, parameters: Sequence[Tensor], turns: float
    ) -> tuple[list[TurnBatch], float, Tensor, list[Distribution], Tensor] | None:
        """Return the turns of each pass, ``L``, its gradient, the old distributions and the full step ``(parameter,)``.

        It returns None if the gradient is not finite and the update is skipped.
        """
        chunks = self._chunks(batch)
        start, gradient, old = self._surrogate_and_gradient(chunks, parameters, turns)
        self.finite_steps.require("the surrogate (train/improvement)", start)
        if not self.finite_steps.accept(gradient.norm()):
            return None
        product = self._fisher_product(batch, parameters)
        direction = conjugate_gradient(product, gradient, self.natural_gradient.cg_iterations)
        curvature = float(direction @ product(direction))
        self.finite_steps.require("the curvature of the Fisher matrix", curvature)
        step = direction * math.sqrt(2 * self.radius / curvature) if curvature > 0 else torch.zeros_like(direction)
        return chunks, start, gradient, old, step

    def passes(self, batch: TurnBatch, gradient: bool = True) -> list[Tensor]:
        """Divide turns among forward passes, by ``chunk_size`` or by :meth:`Policy.passes`."""
        if self.chunk_size is None:
            return self.pass_limit.split(self.policy.passes(batch, gradient))
        turns = torch.arange(len(batch), device=batch.response_mask.device)
        return self.pass_limit.split(turns.split(self.chunk_size))

    def _chunks(self, batch: TurnBatch) -> list[TurnBatch]:
        """Return the turns of each forward pass."""
        passes = self.passes(batch)
        return [batch] if len(passes) == 1 else [batch[turns] for turns in passes]

    def _surrogate(self, chunk: TurnBatch) -> tuple[Tensor, Distribution, TokenLoss]:
        """Return the surrogate summed over turns, ``()`` with gradient, the distribution and the loss of each token."""
        policy = self.policy.evaluate(chunk)
        assert policy.distribution is not None
        tokens = check_loss(self, self.loss(chunk, policy), chunk.response_mask, policy)
        return -(tokens.loss * chunk.response_mask).sum(), policy.distribution, tokens

    def _surrogate_and_gradient(
        self, chunks: Sequence[TurnBatch], parameters: Sequence[Tensor], turns: float
    ) -> tuple[float, Tensor, list[Distribution]]:
        """Return ``L`` and its gradient ``(parameter,)`` over all ranks, and the old distribution of each chunk."""
        total, old = torch.zeros(sum(parameter.numel() for parameter in parameters), device=self.device), []
        surrogate = torch.zeros((), dtype=torch.float64, device=self.device)
        for chunk in chunks:
            objective, distribution, tokens = self._surrogate(chunk)
            gradient = torch.autograd.grad(objective, parameters, allow_unused=True)
            total, surrogate = total + flatten(gradient, parameters), surrogate + objective.detach()
            old.append(distribution.detach())
            self.record_all(tokens.metrics)
        return float(self.reduce_sum(surrogate) / turns), self.reduce_sum(total) / turns, old

    @torch.no_grad()
    def _surrogate_and_kl(
        self, chunks: Sequence[TurnBatch], old: Sequence[Distribution], turns: float
    ) -> tuple[float, float]:
        """Return ``L`` and ``KL`` over all ranks at the current weights.

        Args:
            chunks: the turns, one batch per forward pass.
            old: the old distributions of each chunk.
            turns: number of turns over all ranks.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for chunk, before in zip(chunks, old, strict=True):
            objective, distribution, _ = self._surrogate(chunk)
            kl = (before.kl(distribution) * chunk.response_mask).sum()
            sums += torch.stack([objective, kl])
        surrogate, kl = (self.reduce_sum(sums) / turns).tolist()
        return surrogate, kl

    def _fisher_product(self, batch: TurnBatch, parameters: Sequence[Tensor]) -> MatrixVectorProduct:
        """Return a function that multiplies the damped Fisher matrix by a vector ``(parameter,)``.

        The matrix is estimated from a share ``fisher_fraction`` of the turns of every rank. If they fit in one forward
        pass, its graph is used for all products; otherwise every product repeats the forward passes.
        """
        count = math.ceil(self.natural_gradient.fisher_fraction * len(batch))
        order = permutation(len(batch), "fisher", self.run_seed, self.current_epoch, self.global_rank)
        sampled_turns = torch.from_numpy(order[:count]).to(batch.response_mask.device)
        chunks = self._chunks(batch[sampled_turns])
        turns = float(self.reduce_sum(torch.tensor(float(count), device=self.device)))
        single_pass = self._product(chunks[0], parameters) if len(chunks) == 1 else None

        def product(vector: Tensor) -> Tensor:
            total = torch.zeros_like(vector)
            for chunk in chunks:
                total += (single_pass or self._product(chunk, parameters))(vector)
            return self.reduce_sum(total) / turns + self.natural_gradient.damping * vector

        return product

    def _product(self, chunk: TurnBatch, parameters: Sequence[Tensor]) -> MatrixVectorProduct:
        """Return a function that multiplies the undamped Fisher matrix, summed over turns, by a vector."""
        new, mask = self.policy.evaluate(chunk).distribution, chunk.response_mask
        assert new is not None
        if self.natural_gradient.product == "gauss_newton":
            return gauss_newton_vector_product(
                new.coordinates, lambda tangent: new.metric(tangent) * mask[..., None], parameters
            )
        return fisher_vector_product((new.detach().kl(new) * mask).sum(), parameters)

    # -- the trust region and the trained weights -------------------------------------------------------------------

    @property
    def radius(self) -> float:
        """The size ``max_kl`` of the trust region in the current collection, in nats per turn.

        Raises:
            ValueError: If ``schedule`` is not constant and the number of collections is not limited.
        """
        if self.schedule == "constant" or not self._trainer:
            return self.max_kl
        epochs = self.trainer.max_epochs
        total = math.inf if epochs is None or epochs < 1 else epochs
        if isinstance(self.run_data, RolloutDataModule):
            total = self.run_data.schedule_length("model.schedule", total)
        if total == math.inf:
            raise ValueError(
                f"model.schedule is {self.schedule!r}; it needs trainer.max_epochs, or data.max_env_steps with "
                "data.num_steps."
            )
        return self.max_kl * learning_rate_factor(self.schedule, int(total), 0.0)(self.current_epoch)

    def actor_parameters(self) -> list[nn.Parameter]:
        """Return the weights that TRPO updates: all trainable ones except those that only the critic uses."""
        critic = {id(parameter) for parameter in self.policy.critic_parameters()}
        return [weight for weight in self.policy.parameters() if weight.requires_grad and id(weight) not in critic]

    def setup(self, stage: str) -> None:
        """Connect the policy with its environment, and check the settings of the run."""
        super().setup(stage)
        if stage == "fit":
            assert self.run_data is not None
            check_run(self.trainer, self.policy, self.run_data)
            _ = self.radius  # raises before the first collection

    def configure_model(self) -> None:
        """Load the weights."""
        super().configure_model()
        check_trainable(self.policy, self.actor_parameters())

    def configure_optimizers(self) -> Any:
        """Return the critic's optimiser if it is Adam, whose state must be saved; the actor has no optimiser."""
        return self.value_fit.optimizers(self.policy.critic_parameters())


def check_run(trainer: L.Trainer, policy: Policy, data: RunDataModule) -> None:
    """Check that a run allows second derivatives and trains on whole collections.

    Args:
        trainer: trainer of the run.
        policy: policy to train.
        data: data module of the run.

    Raises:
        ValueError: If a setting prevents second derivatives, or training on whole collections.
    """
    if trainer.max_steps != -1:
        raise ValueError(
            f"trainer.max_steps is {trainer.max_steps}, but TRPO counts collections; set it to -1 and limit the run by "
            "trainer.max_epochs or data.max_env_steps."
        )
    for name, value in {"num_epochs": data.num_epochs, "num_minibatches": data.num_minibatches}.items():
        if value != 1:
            raise ValueError(f"data.{name} is {value}; it must be 1, because TRPO makes one update per collection.")
    precision = str(trainer.precision)
    if not precision.startswith(("32", "64")):
        raise ValueError(
            f"trainer.precision is {precision}; it must be 32-true or 64-true, because 16 bits are too imprecise for a "
            "trust region."
        )
    if shards_parameters(trainer.strategy):
        raise ValueError(
            "trainer.strategy shards the weights (FSDP2), under which second derivatives are lost; TRPO needs auto or "
            "ddp."
        )
    config = policy.trunk and policy.trunk.language_model.config
    for name, wrong, right in (
        ("attention", ("flash_attention_2",), "sdpa or eager"),
        ("liger_kernels", (True,), "false"),
        ("quantization", ("nf4",), "null"),
    ):
        if config and getattr(config, name) in wrong:
            value = getattr(config, name)
            raise ValueError(
                f"language_model.{name} is {value}, which does not support second derivatives; TRPO needs {right}."
            )


def check_trainable(policy: Policy, actor: Sequence[Tensor]) -> None:
    """Check that actor and critic can be trained separately.

    Args:
        policy: configured policy.
        actor: weights that TRPO updates.

    Raises:
        ValueError: If the critic has an adapter, if the actor has no trainable weights or 16-bit weights, or if the
            generator needs importance weights.
    """
    if policy.importance_cap is not None:
        raise ValueError(
            f"generator.importance_cap is {policy.importance_cap:g} and language_model.recompute_logprobs in effect, "
            "but TRPO supports no importance weights; importance_cap must be null, or recompute_logprobs false."
        )
    check_separate_critic(policy, "TRPO")
    narrow = next((weight.dtype for weight in actor if weight.dtype in (torch.bfloat16, torch.float16)), None)
    if narrow is not None:
        name = str(narrow).removeprefix("torch.")
        raise ValueError(
            f"language_model.dtype is {name}; it must be float32 if the model's weights are trained, because 16 bits "
            "are too imprecise for steps inside a trust region."
        )
    if not actor:
        raise ValueError(f"model.policy is a {type(policy).__name__} without trainable weights, which TRPO needs.")

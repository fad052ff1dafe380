"""TRPO (arXiv:1502.05477) for policies whose turn is one token or many.

For the tokens m of a turn, with N turns in the collection:

    L(w)  = 1/N  sum_turns sum_m  pi_w(a_m | s_m) / pi_old(a_m | s_m)  A_m  +  ent_coef H_m
    KL(w) = 1/N  sum_turns sum_m  KL(pi_old(. | s_m) || pi_w(. | s_m))            exact, over all choices of a token

    maximise L(w)  subject to  KL(w) <= max_kl

    g = dL/dw,   F = d2KL/dw2  (Fisher's matrix),   x = (F + damping I)^-1 g  by conjugate gradient
    full step = x sqrt(2 max_kl / x^T (F + damping I) x)
    w <- w + backtrack_coeff^k full step,   the first k for which  L rises by at least accept_ratio of what the
    gradient promises  and  KL(w) <= max_kl;   if there is none, w stays what it was, bit by bit

Only the actor's trainable weights move: LoRA and heads, or all of a model. The critic is fitted apart, on weights that
the actor does not read. With one token per turn this is the TRPO of the paper.

Departures from the paper:

1. A turn's tokens are weighed by their own ratios, not by the product of them, and its divergence is the sum of its
   tokens' at what was sampled. To first and second order at the old policy both are those of whole turns.
2. Advantages are those of ``credit`` (see :mod:`lrl.algorithms.ppo`), by default generalised advantage estimation.
3. Fisher's matrix may be taken from a share of the turns (appendix C of the paper), and is damped.
4. Products with it are ``J^T M J v``, with the divergence's second derivative M written down: cheaper than to
   differentiate the divergence twice, which ``fisher: double_backward`` does.
5. The critic is fitted to lambda returns by L-BFGS from where it was, or by minibatches of Adam.
6. Episodes that go on in the next collection are bootstrapped, not thrown away.
7. The region may shrink over the run.
8. Advantages are scaled to deviation 1, an entropy bonus can be added, and a step must bring a tenth of what the
   gradient promises (``accept_ratio``; the paper takes any improvement).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrl.functional.credit import Discounts
from lrl.functional.distributions import Distribution
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
from lrl.training.crediting import credited, reduce_sum
from lrl.training.critic_fit import ValueFit, fit_values
from lrl.training.policy_module import PolicyModule
from lrl.training.schedule import Schedule, learning_rate_factor
from lrl.training.trpo_checks import check_region, check_run, check_trainable
from lrl.types import Rollout, TurnBatch


class TRPOModule(PolicyModule):
    """Trains a policy that has a critic of its own weights by natural gradient inside a trust region.

    One collection is one update: ``data.num_epochs`` and ``data.num_minibatches`` must be 1.

    Args:
        policy: what is trained.
        credit: ``turn``, ``token``, ``nested`` or ``bandit``.
        gamma: discount per turn.
        gae_lambda: per turn.
        token_gamma: discount per token inside a turn.
        token_lambda: per token inside a turn.
        normalise_advantages: to mean 0 and standard deviation 1 over the tokens of a collection.
        max_kl: nats per turn that the policy may move in one update.
        schedule: of ``max_kl`` over the run: where nothing is left to learn, a region of constant size is filled with
            noise.
        damping: is added to the diagonal of Fisher's matrix.
        cg_iterations: of conjugate gradient.
        fisher: how products with Fisher's matrix are made: ``gauss_newton`` or ``double_backward``.
        fisher_fraction: share of the turns that it is taken from.
        backtrack_coeff: from one step that is tried to the next.
        max_backtracks: how many are tried.
        accept_ratio: least share of the promised improvement.
        ent_coef: weight of the entropy bonus, in nats per token.
        chunk_size: turns in one pass of the network; null takes all at once. Saves memory, and on a CPU time. The old
            probabilities of all choices are kept beside: turns x tokens x vocabulary numbers.
        value_fit: how the critic is fitted.
        init_from: weights to start from.
        max_skipped_steps: steps in a row that may be skipped because their gradients are not finite.
    """

    def __init__(
        self,
        policy: Policy,
        credit: Literal["turn", "token", "nested", "bandit"] = "nested",
        gamma: float = 0.995,
        gae_lambda: float = 0.97,
        token_gamma: float = 1.0,
        token_lambda: float = 0.98,
        normalise_advantages: bool = True,
        max_kl: float = 0.01,
        schedule: Schedule = "constant",
        damping: float = 0.1,
        cg_iterations: int = 10,
        fisher: Literal["gauss_newton", "double_backward"] = "gauss_newton",
        fisher_fraction: float = 1.0,
        backtrack_coeff: float = 0.5,
        max_backtracks: int = 10,
        accept_ratio: float = 0.1,
        ent_coef: float = 0.0,
        chunk_size: int | None = None,
        value_fit: ValueFit | None = None,
        init_from: str | None = None,
        max_skipped_steps: int = 10,
    ) -> None:
        self.value_fit = ValueFit() if value_fit is None else value_fit
        lr = self.value_fit.lr or 1.0  # of the critic, if it has one
        super().__init__(policy, lr, schedule=schedule, init_from=init_from, max_skipped_steps=max_skipped_steps)
        self.automatic_optimization = False
        self.credit, self.normalise_advantages = credit, normalise_advantages
        self.discounts = Discounts(
            gamma=gamma, gae_lambda=gae_lambda, token_gamma=token_gamma, token_lambda=token_lambda
        )
        self.max_kl, self.damping, self.cg_iterations = max_kl, damping, cg_iterations
        self.fisher, self.fisher_fraction, self.chunk_size = fisher, fisher_fraction, chunk_size
        self.backtrack_coeff, self.max_backtracks, self.accept_ratio = backtrack_coeff, max_backtracks, accept_ratio
        self.ent_coef = ent_coef
        check_region(policy, credit, self.discounts, vars(self))

    @property
    def needs_reference(self) -> bool:
        """The old policy is what the new one is held to."""
        return False

    def setup(self, stage: str) -> None:
        """Refuse what a trust region cannot be had under."""
        super().setup(stage)
        if stage == "fit":
            check_run(self.trainer, self.policy)
            _ = self.radius  # says what its schedule misses before anything is played

    def configure_model(self) -> None:
        """Load the weights."""
        super().configure_model()
        check_trainable(self.policy, self.actor_parameters())

    def configure_optimizers(self) -> Any:
        """None for the actor; the critic's, if that one has a memory."""
        return self.value_fit.optimizers(self.policy.critic_parameters())

    @property
    def radius(self) -> float:
        """``max_kl`` of this collection.

        Raises:
            ValueError: it has a schedule and the run no length.
        """
        if self.schedule == "constant" or not self._trainer:
            return self.max_kl
        if self.trainer.max_epochs is None or self.trainer.max_epochs < 1:
            raise ValueError(f"model.schedule is {self.schedule!r}; it needs trainer.max_epochs.")
        return self.max_kl * learning_rate_factor(self.schedule, self.trainer.max_epochs, 0.0)(self.current_epoch)

    def actor_parameters(self) -> list[nn.Parameter]:
        """The weights that move inside the trust region."""
        critic = {id(parameter) for parameter in self.policy.critic_parameters()}
        return [weight for weight in self.policy.parameters() if weight.requires_grad and id(weight) not in critic]

    def turn_batch(self, rollout: Rollout) -> TurnBatch:
        """Credit every token that was sampled."""
        batch = rollout.turn_batch(torch.zeros_like(rollout.logprobs))
        return credited(self, rollout, batch, None, self.credit, self.discounts, self.normalise_advantages)

    def training_step(self, batch: TurnBatch) -> None:
        """All of a collection: one step of the actor, then the critic."""
        self._improve(batch)
        error = fit_values(self, batch, self.value_fit, self.chunk_size)
        self.finite_steps.require("train/value_loss", error)
        self.record("train/value_loss", error)

    @sdpa_kernel(SDPBackend.MATH)  # the others have no second derivative
    def _improve(self, batch: TurnBatch) -> None:
        parameters, parts = self.actor_parameters(), batch.split(self.chunk_size)
        turns = float(reduce_sum(self, torch.tensor(float(len(batch)), device=self.device)))
        start, gradient, old = self._surrogate_and_gradient(parts, parameters, turns)
        self.finite_steps.require("the surrogate (train/improvement)", start)
        if not self.finite_steps.accept(gradient.norm()):
            return
        product = self._fisher_product(batch, parameters)
        direction = conjugate_gradient(product, gradient, self.cg_iterations)
        curvature, radius = float(direction @ product(direction)), self.radius
        self.finite_steps.require("the curvature of the Fisher matrix", curvature)
        full_step = direction * math.sqrt(2 * radius / curvature) if curvature > 0 else torch.zeros_like(direction)
        search = line_search(
            lambda: self._surrogate_and_kl(parts, old, turns),
            parameters,
            full_step,
            start=start,
            expected=float(gradient @ full_step),
            max_kl=radius,
            max_backtracks=self.max_backtracks,
            backtrack_coeff=self.backtrack_coeff,
            accept_ratio=self.accept_ratio,
        )
        self.record("train/grad_norm", gradient.norm())
        self.record("train/expected_improvement", gradient @ full_step)
        for name, value in search._asdict().items():
            self.record(_METRICS[name], torch.tensor(float(value)))

    def _surrogate_and_gradient(
        self, parts: Sequence[TurnBatch], parameters: Sequence[Tensor], turns: float
    ) -> tuple[float, Tensor, list[Distribution]]:
        """The surrogate and its gradient ``(parameter,)``, over all ranks; the distributions that were sampled from."""
        total, old = torch.zeros(sum(parameter.numel() for parameter in parameters), device=self.device), []
        surrogate = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in parts:
            look = self._look(part)
            gradient = torch.autograd.grad(look.objective, parameters, allow_unused=True)
            total, surrogate = total + flatten(gradient, parameters), surrogate + look.objective.detach()
            old.append(look.distribution.detach())
            self.record("train/entropy", look.entropy)
            self.record("train/ratio_error", look.ratio_error)
        return float(reduce_sum(self, surrogate) / turns), reduce_sum(self, total) / turns, old

    def _look(self, part: TurnBatch) -> _Look:
        """What the policy as it is says of turns."""
        policy, mask = self.policy.evaluate(part), part.response_mask
        assert policy.distribution is not None
        ratio = ((policy.logprobs - part.old_logprobs) * mask).exp()
        objective = ratio * part.advantages + self.ent_coef * policy.entropy
        error = (ratio.detach() - 1).abs()[mask].max()
        return _Look((objective * mask).sum(), policy.distribution, policy.entropy.detach()[mask], error)

    @torch.no_grad()
    def _surrogate_and_kl(
        self, parts: Sequence[TurnBatch], old: Sequence[Distribution], turns: float
    ) -> tuple[float, float]:
        """``L`` and ``KL`` at the weights as they are, over all ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part, before in zip(parts, old, strict=True):
            look = self._look(part)
            kl = (before.kl(look.distribution) * part.response_mask).sum()
            sums += torch.stack([look.objective, kl])
        surrogate, kl = (reduce_sum(self, sums) / turns).tolist()
        return surrogate, kl

    def _fisher_product(self, batch: TurnBatch, parameters: Sequence[Tensor]) -> MatrixVectorProduct:
        """Products with the damped matrix, of a share of the turns of every rank.

        What one pass can hold is kept for all products; several passes are made again for each.
        """
        count = math.ceil(self.fisher_fraction * len(batch))
        seed = self.trainer.datamodule.seed if self._trainer else 0  # pyright: ignore[reportAttributeAccessIssue]
        order = permutation(len(batch), "fisher", seed, self.current_epoch, self.global_rank)
        picked = torch.from_numpy(order[:count]).to(batch.response_mask.device)
        parts = batch[picked].split(self.chunk_size)
        turns = float(reduce_sum(self, torch.tensor(float(count), device=self.device)))
        kept = self._product(parts[0], parameters) if len(parts) == 1 else None

        def product(vector: Tensor) -> Tensor:
            total = torch.zeros_like(vector)
            for part in parts:
                total += (kept or self._product(part, parameters))(vector)
            return reduce_sum(self, total) / turns + self.damping * vector

        return product

    def _product(self, part: TurnBatch, parameters: Sequence[Tensor]) -> MatrixVectorProduct:
        """Products with the undamped matrix, summed over turns."""
        new, mask = self.policy.evaluate(part).distribution, part.response_mask
        assert new is not None
        if self.fisher == "gauss_newton":
            return gauss_newton_vector_product(
                new.coordinates, lambda tangent: new.metric(tangent) * mask[..., None], parameters, damping=0.0
            )
        return fisher_vector_product((new.detach().kl(new) * mask).sum(), parameters, damping=0.0)


class _Look(NamedTuple):
    """At some turns, by the weights as they are."""

    objective: Tensor
    """Summed over turns; its mean is the surrogate."""
    distribution: Distribution
    entropy: Tensor
    ratio_error: Tensor


_METRICS = {
    "accepted": "train/step_accepted",
    "step": "train/step_share",
    "improvement": "train/improvement",
    "kl": "train/kl",
}

"""Values of a collection, and the fit of a critic with separate weights to its returns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lrl.functional.random import permutation
from lrl.lm.heads import at_least_float32
from lrl.policies.policy import Policy
from lrl.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, check_fields
from lrl.types import TurnBatch

if TYPE_CHECKING:
    from lrl.training.gradient_module import GradientModule

_CHUNK = 256
"""Number of turns in one pass of a value network."""

_SETTINGS_OF = {"lbfgs": ("iterations",), "adam": ("lr", "num_epochs", "num_minibatches")}
"""The settings that each method uses, besides ``l2``."""


@dataclass(frozen=True, kw_only=True)
class ValueFit:
    """Settings of a least-squares fit to the returns: on all turns by L-BFGS, or on minibatches by Adam."""

    method: Literal["lbfgs", "adam"] = "lbfgs"
    """Optimiser. The state of L-BFGS is reset in every collection, and the state of Adam is kept."""
    l2: NonNegativeFloat = 1e-3
    """Weight of the penalty on the squared weights."""
    iterations: PositiveInt = 25
    """Maximum number of iterations of L-BFGS."""
    lr: PositiveFloat = 1e-3
    """Learning rate of Adam."""
    num_epochs: PositiveInt = 10
    """Number of passes of Adam over the collection."""
    num_minibatches: PositiveInt = 16
    """Number of minibatches in each pass of Adam."""

    def __post_init__(self) -> None:
        check_fields(self, "ValueFit")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("method", "l2", *_SETTINGS_OF[self.method]) and value != field.default:
                raise ValueError(
                    f"ValueFit.{field.name} is {value}; it must be left out, {self.method} does not read it."
                )

    def optimizers(self, weights: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Return the optimisers whose state is saved in checkpoints: Adam, if it is used.

        Args:
            weights: weights of the critic.
        """
        return [] if self.method == "lbfgs" else [torch.optim.Adam(weights, lr=self.lr, fused=True)]


@torch.no_grad()
def values_of(policy: Policy, batch: TurnBatch) -> Tensor:
    """Return the values before all tokens, float ``(turn, token)``, with the current weights."""

    def values_of_pass(turns: TurnBatch) -> Tensor:
        """Return the values of the turns of one pass."""
        values = policy.critic_view(turns)
        chunks = torch.arange(len(turns), device=turns.response_mask.device).split(_CHUNK)
        return at_least_float32(torch.cat([values(chunk) for chunk in chunks]))

    return policy.in_passes(batch, values_of_pass)


def fit_values(module: GradientModule, batch: TurnBatch, fit: ValueFit) -> Tensor:
    """Fit the weights that only the critic uses to the returns of a batch; all ranks must call it.

    Args:
        module: module whose policy has the critic.
        batch: turns with returns.
        fit: settings of the fit.

    Returns:
        Half the mean squared error over the tokens of all ranks after the fit, ``()``.

    Raises:
        ValueError: If the critic has no weights of its own.
    """
    weights, values = module.policy.critic_parameters(), module.policy.critic_view(batch)
    if not weights:
        raise ValueError(
            f"model.policy is a {type(module.policy).__name__} whose critic has no weights of its own; it "
            "cannot be fitted separately."
        )
    returns, mask = batch.returns, batch.response_mask
    assert returns is not None

    def loss(index: Tensor) -> Tensor:
        """Return the mean squared error over all ranks plus the penalty, and set the gradients."""
        picked = mask[index]
        count = module.reduce_sum(picked.sum().float()).clamp(min=1)
        with torch.enable_grad():
            error = ((values(index) - returns[index]).square() * picked).sum() / count
            gradients = torch.autograd.grad(error, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = module.reduce_sum(gradient)
        mean = module.reduce_sum(error.detach())
        if not fit.l2:
            return mean
        for weight in weights:
            assert weight.grad is not None
            weight.grad.add_(weight.detach(), alpha=2 * fit.l2)
        return mean + fit.l2 * torch.stack([weight.detach().square().sum() for weight in weights]).sum()

    everything = torch.arange(len(batch), device=mask.device)
    if fit.method == "lbfgs":  # with a line search; torch limits the evaluations of the loss to 1.25 per iteration
        options: Any = {"max_iter": fit.iterations, "line_search_fn": "strong_wolfe", "history_size": 10}
        torch.optim.LBFGS(weights, **options).step(lambda: loss(everything))
    else:
        optimizer: Any = module.optimizers(use_pl_optimizer=False)
        for epoch in range(fit.num_epochs):
            order = permutation(len(batch), "value_fit", module.run_seed, module.current_epoch, epoch)
            for minibatch in torch.from_numpy(order).to(mask.device).tensor_split(fit.num_minibatches):
                loss(minibatch)
                optimizer.step()
    with torch.no_grad():
        after = ((values(everything) - returns).square() * mask).sum() / 2
    for weight in weights:
        weight.grad = None
    return module.reduce_sum(after) / module.reduce_sum(mask.sum().float())


def check_separate_critic(policy: Policy, key: str) -> None:
    """Check that the critic can be fitted without the trunk.

    Args:
        policy: configured policy.
        key: setting that requires the separate fit, for the error message.

    Raises:
        ValueError: If the critic has an adapter in the trunk.
    """
    if policy.has_critic_adapter:
        raise ValueError(
            f"value_head.adapter is true; it must be false, {key} fits the critic separately, without the trunk."
        )

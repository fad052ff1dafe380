"""How a critic with weights of its own is fitted to the returns of a collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lrl.algorithms.crediting import reduce_sum
from lrl.algorithms.module import PolicyModule
from lrl.functional.random import permutation
from lrl.types import TurnBatch


@dataclass(frozen=True, kw_only=True)
class ValueFit:
    """Least squares on value targets: all at once by L-BFGS, or by minibatches of Adam."""

    method: Literal["lbfgs", "adam"] = "lbfgs"
    """L-BFGS begins anew in every collection; Adam remembers."""
    l2: float = 1e-3
    """Weight of the squared weights."""
    iterations: int = 25
    """Of L-BFGS."""
    lr: float = 1e-3
    """Of Adam."""
    num_epochs: int = 10
    """Passes of Adam over the collection."""
    num_minibatches: int = 16
    """Parts of each pass of Adam."""

    def __post_init__(self) -> None:
        if self.method not in ("lbfgs", "adam"):
            raise ValueError(f"value_fit.method is {self.method!r}; it must be lbfgs or adam.")
        if self.l2 < 0:
            raise ValueError(f"value_fit.l2 is {self.l2}; it must be 0 or positive.")
        if self.lr <= 0:
            raise ValueError(f"value_fit.lr is {self.lr}; it must be positive.")
        for name in ("iterations", "num_epochs", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"value_fit.{name} is {getattr(self, name)}; it must be at least 1.")

    def optimizers(self, weights: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Those whose memory is part of a checkpoint."""
        return [torch.optim.Adam(weights, lr=self.lr)] if self.method == "adam" else []


def fit_values(module: PolicyModule, batch: TurnBatch, fit: ValueFit) -> Tensor:
    """Move the critic's own weights, and nothing else.

    Args:
        module: of which all ranks call it.
        batch: credited turns.
        fit: how.

    Returns:
        Mean squared error of the tokens of all ranks, halved, after the fit.
    """
    weights, values = module.policy.critic_parameters(), module.policy.critic_view(batch)
    returns, mask = batch.returns, batch.response_mask
    assert returns is not None

    def loss(index: Tensor) -> Tensor:
        """Mean squared error over all ranks and decay, with the gradient put where optimisers look for it."""
        picked = mask[index]
        count = reduce_sum(module, picked.sum().float()).clamp(min=1)
        with torch.enable_grad():
            errors = ((values(index) - returns[index]).square() * picked).sum()
            gradients = torch.autograd.grad(errors, weights)
            decay = fit.l2 * torch.stack([weight.square().sum() for weight in weights]).sum()
            pulls = torch.autograd.grad(decay, weights)
        for weight, gradient, pull in zip(weights, gradients, pulls, strict=True):
            weight.grad = reduce_sum(module, gradient) / count + pull
        return reduce_sum(module, errors.detach()) / count + decay.detach()

    everything = torch.arange(len(batch), device=mask.device)
    if fit.method == "lbfgs":
        _by_lbfgs(weights, lambda: loss(everything), fit.iterations)
    else:
        optimizer: Any = module.optimizers(use_pl_optimizer=False)
        data: Any = module.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        for epoch in range(fit.num_epochs):
            order = permutation(len(batch), "value_fit", data.seed, module.current_epoch, epoch)
            for part in torch.from_numpy(order).to(mask.device).tensor_split(fit.num_minibatches):
                loss(part)
                optimizer.step()
    with torch.no_grad():
        after = ((values(everything) - returns).square() * mask).sum() / 2
    for weight in weights:
        weight.grad = None
    return reduce_sum(module, after) / reduce_sum(module, mask.sum().float())


def _by_lbfgs(weights: list[nn.Parameter], loss: Any, iterations: int) -> None:
    """As many iterations as SciPy's would make at most, each with a line search that keeps the loss falling."""
    optimizer = torch.optim.LBFGS(weights, max_iter=iterations, line_search_fn="strong_wolfe", history_size=10)
    optimizer.step(loss)

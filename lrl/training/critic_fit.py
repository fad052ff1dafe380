"""How a critic with weights of its own is fitted to the returns of a collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lrl.functional.random import permutation
from lrl.training.crediting import reduce_sum
from lrl.training.policy_module import PolicyModule
from lrl.types import TurnBatch

_DEFAULTS = {"iterations": 25, "lr": 1e-3, "num_epochs": 10, "num_minibatches": 16}


@dataclass(frozen=True, kw_only=True)
class ValueFit:
    """Least squares on value targets: all at once by L-BFGS, or by minibatches of Adam."""

    method: Literal["lbfgs", "adam"] = "lbfgs"
    """L-BFGS begins anew in every collection; Adam remembers."""
    l2: float = 1e-3
    """Weight of the squared weights."""
    iterations: int | None = None
    """Of L-BFGS, at most; null takes 25."""
    lr: float | None = None
    """Of Adam; null takes 1e-3."""
    num_epochs: int | None = None
    """Passes of Adam over the collection; null takes 10."""
    num_minibatches: int | None = None
    """Parts of each pass of Adam; null takes 16."""

    def __post_init__(self) -> None:
        if self.method not in ("lbfgs", "adam"):
            raise ValueError(f"value_fit.method is {self.method!r}; it must be lbfgs or adam.")
        if self.l2 < 0:
            raise ValueError(f"value_fit.l2 is {self.l2}; it must be 0 or positive.")
        for name, default in _DEFAULTS.items():
            value, read = getattr(self, name), (name == "iterations") == (self.method == "lbfgs")
            if value is not None and not read:
                raise ValueError(f"value_fit.{name} is {value}, which {self.method} does not read; it must be null.")
            if value is None:
                object.__setattr__(self, name, default if read else None)
            elif value <= 0 or (name != "lr" and value < 1):
                raise ValueError(
                    f"value_fit.{name} is {value}; it must be {'positive' if name == 'lr' else 'at least 1'}."
                )

    def optimizers(self, weights: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Those whose memory is part of a checkpoint."""
        return [] if self.lr is None else [torch.optim.Adam(weights, lr=self.lr, fused=True)]


def fit_values(module: PolicyModule, batch: TurnBatch, fit: ValueFit, chunk_size: int | None = None) -> Tensor:
    """Move the critic's own weights, and nothing else.

    Args:
        module: of which all ranks call it.
        batch: credited turns.
        fit: how.
        chunk_size: turns in one pass of what lies below the critic; None takes all at once.

    Returns:
        Mean squared error of the tokens of all ranks, halved, after the fit.
    """
    weights, values = module.policy.critic_parameters(), module.policy.critic_view(batch, chunk_size)
    returns, mask = batch.returns, batch.response_mask
    assert returns is not None

    def loss(index: Tensor) -> Tensor:
        """Mean squared error over all ranks and decay, with the gradient put where optimisers look for it."""
        picked = mask[index]
        count = reduce_sum(module, picked.sum().float()).clamp(min=1)
        with torch.enable_grad():
            error = ((values(index) - returns[index]).square() * picked).sum() / count
            gradients = torch.autograd.grad(error, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = reduce_sum(module, gradient)
        mean = reduce_sum(module, error.detach())
        if not fit.l2:
            return mean
        for weight in weights:
            assert weight.grad is not None
            weight.grad.add_(weight.detach(), alpha=2 * fit.l2)
        return mean + fit.l2 * torch.stack([weight.detach().square().sum() for weight in weights]).sum()

    everything = torch.arange(len(batch), device=mask.device)
    if fit.iterations is not None:
        _by_lbfgs(weights, lambda: loss(everything), fit.iterations)
    else:
        assert fit.num_epochs is not None
        assert fit.num_minibatches is not None
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
    """At most as many iterations, each with a line search; torch ends them after 1.25 looks at the loss for each."""
    optimizer = torch.optim.LBFGS(weights, max_iter=iterations, line_search_fn="strong_wolfe", history_size=10)
    optimizer.step(loss)

"""Means and sums over the tokens that count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def selected_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of ``ids`` ``(...)`` under ``logits`` ``(..., vocabulary)``."""
    return _log_softmax(logits).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the log-softmax over the last axis of ``logits`` ``(..., vocabulary)``, at least in float32."""
    halves = (torch.bfloat16, torch.float16)
    return torch.log_softmax(logits.float() if logits.dtype in halves else logits, dim=-1)


def whiten(
    advantages: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None = None, eps: float = 1e-8
) -> Tensor:
    """Scale advantages to mean 0 and standard deviation 1 over the sampled tokens of all ranks.

    Args:
        advantages: float ``(turn, token)``, or any other shape.
        mask: bool, the same shape.
        reduce: sums a tensor over ranks; None is for one rank.
        eps: added to the standard deviation.

    Returns:
        float, the same shape, 0 where masked.
    """
    centred, squares, count = _deviations(advantages[mask], reduce)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    out = torch.zeros_like(advantages)
    out[mask] = (centred / (std + eps)).to(out.dtype) if count > 1 else advantages[mask]
    return out


def _deviations(values: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Deviations from the mean over ranks, float64 ``(token,)``; the sum of their squares, and their number."""
    reduce = reduce or (lambda tensor: tensor)
    wide = values.double()
    total, count = reduce(torch.stack([wide.sum(), wide.new_tensor(float(len(wide)))]))
    centred = wide - total / count.clamp(min=1)
    return centred, reduce(centred.square().sum()), count


def variance(values: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the variance of values over all ranks, float64 ``()``.

    Args:
        values: float ``(token,)``.
        reduce: sums a tensor over ranks; None is for one rank.
    """
    _, squares, count = _deviations(values, reduce)
    return squares / count.clamp(min=1)


def explained_variance(values: Tensor, targets: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return ``1 - Var(target - value) / Var(target)``, float64 ``()``; NaN if the targets do not vary.

    1 is a perfect critic, 0 one that predicts the mean.

    Args:
        values: float ``(token,)``.
        targets: float ``(token,)``.
        reduce: sums a tensor over ranks; None is for one rank.
    """
    spread, error = variance(targets, reduce), variance(targets - values, reduce)
    return torch.where(spread > 0, 1 - error / spread, torch.nan)

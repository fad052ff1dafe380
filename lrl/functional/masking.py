"""Means and sums over the tokens that count."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``values`` where ``mask`` is true; 0 where nothing is.

    Args:
        values: any shape; entries outside the mask may be anything but NaN.
        mask: bool, the same shape.
        dim: the axis to reduce; None reduces all.
    """
    if dim is None:
        return (values * mask).sum() / mask.sum().clamp(min=1)
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def selected_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of ``ids`` ``(...)`` under ``logits`` ``(..., vocabulary)``."""
    return _log_softmax(logits).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 at least."""
    halves = (torch.bfloat16, torch.float16)
    return torch.log_softmax(logits.float() if logits.dtype in halves else logits, dim=-1)

"""Losses on ``(turn, token)`` tensors. Each returns one number per token or the reduced scalar; none detaches."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Pessimistic clipped surrogate, to be maximised (arXiv:1707.06347, eq. 7).

    ``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; ``clip_high > clip_low`` is the asymmetric clip of DAPO
    (arXiv:2503.14476, eq. 10).

    Args:
        ratio: ``(turn, token)`` new over old probability.
        advantages: ``(turn, token)``.
        clip_low: how far below 1.
        clip_high: how far above 1.
    """
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor | None, clip_range: float | None) -> Tensor:
    """Half the squared error of a critic, pessimistic about moves beyond ``clip_range`` (as in OpenAI's baselines).

    Args:
        values: ``(turn, token)``.
        returns: ``(turn, token)``.
        old_values: ``(turn, token)`` what the critic said when it was asked first; used with ``clip_range`` only.
        clip_range: how far a value may move; None is the plain error.
    """
    error = (values - returns).square()
    if clip_range is not None:
        assert old_values is not None
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.max(error, (clipped - returns).square())
    return error / 2


def normalise(
    values: Tensor, mask: Tensor, how: str, num_sequences: Tensor, num_tokens: Tensor, max_tokens: int
) -> Tensor:
    """Reduce ``(turn, token)`` values to one number.

    Args:
        values: ``(turn, token)``.
        mask: bool ``(turn, token)``.
        how: ``sequence`` averages each turn over its tokens, then over turns (GRPO); ``token`` weighs all tokens of
            the batch alike (DAPO); ``constant`` divides by ``max_tokens`` per turn (Dr. GRPO).
        num_sequences: how many turns the batch has, averaged over ranks.
        num_tokens: how many sampled tokens the batch has, averaged over ranks.
        max_tokens: the longest possible turn.

    Raises:
        ValueError: unknown ``how``.
    """
    if how == "sequence":
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / num_sequences
    if how == "token":
        return (values * mask).sum() / num_tokens
    if how == "constant":
        return (values * mask).sum() / (num_sequences * max_tokens)
    raise ValueError(f"loss_normalisation is {how!r}; it must be sequence, token or constant.")

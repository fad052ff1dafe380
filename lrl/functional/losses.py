"""Losses on ``(turn, token)`` tensors: one number per token, or their reduction to a scalar.

The functions do not detach their inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return the clipped surrogate of each token, which is to be maximised (arXiv:1707.06347, eq. 7).

    ``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; ``clip_high > clip_low`` is the asymmetric clip of DAPO
    (arXiv:2503.14476, eq. 10).

    Args:
        ratio: new over old probability, ``(turn, token)``.
        advantages: ``(turn, token)``.
        clip_low: the ratio is clipped below ``1 - clip_low``.
        clip_high: the ratio is clipped above ``1 + clip_high``.
    """
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor | None, clip_range: float | None) -> Tensor:
    """Return half the squared error of a critic at each token, optionally clipped as in OpenAI's baselines.

    Args:
        values: ``(turn, token)``.
        returns: ``(turn, token)``.
        old_values: values when the advantages were estimated, ``(turn, token)``; used with ``clip_range`` only.
        clip_range: largest change of a value that reduces the loss; None does not clip.
    """
    error = (values - returns).square()
    if clip_range is not None:
        assert old_values is not None
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.max(error, (clipped - returns).square())
    return error / 2


def normalise(
    values: Tensor,
    mask: Tensor,
    how: str,
    num_turns: Tensor | float = 1,
    num_tokens: Tensor | float = 1,
    max_tokens: int = 1,
) -> Tensor:
    """Reduce the losses of tokens to one number.

    Args:
        values: ``(turn, token)``.
        mask: bool ``(turn, token)``.
        how: ``sequence`` averages over the tokens of each turn, then over turns (GRPO); ``token`` averages over all
            tokens (DAPO); ``constant`` divides by ``max_tokens`` per turn (Dr. GRPO); ``sum`` adds them up.
        num_turns: number of turns in the optimiser step, averaged over ranks, ``()``.
        num_tokens: number of sampled tokens in the optimiser step, averaged over ranks, ``()``.
        max_tokens: maximum number of tokens of a turn.
    """
    if how == "sum":
        return (values * mask).sum()
    if how == "token":
        return (values * mask).sum() / num_tokens
    if how == "sequence":
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / num_turns
    assert how == "constant"
    return (values * mask).sum() / (num_turns * max_tokens)


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor, entropy: Tensor, mask: Tensor, clip: tuple[float, float] | None = None
) -> dict[str, Tensor]:
    """Return metrics of the change from the policy that sampled, at the sampled tokens.

    Args:
        log_ratio: new minus old log-probability, ``(turn, token)``.
        entropy: in nats, ``(turn, token)``.
        mask: bool ``(turn, token)``.
        clip: distances below and above 1 at which the ratio is clipped; None does not clip.

    Returns:
        Values of the sampled tokens, ``(sampled token,)``: ``train/approx_kl``, which is ``r - 1 - log r`` in nats;
        ``train/entropy``; ``train/ratio_error``, which is ``|r - 1|``; ``train/clip_fraction``, whether r is clipped.
    """
    log_ratio, entropy = torch.stack([log_ratio, entropy])[:, mask]
    moved = log_ratio.exp() - 1
    metrics = {"train/approx_kl": moved - log_ratio, "train/entropy": entropy, "train/ratio_error": moved.abs()}
    if clip is not None:
        metrics["train/clip_fraction"] = (moved < -clip[0]) | (moved > clip[1])
    return metrics


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy by Schulman's k3 (2020).

    ``exp(d) - 1 - d`` with ``d = log pi_ref - log pi`` is unbiased and never negative.

    Args:
        logprobs: log-probabilities of the policy that sampled, any shape.
        ref_logprobs: log-probabilities of the reference, of the same shape.
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - 1 - difference

"""Losses of tokens, ``(turn, token)``, their reduction to a scalar, and metrics of the probability ratio.

Gradients flow through all inputs unless a function is marked ``no_grad``.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lrl.types import Derive


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return the clipped surrogate objective of each token, which is maximised (arXiv:1707.06347, eq. 7).

    ``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; ``clip_high > clip_low`` is the asymmetric clip of DAPO
    (arXiv:2503.14476, eq. 10).

    Args:
        ratio: probability under the new policy divided by that under the old policy, ``(turn, token)``.
        advantages: ``(turn, token)``.
        clip_low: smaller ratios are clipped to ``1 - clip_low``.
        clip_high: larger ratios are clipped to ``1 + clip_high``.
    """
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor | None, clip_range: float | None) -> Tensor:
    """Return half the squared error of a critic at each token, optionally clipped as in OpenAI's baselines.

    Args:
        values: predictions of the critic, ``(turn, token)``.
        returns: targets, ``(turn, token)``.
        old_values: values from which the advantages were estimated, ``(turn, token)``; used only with ``clip_range``.
        clip_range: largest difference from ``old_values`` up to which a change can reduce the loss; None does not clip.
    """
    error = (values - returns).square()
    if clip_range is not None:
        assert old_values is not None
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.max(error, (clipped - returns).square())
    return error / 2


def reduce_tokens(
    values: Tensor,
    mask: Tensor,
    how: str,
    num_turns: Tensor | float = 1,
    num_tokens: Tensor | float = 1,
    max_tokens: int = 1,
) -> Tensor:
    """Reduce the losses of tokens to a scalar, ``()``.

    Args:
        values: losses, ``(turn, token)``.
        mask: true for sampled tokens, bool ``(turn, token)``.
        how: ``sequence`` averages over the tokens of each turn, then over turns (GRPO); ``token`` averages over all
            tokens (DAPO); ``constant`` divides the sum by ``num_turns * max_tokens`` (Dr. GRPO); ``sum`` divides by
            nothing.
        num_turns: number of turns of the optimiser step, averaged over ranks, ``()``.
        num_tokens: number of sampled tokens of the optimiser step, averaged over ranks, ``()``.
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


def ratio_metrics(
    log_ratio: Tensor, entropy: Tensor, mask: Tensor, clip: tuple[float, float] | None = None
) -> dict[str | Derive, Tensor]:
    """Return metrics of the difference between the policy and the policy that sampled, see :class:`TokenLoss`.

    They are, with ``r`` the ratio at a sampled token: ``train/approx_kl``, which is ``r - 1 - log r`` in nats;
    ``train/entropy``; ``train/ratio_error_max``, which is ``|r - 1|``; ``train/clip_fraction``, whether ``r`` is
    outside the clip range (only with ``clip``).

    Args:
        log_ratio: log-probability under the new policy minus that under the old one, ``(turn, token)``.
        entropy: entropy in nats, ``(turn, token)``.
        mask: true for sampled tokens, bool ``(turn, token)``.
        clip: ``clip_low`` and ``clip_high`` of :func:`clipped_surrogate`; None if the ratio is not clipped.
    """
    return {_ratio_metrics(clip): torch.stack([log_ratio.detach(), entropy.detach()])[:, mask]}


@lru_cache(maxsize=64)
def _ratio_metrics(clip: tuple[float, float] | None) -> Derive:
    """Return the same function for the same arguments, so that metrics of several minibatches are computed together."""
    return partial(_derive_ratio_metrics, clip=clip)


def _derive_ratio_metrics(values: Tensor, clip: tuple[float, float] | None) -> dict[str, Tensor]:
    """Return the metrics of :func:`ratio_metrics` by name, each ``(sampled token,)``.

    Args:
        values: logarithm of the ratio, and entropy, ``(2, sampled token)``.
        clip: see :func:`ratio_metrics`.
    """
    log_ratio, entropy = values
    moved = log_ratio.exp() - 1
    metrics = {"train/approx_kl": moved - log_ratio, "train/entropy": entropy, "train/ratio_error_max": moved.abs()}
    if clip is not None:
        metrics["train/clip_fraction"] = (moved < -clip[0]) | (moved > clip[1])
    return metrics


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy by Schulman's k3 (2020).

    The estimate ``exp(d) - 1 - d`` with ``d = log pi_ref - log pi`` is unbiased and never negative.

    Args:
        logprobs: log-probabilities under the policy that sampled, any shape.
        ref_logprobs: log-probabilities under the reference policy, of the same shape.
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - 1 - difference


class WithGradients(torch.autograd.Function):
    """Returns a loss whose gradients have already been computed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *gradients_and_weights: Tensor | None) -> Tensor:
        """Return ``loss``, ``()``.

        Args:
            ctx: stores the gradients.
            loss: a loss without graph.
            gradients_and_weights: the gradients of all weights, None for weights without one, then the weights.
        """
        half = len(gradients_and_weights) // 2
        ctx.gradients = gradients_and_weights[:half]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weights times ``factor``, ``()``, and None for the other arguments."""
        scaled = (None if gradient is None else gradient * factor for gradient in ctx.gradients)
        return None, *(None for _ in ctx.gradients), *scaled

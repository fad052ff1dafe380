"""From logits to sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lrl.functional.random import exponentials
from lrl.types import SamplingConfig

_SMALLEST_BLOCK = 64
"""Token ids that are sampled in one race."""


def sampling_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of log-probabilities: float32, or float64 where the logits ``(..., vocabulary)`` are."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def sampling_logprobs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return log-probabilities ``(row, vocabulary)`` of the distribution that tokens are sampled from.

    Args:
        logits: ``(row, vocabulary)``.
        sampling: temperature, top-k and top-p.
    """
    logits = logits.to(sampling_dtype(logits))
    if sampling.temperature == 0:
        greedy = torch.full_like(logits, -torch.inf)
        return greedy.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def sample_tokens(logprobs: Tensor, uniforms: Tensor, row: Tensor | None = None) -> Tensor:
    """Sample tokens by two exponential races (the Gumbel-max trick): among blocks of ids, then inside one.

    Of exponential clocks with rates ``p`` the first to ring is a sample of ``p``. Rounding moves probabilities with the
    shape of the batch; then a race changes its winner in proportion to their total variation distance. Inverting the
    cumulative distribution moves the boundaries of all rare tokens too, and changed 400 times as many samples of the
    embedded model. Blocks keep the numbers per row at about twice the square root of the vocabulary.

    Args:
        logprobs: ``(row, vocabulary)``; -inf is never sampled.
        uniforms: int64 ``(sample,)``, 64 uniformly distributed bits each.
        row: the distribution of each sample, int64 ``(sample,)``; null samples once from each.

    Returns:
        int64 ``(sample,)``.
    """
    size = logprobs.shape[-1]
    if row is None:
        row = torch.arange(len(logprobs), device=logprobs.device)
    if size <= _SMALLEST_BLOCK:  # one race is enough
        return (logprobs.exp()[row] / exponentials(uniforms, size)).argmax(-1)
    block = max(_SMALLEST_BLOCK, 1 << (size.bit_length() // 2))
    rates = pad(logprobs.exp(), (0, -size % block)).unflatten(-1, (-1, block))
    of_blocks, of_tokens = exponentials(uniforms, rates.shape[1] + block).split([rates.shape[1], block], dim=-1)
    chosen = (rates.sum(-1)[row] / of_blocks).argmax(-1)
    inside = rates[row, chosen]
    return chosen * block + (inside / of_tokens).argmax(-1)

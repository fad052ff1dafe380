"""Token-by-token decoding: one prefill per distinct prompt, finished rows leave, numbers named by counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lrl.types import SamplingConfig

_LEAVE = 0.75
"""Finished rows leave when fewer than this share of the batch is still writing: leaving copies the cache."""


@dataclass(frozen=True, kw_only=True)
class Responses:
    """What was sampled."""

    ids: Tensor
    """int64 ``(row, token)``, right-padded with 0."""
    mask: Tensor
    """bool ``(row, token)``: every sampled token, the one that ended the answer included."""
    logprobs: Tensor
    """``(row, token)`` under the sampled distribution (after temperature, top-k and top-p)."""


def sampling_dtype(logits: Tensor) -> torch.dtype:
    """Log-probabilities are float32, or float64 where the model is."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def sampling_logprobs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities ``(row, vocabulary)`` of the distribution that tokens are drawn from."""
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


def draw_tokens(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative distribution at one uniform number per row.

    Args:
        logprobs: ``(row, vocabulary)``; -inf is never drawn.
        uniforms: float64 ``(row,)`` in [0, 1).

    Returns:
        int64 ``(row,)``.
    """
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logprobs.shape[-1] - 1)


def distinct(prompts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[int]]:
    """The distinct prompts in order of appearance, and which one each row has."""
    seen: dict[tuple[int, ...], int] = {}
    index = [seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts]
    return list(seen), index


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``(prompt, column)`` of prompts that end in the same column."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return ids, torch.arange(width, device=device)[None] >= width - lengths[:, None]


class Decoder:
    """Decodes with a causal language model that shares its weights with training.

    Args:
        model: called as a Hugging Face causal LM is.
        stop_ids: tokens that end an answer.
        own_mask: hand the model its 4-D mask (cheaper, only where every layer attends fully).
        stops: whether an answer, given as its token ids so far, ends by its text; for tokenizers that write the
            format's end with several tokens. It is asked row by row.
    """

    def __init__(
        self, model: Any, stop_ids: set[int], own_mask: bool, stops: Callable[[list[int]], bool] | None = None
    ) -> None:
        self.model, self.own_mask, self.stops = model, own_mask, stops
        self.stop_ids = torch.tensor(sorted(stop_ids))

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: SamplingConfig, device: torch.device
    ) -> Responses:
        """Sample one response for each prompt; equal prompts are computed once.

        Args:
            prompts: token ids, one list per row.
            uniforms: float64 ``(row, max_new_tokens)``, one number per token that may be drawn.
            sampling: the distribution.
            device: where the model lives.
        """
        uniforms, stop = uniforms.to(device), self.stop_ids.to(device)
        unique, index = distinct(prompts)
        ids, mask = left_pad(unique, device)
        logits, cache = self._prefill(ids, mask)
        rows = torch.tensor(index, device=device)
        cache.batch_select_indices(rows)
        logits, mask, position = logits[rows], mask[rows], mask.sum(1)[rows]
        num_rows, steps = len(prompts), sampling.max_new_tokens
        out_ids = torch.zeros(num_rows, steps, dtype=torch.long, device=device)
        out_mask = torch.zeros(num_rows, steps, dtype=torch.bool, device=device)
        out_logprobs = torch.zeros(num_rows, steps, dtype=sampling_dtype(logits), device=device)
        row, writing = torch.arange(num_rows, device=device), torch.ones(num_rows, dtype=torch.bool, device=device)
        step = 0
        for step in range(steps):
            logprobs = sampling_logprobs(logits, sampling)
            token = draw_tokens(logprobs, uniforms[row, step])
            live = row[writing]
            out_ids[live, step], out_mask[live, step] = token[writing], True
            out_logprobs[live, step] = logprobs.gather(-1, token[:, None]).squeeze(-1)[writing]
            writing = writing & ~torch.isin(token, stop)
            if self.stops is not None:
                ended = [self.stops(ids) for ids in out_ids[row, : step + 1].tolist()]
                writing = writing & ~torch.tensor(ended, device=device)
            remaining = int(writing.sum())
            if remaining == 0 or step == steps - 1:
                break
            if remaining < _LEAVE * len(row):
                stay = writing.nonzero().squeeze(-1)
                cache.batch_select_indices(stay)
                row, token, mask, position, writing = row[stay], token[stay], mask[stay], position[stay], writing[stay]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = self._step(token, mask, position, cache)
            position = position + 1
        width = step + 1
        return Responses(ids=out_ids[:, :width], mask=out_mask[:, :width], logprobs=out_logprobs[:, :width])

    def _prefill(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, DynamicCache]:
        cache = DynamicCache(config=self.model.config)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1], cache

    def _step(self, token: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
        attention = self._own(mask) if self.own_mask else mask.long()
        out = self.model(
            input_ids=token[:, None], attention_mask=attention, position_ids=position[:, None], past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _own(self, mask: Tensor) -> Tensor:
        """An additive mask ``(row, 1, 1, column)`` for one new token per row."""
        dtype = self.model.dtype
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return additive.masked_fill_(~mask, torch.finfo(dtype).min)[:, None, None, :]

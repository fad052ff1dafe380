"""The pass over prompts that answers begin behind: what all of them begin with is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from lrl.models.kv_cache import ReservedLayer

_MIN_PREFIX = 16
"""Prompts that begin with fewer common tokens are computed apart: a pass of its own costs more."""


class Prefilled(NamedTuple):
    """Prompts that have been read."""

    logits: Tensor
    """``(prompt, vocabulary)``: of the token behind each prompt."""
    mask: Tensor
    """bool ``(prompt, column)``: the cache's columns that hold a token; prompts end in the last column."""
    cache: DynamicCache
    """Their keys and values."""
    states: Tensor
    """``(prompt, hidden)``: what the logits are made from."""


@torch.no_grad()
def prefill(model: Any, prompts: Sequence[tuple[int, ...]], device: torch.device, own_mask: bool) -> Prefilled:
    """Read prompts.

    Args:
        model: called as a Hugging Face causal LM is.
        prompts: token ids.
        device: where the model lives.
        own_mask: share the common beginning, and keep room in the cache: only where every layer attends fully.
    """
    cache = DynamicCache(config=model.config)
    if own_mask:
        cache.layers[:] = [ReservedLayer() for _ in cache.layers]
    shared = common_prefix(prompts) if own_mask and len(prompts) > 1 else 0
    if shared < _MIN_PREFIX:
        shared = 0
    else:
        prefix = torch.tensor([prompts[0][:shared]], device=device)
        _read(model, prefix, torch.ones_like(prefix), cache)
        cache.batch_repeat_interleave(len(prompts))
    ids, mask = left_pad([prompt[shared:] for prompt in prompts], device)
    mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)
    logits, states = _read(model, ids, mask.long(), cache)
    return Prefilled(logits=logits, mask=mask, cache=cache, states=states)


def _read(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
    """Logits and states behind the last of the columns ``ids``, the last ones of ``mask``."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with head_inputs(model) as states:
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return out.logits[:, -1], states[0][:, -1].clone()  # not a view, which would keep all columns


@contextmanager
def head_inputs(model: Any, last_only: bool = False) -> Iterator[list[Tensor]]:
    """The hidden states ``(row, column, hidden)`` that each pass makes logits from.

    Args:
        model: a Hugging Face causal LM.
        last_only: make logits of the last column only, which costs nothing to speak of: they are not wanted.
    """
    states: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        states.append(args[0])
        return (args[0][:, -1:],) if last_only else None

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield states
    finally:
        handle.remove()


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all prompts begin with, the last token of each left out."""
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    return next((n for n in range(limit) if first[n] != last[n]), limit)


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``(prompt, column)`` of prompts that end in the same column."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return ids, torch.arange(width, device=device)[None] >= width - lengths[:, None]

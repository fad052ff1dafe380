"""The forward pass over prompts that fills the KV cache: their common prefix is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from lrl.models.kv_cache import ReservedLayer
from lrl.models.padding import left_pad

_MIN_PREFIX = 16
"""Shorter common prefixes are not computed separately: a pass of their own would cost more."""


class Prefilled(NamedTuple):
    """Prompts with their KV cache."""

    logits: Tensor
    """``(prompt, vocabulary)``: of the token after each prompt."""
    mask: Tensor
    """bool ``(prompt, column)``: the cache's columns that hold a token; prompts end in the last column."""
    cache: DynamicCache
    """Keys and values of the prompts."""
    states: Tensor
    """``(prompt, hidden)``: the hidden states that the logits are computed from."""


def distinct_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the distinct prompts in order of appearance, and for each row the index of its prompt."""
    seen: dict[tuple[int, ...], int] = {}
    index = [seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts]
    return list(seen), index


@torch.no_grad()
def prefill(model: Any, prompts: Sequence[tuple[int, ...]], share: bool) -> Prefilled:
    """Compute the KV cache of some prompts, and the logits after them.

    Args:
        model: called as a Hugging Face causal LM is.
        prompts: token ids.
        share: compute the common prefix once, and let the cache reserve room: only where every layer attends fully.
    """
    device = next(model.parameters()).device
    cache = DynamicCache(config=model.config)
    if share:
        cache.layers[:] = [ReservedLayer() for _ in cache.layers]
    shared = common_prefix(prompts) if share and len(prompts) > 1 else 0
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
    """Return logits and hidden states after the last column, ``(prompt, vocabulary)`` and ``(prompt, hidden)``.

    Args:
        model: called as a Hugging Face causal LM is.
        ids: int64 ``(prompt, column)``, the new columns.
        mask: int64 ``(prompt, all columns)``, of which the new ones are the last.
        cache: keys and values of the columns before; the new ones are appended.
    """
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
    """Collect the hidden states ``(row, column, hidden)`` that each forward pass computes its logits from.

    Args:
        model: a Hugging Face causal LM.
        last_only: compute the logits of the last column only, for callers that do not need logits.
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
    """Return the length of the longest common prefix that leaves every prompt at least one token."""
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    return next((n for n in range(limit) if first[n] != last[n]), limit)

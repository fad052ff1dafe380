"""The forward pass over prompts that fills the KV cache.

The common prefix of all prompts is computed once. The rest is computed in groups of prompts of about the same length,
so that there is little padding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lrl.lm.forward import head_inputs

_MIN_PREFIX = 16
"""Shorter common prefixes are not computed separately: an additional pass would cost more."""
_PASS = {"cpu": 64}
"""Fixed cost of a forward pass, in tokens that take the same time: about 100 for the embedded model on one thread. With
values from 32 to 128, SmolLM2 reads 32 prompts of 31 to 121 tokens in about the same time."""
_PASS_ELSEWHERE = 8192
"""Not measured."""


class ReservedLayer(DynamicLayer):
    """A layer of the KV cache with buffers that are allocated once, instead of concatenation at every token."""

    _buffers: list[Tensor] | None = None

    def reserve(self, columns: int) -> None:
        """Allocate room for ``columns`` more columns."""
        size = self.get_seq_length()
        assert self.keys is not None
        assert self.values is not None
        self._buffers = [nn.functional.pad(tensor, (0, 0, 0, columns)) for tensor in (self.keys, self.values)]
        self._show(size)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new columns and return all.

        Args:
            key_states: ``(row, head, new column, size)``.
            value_states: of the same shape.
            args: ignored, as in the parent.
            kwargs: ignored, as in the parent.

        Returns:
            Keys and values ``(row, head, column, size)``.
        """
        if self._buffers is None:
            return super().update(key_states, value_states, *args, **kwargs)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for buffer, tensor in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = tensor
        return self._show(end)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with the indices ``(row,)``, and drop the others."""
        if self._buffers is None:
            super().batch_select_indices(indices)
            return
        size = self.get_seq_length()
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show(size)

    def _show(self, size: int) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        self.keys, self.values = keys, values = [buffer[:, :, :size] for buffer in self._buffers]
        return keys, values


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
        share: compute the common prefix once and let the cache reserve room; requires full attention in every layer.
    """
    device = next(model.parameters()).device
    shared = common_prefix(prompts) if share and len(prompts) > 1 else 0
    if shared < _MIN_PREFIX:
        shared = 0
    prefix = _new_cache(model, share)
    if shared:
        ids = torch.tensor([prompts[0][:shared]], device=device)
        _read(model, ids, torch.ones_like(ids), prefix)
    groups = length_groups([len(prompt) - shared for prompt in prompts], device) if share else [[*range(len(prompts))]]
    parts = []
    for group in groups:
        cache = copy.deepcopy(prefix) if len(groups) > 1 else prefix
        if shared:
            cache.batch_repeat_interleave(len(group))
        ids, mask = left_pad([prompts[n][shared:] for n in group], device)
        mask = torch.cat([mask.new_ones(len(group), shared), mask], dim=1)
        logits, states = _read(model, ids, mask.long(), cache)
        parts.append(Prefilled(logits=logits, mask=mask, cache=cache, states=states))
    if len(parts) == 1:
        return parts[0]
    order = torch.argsort(torch.tensor([n for group in groups for n in group], device=device))
    width = max(part.mask.shape[1] for part in parts)
    cache = _new_cache(model, share)
    for index in range(len(prefix.layers)):
        layers = [part.cache.layers[index] for part in parts]
        keys = torch.cat([_widened(layer.keys, width, 2) for layer in layers])[order]
        cache.update(keys, torch.cat([_widened(layer.values, width, 2) for layer in layers])[order], index)
        for part in parts:
            part.cache.layers[index] = None  # frees the memory of what was copied
    return Prefilled(
        logits=torch.cat([part.logits for part in parts])[order],
        mask=torch.cat([_widened(part.mask, width, 1) for part in parts])[order],
        cache=cache,
        states=torch.cat([part.states for part in parts])[order],
    )


def length_groups(lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the indices of texts in groups of about the same length, each in ascending order.

    Groups go from short to long texts. A group ends where its padding would take longer to compute than another pass.

    Args:
        lengths: number of tokens of each text.
        device: that computes them.
    """
    most = _PASS.get(device.type, _PASS_ELSEWHERE)
    groups: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens += lengths[index]
        if not groups or lengths[index] * (len(groups[-1]) + 1) - tokens > most:
            groups.append([])
            tokens = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def _new_cache(model: Any, share: bool) -> Any:
    cache = DynamicCache(config=model.config)
    if share:
        cache.layers[:] = [ReservedLayer() for _ in cache.layers]
    return cache


def _widened(part: Tensor, width: int, dim: int) -> Tensor:
    """Return a tensor with zeros before its columns, which are dimension ``dim``."""
    missing = width - part.shape[dim]
    return functional.pad(part, [0, 0] * (part.dim() - dim - 1) + [missing, 0])


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


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids (int64) and mask (bool), each ``(prompt, column)``, of prompts that end in the same column."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return ids, torch.arange(width, device=device)[None] >= width - lengths[:, None]


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the longest common prefix that leaves every prompt at least one token."""
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    return next((n for n in range(limit) if first[n] != last[n]), limit)

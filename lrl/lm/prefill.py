"""The forward pass over prompts that fills the KV cache.

The common prefix of all prompts is computed once. The rest is computed in groups of prompts of about the same length,
so that there is little padding. Prompts that begin with a prompt of the call before, as those of the next turn of an
episode may, continue its KV cache (:class:`KeptPrompts`).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lrl.lm.forward import head_inputs
from lrl.lm.frozen_states import LowerLayers

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


class KeptPrompts:
    """Keeps the KV cache of the prompts of one call, for prompts of the next call that begin with them.

    Args:
        max_bytes: more is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.computed_tokens = 0
        """Number of tokens of prompts computed so far, for tests and benchmarks."""
        self.excess_bytes = 0
        """Size of the last cache that was too large to be kept; 0 if there was none."""
        self._of: Hashable = None
        self._rows: dict[tuple[int, ...], int] = {}
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._mask = torch.zeros(0, 0, dtype=torch.bool)

    def begin(self, collection: Hashable, model: nn.Module) -> None:
        """Drop what was kept for another collection, or for other weights."""
        of = collection, id(model), *((id(weight), weight._version) for weight in model.parameters())
        if of != self._of:
            self._of, self._rows, self._layers = of, {}, []

    def longest(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...] | None]:
        """Return for each prompt the longest kept one that it continues; None if there is none."""
        found, beginnings = dict[tuple[int, ...], tuple[int, ...] | None](), list[tuple[int, ...]]()
        for prompt in sorted({*prompts, *self._rows}):  # a prompt follows those that it begins with
            while beginnings and prompt[: len(beginnings[-1])] != beginnings[-1]:
                beginnings.pop()
            found[prompt] = beginnings[-1] if beginnings else None
            if prompt in self._rows:
                beginnings.append(prompt)
        return [found[prompt] for prompt in prompts]

    def take(self, model: Any, prompts: Sequence[tuple[int, ...]]) -> tuple[Any, Tensor]:
        """Return a copy of the cache of some kept prompts, and which of its columns hold a token, ``(row, column)``."""
        rows = torch.tensor([self._rows[prompt] for prompt in prompts], device=self._mask.device)
        mask, cache = self._mask[rows], _new_cache(model, share=True)
        width = max(map(len, prompts))
        columns = torch.argsort(mask.byte(), dim=1, stable=True)[:, -width:]  # without most columns of padding
        for index, pair in enumerate(self._layers):
            parts = (part[rows] for part in pair)
            cache.update(
                *(
                    part.gather(2, columns[:, None, :, None].expand(*part.shape[:2], -1, part.shape[3]))
                    for part in parts
                ),
                index,
            )
        return cache, mask.gather(1, columns)

    def put(self, prompts: Sequence[tuple[int, ...]], filled: Prefilled) -> None:
        """Keep prompts in place of those of the last call; the cache must not be changed in place afterwards."""
        layers: list[Any] = filled.cache.layers
        self._layers = [(layer.keys, layer.values) for layer in layers]
        self._rows, self._mask = {prompt: row for row, prompt in enumerate(prompts)}, filled.mask
        size = sum(part.nbytes for pair in self._layers for part in pair)
        if size > self.max_bytes:
            self._rows, self._layers, self.excess_bytes = {}, [], size


@torch.no_grad()
def prefill(
    model: Any,
    prompts: Sequence[tuple[int, ...]],
    share: bool,
    kept: KeptPrompts | None = None,
    keep: bool = True,
    lower: LowerLayers | None = None,
) -> Prefilled:
    """Compute the KV cache of some prompts, and the logits after them.

    Args:
        model: called as a Hugging Face causal LM is.
        prompts: token ids.
        share: compute the common prefix once and let the cache reserve room; requires full attention in every layer.
        kept: the prompts of the last call, which are continued if ``share``; None keeps none.
        keep: whether these prompts replace those of the last call.
        lower: records the states below the lowest adapter; None records nothing.
    """
    device = next(model.parameters()).device
    known = [None] * len(prompts) if kept is None or not share else kept.longest(prompts)
    fresh = [n for n, beginning in enumerate(known) if beginning is None]
    shared = common_prefix([prompts[n] for n in fresh]) if share and len(fresh) > 1 else 0
    if shared < _MIN_PREFIX:
        shared = 0
    prefix = _new_cache(model, share)
    if shared:
        ids = torch.tensor([prompts[fresh[0]][:shared]], device=device)
        with nullcontext([]) if lower is None else lower.watched() as below:
            _read(model, ids, torch.ones_like(ids), prefix)
        if lower is not None:
            lower.record(prompts[fresh[0]][:shared], below[0][0])
    rest = [
        len(prompt) - (shared if before is None else len(before)) for prompt, before in zip(prompts, known, strict=True)
    ]
    if kept is not None:
        kept.computed_tokens += sum(rest) + shared
    parts, order = list[Prefilled](), list[int]()
    for members in (fresh, [n for n, beginning in enumerate(known) if beginning is not None]):
        groups = (
            length_groups([rest[n] for n in members], device) if share else [[*range(len(members))]] if members else []
        )
        for group in ([members[place] for place in places] for places in groups):
            order += group
            if before := [one for n in group if (one := known[n]) is not None]:
                assert kept is not None
                cache, seen = kept.take(model, before)
            else:
                cache = copy.deepcopy(prefix) if len(groups) > 1 or len(fresh) < len(prompts) else prefix
                if shared:
                    cache.batch_repeat_interleave(len(group))
                seen = torch.ones(len(group), shared, dtype=torch.bool, device=device)
            ids, mask = left_pad([prompts[n][len(prompts[n]) - rest[n] :] for n in group], device)
            mask = torch.cat([seen, mask], dim=1)
            with nullcontext([]) if lower is None else lower.watched() as below:
                logits, states = _read(model, ids, mask.long(), cache)
            if lower is not None:
                for row, n in enumerate(group):
                    lower.record(prompts[n], below[0][row, ids.shape[1] - rest[n] :])
            parts.append(Prefilled(logits=logits, mask=mask, cache=cache, states=states))
    filled = (
        parts[0] if len(parts) == 1 else _merged(model, parts, torch.argsort(torch.tensor(order, device=device)), share)
    )
    if kept is not None and share and keep:
        kept.put(prompts, filled)
    return filled


def _merged(model: Any, parts: Sequence[Prefilled], order: Tensor, share: bool) -> Prefilled:
    """Return the prompts of several passes in one cache; ``order``, int64 ``(prompt,)``, sorts them."""
    width = max(part.mask.shape[1] for part in parts)
    cache = _new_cache(model, share)
    for index in range(len(parts[0].cache.layers)):
        layers: list[Any] = [part.cache.layers[index] for part in parts]
        keys = torch.cat([_widened(layer.keys, width, 2) for layer in layers])[order]
        cache.update(keys, torch.cat([_widened(layer.values, width, 2) for layer in layers])[order], index)
        for part in parts:
            part.cache.layers[index] = None  # pyright: ignore (frees the memory of what was copied)
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

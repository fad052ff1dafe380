"""Attention in rows of several turns, without most pairs of tokens that do not attend to each other.

In a row that is a tree (:mod:`lrl.lm.layouts`), a token attends to its path alone, which is much shorter than the row,
but the kernels compute all pairs of columns. Here the columns of a row are divided into blocks of queries, and each
block reads only those keys that one of its queries attends to: the path to the first of them, and the block itself. So
the cost is proportional to the length of paths, not to that of rows.

The blocks travel with the 4-D mask, so that layers which are recomputed in the backward pass find them as well. Models
whose attention is not found by transformers' ``AttentionInterface`` use the mask alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

_SIZES = (32, 64, 128, 256)
"""Numbers of queries per block to choose from."""
_OVERHEAD = 32
"""Cost of gathering the keys of a block, in queries that read them."""
_WORTH = 0.7
"""Blocks are used if they cost less than this share of whole rows."""
_ATTRIBUTE = "lrl_blocks"


class Blocks(NamedTuple):
    """Blocks of queries with the keys that they read; all rows have the same number of blocks."""

    size: int
    """Queries per block; the last block of a row is padded."""
    keys: Tensor
    """int64 ``(block, key)``: the keys of each block, by ``row * columns + column``."""
    mask: Tensor
    """``(block, 1, query, key)``: what attention adds to its scores."""


def divide(last: Tensor, dtype: torch.dtype) -> Blocks | None:
    """Divide rows into blocks; None if that saves too little.

    Args:
        last: the last column that attends to each token, int64 ``(row, column)``; -1 for padding.
        dtype: of the mask.
    """
    rows, width = last.shape
    costs = dict[int, int]()
    for size in _SIZES:
        if size < width:
            blocks = -(-width // size)
            costs[size] = rows * blocks * (size + _OVERHEAD) * int(_visible(last, size).sum(-1).max())
    size = min(costs, key=costs.__getitem__, default=width)
    if not costs or costs[size] > _WORTH * rows * width * (width + _OVERHEAD):
        return None
    visible = _visible(last, size)
    count = visible.sum(-1)
    keys = torch.argsort(visible.byte(), dim=-1, descending=True, stable=True)[..., : int(count.max())]
    is_key = torch.arange(keys.shape[-1], device=last.device) < count[..., None]
    ends = last.gather(1, keys.flatten(1)).view_as(keys)
    query = torch.arange(visible.shape[1] * size, device=last.device).view(1, -1, size, 1)
    seen = (keys[:, :, None] <= query) & (query <= ends[:, :, None]) & is_key[:, :, None]
    widest = torch.float32 if dtype == torch.float64 else dtype  # eager attention takes its softmax in float32
    mask = torch.zeros(seen.shape, dtype=dtype, device=last.device).masked_fill_(~seen, torch.finfo(widest).min)
    first = torch.arange(rows, device=last.device)[:, None, None] * width
    return Blocks(size, (keys + first).flatten(0, 1), mask.flatten(0, 1)[:, None])


def _visible(last: Tensor, size: int) -> Tensor:
    """Return which columns a query of each block attends to, or lie in it, bool ``(row, block, column)``."""
    column = torch.arange(last.shape[1], device=last.device)
    start = torch.arange(0, last.shape[1], size, device=last.device)[:, None]
    return (column < start + size) & ((last[:, None] >= start) | (column >= start))


def with_blocks(mask: Tensor, last: Tensor) -> Tensor:
    """Return a 4-D mask ``(row, 1, column, column)`` whose attention is computed in blocks if that is faster."""
    blocks = divide(last, mask.dtype)
    if blocks is not None:
        setattr(mask, _ATTRIBUTE, blocks)
    return mask


def attend(
    attention: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute attention, in blocks if the mask has some.

    Args:
        attention: a kernel of transformers.
        module: the attention layer.
        query: ``(row, head, column, size)``.
        key: ``(row, key head, column, size)``.
        value: ``(row, key head, column, size)``.
        attention_mask: added to the scores.
        args: of the kernel.
        kwargs: of the kernel.

    Returns:
        ``(row, column, head, size)``, and the kernel's weights, which are None for blocks.
    """
    blocks: Blocks | None = getattr(attention_mask, _ATTRIBUTE, None)
    has_bias = kwargs.get("position_bias") is not None  # has one column per key of the whole row
    if blocks is None or has_bias or query.shape[2] != key.shape[2]:
        return attention(module, query, key, value, attention_mask, *args, **kwargs)
    rows, heads, width, size = query.shape
    missing = -width % blocks.size
    query = functional.pad(query, (0, 0, 0, missing)).transpose(1, 2).reshape(-1, blocks.size, heads, size)
    read = blocks.keys.flatten()
    key, value = (
        part.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, read)
        .view(*blocks.keys.shape, part.shape[1], part.shape[3]).transpose(1, 2)
        for part in (key, value)
    )  # fmt: skip
    out, _ = attention(module, query.transpose(1, 2), key, value, blocks.mask, *args, **kwargs)
    return out.reshape(rows, width + missing, heads, -1)[:, :width], None


_find = AttentionInterface.get_interface


def _find_with_blocks(
    self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the kernel that transformers finds, wrapped by :func:`attend`."""
    return partial(attend, _find(self, attn_implementation, default))


AttentionInterface.get_interface = _find_with_blocks

"""Batches of a fixed shape, in which the states of a text do not depend on the other texts, and a cache for states."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor

Value = TypeVar("Value")


@final
class LRUCache(Generic[Value]):
    """Caches values by key within a number of bytes; the least recently used are evicted.

    Args:
        max_bytes: largest total size of the values; 0 caches nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        """Size of all values that are kept."""
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Value | None:
        """Return a value, which becomes the most recently used one; None if it is not cached."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Store a value of ``size`` bytes as the most recently used one, and evict others beyond the limit."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._kept[key] = value, size
        self.bytes += size
        self.shrink()

    def shrink(self, max_bytes: int | None = None) -> None:
        """Evict values until the cache has at most ``max_bytes``, by default its own limit."""
        limit = self.max_bytes if max_bytes is None else max_bytes
        while self.bytes > limit:
            self.bytes -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Drop all values."""
        self._kept.clear()
        self.bytes = 0


# Batches of a fixed shape, in which the states of a text do not depend on the other texts.
#
# The order of additions in a matrix product may depend on the shape of the batch. So the shape is a function of the
# length of a text: texts of about the same length are padded on the right and computed together, in a number of rows
# that follows from that length, of which unused ones repeat the first text. The number of elements is a multiple of 32,
# because vector instructions may round a remainder differently. When a shape first occurs, :func:`place_matters` tests
# whether states depend on the place in the batch; if so, each text of that shape is computed alone.

_COLUMNS = {"cpu": 128}
"""Elements of a batch, padding included. On a CPU, larger batches are hardly faster and repeat more rows."""
_COLUMNS_ELSEWHERE = 4096
_CACHED = {"cpu": 1024}
"""Elements of a batch including the columns before it, whose keys and values are copied to each row."""
_CACHED_ELSEWHERE = 16384
_MULTIPLE = 32


class Shape(NamedTuple):
    """The shape of a batch."""

    rows: int
    width: int
    """Columns of each row; shorter texts are padded on the right."""
    past: int
    """Number of columns before, whose keys and values are given."""


class FixedBatch(NamedTuple):
    """Texts that are computed together."""

    texts: list[int]
    """Their indices; the batch has ``shape.rows`` rows, of which the last ones may repeat the first text."""
    shape: Shape

    @property
    def members(self) -> list[int]:
        """The text of each row."""
        return [*self.texts, *self.texts[:1] * (self.shape.rows - len(self.texts))]

    def rectangle(self, ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Return the token ids of the batch, int64 ``(row, column)``.

        Args:
            ids: of all texts.
            device: of the result.
        """
        width = self.shape.width
        return torch.tensor([[*ids[n], *[0] * (width - len(ids[n]))] for n in self.members], device=device)


def padded(length: int) -> int:
    """Return the width that texts of this length are padded to: a multiple of 4, or of more for long texts."""
    step = 4 if length <= 16 else max(8, 1 << (length.bit_length() - 3))
    return -(-length // step) * step


def fixed_batches(
    lengths: Sequence[int],
    device: torch.device,
    alone: Callable[[Shape], bool],
    *,
    pasts: Sequence[int] | None = None,
    limit: int | None = None,
) -> Iterator[FixedBatch]:
    """Yield batches that hold each text once.

    Args:
        lengths: number of tokens of each text.
        device: that computes them.
        alone: whether texts that could be computed in batches of a shape are computed alone, without padding.
        pasts: number of tokens before each text whose keys and values are given; None is 0.
        limit: the maximum number of positions, which padding does not exceed; None is no limit.
    """
    pasts = pasts or [0] * len(lengths)
    alike: dict[Shape, list[int]] = {}
    for text, (length, past) in enumerate(zip(lengths, pasts, strict=True)):
        alike.setdefault(_shape(length, past, device, limit), []).append(text)
    for shape, texts in alike.items():
        if shape.rows == 1 or alone(shape):
            yield from (FixedBatch([text], Shape(1, lengths[text], pasts[text])) for text in texts)
        else:
            yield from (FixedBatch(texts[n : n + shape.rows], shape) for n in range(0, len(texts), shape.rows))


def _shape(length: int, past: int, device: torch.device, limit: int | None) -> Shape:
    width = padded(length) if limit is None else max(length, min(padded(length), limit))
    rows = _COLUMNS.get(device.type, _COLUMNS_ELSEWHERE) // width
    if past:
        past = padded(past)
        rows = min(rows, _CACHED.get(device.type, _CACHED_ELSEWHERE) // (past + width))
    rows -= rows % (_MULTIPLE // math.gcd(_MULTIPLE, width))
    return Shape(max(1, rows), width, past)


@torch.no_grad()
def place_matters(states: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Return whether reversing the order of a batch changes the states of a text in any bit.

    Args:
        states: from the inputs to the states ``(row, ...)``.
        inputs: each ``(row, ...)``.
    """
    return not torch.equal(states(*inputs), states(*(one.flip(0) for one in inputs)).flip(0))

"""Batches of fixed shapes, in which the hidden states of a text do not depend on other texts, and a cache of states."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor

_AT_ONCE = 2**13
"""Largest number of prompt tokens whose keys and values are in memory at the same time."""

Value = TypeVar("Value")


@final
class LRUCache(Generic[Value]):
    """Cache with a maximum size in bytes, from which the least recently used values are evicted.

    Args:
        max_bytes: maximum total size of the values; 0 disables the cache.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        """Total size of the cached values in bytes."""
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
        """Store a value of ``size`` bytes as the most recently used one; values beyond the limit are evicted."""
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
# The order of additions in a matrix product may depend on the shape of the batch. The shape of the batch of a text is
# therefore determined by the length of the text alone: texts of similar length are padded on the right to the same
# width, and computed in batches with a fixed number of rows. Unused rows repeat the first text. The number of elements
# is a multiple of 32, because vector instructions may round a remainder differently. When a shape first occurs,
# :func:`place_matters` tests whether states depend on the row in the batch; if so, each text of this shape is computed
# alone.

_COLUMNS = {"cpu": 128}
"""Maximum number of elements (rows x columns) of a batch by device, including padding; larger batches are hardly faster
on a CPU, and repeat more rows."""
_COLUMNS_ELSEWHERE = 4096
_CACHED = {"cpu": 1024}
"""The same limit if the columns before a batch are counted as well, whose keys and values are copied to each row."""
_CACHED_ELSEWHERE = 16384
_MULTIPLE = 32


class Shape(NamedTuple):
    """Shape of a batch."""

    rows: int
    width: int
    """Number of columns of each row; shorter texts are padded on the right."""
    past: int
    """Number of columns before the batch, whose keys and values are given."""


class FixedBatch(NamedTuple):
    """Texts that are computed in the same batch."""

    texts: list[int]
    """Indices of the texts, at most ``shape.rows``; the remaining rows of the batch repeat the first text."""
    shape: Shape

    @property
    def members(self) -> list[int]:
        """Index of the text in each row."""
        return [*self.texts, *self.texts[:1] * (self.shape.rows - len(self.texts))]

    def rectangle(self, ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Return the token ids of the batch, int64 ``(row, column)``.

        Args:
            ids: token ids of all texts.
            device: device of the result.
        """
        width = self.shape.width
        return torch.tensor([[*ids[n], *[0] * (width - len(ids[n]))] for n in self.members], device=device)


def padded(length: int) -> int:
    """Return the width to which texts of this length are padded: a multiple of 4, or of 8 and more for long texts."""
    step = 4 if length <= 16 else max(8, 1 << (length.bit_length() - 3))
    return -(-length // step) * step


def divided(prompts: Iterable[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Divide prompts among groups that are computed together, sorted so that common pieces are in the same group."""
    part, tokens = list[tuple[int, ...]](), 0
    for prompt in sorted(prompts):
        if part and tokens + len(prompt) > _AT_ONCE:
            yield part
            part, tokens = [], 0
        pairs = zip(part[-1] if part else (), prompt, strict=False)
        part, tokens = [*part, prompt], tokens + len(prompt) - sum(accumulate((a == b for a, b in pairs), min))
    if part:
        yield part


def fixed_batches(
    lengths: Sequence[int],
    device: torch.device,
    alone: Callable[[Shape], bool],
    *,
    pasts: Sequence[int] | None = None,
    limit: int | None = None,
    columns: int | None = None,
) -> Iterator[FixedBatch]:
    """Divide texts among batches of fixed shapes; every text is in one batch.

    Args:
        lengths: number of tokens of each text.
        device: device on which the batches are computed.
        alone: returns whether texts with this shape of batch must be computed one by one, without padding.
        pasts: for each text, the number of tokens before it, whose keys and values are given; None means 0.
        limit: maximum width of a padded text; None sets no limit.
        columns: maximum number of elements of a batch on a CPU; None selects a number that suits small models.
    """
    pasts = pasts or [0] * len(lengths)
    alike: dict[Shape, list[int]] = {}
    for text, (length, past) in enumerate(zip(lengths, pasts, strict=True)):
        alike.setdefault(_shape(length, past, device, limit, columns), []).append(text)
    for shape, texts in alike.items():
        if shape.rows == 1 or alone(shape):
            yield from (FixedBatch([text], Shape(1, lengths[text], pasts[text])) for text in texts)
        else:
            yield from (FixedBatch(texts[n : n + shape.rows], shape) for n in range(0, len(texts), shape.rows))


def _shape(length: int, past: int, device: torch.device, limit: int | None, columns: int | None) -> Shape:
    """Return the shape of the batch for a text with ``length`` tokens after ``past`` tokens."""
    width = padded(length) if limit is None else max(length, min(padded(length), limit))
    most = columns if columns is not None and device.type == "cpu" else _COLUMNS.get(device.type, _COLUMNS_ELSEWHERE)
    rows = most // width
    if past:
        past = padded(past)
        rows = min(rows, _CACHED.get(device.type, _CACHED_ELSEWHERE) // (past + width))
    rows -= rows % (_MULTIPLE // math.gcd(_MULTIPLE, width))
    return Shape(max(1, rows), width, past)


@torch.no_grad()
def place_matters(states: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Return whether reversing the order of a batch changes the states of a text in any bit.

    Args:
        states: computes states ``(row, ...)`` from the inputs.
        inputs: inputs of a batch, each ``(row, ...)``.
    """
    return not torch.equal(states(*inputs), states(*(one.flip(0) for one in inputs)).flip(0))

"""Batches of a fixed shape, in which no bit of a text's states depends on the other texts.

Matrix products may add in another order where a batch has another shape, so that a text's states could differ in the
last bit from batch to batch. Here the shape follows from the text alone: texts of about the same length are computed
together, padded on the right, in batches whose number of rows follows from that length, and rows that are left over
repeat the first text. The number of columns is a multiple of 32, so that vector instructions leave no remainder, which
they would round in another way. Whether the place in a batch of some shape still makes a difference is tried when the
shape first occurs (:func:`place_matters`); where it does, every text of that shape is computed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_COLUMNS = {"cpu": 128}
"""Columns of a batch, padding included. On a CPU more are hardly faster, and a row that repeats a text costs time."""
_COLUMNS_ELSEWHERE = 4096
_CACHED = {"cpu": 1024}
"""Columns of a batch together with those before them, whose keys and values are copied into each row."""
_CACHED_ELSEWHERE = 16384
_MULTIPLE = 32


class Shape(NamedTuple):
    """The shape of a batch."""

    rows: int
    width: int
    """Columns of each row; shorter texts are padded on the right."""
    past: int
    """Columns before them, of which the keys and values are given."""


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
    """Return the width that texts of this length are padded to: a multiple of 4, 8, and more for long texts."""
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
        limit: the maximum number of positions, beyond which nothing is padded; None is no limit.
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


def arbitrary_ids(rows: int, width: int, vocabulary: int, device: torch.device) -> Tensor:
    """Return token ids, int64 ``(row, column)``, that differ from row to row."""
    return (torch.arange(rows * width, device=device) * 7919 + 11).view(rows, width) % vocabulary


@torch.no_grad()
def place_matters(states: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Return whether texts have other states, in any bit, where a batch of the same shape holds them in another order.

    Args:
        states: from the inputs to the states ``(row, ...)``.
        inputs: each ``(row, ...)``.
    """
    return not torch.equal(states(*inputs), states(*(one.flip(0) for one in inputs)).flip(0))

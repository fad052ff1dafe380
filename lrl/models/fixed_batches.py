"""Batches of a fixed shape, in which no bit of a text's states depends on the other texts.

Matrix products may add in another order where a batch has another shape, so that a text's states could differ in the
last bit from batch to batch. Here the shape follows from the text alone: texts of about the same length are computed
together, padded on the right, in batches whose number of rows follows from that length, and rows that are left over
repeat the first text. Whether the place in such a batch makes a difference is tried once (:func:`place_matters`);
where it does, every text is computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_TOKENS = {"cpu": 256}
"""Columns of a batch, padding included. On a CPU more are hardly faster, and a row that repeats a text costs time."""
_TOKENS_ELSEWHERE = 4096

Text = TypeVar("Text")
Shape = TypeVar("Shape", bound=Hashable)


class FixedBatch(NamedTuple):
    """Texts that are computed together."""

    texts: list[int]
    """Their indices; the batch has ``rows`` rows, of which the last ones may repeat the first text."""
    rows: int
    width: int
    """Columns of each row; shorter texts are padded on the right."""

    @property
    def members(self) -> list[int]:
        """The text of each row."""
        return [*self.texts, *self.texts[:1] * (self.rows - len(self.texts))]

    def rectangle(self, ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Return the token ids of the batch, int64 ``(row, column)``.

        Args:
            ids: of all texts.
            device: of the result.
        """
        return torch.tensor([[*ids[n], *[0] * (self.width - len(ids[n]))] for n in self.members], device=device)


def padded(length: int) -> int:
    """Return the width that texts of this length are padded to: one of four between two powers of two."""
    step = 1 << max(0, length.bit_length() - 3)
    return -(-length // step) * step


def fixed_batches(
    lengths: Sequence[int], device: torch.device, *, apart: Sequence[Hashable] | None = None, alone: bool = False
) -> Iterator[FixedBatch]:
    """Yield batches that hold each text once.

    Args:
        lengths: number of tokens of each text.
        device: that computes them.
        apart: texts are computed together only where these are equal; None makes no difference.
        alone: compute every text alone, without padding.
    """
    if alone:
        yield from (FixedBatch([text], 1, length) for text, length in enumerate(lengths))
        return
    alike: dict[tuple[int, Hashable], list[int]] = {}
    for text, length in enumerate(lengths):
        alike.setdefault((padded(length), apart and apart[text]), []).append(text)
    for (width, _), texts in alike.items():
        rows = _rows(width, device)
        for first in range(0, len(texts), rows):
            yield FixedBatch(texts[first : first + rows], rows, width if rows > 1 else lengths[texts[first]])


def _rows(width: int, device: torch.device) -> int:
    return max(1, _TOKENS.get(device.type, _TOKENS_ELSEWHERE) // width)


@torch.no_grad()
def place_matters(states: Callable[[Tensor], Tensor], vocabulary: int, device: torch.device) -> bool:
    """Return whether texts have other states, in any bit, where a batch of the same shape holds them in another order.

    Args:
        states: from token ids ``(row, column)`` to the states ``(row, column, hidden)``.
        vocabulary: number of tokens.
        device: that computes them.
    """
    width = 16
    texts = _rows(width, device)
    ids = (torch.arange(texts * width, device=device) * 7919 + 11).view(texts, width) % vocabulary
    return not torch.equal(states(ids), states(ids.flip(0)).flip(0))

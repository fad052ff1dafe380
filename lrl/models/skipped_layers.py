"""Leave decoder layers out of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def skipped(layers: Any, output: Tensor | None = None) -> Iterator[None]:
    """Let layers return what they are given, inside a ``with`` block.

    Args:
        layers: decoder layers.
        output: what the last of them returns instead, ``(row, column, hidden)``.
    """
    chosen: Sequence[Any] = list(layers)
    try:
        for number, layer in enumerate(chosen):
            given = output if number == len(chosen) - 1 else None
            layer.forward = lambda states, *_, given=given, **__: states if given is None else given
        yield
    finally:
        for layer in chosen:
            vars(layer).pop("forward", None)

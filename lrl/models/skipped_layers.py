"""Leave decoder layers out of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as stack:
        for number, layer in enumerate(chosen):
            given = output if number == len(chosen) - 1 else None
            kept = lambda states, *_, given=given, **__: states if given is None else given  # noqa: E731
            stack.enter_context(replaced_forward(layer, kept))
        yield


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another ``forward`` inside a ``with`` block; one that was set on the instance comes back."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before

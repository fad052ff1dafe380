"""One forward pass of a causal LM over turns that are arranged in rows; passes without gradient."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lrl.models.attention import bare, compute_dtype
from lrl.models.lora import decoder_layers
from lrl.models.prompt_sharing import Layout, Lower
from lrl.models.skipped_layers import skipped


def logits_of(model: Any, layout: Layout, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the logits ``(turn, token, vocabulary)`` that predict each response token.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        layout: the position of each turn's tokens.
        dtype: dtype of the attention mask; None takes that of the computation.
    """
    given = {
        "input_ids": layout.input_ids,
        "attention_mask": layout.attention_mask(compute_dtype(model) if dtype is None else dtype),
        "position_ids": layout.position_ids,
        "logits_to_keep": layout.logit_columns,
        "use_cache": False,
    }
    with started_above(model, layout.lower):
        return at_tokens(model(**accepted(model, given)).logits, layout)


@contextmanager
def without_gradient(module: nn.Module) -> Iterator[None]:
    """Switch gradients and dropout off inside a ``with`` block.

    Every pass whose result is data to learn from (samples, old or reference log-probabilities, values, statistics) runs
    inside this block. Afterwards each submodule is in the mode that it was in before.

    Args:
        module: what computes the pass, a policy or a model.
    """
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def started_above(model: Any, lower: Lower | None) -> Iterator[None]:
    """Let passes inside a ``with`` block start from given states, and leave out the layers below; None changes nothing.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        lower: the states, for one pass of their shape.
    """
    if lower is None:
        yield
        return
    with skipped(decoder_layers(model)[1][: lower.depth], lower.states):
        yield


def at_tokens(columns: Tensor, layout: Layout) -> Tensor:
    """Pick the columns that predict each response token, ``(turn, token, size)``.

    Args:
        columns: ``(row, column, size)``, of the kept columns, or of all if the model cannot leave columns out.
        layout: the position of each turn's tokens.
    """
    if columns.shape[1] != len(layout.logit_columns):
        columns = columns[:, layout.logit_columns]
    return columns[layout.row[:, None], layout.kept]


def accepted(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a model's forward pass accepts: models with ALiBi take no positions."""
    names = _names(type(bare(model)))
    return {name: value for name, value in given.items() if name in names}


@lru_cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)  # pyright: ignore[reportAttributeAccessIssue]

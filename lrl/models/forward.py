"""One forward pass over turns that are laid out in rows."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lrl.models.attention import bare, compute_dtype
from lrl.models.prompt_sharing import Layout


def logits_of(model: Any, layout: Layout, dtype: torch.dtype | None = None) -> Tensor:
    """Logits ``(turn, token, vocabulary)`` that predict each response token.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        layout: which tokens stand where.
        dtype: of attention's mask; None is what the model computes in.
    """
    given = {
        "input_ids": layout.input_ids,
        "attention_mask": layout.attention_mask(compute_dtype(model) if dtype is None else dtype),
        "position_ids": layout.position_ids,
        "logits_to_keep": layout.logit_columns,
        "use_cache": False,
    }
    return at_tokens(model(**accepted(model, given)).logits, layout)


def at_tokens(columns: Tensor, layout: Layout) -> Tensor:
    """What stands where each response token is predicted, ``(turn, token, size)``.

    Args:
        columns: ``(row, column, size)``, of the columns asked for, or of all where a model cannot be asked.
        layout: where each token is.
    """
    if columns.shape[1] != len(layout.logit_columns):
        columns = columns[:, layout.logit_columns]
    return columns[layout.row[:, None], layout.kept]


def accepted(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a model's forward pass has a name for: models with ALiBi take no positions."""
    names = _names(type(bare(model)))
    return {name: value for name, value in given.items() if name in names}


@lru_cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)  # pyright: ignore[reportAttributeAccessIssue]

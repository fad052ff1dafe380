"""How far a merged model is from its adapter model, and whether that can be rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrl.models.attention import bare, compute_dtype, in_dtype, in_float32, is_halved, max_positions

_TEXTS, _TOKENS = 2, 32
"""Texts that the models are compared on, and the tokens of each."""
_BROKEN = 1e-3
"""Largest difference of logits, relative to the largest logit, that can be rounding in float32."""
_SOUND = 4.0
"""Mean difference of log-probabilities that can be rounding in 16 bits, in units of that of the adapter model: there
activations are rounded, in the merged model the sums of weights as well."""
_LEAST = 1e-4
"""Mean difference of log-probabilities, in nats, that is never more than rounding in 16 bits."""


class Distance(NamedTuple):
    """Holds how far the merged model is from the adapter model."""

    logits: float
    """Largest absolute difference of logits, each model in its own data type."""
    largest: float
    """Largest absolute logit of the adapter model."""
    merged: tuple[float, float] | None = None
    """Mean and largest difference of log-probabilities, in nats, from the adapter model in float32; in 16 bits only."""
    adapter: tuple[float, float] | None = None
    """The same of the adapter model in its own data type, which rounds as well."""

    def describe(self) -> str:
        """Return a sentence on the distance."""
        difference = f"{self.logits:.1e}, the largest logit being {self.largest:.3g}."
        if self.merged is None or self.adapter is None:
            return f"Largest difference of logits from the adapter model: {difference}"
        merged, adapter = ("{:.2g} and {:.2g} nats".format(*pair) for pair in (self.merged, self.adapter))
        return (
            f"Mean and largest difference of log-probabilities from the adapter model in float32: {merged}; that of "
            f"the adapter model as it was trained: {adapter}. Largest difference of logits: {difference}"
        )


class AdapterLogits(NamedTuple):
    """Holds the logits of the adapter model, each float64 ``(text, token, vocabulary)``."""

    own: Tensor
    """In its own data type."""
    exact: Tensor
    """In float32 or better."""
    rounded: Tensor | None
    """In the data type of the result, if that has 16 bits."""


def comparison_texts(model: Any) -> Tensor:
    """Return ids ``(text, token)`` to compare models on: random ones, and the last of the vocabulary."""
    size = bare(model).get_output_embeddings().weight.shape[0]
    tokens = min(_TOKENS, max_positions(model) or _TOKENS)
    ids = torch.randint(size, (_TEXTS, tokens), generator=torch.Generator().manual_seed(0), device="cpu")
    last = torch.arange(size - min(size, tokens // 2), size, device="cpu")
    ids[0, : len(last)] = last  # where added tokens are
    return ids.to(next(model.parameters()).device)


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Compute the logits of a causal LM, float64 ``(text, token, vocabulary)``, of ids ``(text, token)``."""
    return model(input_ids=ids, use_cache=False).logits.double()


def adapter_logits(model: Any, ids: Tensor, dtype: torch.dtype) -> AdapterLogits:
    """Compute the logits of a model that is to be merged.

    Args:
        model: with adapters, in evaluation mode.
        ids: of :func:`comparison_texts`.
        dtype: data type of the result.
    """
    own = logits_of(model, ids)
    halved, halves = is_halved(model), dtype in (torch.bfloat16, torch.float16)
    exact, rounded = own, own if halves else None
    if halved:
        with in_float32(model):
            exact = logits_of(model, ids)
    if halves and dtype != compute_dtype(model):
        with in_dtype(model, dtype):
            rounded = logits_of(model, ids)
    return AdapterLogits(own, exact, rounded)


def check_rounding(after: Tensor, before: AdapterLogits, folder: Path) -> None:
    """Raise if a merged model differs from its adapter model by more than rounding.

    Args:
        after: logits of the merged model, ``(text, token, vocabulary)``.
        before: those of the adapter model.
        folder: what was to be written.

    Raises:
        ValueError: so it is.
    """
    if before.rounded is None:
        found, unit = float((after - before.exact).abs().max()), "in its logits"
        most = _BROKEN * float(before.exact.abs().max())
    else:
        found, usual = (float(_differences(one, before.exact).mean()) for one in (after, before.rounded))
        most, unit = _SOUND * usual + _LEAST, "nats in its log-probabilities on average"
    if not found <= most:
        raise ValueError(
            f"the merged model differs from the adapter model by {found:.3g} {unit}, which is more than rounding "
            f"({most:.2g} at most); {str(folder)!r} was not written."
        )


def _differences(logits: Tensor, exact: Tensor) -> Tensor:
    """Return the absolute differences of log-probabilities, in nats; all are ``(text, token, vocabulary)``."""
    return (torch.log_softmax(logits, dim=-1) - torch.log_softmax(exact, dim=-1)).abs()


def distance_of(after: Tensor, before: AdapterLogits) -> Distance:
    """Return the distance of the logits ``(text, token, vocabulary)`` of the merged model."""
    logits, largest = float((after - before.own).abs().max()), float(before.own.abs().max())
    if before.exact is before.own and before.rounded is None:
        return Distance(logits, largest)
    differences = (_differences(one, before.exact) for one in (after, before.own))
    merged, adapter = ((float(one.mean()), float(one.max())) for one in differences)
    return Distance(logits, largest, merged, adapter)

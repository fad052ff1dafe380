"""Passes through the layers below the lowest adapter only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from lrl.models.attention import bare, compute_dtype, max_positions
from lrl.models.fixed_batches import Shape, arbitrary_ids, place_matters
from lrl.models.forward import without_gradient
from lrl.models.lora import decoder_layers
from lrl.models.prompt_sharing import additive_mask
from lrl.models.skipped_layers import skipped

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Of each lower layer. Of one text ``(head, token, size)``, of a batch ``(row, head, column, size)``."""


@final
class LowerPass:
    """Runs the layers below the lowest adapter, without dropout.

    Args:
        model: a Hugging Face causal LM with adapters.
        depth: number of layers below the lowest adapter.
    """

    def __init__(self, model: Any, depth: int) -> None:
        self.model, self.depth = model, depth
        words = bare(model).get_input_embeddings().weight
        self.device: torch.device = words.device
        self.vocabulary: int = words.shape[0]
        self.max_positions = max_positions(model)

    def read(self, ids: Tensor) -> tuple[Tensor, KeysAndValues]:
        """Return the states ``(row, column, hidden)`` of texts, and their keys and values.

        Args:
            ids: int64 ``(row, column)``, padded on the right.
        """
        cache: Any = DynamicCache(config=bare(self.model).config)  # needed or not: every bit is the same
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        states = self._run(ids, positions, None, cache)
        return states, [(layer.keys, layer.values) for layer in cache.layers[: self.depth]]

    def read_after(self, past: Sequence[tuple[Tensor, Tensor]], ids: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Return the states ``(row, column, hidden)`` of what follows other tokens.

        Args:
            past: keys and values of the tokens before, padded on the right.
            ids: int64 ``(row, column)``, padded on the right.
            positions: int64 ``(row, column)``.
            seen: bool ``(row, column, column before or own column)``: what each token attends to.
        """
        cache = DynamicCache(config=bare(self.model).config)
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        return self._run(ids, positions, additive_mask(seen, compute_dtype(self.model)), cache)

    def place_matters(self, shape: Shape) -> bool:
        """Return whether the place of a text in a batch of this shape makes a difference to any bit of its states."""
        rows, width, before = shape
        ids = arbitrary_ids(rows, width, self.vocabulary, self.device)
        if not before:
            return place_matters(lambda ids: self.read(ids)[0], ids)
        limit = before + width if self.max_positions is None else self.max_positions
        _, past = self.read(arbitrary_ids(rows, min(before, limit), self.vocabulary, self.device))
        past = [tuple(functional.pad(part, (0, 0, 0, before - part.shape[2])) for part in pair) for pair in past]
        positions = torch.arange(before, before + width, device=self.device).clamp(max=limit - 1).expand_as(ids)
        seen = torch.ones(rows, width, before + width, dtype=torch.bool, device=self.device).tril(before)

        def states(ids: Tensor, *parts: Tensor) -> Tensor:
            return self.read_after(list(zip(parts[::2], parts[1::2], strict=True)), ids, positions, seen)

        return place_matters(states, ids, *(part for pair in past for part in pair))

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        _, layers = decoder_layers(self.model)
        found: list[Any] = []
        handle = layers[self.depth - 1].register_forward_hook(lambda _, given, out: found.append(out))
        inner = bare(self.model).base_model
        try:
            with without_gradient(inner), skipped(layers[self.depth :]):
                inner(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
        finally:
            handle.remove()
        return found[0]

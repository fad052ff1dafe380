"""A KV cache layer that reserves its memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer


class ReservedLayer(DynamicLayer):
    """Keeps keys and values in buffers that are allocated once: concatenation would copy everything at every token."""

    _buffers: list[Tensor] | None = None

    def reserve(self, columns: int) -> None:
        """Allocate room for ``columns`` more columns."""
        size = self.get_seq_length()
        assert self.keys is not None
        assert self.values is not None
        self._buffers = [nn.functional.pad(tensor, (0, 0, 0, columns)) for tensor in (self.keys, self.values)]
        self._show(size)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new columns and return all.

        Args:
            key_states: ``(row, head, new column, size)``.
            value_states: of the same shape.
            args: ignored, as in the parent.
            kwargs: ignored, as in the parent.

        Returns:
            Keys and values ``(row, head, column, size)``.
        """
        if self._buffers is None:
            return super().update(key_states, value_states, *args, **kwargs)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for buffer, tensor in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = tensor
        return self._show(end)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with the indices ``(row,)``, and drop the others."""
        if self._buffers is None:
            super().batch_select_indices(indices)
            return
        size = self.get_seq_length()
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show(size)

    def _show(self, size: int) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        self.keys, self.values = keys, values = [buffer[:, :, :size] for buffer in self._buffers]
        return keys, values

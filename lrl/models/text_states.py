"""One state per text: pooled over its tokens, and kept where the model is frozen and texts come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor

from lrl.models.lru_cache import LRUCache
from lrl.turn_batch import Inputs

_MIB = 2**20


def pool(states: Tensor, mask: Tensor, pooling: Literal["last", "mean"]) -> Tensor:
    """Reduce states ``(turn, column, hidden)`` with their mask ``(turn, column)`` to ``(turn, hidden)``.

    Args:
        states: of right-padded texts.
        mask: true at their tokens.
        pooling: the ``last`` token's state, or the ``mean`` of all tokens' states.
    """
    lengths = mask.sum(1)
    if pooling == "mean":
        return (states * mask[..., None]).sum(1) / lengths[:, None]
    return states[torch.arange(len(states), device=states.device), lengths - 1]


@final
class KeptStates:
    """Computes and keeps one vector per text.

    As in :mod:`lrl.models.lower_layers` each text is computed alone, never in a batch, so that no bit of a gradient
    depends on whether its states were kept, dropped or computed again after a resume.

    Args:
        max_mib: the least recently used states are dropped beyond this, in MiB; None keeps none and computes batches.
    """

    def __init__(self, max_mib: int | None) -> None:
        self._kept = None if max_mib is None else LRUCache[Tensor](max_mib * _MIB)
        self._weights: tuple[Any, ...] = ()

    @torch.no_grad()
    def states(self, model: Any, compute: Callable[[Inputs], Tensor], texts: Inputs) -> Tensor:
        """Return the states ``(row, hidden)`` of texts.

        Args:
            model: frozen; if its weights have been replaced, nothing that was kept is used.
            compute: from texts to states.
            texts: ``text_ids``, int64, and ``text_mask``, bool, each ``(row, column)``, right-padded.
        """
        if self._kept is None:
            return compute(texts)
        weights = tuple((id(part), part.data_ptr(), part._version) for part in model.parameters())
        if weights != self._weights:
            self._kept.clear()
            self._weights = weights
        rows = []
        lengths = texts["text_mask"].sum(1).tolist()
        for ids, mask, length in zip(texts["text_ids"], texts["text_mask"], lengths, strict=True):
            key = torch.is_autocast_enabled(ids.device.type), ids[:length].cpu().numpy().tobytes()
            states = self._kept.get(key)
            if states is None:
                states = compute({"text_ids": ids[None, :length], "text_mask": mask[None, :length]})[0]
                self._kept.put(key, states, states.numel() * states.element_size() + len(key[1]))
            rows.append(states)
        return torch.stack(rows)

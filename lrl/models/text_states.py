"""One state per text: pooled over its tokens, and kept where the model is frozen and texts come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor

from lrl.models.attention import compute_dtype, max_positions
from lrl.models.fixed_batches import Shape, arbitrary_ids, fixed_batches, place_matters
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

    As in :mod:`lrl.models.lower_layers` texts are computed in batches of a fixed shape, so that no bit of a gradient
    depends on whether their states were kept, dropped or computed again after a resume.

    Args:
        max_mib: the least recently used states are dropped beyond this, in MiB; None keeps none and computes batches.
    """

    def __init__(self, max_mib: int | None) -> None:
        self._kept = None if max_mib is None else LRUCache[Tensor](max_mib * _MIB)
        self._weights: tuple[Any, ...] = ()
        self._place_matters: dict[tuple[torch.dtype, Shape], bool] = {}

    def states(self, model: Any, compute: Callable[[Inputs], Tensor], texts: Inputs) -> Tensor:
        """Return the states ``(row, hidden)`` of texts; called inside :func:`~lrl.models.forward.without_gradient`.

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
            self._place_matters.clear()
            self._weights = weights
        ids, device, dtype = texts["text_ids"], texts["text_ids"].device, compute_dtype(model)
        rows = [tuple(row[:length]) for row, length in zip(ids.tolist(), texts["text_mask"].sum(1).tolist())]
        kept = {row: self._kept.get((dtype, row)) for row in rows}
        found = {row: states for row, states in kept.items() if states is not None}
        missing = [row for row in kept if row not in found]

        def alone(shape: Shape) -> bool:
            if (dtype, shape) not in self._place_matters:
                words = model.get_input_embeddings().weight
                arbitrary = arbitrary_ids(shape.rows, shape.width, len(words), device)
                self._place_matters[dtype, shape] = place_matters(lambda ids: compute(_full(ids)), arbitrary)
            return self._place_matters[dtype, shape]

        for batch in fixed_batches([len(row) for row in missing], device, alone, limit=max_positions(model)):
            lengths = torch.tensor([len(missing[n]) for n in batch.members], device=device)
            batch_ids = batch.rectangle(missing, device)
            mask = torch.arange(batch.shape.width, device=device) < lengths[:, None]
            states = compute({"text_ids": batch_ids, "text_mask": mask})
            found |= {missing[n]: states[row].clone() for row, n in enumerate(batch.texts)}
        for row, states in found.items():
            self._kept.put((dtype, row), states, states.numel() * states.element_size() + 8 * len(row))
        return torch.stack([found[row] for row in rows])


def _full(ids: Tensor) -> Inputs:
    return {"text_ids": ids, "text_mask": torch.ones_like(ids, dtype=torch.bool)}

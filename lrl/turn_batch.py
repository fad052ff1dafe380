"""The batches of turns that training steps see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
"""What a policy needs to evaluate a turn again: tensors with a leading turn axis, right-padded with zeros."""


class TurnBatch:
    """Represents the turns of a training step: padded, masked, immutable.

    A plain class, not a dataclass: Lightning moves and casts it through :meth:`to`.

    Attributes:
        inputs: the policy's own payload, each tensor ``(turn, ...)``.
        response_mask: bool ``(turn, token)``, true exactly where a token was sampled, or demonstrated.
        old_logprobs: ``(turn, token)`` log-probabilities recorded while sampling.
        advantages: ``(turn, token)``.
        ref_logprobs: ``(turn, token)`` of the reference policy, where one is asked for.
        returns: ``(turn, token)``, targets of the value function, if there is one.
        old_values: ``(turn, token)``, its values when the advantages were estimated.
    """

    __slots__ = ("advantages", "inputs", "old_logprobs", "old_values", "ref_logprobs", "response_mask", "returns")
    inputs: Inputs
    response_mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor | None
    returns: Tensor | None
    old_values: Tensor | None

    def __init__(
        self,
        *,
        inputs: Inputs,
        response_mask: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        ref_logprobs: Tensor | None = None,
        returns: Tensor | None = None,
        old_values: Tensor | None = None,
    ) -> None:
        fields = {"inputs": dict(inputs), "response_mask": response_mask, "old_logprobs": old_logprobs}
        fields |= {"advantages": advantages, "ref_logprobs": ref_logprobs, "returns": returns, "old_values": old_values}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"TurnBatch is immutable: use replace({name}=...)")

    def __len__(self) -> int:
        return len(self.response_mask)

    def fields(self) -> dict[str, Any]:
        """Return all fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def replace(self, **changes: Any) -> TurnBatch:
        """Return a copy with some fields replaced."""
        return TurnBatch(**(self.fields() | changes))

    def map(self, function: Any) -> TurnBatch:
        """Return a copy with ``function`` applied to every tensor."""
        inputs = {name: function(tensor) for name, tensor in self.inputs.items()}
        others = {k: v if v is None else function(v) for k, v in self.fields().items() if k != "inputs"}
        return TurnBatch(inputs=inputs, **others)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: Tensor) -> TurnBatch:
        """Select turns by an index tensor ``(turn,)``."""
        return self.map(lambda tensor: tensor[index])

    def split(self, size: int | None) -> list[TurnBatch]:
        """Split into chunks of at most ``size`` turns; None returns one chunk."""
        index = torch.arange(len(self), device=self.response_mask.device)
        return [self[part] for part in index.split(size or max(len(self), 1))]

    def to(self, *args: Any, **kwargs: Any) -> TurnBatch:
        """Move every tensor to a device."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

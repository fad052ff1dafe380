"""Stop a run whose loss is not finite, and skip optimiser steps whose gradients are not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NONE = 2**31 - 1
"""A minibatch that there is not."""


class FiniteSteps:
    """Decides, on all ranks alike, whether an optimiser step may be taken.

    One number is read per step, the norm of the gradients, which clipping needs anyway. A loss that is not finite is
    not looked at when it is made: its gradients are multiplied by NaN, so that the norm tells of it on every rank.

    Args:
        module: whose trainer knows the collection and the minibatch.
        max_skipped: steps in a row that may be skipped.
        key: what the configuration calls ``max_skipped``.
    """

    def __init__(
        self, module: L.LightningModule, max_skipped: int, key: str = "model.optimizer.max_skipped_steps"
    ) -> None:
        self._module, self._max_skipped, self._key = [module], max_skipped, key  # in a list: no submodule of itself
        self._losses: list[tuple[int, Tensor]] = []
        self._skipped = self._in_a_row = 0

    def watch(self, loss: Tensor) -> Tensor:
        """Return what to differentiate ``loss`` with: 1, or NaN where the loss is not finite."""
        value = loss.detach()
        self._losses.append((self._minibatch, value))
        return value * 0 + 1

    def forget(self) -> None:
        """Forget the losses of a step that is not taken."""
        self._losses.clear()

    def accept(self, norm: Tensor) -> bool:
        """Return whether to take a step by gradients of this norm, the same on all ranks.

        Raises:
            ValueError: a loss was not finite on some rank, or too many steps in a row were skipped.
        """
        losses, self._losses = self._losses, []
        if math.isfinite(float(norm)):
            self._in_a_row = 0
            return True
        self._check_losses(losses)
        self._skipped, self._in_a_row = self._skipped + 1, self._in_a_row + 1
        if self._in_a_row > self._max_skipped:
            raise ValueError(
                f"train/grad_norm is not finite in {self._place(self._minibatch)}, after {self._max_skipped} skipped "
                f"steps in a row ({self._key}); {_ADVICE}."
            )
        return False

    def _check_losses(self, losses: Iterable[tuple[int, Tensor]]) -> None:
        bad = [minibatch for minibatch, loss in losses if not math.isfinite(float(loss))]
        first = torch.tensor(min(bad, default=_NONE), device=self._module[0].device)
        found = int(self._trainer.strategy.reduce(first, reduce_op="min"))
        if found != _NONE:
            raise ValueError(f"train/loss is not finite in {self._place(found)}; {_ADVICE}.")

    def require(self, name: str, value: Tensor | float) -> None:
        """Stop unless a figure that is the same on all ranks is finite.

        Raises:
            ValueError: it is not.
        """
        if not math.isfinite(float(value)):
            raise ValueError(f"{name} is not finite in collection {self._collection}; {_ADVICE}.")

    def flush(self) -> int:
        """Return how many steps were skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def state(self) -> list[int]:
        """Return the skipped steps since the last logged row, and the consecutive ones."""
        return [self._skipped, self._in_a_row]

    def load(self, state: list[int]) -> None:
        """Restore what :meth:`state` returned."""
        self._skipped, self._in_a_row = state

    @property
    def _trainer(self) -> Any:
        return self._module[0].trainer

    @property
    def _minibatch(self) -> int:
        """The index of the running minibatch; 0 without a trainer."""
        attached = self._module[0]._trainer
        return max(attached.fit_loop.epoch_loop.batch_idx, 0) if attached else 0

    @property
    def _collection(self) -> int:
        return self._module[0].current_epoch + 1

    def _place(self, minibatch: int) -> str:
        return f"minibatch {minibatch + 1} of collection {self._collection}"


_ADVICE = "the run stops and its last checkpoint stays as it was, try a smaller learning rate or look at the rewards"


def gradient_norm(weights: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients; a sharded one where gradients are sharded."""
    return nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])


def whole_number(number: Tensor) -> Tensor:
    """Return a number that ranks may hold parts of; all ranks must call it."""
    return number.full_tensor() if isinstance(number, DTensor) else number


@torch.no_grad()
def weights_are_finite(module: L.LightningModule) -> bool:
    """Return whether all trainable weights are finite, on all ranks; all ranks must call it."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    local = [weight for weight in local if weight.numel()]
    finite = not local or math.isfinite(float(nn.utils.get_total_norm(local, norm_type=math.inf)))
    missing = torch.tensor(0.0 if finite else 1.0, device=module.device)
    return not float(module.trainer.strategy.reduce(missing, reduce_op="sum"))

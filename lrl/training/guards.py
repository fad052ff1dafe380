"""Guards of a training run: losses and gradients that are not finite, SIGTERM and Ctrl-C, signals during a step.

:class:`FiniteSteps` stops a run whose loss is not finite and skips optimiser steps whose gradients are not.
:class:`Interruption` ends a run at the next complete step, with a checkpoint that resumes bit-identically.
:class:`DeferredSignals` delays the handlers of other signals while weights change.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

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


# SIGTERM and Ctrl-C: a run ends at the next whole step, with a checkpoint that resumes bit-identically.

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_T = TypeVar("_T")


class _AbandonedError(BaseException):
    """Raised by a signal's handler inside :meth:`Interruption.attempt`."""


class Interruption:
    """Notes signals, and ends the run on all ranks where the state is whole.

    Lightning ends at a SIGTERM without a checkpoint and with exit status 0, at Ctrl-C wherever the run happens to be.
    Here a signal is noted. All ranks ask each other at the end of every optimiser step, collection and validation
    whether one came to any of them, write a checkpoint together and exit with status 128 + signal, as a shell does. A
    second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self._came, self._abandons = 0, False
        self._handlers: dict[int, Any] = {}
        self._trainer: L.Trainer | None = None
        self._write: Callable[[], Path] = Path

    def listen(self, trainer: L.Trainer, write: Callable[[], Path]) -> None:
        """Take over from Lightning's handlers.

        Args:
            trainer: whose run is to be ended.
            write: writes a checkpoint and returns where; all ranks call it.
        """
        self._trainer, self._write = trainer, write
        self._came = signal.SIGTERM if trainer.received_sigterm else 0
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def ignore(self) -> None:
        """Give the signals back to those who handled them before."""
        handlers, self._handlers, self._trainer = self._handlers, {}, None
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._came = number
        name = signal.Signals(number).name
        os.write(2, f"{name}: a checkpoint is written at the next whole step, Ctrl-C again ends at once.\n".encode())
        if self._abandons:
            self._abandons = False
            raise _AbandonedError

    def attempt(self, work: Callable[[], _T]) -> _T:
        """Do what takes long and changes nothing that is saved; a signal breaks it off.

        All ranks must call it. A rank that broke off waits for the others, which finish their work unless the signal
        came to them as well.

        Args:
            work: a collection or a validation, broken off only inside :meth:`abandonable`. What it raises after a
                signal does not count: the processes of environments may have got the signal too.
        """
        self.check()
        result: Any = None
        try:
            result = work()
        except (_AbandonedError, Exception) as error:
            if not isinstance(error, _AbandonedError):
                if not (self._came and self._trainer):
                    raise
                logging.getLogger("lrl.trace").debug("raised after the signal", exc_info=True)
        self.check()
        return result

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Let a signal interrupt this part of :meth:`attempt`, which makes no collective calls."""
        if self._trainer is not None and self._came:
            raise _AbandonedError
        self._abandons = self._trainer is not None
        try:
            yield
        finally:
            self._abandons = False

    def check(self) -> None:
        """End the run if a signal came to any rank; all ranks must call it, where the state is whole.

        Raises:
            SystemExit: one came; the checkpoint is written.
        """
        if self._trainer is None:
            return
        number = self._came
        if self._trainer.world_size > 1:
            came = torch.tensor(number, device=self._trainer.strategy.root_device)
            number = int(self._trainer.strategy.reduce(came, reduce_op="max"))
        if number:
            path, name = os.path.relpath(self._write()), signal.Signals(number).name
            if self._trainer.is_global_zero:
                logging.getLogger("lrl").warning("%s: wrote %s; resume with ckpt_path %s", name, path, path)
            # Lightning kills the main process where one of those that it started ends with another status than 0.
            raise SystemExit(128 + number if self._trainer.is_global_zero else 0)


# Signals that ask for a checkpoint, deferred while weights change.

_USUAL = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


def requeue_signals(trainer: L.Trainer) -> set[int]:
    """Return the signals that Slurm may send before the time limit; Lightning 2.6.6 saves in their handler."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    configured = getattr(environment, "requeue_signal", None)
    return {*_USUAL, *([] if configured is None else [configured])}


class DeferredSignals:
    """Context manager that defers signals while weights change, and raises them again at its end.

    A handler runs between any two instructions. A checkpoint written in the middle of a line search, or between an
    optimiser's step and the count of it, would hold changed weights beside turns that still count as untrained: a
    resume would train on them again, far from the policy that sampled them. If the block ends in an exception, the
    signals are dropped: there is no consistent state to save.

    Args:
        signals: their numbers; those without a handler are left alone.
    """

    def __init__(self, signals: set[int] | None = None) -> None:
        self.inside = False
        """Whether weights are changing; stays true after an error in the block, which leaves no consistent state."""
        self._signals = signals or set()
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def __enter__(self) -> None:
        self.inside = True
        if threading.current_thread() is not threading.main_thread() or self._handlers:
            return
        for number in self._signals:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Raise the signals that came."""
        self.inside = error is not None
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        came, self._came = self._came, []
        for number in came if error is None else ():
            signal.raise_signal(number)

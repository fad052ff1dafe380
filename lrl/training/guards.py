"""Guards of a training run: losses and gradients that are not finite, too little memory, and signals.

:func:`check_credit` and :func:`check_loss` check what the methods of an algorithm return.
:class:`FiniteSteps` stops a run whose loss is not finite and skips optimiser steps whose gradients are not.
:class:`PassLimit` repeats a minibatch in smaller passes if memory runs out.
:class:`Interruption` ends a run at the next complete step, with a checkpoint that resumes bit-identically.
:class:`DeferredSignals` delays the handlers of other signals while weights change.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lrl.faults import out_of_memory
from lrl.types import Credit, Evaluation, TokenLoss

_MAX_SKIPPED = 10
"""Number of consecutive optimiser steps that may be skipped because their gradients are not finite."""
_NO_MINIBATCH = 2**31 - 1
"""Sentinel: no minibatch had a loss that is not finite."""


def check_credit(module: object, credit: Any, mask: Tensor) -> Credit:
    """Return what ``advantages`` of an algorithm has returned.

    Args:
        module: the algorithm.
        credit: what it has returned.
        mask: ``response_mask`` of the rollout, bool ``(time, env, token)``.

    Raises:
        ValueError: If it is no :class:`~lrl.types.Credit`, or has tensors of another shape.
    """
    method = f"{type(module).__name__}.advantages"
    if not isinstance(credit, Credit):
        raise ValueError(f"{method} returned {_kind(credit)}; it must return a Credit.")
    _check_shape(f"{method} returned advantages", credit.advantages, mask, "rollout.response_mask, (time, env, token)")
    if credit.returns is not None:
        _check_shape(f"{method} returned returns", credit.returns, mask, "rollout.response_mask, (time, env, token)")
    _check_metrics(method, credit.metrics)
    return credit


def _check_shape(start: str, values: Any, mask: Tensor, name: str) -> None:
    """Raise an error that begins with ``start`` if values are no tensor, or have another shape than a mask."""
    needed = f"it must be a tensor with the shape of {name}, which is {tuple(mask.shape)}."
    if not isinstance(values, Tensor):
        raise ValueError(f"{start} that are {_kind(values)}; {needed}")
    if values.shape != mask.shape:
        raise ValueError(f"{start} of shape {tuple(values.shape)}; {needed}")


def _check_metrics(method: str, metrics: Mapping[Any, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{method} returned the metric {name}, which is {value!r}; it must be a tensor.")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_loss(module: object, tokens: Any, mask: Tensor, policy: Evaluation) -> TokenLoss:
    """Return what ``loss`` of an algorithm has returned.

    Args:
        module: the algorithm.
        tokens: what it has returned.
        mask: ``response_mask`` of the turns, bool ``(turn, token)``.
        policy: the evaluation of the turns from which the loss was computed.

    Raises:
        ValueError: If it is no :class:`~lrl.types.TokenLoss`, its loss has another shape or no gradient, or one of its
            metrics is no tensor.
    """
    method = f"{type(module).__name__}.loss"
    if not isinstance(tokens, TokenLoss):
        raise ValueError(f"{method} returned {_kind(tokens)}; it must return a TokenLoss.")
    _check_shape(f"{method} returned losses", tokens.loss, mask, "batch.response_mask, (turn, token)")
    if policy.logprobs.requires_grad and not tokens.loss.requires_grad:
        raise ValueError(f"{method} returned a loss without gradient; it must be computed from policy.logprobs.")
    _check_metrics(method, tokens.metrics)
    return tokens


class FiniteSteps:
    """Decides whether an optimiser step is taken; the decision is the same on all ranks.

    To avoid waiting for the device more than once per step, only the norm of the gradients is read, which clipping
    needs anyway. If a loss is not finite, its gradients are multiplied by NaN, so that the norm is NaN on every rank.

    Args:
        module: module that is trained.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = [module]  # a list hides it from nn.Module
        self._losses: list[tuple[int, Tensor]] = []
        self._skipped = self._in_a_row = 0

    def watch(self, loss: Tensor) -> Tensor:
        """Return the initial gradient for the backward pass of a loss: 1, or NaN if the loss is not finite."""
        value = loss.detach()
        self._losses.append((self._minibatch, value))
        return value * 0 + 1

    def forget(self) -> None:
        """Drop the losses of a step that is not taken."""
        self._losses.clear()

    def accept(self, norm: Tensor) -> bool:
        """Return whether to take the step, given the norm of its gradients over all ranks.

        Raises:
            ValueError: If a loss was not finite on some rank, or too many consecutive steps were skipped.
        """
        losses, self._losses = self._losses, []
        if math.isfinite(float(norm)):
            self._in_a_row = 0
            return True
        self._check_losses(losses)
        self._skipped, self._in_a_row = self._skipped + 1, self._in_a_row + 1
        if self._in_a_row > _MAX_SKIPPED:
            raise ValueError(
                f"train/grad_norm is not finite in {self._place(self._minibatch)}, after {_MAX_SKIPPED} skipped steps "
                f"in a row; {_ADVICE}."
            )
        return False

    def _check_losses(self, losses: Iterable[tuple[int, Tensor]]) -> None:
        bad = [minibatch for minibatch, loss in losses if not math.isfinite(float(loss))]
        first = torch.tensor(min(bad, default=_NO_MINIBATCH), device=self._module[0].device)
        found = int(self._trainer.strategy.reduce(first, reduce_op="min"))
        if found != _NO_MINIBATCH:
            raise ValueError(f"train/loss is not finite in {self._place(found)}; {_ADVICE}.")

    def require(self, name: str, value: Tensor | float) -> None:
        """Check that a number is finite.

        Args:
            name: name of the number, for the error message.
            value: the number, ``()``, which must be the same on all ranks.

        Raises:
            ValueError: If the number is not finite.
        """
        if not math.isfinite(float(value)):
            raise ValueError(f"{name} is not finite in collection {self._collection}; {_ADVICE}.")

    def flush(self) -> int:
        """Return the number of steps skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def state(self) -> list[int]:
        """Return the number of steps skipped since the last logged row, and the number of consecutive skipped steps."""
        return [self._skipped, self._in_a_row]

    def load(self, state: list[int]) -> None:
        """Restore what :meth:`state` returned."""
        self._skipped, self._in_a_row = state

    @property
    def _trainer(self) -> Any:
        return self._module[0].trainer

    @property
    def _minibatch(self) -> int:
        """Index of the current minibatch; 0 without a trainer."""
        attached = self._module[0]._trainer
        return max(attached.fit_loop.epoch_loop.batch_idx, 0) if attached else 0

    @property
    def _collection(self) -> int:
        return self._module[0].current_epoch + 1

    @property
    def place(self) -> str:
        """The current minibatch, for messages."""
        return self._place(self._minibatch)

    def _place(self, minibatch: int) -> str:
        return f"minibatch {minibatch + 1} of collection {self._collection}"


_ADVICE = "the run stops and its last checkpoint is unchanged; try a smaller learning rate or check the rewards"


@torch.no_grad()
def weights_are_finite(module: L.LightningModule) -> bool:
    """Return whether all trainable weights are finite, on all ranks; all ranks must call it."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    local = [weight for weight in local if weight.numel()]
    finite = not local or math.isfinite(float(nn.utils.get_total_norm(local, norm_type=math.inf)))
    missing = torch.tensor(0.0 if finite else 1.0, device=module.device)
    return not float(module.trainer.strategy.reduce(missing, reduce_op="sum"))


# Too little memory.

_T = TypeVar("_T")


class PassLimit:
    """Limits the number of turns of a forward pass of an update, and halves the limit when memory runs out."""

    def __init__(self) -> None:
        self.turns: int | None = None
        """Maximum number of turns of a pass; None if there is no limit."""
        self._largest = 0
        """Number of turns of the largest pass of the current minibatch."""

    def split(self, passes: Sequence[Tensor]) -> list[Tensor]:
        """Split the passes that are too large.

        Args:
            passes: turns of each pass, int64 ``(turn,)``.
        """
        split = passes if self.turns is None else [part for turns in passes for part in turns.split(self.turns)]
        self._largest = max(map(len, split), default=0)
        return [*split]

    def attempt(self, work: Callable[[], _T], place: str, undo: Callable[[], None] | None) -> _T:
        """Return ``work()``; when memory runs out, halve the limit and call it again.

        Args:
            work: computes the gradient of a minibatch in passes that :meth:`split` returned.
            place: the minibatch, for messages.
            undo: drops what a failed call of ``work`` recorded; None does not call ``work`` again.

        Raises:
            ValueError: If memory runs out, and ``work`` is not called again or has passes of one turn already.
        """
        before = 0
        while True:
            try:
                result = work()
                break
            except (MemoryError, RuntimeError) as error:
                reason = out_of_memory(error)
                if reason is None:
                    raise
                if undo is None or self._largest < 2:
                    raise ValueError(
                        f"memory ran out in {place}, in a pass of {self._largest} turns ({reason}); a larger "
                        "data.num_minibatches, shorter texts or gradient_checkpointing need less."
                    ) from error
            undo()  # not in the handler, in which the tensors of the failed call exist
            before, self.turns = before or self._largest, -(-self._largest // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if before:
            text = "memory ran out in %s for a pass of %d turns; from now on a pass has at most %d turns"
            logging.getLogger("lrl").warning(text, place, before, self.turns)
        return result


# SIGTERM and Ctrl-C.

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _AbandonedError(BaseException):
    """Raised by a signal's handler inside :meth:`Interruption.attempt`."""


class Interruption:
    """Ends a run after SIGTERM or Ctrl-C with a checkpoint of a consistent state, on all ranks.

    Lightning reacts to SIGTERM by ending without a checkpoint and with exit status 0, and to Ctrl-C by ending at once.
    Here the handler only stores the signal. At the end of every optimiser step, collection and validation all ranks
    check together whether any of them received one; then they write a checkpoint and exit with status 128 + signal, the
    convention of shells. A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self._received = 0
        """Number of the signal that was received; 0 for none."""
        self._abandons = False
        """Whether a signal aborts the current work, inside :meth:`abandonable`."""
        self._handlers: dict[int, Any] = {}
        self._trainer: L.Trainer | None = None
        self._write: Callable[[], Path] = Path

    def listen(self, trainer: L.Trainer, write: Callable[[], Path]) -> None:
        """Replace Lightning's signal handlers.

        Args:
            trainer: trainer of the run.
            write: writes a checkpoint and returns its path; all ranks call it.
        """
        self._trainer, self._write = trainer, write
        self._received = signal.SIGTERM if trainer.received_sigterm else 0
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def ignore(self) -> None:
        """Restore the previous signal handlers."""
        handlers, self._handlers, self._trainer = self._handlers, {}, None
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            if number == signal.SIGINT:
                if os.isatty(2):
                    os.write(2, b"\x1b[?25h\n")  # show the cursor, which the progress bar hides
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._received = number
        name = signal.Signals(number).name
        again = " again" if number == signal.SIGINT else ""
        text = (
            f"{name}: the run ends with a checkpoint after the current step; press Ctrl-C{again} to end it at once.\n"
        )
        if os.isatty(2):
            text = (
                f"\n{text}\n\n"  # below the progress bar, which erases as many lines as it has when it is drawn again
            )
        os.write(2, text.encode())
        if self._abandons:
            self._abandons = False
            raise _AbandonedError

    def attempt(self, work: Callable[[], _T]) -> _T:
        """Run long work that changes no state to be saved; a signal aborts it.

        All ranks must call it. A rank that aborts waits for the others, which finish their work unless they received
        the signal as well.

        Args:
            work: a collection or a validation, aborted only inside :meth:`abandonable`. Errors after a signal are
                ignored, because the processes of environments may have received the signal as well.
        """
        self.check()
        result: Any = None
        try:
            result = work()
        except (_AbandonedError, Exception) as error:
            if not isinstance(error, _AbandonedError):
                if not (self._received and self._trainer):
                    raise
                logging.getLogger("lrl.trace").debug("raised after the signal", exc_info=True)
        self.check()
        return result

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Let a signal abort this part of :meth:`attempt`, which must make no collective calls between ranks."""
        if self._trainer is not None and self._received:
            raise _AbandonedError
        self._abandons = self._trainer is not None
        try:
            yield
        finally:
            self._abandons = False

    def check(self) -> None:
        """End the run if any rank received a signal; all ranks must call it in a consistent state.

        Raises:
            SystemExit: If any rank received a signal; the checkpoint has been written.
        """
        if self._trainer is None:
            return
        number = self._received
        if self._trainer.world_size > 1:
            received = torch.tensor(number, device=self._trainer.strategy.root_device)
            number = int(self._trainer.strategy.reduce(received, reduce_op="max"))
        if number:
            path, name = os.path.relpath(self._write()), signal.Signals(number).name
            if self._trainer.is_global_zero:
                logging.getLogger("lrl").warning("%s: wrote %s, from which the run can be resumed", name, path)
            # Lightning kills the main process if one of its child processes ends with a status other than 0.
            raise SystemExit(128 + number if self._trainer.is_global_zero else 0)


# Signals in whose handlers a checkpoint is written.

_USER_SIGNALS = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


def requeue_signals(trainer: L.Trainer) -> set[int]:
    """Return the signals that Slurm may send before the time limit; Lightning 2.6.6 saves in their handlers."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    configured = getattr(environment, "requeue_signal", None)
    return {*_USER_SIGNALS, *([] if configured is None else [configured])}


class DeferredSignals:
    """Context manager that defers signals while weights change, and raises them again when it exits.

    Signal handlers run between any two instructions. A checkpoint that is written in the middle of a line search, or
    between an optimiser step and the update of its counter, would contain changed weights and turns that count as
    untrained. A resumed run would then train on these turns again with a policy that differs from the one that sampled
    them. If the block ends in an exception, the signals are dropped, because there is no consistent state to save.

    Args:
        signals: numbers of the signals; those without a handler are ignored.
    """

    def __init__(self, signals: set[int] | None = None) -> None:
        self.inside = False
        """Whether weights are changing; it stays true after an error in the block, which leaves no consistent state."""
        self._signals = signals or set()
        self._handlers: dict[int, Any] = {}
        self._received: list[int] = []

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
        if number not in self._received:
            self._received.append(number)

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Raise the signals that were received."""
        self.inside = error is not None
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        received, self._received = self._received, []
        for number in received if error is None else ():
            signal.raise_signal(number)

"""SIGTERM and Ctrl-C: a run ends at the next whole step, with a checkpoint that resumes bit-identically."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import lightning as L
import torch

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

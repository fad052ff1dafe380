"""Signals that ask for a checkpoint, deferred while weights change."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L

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

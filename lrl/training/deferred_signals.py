"""When a requeued job's checkpoint may be written: not while weights move."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L

_USUAL = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


def requeue_signals(trainer: L.Trainer) -> set[int]:
    """What Slurm may be told to send before the time is up; Lightning 2.6.6 writes its checkpoint in the handler."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    configured = getattr(environment, "requeue_signal", None)
    return {*_USUAL, *([] if configured is None else [configured])}


class WholeSteps:
    """Puts signals off while weights move; a context manager.

    A handler runs between any two instructions. What it saved in the middle of a line search, or between an optimiser's
    step and the count of it, would hold moved weights beside turns that still count as untrained: after a resume they
    would be trained on again, far from the policy that sampled them. Where a step ends in an exception, what came is
    dropped: there is no whole state to save.

    Args:
        signals: their numbers; those that nobody handles are left alone.
    """

    def __init__(self, signals: set[int] | None = None) -> None:
        self._signals = signals or set()
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def __enter__(self) -> None:
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
        """Hand over what came."""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        came, self._came = self._came, []
        for number in came if error is None else ():
            signal.raise_signal(number)

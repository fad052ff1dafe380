"""Environments in processes of their own, where a death is one sentence or is made good, and never a hang."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import CloudpickleWrapper

OnDeath = Literal["fail", "restart"]

_CONTEXT = "forkserver"
"""Forking a process that runs torch's threads can hang."""


class EnvironmentDiedError(ValueError):
    """An environment's process ended, or the environment raised an error; says which, and the seed of its episode.

    A ``ValueError``, so that every command tells it in one sentence.
    """


class ProcessEnvs(AsyncVectorEnv):
    """Gymnasium's asynchronous environments, whose deaths are noticed.

    Observations travel through pipes: Gymnasium 1.4 reads texts back wrong from shared memory.

    Args:
        copies: each makes one environment.
        name: of the environment, for errors.
        on_death: ``fail`` raises :class:`EnvironmentDiedError`. ``restart`` starts the process again and plays the
            episode up to where it was, with the same seeds and actions; a second death in an episode raises.
    """

    def __init__(self, copies: Sequence[Callable[[], gym.Env]], name: str, on_death: OnDeath = "fail") -> None:
        self.name, self.on_death = name, on_death
        super().__init__(copies, shared_memory=False, context=_CONTEXT, autoreset_mode=AutoresetMode.DISABLED)
        self.parent_pipes: list[Any] = [Line(self, number, pipe) for number, pipe in enumerate(self.parent_pipes)]

    def start(self, number: int) -> Any:
        """Start one environment's process again; the pipe to it."""
        context: Any = multiprocessing.get_context(_CONTEXT)
        ours, theirs = context.Pipe()
        make = CloudpickleWrapper(self.env_fns[number])
        arguments = (number, make, theirs, ours, None, self.error_queue, self.autoreset_mode, None)
        process = context.Process(target=_async_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.processes[number] = process
        return ours

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Of all, or of those of the mask."""
        with self._closed_on_death():
            return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        """Of all."""
        with self._closed_on_death():
            return super().step(actions)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Of all."""
        with self._closed_on_death():
            return super().call(name, *args, **kwargs)

    def set_attr(self, name: str, values: Any) -> None:
        """Of all."""
        with self._closed_on_death():
            super().set_attr(name, values)

    @contextmanager
    def _closed_on_death(self) -> Iterator[None]:
        try:
            yield
        except EnvironmentDiedError:
            self._state = AsyncState.DEFAULT  # nobody waits for the others' answers any more
            self.close(terminate=True)
            raise


class Line:
    """The pipe to one environment's process, with what was said since its episode began.

    Args:
        owner: has the process.
        number: of the environment.
        pipe: to the process.
    """

    def __init__(self, owner: ProcessEnvs, number: int, pipe: Any) -> None:
        self._owner, self._number, self._pipe = owner, number, pipe
        self._settings: dict[str, Any] = {}
        self._said: list[tuple[str, Any]] = []
        self._pending: tuple[str, Any] = ("", None)
        self._restarted = False

    @property
    def closed(self) -> bool:
        """Whether nobody can be reached."""
        return self._pipe.closed

    @property
    def seed(self) -> int | None:
        """Of the running episode."""
        resets = [data for command, data in (*self._said, self._pending) if command == "reset"]
        return resets[-1]["seed"] if resets else None

    def close(self) -> None:
        """Hang up."""
        self._pipe.close()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is an answer, if only that nobody answers any more."""
        try:
            return self._pipe.poll(timeout)
        except OSError:
            return True

    def send(self, message: tuple[str, Any]) -> None:
        """Say something; whether it was heard, :meth:`recv` finds out."""
        self._pending = message
        with suppress(OSError):
            self._pipe.send(message)

    def recv(self) -> Any:
        """The answer.

        Raises:
            EnvironmentDiedError: there is none, or it is an error.
        """
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            if self._pending[0] == "close":
                return None, True
            answer = self._restart(self._post_mortem())
        if not answer[1]:
            raise self._error()
        self._keep(*self._pending)
        return answer

    def _keep(self, command: str, data: Any) -> None:
        """Remember what a process must be told to stand where this one stands."""
        if command == "_setattr":
            self._settings[data[0]] = data[1]
        elif command == "reset":
            self._said, self._restarted = [(command, data)], False
        elif command == "step":
            self._said.append((command, data))

    def _restart(self, reason: str) -> Any:
        """The answer of a process that is told everything again."""
        if self._owner.on_death == "fail":
            raise EnvironmentDiedError(f"{self._who()} died: {reason}; env.on_death: restart would go on without it.")
        if self._restarted:
            raise EnvironmentDiedError(f"{self._who()} died twice in one episode: {reason}.")
        self._pipe.close()
        self._pipe = self._owner.start(self._number)
        answer: Any = None
        try:
            for message in (*(("_setattr", item) for item in self._settings.items()), *self._said, self._pending):
                self._pipe.send(message)
                answer = self._pipe.recv()
        except (EOFError, OSError):
            raise EnvironmentDiedError(f"{self._who()} died twice in one episode: {self._post_mortem()}.") from None
        self._restarted = True
        return answer

    def _post_mortem(self) -> str:
        process = self._owner.processes[self._number]
        process.join(timeout=5)
        code = process.exitcode
        if code is None:
            return "its process does not answer"
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit status {code}"

    def _error(self) -> EnvironmentDiedError:
        try:
            _, kind, value, _ = self._owner.error_queue.get(timeout=5)
            reason = " ".join(f"{kind.__name__}: {value}".split())
        except queue.Empty:
            reason = "an error that it could not tell"
        return EnvironmentDiedError(f"{self._who()} raised {reason}")

    def _who(self) -> str:
        return f"environment {self._number} of {self._owner.name} (episode's seed {self.seed})"

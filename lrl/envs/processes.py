"""Vectorized environments in separate processes that detect, report and optionally restart dead processes."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import CloudpickleWrapper

from lrl.envs.boundary import EnvironmentFailedError, empty_observation

OnDeath = Literal["fail", "restart"]
"""Whether a dead process ends the run or is restarted."""

_CONTEXT = "forkserver"
"""Start method of processes: forking a process that runs torch's threads can deadlock."""


class SupervisedAsyncVectorEnv(AsyncVectorEnv):
    """A version of Gymnasium's ``AsyncVectorEnv`` that detects dead processes and leaves out idle copies.

    Observations are sent through pipes, because Gymnasium 1.4 corrupts texts in shared memory.

    Args:
        env_fns: Functions that each create one environment.
        name: Name of the environment, for error messages.
        on_death: ``fail`` raises :class:`EnvironmentFailedError`. ``restart`` starts the process again and replays the
            episode with the same seeds and actions; a second death in the same episode raises.

    Attributes:
        idle: See :class:`~lrl.envs.separate.SeparateEnvs`.

    Raises:
        ValueError: If the copies have different spaces, or cannot be created in another process.
    """

    steps_ended_copies = True

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]], name: str, on_death: OnDeath = "fail") -> None:
        self.name, self.on_death = name, on_death
        self.idle = np.ones(len(env_fns), dtype=bool)
        try:
            super().__init__(env_fns, shared_memory=False, context=_CONTEXT, autoreset_mode=AutoresetMode.DISABLED)
        except RuntimeError as error:  # Gymnasium compares the spaces.
            raise ValueError(f"env is {name!r}, whose copies have different spaces: {error}") from error
        except (EOFError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
            self._end_processes()
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
            raise ValueError(
                f"env.vectorization is 'async', but {name!r} cannot be created in another process ({reason}); register "
                "it in a module, name it module:id, give kwargs that can be pickled, and start a script's work under "
                "if __name__ == '__main__', or set vectorization to sync."
            ) from error
        self.parent_pipes: list[Any] = [WorkerPipe(self, index, pipe) for index, pipe in enumerate(self.parent_pipes)]

    def _end_processes(self) -> None:
        """End the processes of environments that could not be created."""
        self.closed = True  # otherwise Gymnasium talks to them when this object is deleted
        for process in getattr(self, "processes", ()):
            if process.pid is not None:
                process.terminate()
                process.join()

    def start_process(self, index: int) -> Connection:
        """Start the process of one environment again and return the pipe to it."""
        context: Any = multiprocessing.get_context(_CONTEXT)
        parent_pipe, child_pipe = context.Pipe()
        env_fn = CloudpickleWrapper(self.env_fns[index])
        arguments = (index, env_fn, child_pipe, parent_pipe, None, self.error_queue, self.autoreset_mode, None)
        process = context.Process(target=_async_worker, args=arguments, daemon=True)
        process.start()
        child_pipe.close()
        self.processes[index] = process
        return parent_pipe

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those selected by ``options["reset_mask"]``, and return their observations.

        Raises:
            EnvironmentFailedError: If a process died and is not restarted.
        """
        mask = (options or {}).get("reset_mask", True)
        with self._close_on_death():
            outcome = super().reset(seed=seed, options=options)
        self.idle = self.idle & ~np.asarray(mask)
        return outcome

    def step(self, actions: Any) -> Any:
        """Step all environments that are not idle.

        Raises:
            EnvironmentFailedError: If a process died and is not restarted.
        """
        with self._close_on_death():
            outcome = super().step(actions)
        self.idle = self.idle | outcome[2] | outcome[3]
        return outcome

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of all environments and return the results.

        Raises:
            EnvironmentFailedError: If a process died and is not restarted.
        """
        with self._close_on_death():
            return super().call(name, *args, **kwargs)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of all environments.

        Raises:
            EnvironmentFailedError: If a process died and is not restarted.
        """
        with self._close_on_death():
            super().set_attr(name, values)

    @contextmanager
    def _close_on_death(self) -> Iterator[None]:
        try:
            yield
        except EnvironmentFailedError:
            self._state = AsyncState.DEFAULT  # Pending results of the other processes are discarded.
            self.close(terminate=True)
            raise


class WorkerPipe:
    """Pipe to the process of one environment that records the current episode, to replay it after a restart.

    Args:
        owner: The vectorized environment that owns the process.
        index: Index of the environment.
        pipe: The pipe to the process.
    """

    def __init__(self, owner: SupervisedAsyncVectorEnv, index: int, pipe: Connection) -> None:
        self._owner, self._index, self._pipe = owner, index, pipe
        self._attributes: dict[str, Any] = {}
        self._episode: list[tuple[str, Any]] = []
        self._pending: tuple[str, Any] = ("", None)
        self._observation: Any = None
        self._restarted = False

    @property
    def closed(self) -> bool:
        """Return whether the pipe is closed."""
        return self._pipe.closed

    @property
    def seed(self) -> int | None:
        """Seed of the current episode."""
        resets = [data for command, data in (*self._episode, self._pending) if command == "reset"]
        return resets[-1]["seed"] if resets else None

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether :meth:`recv` returns without waiting, which includes that the process is dead.

        Args:
            timeout: Seconds to wait; None waits without limit.
        """
        if self._pending[0] == "idle":
            return True
        try:
            return self._pipe.poll(timeout)
        except OSError:
            return True

    def send(self, message: tuple[str, Any]) -> None:
        """Send a command and its data. If the process is dead, :meth:`recv` detects it.

        Nothing is sent that would step or reset an idle environment, whose observation stays the same.
        """
        if message[0] == "reset-noop" or (message[0] == "step" and self._owner.idle[self._index]):
            self._pending = ("idle", message[0])
            return
        self._pending = message
        with suppress(OSError):
            self._pipe.send(message)

    def recv(self) -> Any:
        """Receive the result of the last command.

        Raises:
            EnvironmentFailedError: If the process died and is not restarted, or the environment raised an error.
        """
        if self._pending[0] == "idle":
            return self._idle_outcome(), True
        try:
            result = self._pipe.recv()
        except (EOFError, OSError):
            if self._pending[0] == "close":
                return None, True
            result = self._restart(self._exit_reason())
        if not result[1]:
            raise self._error()
        self._record(*self._pending)
        if self._pending[0] in ("reset", "step"):
            self._observation = result[0][0]
        return result

    def _idle_outcome(self) -> tuple[Any, ...]:
        """Return what a step or a reset of the other environments returns for this one."""
        observation = self._observation
        if not any(command == "reset" for command, _ in self._episode):
            observation = empty_observation(self._owner.single_observation_space)
        return (observation, {}) if self._pending[1] == "reset-noop" else (observation, 0.0, False, False, {})

    def _record(self, command: str, data: Any) -> None:
        """Record a command that has to be replayed after a restart."""
        if command == "_setattr":
            self._attributes[data[0]] = data[1]
        elif command == "reset":
            self._episode, self._restarted = [(command, data)], False
        elif command == "step":
            self._episode.append((command, data))

    def _restart(self, reason: str) -> Any:
        """Restart the process, replay all recorded commands and return the result of the pending one."""
        if self._owner.on_death == "fail":
            raise EnvironmentFailedError(f"{self._name()} died: {reason}; set env.on_death to restart to continue.")
        if self._restarted:
            raise EnvironmentFailedError(f"{self._name()} died twice in one episode: {reason}.")
        self._pipe.close()
        self._pipe = self._owner.start_process(self._index)
        result: Any = None
        try:
            for message in (*(("_setattr", item) for item in self._attributes.items()), *self._episode, self._pending):
                self._pipe.send(message)
                result = self._pipe.recv()
        except (EOFError, OSError):
            raise EnvironmentFailedError(f"{self._name()} died twice in one episode: {self._exit_reason()}.") from None
        self._restarted = True
        return result

    def _exit_reason(self) -> str:
        process = self._owner.processes[self._index]
        process.join(timeout=5)
        code = process.exitcode
        if code is None:
            return "its process does not respond"
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit status {code}"

    def _error(self) -> EnvironmentFailedError:
        try:
            _, kind, value, _ = self._owner.error_queue.get(timeout=5)
            if issubclass(kind, EnvironmentFailedError):
                return EnvironmentFailedError(f"environment {self._index} of {value}")
            reason = " ".join(f"{kind.__name__}: {value}".split())
        except queue.Empty:
            reason = "an unknown error"
        return EnvironmentFailedError(f"{self._name()} raised {reason}")

    def _name(self) -> str:
        return f"environment {self._index} of {self._owner.name} (episode seed {self.seed})"

"""Vectorized environments: all copies in this process, or each copy in a process of its own."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from lrl.envs.native import EnvironmentFailedError, empty_observation

_CONTEXT = "forkserver"
"""Start method of processes; forking a process with torch's threads can deadlock."""


class SupervisedAsyncVectorEnv(AsyncVectorEnv):
    """Version of Gymnasium's ``AsyncVectorEnv`` that detects dead processes and does not step idle copies.

    Observations are sent through pipes, because Gymnasium 1.4 corrupts texts in shared memory.

    Args:
        env_fns: functions that each create one environment.
        name: name of the environment, for error messages.

    Attributes:
        idle: see :class:`~lrl.envs.processes.SeparateEnvs`.
        steps_ended_copies: always True, because :meth:`step` skips idle copies, so other copies can continue before
            ended ones are reset.

    Raises:
        ValueError: If the copies have different spaces, or cannot be created in another process.
        EnvironmentFailedError: If a process dies or an environment raises an error during any later call.
    """

    steps_ended_copies = True

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]], name: str) -> None:
        self.name = name
        self.idle = np.ones(len(env_fns), dtype=bool)
        try:
            super().__init__(env_fns, shared_memory=False, context=_CONTEXT, autoreset_mode=AutoresetMode.DISABLED)
        except RuntimeError as error:  # raised by Gymnasium for different spaces
            raise ValueError(f"env.id is {name!r}, whose copies have different spaces: {error}") from error
        except (EOFError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
            self._end_processes()
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
            raise ValueError(
                f"env.vectorization is 'async', but env.id {name!r} cannot be created in another process ({reason}); "
                "register it in a module and set env.id to module:id, use env.kwargs that can be pickled, and start "
                "a script's work under if __name__ == '__main__', or set env.vectorization to 'sync'."
            ) from error
        self.parent_pipes: list[Any] = [WorkerPipe(self, index, pipe) for index, pipe in enumerate(self.parent_pipes)]

    def _end_processes(self) -> None:
        """End the processes of environments that could not be created."""
        self.closed = True  # otherwise Gymnasium sends commands to them when this object is deleted
        for process in getattr(self, "processes", ()):
            if process.pid is not None:
                process.terminate()
                process.join()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those selected by ``options["reset_mask"]``, and return their observations."""
        mask = (options or {}).get("reset_mask", True)
        outcome = super().reset(seed=seed, options=options)
        self.idle = self.idle & ~np.asarray(mask)
        return outcome

    def step(self, actions: Any) -> Any:
        """Step all environments that are not idle."""
        outcome = super().step(actions)
        self.idle = self.idle | outcome[2] | outcome[3]
        return outcome

    def end(self, error: EnvironmentFailedError) -> NoReturn:
        """End all processes and raise an error of one of them.

        Raises:
            EnvironmentFailedError: If this method is called; it always raises ``error``.
        """
        self._state = AsyncState.DEFAULT  # discards pending results of the other processes
        self.close(terminate=True)
        raise error


class WorkerPipe:
    """Pipe to the process of one environment, which detects the end of the process and skips an idle environment.

    Args:
        owner: the vectorized environment that owns the process.
        index: index of the environment.
        pipe: the pipe to the process.
    """

    def __init__(self, owner: SupervisedAsyncVectorEnv, index: int, pipe: Connection) -> None:
        self._owner, self._index, self._pipe = owner, index, pipe
        self._command, self._is_skipped = "", False
        """The last command, and whether it was skipped because the environment is idle."""
        self._seed: int | None = None
        self._observation = empty_observation(owner.single_observation_space)

    @property
    def closed(self) -> bool:
        """True if the pipe is closed."""
        return self._pipe.closed

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether :meth:`recv` would return without waiting; this is also the case if the process is dead.

        Args:
            timeout: seconds to wait; None waits without limit.
        """
        try:
            return self._is_skipped or self._pipe.poll(timeout)
        except OSError:
            return True

    def send(self, message: tuple[str, Any]) -> None:
        """Send a command and its data. If the process is dead, :meth:`recv` detects it.

        Two commands are not sent, because they do not change the observation: the step of an idle environment, and
        ``reset-noop``, which Gymnasium sends to environments that ``reset_mask`` does not select.
        """
        self._command, data = message
        self._is_skipped = self._command == "reset-noop" or (self._command == "step" and self._owner.idle[self._index])
        if self._command == "reset":
            self._seed = data["seed"]
        if not self._is_skipped:
            with suppress(OSError):
                self._pipe.send(message)

    def recv(self) -> Any:
        """Receive the result of the last command.

        Raises:
            EnvironmentFailedError: If the process died, or the environment raised an error.
        """
        if self._is_skipped:
            step = (self._observation, 0.0, False, False, {})
            return (step if self._command == "step" else (self._observation, {})), True
        try:
            result = self._pipe.recv()
        except (EOFError, OSError):
            if self._command == "close":
                return None, True
            self._owner.end(EnvironmentFailedError(f"{self._name()} died: {self._exit_reason()}."))
        if not result[1]:
            self._owner.end(self._error())
        if self._command in ("reset", "step"):
            self._observation = result[0][0]
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
        return f"environment {self._index} of {self._owner.name} (episode seed {self._seed})"


class SeparateEnvs(SyncVectorEnv):
    """Version of Gymnasium's ``SyncVectorEnv`` that does not step idle copies.

    ``infos`` has one array ``(env,)`` per name, without Gymnasium's masks ``_<name>``. If the info of a copy lacks the
    name, its element is 0 or False in an array of numbers or bools, otherwise None.

    Args:
        env_fns: functions that each create one copy.
        name: name of the environment, for error messages.
        collects_infos: whether :meth:`reset` and :meth:`step` return infos; if not, they return an empty dictionary.

    Attributes:
        idle: copies that :meth:`step` does not step, bool ``(env,)``; their observation stays the same and their reward
            is 0. A copy is idle before its first reset, and from the end of its episode to the next reset.
        steps_ended_copies: always True, because :meth:`step` skips idle copies, so other copies can continue before
            ended ones are reset.

    Raises:
        ValueError: If the copies have different spaces.
    """

    steps_ended_copies = True

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]], name: str, collects_infos: bool = True) -> None:
        try:
            super().__init__(env_fns, autoreset_mode=AutoresetMode.DISABLED)
        except RuntimeError as error:  # raised by Gymnasium for different spaces
            raise ValueError(f"env.id is {name!r}, whose copies have different spaces: {error}") from error
        self.name, self._collects_infos = name, collects_infos
        self.idle = np.ones(self.num_envs, dtype=bool)
        self._env_obs: list[Any] = [None] * self.num_envs

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start episodes and return the observations of all copies.

        Args:
            seed: one seed per copy, or the first of consecutive seeds.
            options: ``reset_mask``, bool ``(env,)``, selects the copies; all other options are passed to them.
        """
        mask, seeds = reset_arguments(self.num_envs, seed, options)
        infos: list[Mapping[str, Any]] = [{}] * self.num_envs
        for row in np.flatnonzero(mask).tolist():
            self._env_obs[row], infos[row] = self.envs[row].reset(seed=seeds[row], options=options)
        if any(observation is None for observation in self._env_obs):  # of copies that have never been reset
            empty = empty_observation(self.single_observation_space)
            self._env_obs = [empty if one is None else one for one in self._env_obs]
        self.idle = self.idle & ~mask
        return self._batch(), self._infos(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step in each copy that is not idle."""
        rewards, terminated, truncated = [0.0] * self.num_envs, [False] * self.num_envs, [False] * self.num_envs
        infos: list[Mapping[str, Any]] = [{}] * self.num_envs
        each = zip(self.envs, iterate(self.action_space, actions), self.idle.tolist(), strict=True)
        for row, (env, action, idle) in enumerate(each):
            if not idle:
                outcome: Any = env.step(action)
                self._env_obs[row], rewards[row], terminated[row], truncated[row], infos[row] = outcome
        ends = np.array((terminated, truncated), dtype=bool)
        self.idle = self.idle | ends[0] | ends[1]
        return self._batch(), np.array(rewards, dtype=np.float64), ends[0], ends[1], self._infos(infos)

    def _batch(self) -> Any:
        """Return the current observations in new arrays, which later steps do not change."""
        space = self.single_observation_space
        with np.errstate(over="ignore"):  # numbers too large for float32 become infinite; check_batch reports these
            return concatenate(space, self._env_obs, create_empty_array(space, self.num_envs, fn=np.empty))

    def _infos(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Return one array ``(env,)`` per name in the infos of the copies."""
        if not self._collects_infos:
            return {}
        names = dict.fromkeys(name for info in infos for name in info)
        return {name: _column([info.get(name) for info in infos]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    """Return one value per copy as an array ``(env,)``, of dtype object unless all have the same simple type."""
    kinds = {value.__class__ for value in values} - {type(None)}
    if kinds <= {bool} or kinds <= {int} or kinds <= {float}:
        zero = next(iter(kinds))(0) if kinds else None
        return np.array([zero if value is None else value for value in values])
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def reset_arguments(
    num_envs: int, seed: int | list[int | None] | None, options: dict[str, Any] | None
) -> tuple[np.ndarray, list[int | None]]:
    """Return which copies are reset, bool ``(env,)``, and the seed of each copy.

    Args:
        num_envs: number of copies.
        seed: see :meth:`SeparateEnvs.reset`.
        options: see :meth:`SeparateEnvs.reset`.

    Raises:
        ValueError: If ``seed`` is a list of another length.
    """
    if seed is None or isinstance(seed, (int, np.integer)):
        seeds = [None if seed is None else int(seed) + row for row in range(num_envs)]
    else:
        seeds = [None if one is None else int(one) for one in seed]
    if len(seeds) != num_envs:
        raise ValueError(
            f"seed is a list of {len(seeds)} numbers; there must be one for each of {num_envs} environments."
        )
    mask = (options or {}).get("reset_mask")
    return np.ones(num_envs, dtype=bool) if mask is None else mask, seeds

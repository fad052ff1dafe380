"""Vectorized environments: all copies in this process, or divided between several processes."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from lrl.envs.native import OWN_OPTIONS, EnvironmentFailedError, empty_observation
from lrl.faults import reason_of

_CONTEXT = "forkserver"
"""Start method of processes; forking a process with torch's threads can deadlock."""

_PRELOADED = ["__main__", "lrl.envs.factory"]
"""Modules that the fork server imports once for all processes, so that not each of them imports torch again."""

_Answer = tuple[str, Any]
"""What a process sends: a problem, empty if there is none, and the result."""


class SeparateEnvs(SyncVectorEnv):
    """Version of Gymnasium's ``SyncVectorEnv`` that does not step idle copies.

    ``infos`` has one array ``(env,)`` per name, without Gymnasium's masks ``_<name>``. If the info of a copy lacks the
    name, its element is NaN, 0 or False in an array of floats, integers or bools, otherwise None.

    Args:
        env_fns: functions that each create one copy.
        name: name of the environment, for error messages.
        collects_infos: whether :meth:`reset` and :meth:`step` return infos; if not, they return an empty dictionary.
        current: its element is set to the index of the copy that is being reset or stepped; None uses a new list.

    Attributes:
        idle: copies that :meth:`step` does not step, bool ``(env,)``; their observation stays the same and their reward
            is 0. A copy is idle before its first reset, and from the end of its episode to the next reset.
        steps_ended_copies: always True, because :meth:`step` skips idle copies, so other copies can continue before
            ended ones are reset.

    Raises:
        ValueError: If the copies have different spaces.
    """

    steps_ended_copies = True

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        name: str,
        collects_infos: bool = True,
        current: MutableSequence[int] | None = None,
    ) -> None:
        try:
            super().__init__(env_fns, autoreset_mode=AutoresetMode.DISABLED)
        except RuntimeError as error:  # raised by Gymnasium for different spaces
            raise ValueError(f"env.id is {name!r}, whose copies have different spaces: {error}") from error
        self.name, self._collects_infos = name, collects_infos
        self._current = [0] if current is None else current
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
            self._current[0] = row
            try:
                self._env_obs[row], infos[row] = self.envs[row].reset(seed=seeds[row], options=options)
            except EnvironmentFailedError as error:
                raise self._named(error) from error
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
                self._current[0] = row
                try:
                    outcome: Any = env.step(action)
                except EnvironmentFailedError as error:
                    raise self._named(error) from error
                self._env_obs[row], rewards[row], terminated[row], truncated[row], infos[row] = outcome
        ends = np.array((terminated, truncated), dtype=bool)
        self.idle = self.idle | ends[0] | ends[1]
        return self._batch(), np.array(rewards, dtype=np.float64), ends[0], ends[1], self._infos(infos)

    def _named(self, error: EnvironmentFailedError) -> EnvironmentFailedError:
        """Return an error of the copy that is being played with its index."""
        return EnvironmentFailedError(f"environment {self._current[0]} of {error}")

    def _batch(self) -> Any:
        """Return the current observations in new arrays, which later steps do not change."""
        space = self.single_observation_space
        with np.errstate(over="ignore"):  # numbers too large for float32 become infinite; check_batch reports these
            return concatenate(space, self._env_obs, create_empty_array(space, self.num_envs, fn=np.empty))

    def _infos(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Return one array ``(env,)`` per name in the infos of the copies."""
        if not self._collects_infos:
            return {}
        return {name: _column(values) for name, values in _values_by_name(infos).items()}


class _CopiesOfProcess(SeparateEnvs):
    """Copies in a process of :class:`ProcessEnvs`, which joins the infos of all processes and numbers all copies."""

    def _named(self, error: EnvironmentFailedError) -> EnvironmentFailedError:
        return error

    def _infos(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return _values_by_name(infos)


class ProcessEnvs(VectorEnv):
    """Vectorized environments whose copies are divided between several processes.

    Each process plays consecutive copies one after another, like :class:`SeparateEnvs`, and returns the same numbers.

    Args:
        env_fns: functions that each create one copy.
        name: name of the environment, for error messages.
        num_processes: number of processes; at most one per copy is started.
        timeout: seconds that a process may take for one step or reset of its copies; None waits without limit.

    Attributes:
        idle: see :class:`SeparateEnvs`.
        processes: the processes, in the order of their copies.
        steps_ended_copies: always True, see :class:`SeparateEnvs`.

    Raises:
        ValueError: If the copies have different spaces, or cannot be created in another process.
        EnvironmentFailedError: If a process dies or does not answer, or an environment raises an error, during any
            later call.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 declared by Gymnasium as an instance variable
    steps_ended_copies = True

    def __init__(
        self, env_fns: Sequence[Callable[[], gym.Env]], name: str, num_processes: int, timeout: float | None = None
    ) -> None:
        self.name, self.num_envs, self._timeout = name, len(env_fns), timeout
        self.idle = np.ones(self.num_envs, dtype=bool)
        self.processes: list[Any] = []
        self._seeds: list[int | None] = [None] * self.num_envs
        self._steps = np.zeros(self.num_envs, dtype=np.int64)
        """Number of steps, including a step in progress, of the current episode of each copy."""
        self._pipes: list[Connection] = []
        self._current: list[MutableSequence[int]] = []
        count = min(num_processes, self.num_envs)
        bounds = [self.num_envs * index // count for index in range(count + 1)]
        self._parts = [slice(*bounds[index : index + 2]) for index in range(count)]
        """Copies of each process."""
        if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:  # the user has set no others
            multiprocessing.set_forkserver_preload(_PRELOADED)
        try:
            for part in self._parts:
                self._start(env_fns[part])
            spaces = [self._created(index) for index in range(count)]
        except (EOFError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
            self._end_processes()
            raise self._cannot_create(reason_of(error)) from error
        self.single_observation_space, self.single_action_space, self.spec = spaces[0]
        if any(one[:2] != spaces[0][:2] for one in spaces):
            self._end_processes()
            raise ValueError(f"env.id is {name!r}, whose copies have different spaces.")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        empty = empty_observation(self.single_observation_space)
        self._observations: list[Any] = [self._batch([empty] * (part.stop - part.start)) for part in self._parts]
        """The current observations of each process."""

    def _start(self, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
        context = multiprocessing.get_context(_CONTEXT)
        pipe, other = context.Pipe()
        current = context.RawArray("i", 1)
        arguments = (other, cloudpickle.dumps(list(env_fns)), self.name, current)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        self.processes.append(process)
        self._pipes.append(pipe)
        self._current.append(current)
        process.start()
        other.close()

    def _created(self, index: int) -> tuple[gym.Space, gym.Space, Any]:
        """Return the spaces and the specification of the copies of a process."""
        problem, result = self._pipes[index].recv()
        if problem:
            self._end_processes()
            raise self._cannot_create(problem)
        return result

    def _cannot_create(self, reason: str) -> ValueError:
        return ValueError(
            f"env.vectorization is 'async', but env.id {self.name!r} cannot be created in another process ({reason}); "
            "register it in a module and set env.id to module:id, use env.kwargs that can be pickled, and start a "
            "script's work under if __name__ == '__main__', or set env.vectorization to 'sync'."
        )

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start episodes and return the observations of all copies; see :meth:`SeparateEnvs.reset`."""
        mask, seeds = reset_arguments(self.num_envs, seed, options)
        others = {name: value for name, value in (options or {}).items() if name not in OWN_OPTIONS}
        self._seeds = [new if chosen else old for new, old, chosen in zip(seeds, self._seeds, mask, strict=True)]
        self._steps = np.where(mask, 0, self._steps)
        calls = {
            index: ("reset", {"seed": seeds[part], "options": others | {"reset_mask": mask[part]}})
            for index, part in enumerate(self._parts)
            if mask[part].any()
        }
        infos: list[Mapping[str, list[Any]]] = [{}] * len(self._parts)
        for index, (observations, info) in self._call(calls).items():
            self._observations[index], infos[index] = observations, info
        self.idle = self.idle & ~mask
        return self._joined_observations(), self._joined_infos(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step in each copy that is not idle."""
        self._steps = self._steps + ~self.idle
        calls = {
            index: ("step", {"actions": actions[part], "idle": self.idle[part]})
            for index, part in enumerate(self._parts)
            if not self.idle[part].all()
        }
        rewards, ends = np.zeros(self.num_envs), np.zeros((2, self.num_envs), dtype=bool)
        infos: list[Mapping[str, list[Any]]] = [{}] * len(self._parts)
        for index, outcome in self._call(calls).items():
            part = self._parts[index]
            self._observations[index], rewards[part], ends[0, part], ends[1, part], infos[index] = outcome
        self.idle = self.idle | ends[0] | ends[1]
        return self._joined_observations(), rewards, ends[0], ends[1], self._joined_infos(infos)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or get an attribute, of each copy."""
        arguments = {"name": name, "args": args, "kwargs": kwargs}
        results = self._call(dict.fromkeys(range(len(self._parts)), ("call", arguments)))
        return tuple(result for part in results.values() for result in part)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each copy."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each copy.

        Args:
            name: name of the attribute.
            values: a list or tuple with one value per copy, or one value for all copies.
        """
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        self._call(
            {index: ("set_attr", {"name": name, "values": each[part]}) for index, part in enumerate(self._parts)}
        )

    def close_extras(self, terminate: bool = False, **kwargs: Any) -> None:
        """Close the copies and end their processes.

        Args:
            terminate: whether to end the processes at once, without closing the copies.
            kwargs: ignored.
        """
        for pipe in self._pipes if not terminate else ():
            with suppress(OSError):
                pipe.send(None)
        self._end_processes(0 if terminate else 5)

    def _call(self, calls: Mapping[int, tuple[str, dict[str, Any]]]) -> dict[int, Any]:
        """Call methods of the copies of some processes, which work at the same time, and return the results."""
        for index, message in calls.items():
            with suppress(OSError):  # of a dead process, which _receive detects
                self._pipes[index].send(message)
        return {index: self._receive(index) for index in calls}

    def _receive(self, index: int) -> Any:
        try:
            if not self._pipes[index].poll(self._timeout):
                self._end(f"{self._place(index)}: no answer within {self._timeout:g} seconds (env.timeout).")
            problem, result = self._pipes[index].recv()
        except (EOFError, OSError):
            self._end(f"{self._place(index)} died: {self._exit_reason(index)}.")
        if problem.startswith("raised"):
            self._end(f"{self._place(index)} {problem}.")
        elif problem:
            self._end(f"environment {self._failing(index)} of {problem}")
        return result

    def _failing(self, index: int) -> int:
        """Return the copy that a process plays at the moment, or played last."""
        return self._parts[index].start + self._current[index][0]

    def _place(self, index: int) -> str:
        copy = self._failing(index)
        return f"environment {copy} of {self.name} (episode seed {self._seeds[copy]}, step {self._steps[copy]})"

    def _exit_reason(self, index: int) -> str:
        process = self.processes[index]
        process.join(timeout=5)
        code = process.exitcode
        if code is None:
            return "its process does not respond"
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit status {code}"

    def _end(self, problem: str) -> NoReturn:
        self.close(terminate=True)
        raise EnvironmentFailedError(problem)

    def _end_processes(self, seconds: float = 0) -> None:
        """End the processes; those that do not end by themselves within a number of seconds are killed."""
        self.closed = True  # Gymnasium closes environments again when they are deleted
        for process in self.processes:
            if process.pid is not None:
                process.join(timeout=seconds)
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def _batch(self, observations: Sequence[Any]) -> Any:
        space = self.single_observation_space
        return concatenate(space, observations, create_empty_array(space, len(observations), fn=np.empty))

    def _joined_observations(self) -> Any:
        return _joined(self.single_observation_space, self._observations)

    def _joined_infos(self, infos: Sequence[Mapping[str, list[Any]]]) -> dict[str, np.ndarray]:
        missing = [[None] * (part.stop - part.start) for part in self._parts]
        pairs = list(zip(infos, missing, strict=True))
        names = dict.fromkeys(name for info in infos for name in info)
        return {name: _column([one for info, nones in pairs for one in info.get(name, nones)]) for name in names}


def _joined(space: gym.Space, parts: Sequence[Any]) -> Any:
    """Join batches of observations of a space."""
    if isinstance(space, gym.spaces.Dict):
        return {name: _joined(one, [part[name] for part in parts]) for name, one in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_joined(one, [part[index] for part in parts]) for index, one in enumerate(space.spaces))
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tuple(one for part in parts for one in part)


def _serve(pipe: Connection, env_fns: bytes, name: str, current: MutableSequence[int]) -> None:
    """Play copies in this process, as the other end of a pipe demands, until it sends None or is closed.

    Args:
        pipe: receives names of methods with their arguments, and sends their results.
        env_fns: the pickled functions that each create one copy.
        name: name of the environment.
        current: its element is set to the index of the copy that is being played.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main process ends this one
    np.random.seed()  # noqa: NPY002 the processes are forked, and global random numbers of environments must differ
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the main process has ended
        try:
            envs = _CopiesOfProcess(pickle.loads(env_fns), name, current=current)
        except Exception as error:
            pipe.send((reason_of(error), None))
            return
        answer: _Answer = "", (envs.single_observation_space, envs.single_action_space, envs.spec)
        while True:
            try:
                pipe.send(answer)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                pipe.send((f"raised {reason_of(error)}", None))
            message = pipe.recv()
            if message is None:
                break
            answer = _answer(envs, *message)
        envs.close()


def _answer(copies: SeparateEnvs, method: str, arguments: dict[str, Any]) -> _Answer:
    """Call a method of the copies, and return the problem, if there is one, and the result."""
    try:
        if method == "step":
            copies.idle = arguments["idle"]
            return "", copies.step(arguments["actions"])
        if method == "call":
            return "", copies.call(arguments["name"], *arguments["args"], **arguments["kwargs"])
        return "", getattr(copies, method)(**arguments)
    except EnvironmentFailedError as error:
        return str(error), None
    except Exception as error:
        return f"raised {reason_of(error)}", None


def _values_by_name(infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all copies for each name in their infos; None where a copy lacks the name."""
    return {name: [info.get(name) for info in infos] for name in dict.fromkeys(name for info in infos for name in info)}


def _column(values: list[Any]) -> np.ndarray:
    """Return one value per copy as an array ``(env,)``, of dtype object unless all have the same simple type."""
    kinds = {value.__class__ for value in values} - {type(None)}
    if kinds <= {bool} or kinds <= {int} or kinds <= {float}:
        missing = None if not kinds else math.nan if kinds == {float} else next(iter(kinds))(0)
        return np.array([missing if value is None else value for value in values])
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

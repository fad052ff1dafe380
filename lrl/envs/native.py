"""Wrappers of native environments: they check returned values, detect success, record steps and reseed noise.

:class:`CheckedEnv` checks what one environment returns and converts values whose meaning is unambiguous, such as a
reward of shape ``(1,)``. :class:`NativeEnv` adds entries to ``info``. :func:`check_batch` checks that all numbers of a
batch are finite, in one NumPy call instead of one per environment.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, final

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.faults import reason_of

OWN_OPTIONS = ("episode", "reset_mask")
"""Options of a reset that lrl passes to its vectorized environments, but not to native environments."""

_SUCCESS = ("success", "is_success")
_NOT_FINITE = "it must be finite"
_MUST_BE_FLAG = "it must be true or false"


class EnvironmentFailedError(ValueError):
    """Raised if an environment raises an error or returns an invalid value, or its process dies.

    The message is one sentence with the environment, the seed of the episode, the step and the problem. The error is a
    ``ValueError``, so that all commands report it.
    """


def shown(value: Any) -> str:
    """Return a value on one line of at most 60 characters, for an error message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the value may be of any class of the environment
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def failure(name: str, seed: Any, step: int, problem: str) -> EnvironmentFailedError:
    """Return the error for a problem at one step; step 0 is the reset."""
    return EnvironmentFailedError(f"{name} (episode seed {seed}, step {step}): {problem}.")


def close_env(env: gym.Env) -> None:
    """Close a native environment; an error is logged as a warning, because the environment is no longer needed."""
    try:
        env.close()
    except Exception as error:
        logging.getLogger("lrl").warning("%s: close raised %s.", _name(env), reason_of(error))


@final
class CheckedEnv(gym.Wrapper):
    """Wrapper that checks everything that a native environment returns, and withholds lrl's own options from it.

    Rewards become finite floats, ``terminated`` and ``truncated`` become bools, and observations have the structure,
    the shapes and a compatible dtype of the observation space. Bounds of a Box are not checked, because many
    environments exceed their own. By default, observations with numbers that are not finite are returned unchanged, and
    :func:`check_batch` reports them after batching.

    Args:
        env: a native environment.
        reset_options: options of every reset; options passed to :meth:`reset` take precedence.
        checks_finite: whether to check here that observations are finite, because nothing else checks them later.

    Raises:
        EnvironmentFailedError: If the environment raises an error or returns an invalid value, in :meth:`reset` or
            :meth:`step`.
    """

    def __init__(
        self, env: gym.Env, reset_options: Mapping[str, Any] | None = None, checks_finite: bool = False
    ) -> None:
        super().__init__(env)
        self.name = _name(env)
        self._space, self._reset_options = env.observation_space, dict(reset_options or {})
        self._checks_finite = checks_finite
        self._seed: int | None = None
        self._step = 0
        self._left_out: set[str] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode. If there are no options for the environment, it gets ``options=None``."""
        self._seed, self._step = seed, 0
        given = {name: value for name, value in (options or {}).items() if name not in OWN_OPTIONS}
        try:
            outcome: Any = self.env.reset(seed=seed, options=(self._reset_options | given) or None)
        except (Exception, SystemExit) as error:
            self._raised("reset", error)
        if not (isinstance(outcome, tuple) and len(outcome) == 2):
            self._fail(f"reset returned {shown(outcome)}; it must return (observation, info)")
        observation, info = outcome
        if not isinstance(info, Mapping):
            self._fail(f"info is {shown(info)}; it must be a dictionary")
        return self._observation(observation), dict(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        self._step += 1
        try:
            outcome: Any = self.env.step(action)
        except (Exception, SystemExit) as error:
            self._raised("step", error)
        if outcome.__class__ is not tuple or len(outcome) != 5:
            must = "it must return (observation, reward, terminated, truncated, info)"
            self._fail(f"step returned {shown(outcome)}; {must}")
        observation, reward, terminated, truncated, info = outcome
        if reward.__class__ is not float or not math.isfinite(reward):
            reward = self._reward(reward)
        if terminated.__class__ is not bool:
            terminated = self._flag("terminated", terminated)
        if truncated.__class__ is not bool:
            truncated = self._flag("truncated", truncated)
        if info.__class__ is not dict:
            if not isinstance(info, Mapping):
                self._fail(f"info is {shown(info)}; it must be a dictionary")
            info = dict(info)
        return self._observation(observation), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment; see :func:`close_env`."""
        close_env(self.env)

    def reported(self, info: Mapping[str, Any]) -> tuple[bool | None, dict[str, float]]:
        """Return the entries of the last step's ``info`` that lrl uses.

        Returns:
            Two values. The first is ``info["success"]``, or ``info["is_success"]`` if that is missing, or None if both
            are missing. The second contains the terms of the reward: each entry ``reward_<term>`` under the name
            ``reward/<term>``. A term that is not a finite number is left out, and one warning is logged per name.

        Raises:
            EnvironmentFailedError: If ``success`` or ``is_success`` is neither a bool nor 0 or 1.
        """
        success = None
        for name in _SUCCESS:
            if success is None and info.get(name) is not None:
                success = self._flag(f"info[{name!r}]", info[name])
        terms: dict[str, float] = {}
        for name, value in info.items():
            if name.__class__ is str and name.startswith("reward_"):
                number = value if value.__class__ is float else _number(value)
                if number is not None and math.isfinite(number):
                    terms[f"reward/{name[7:]}"] = number
                elif name not in self._left_out:
                    self._left_out.add(name)
                    problem = f"info[{name!r}] is {shown(value)}, which is not a finite number and is left out"
                    logging.getLogger("lrl").warning("%s", failure(self.name, self._seed, self._step, problem))
        return success, terms

    def _observation(self, observation: Any) -> Any:
        space = self._space
        if observation.__class__ is not np.ndarray or not _fits(space, observation):
            observation = self._conform(space, observation, "observation")
        if self._checks_finite:
            found = _not_finite(space, observation, "observation")
            if found is not None:
                self._fail(found)
        return observation

    def _conform(self, space: gym.Space, value: Any, key: str) -> Any:
        """Convert an observation to the structure, shapes and dtypes of its space; raise if that is ambiguous."""
        if isinstance(space, spaces.Dict):
            missing = [name for name in space.spaces if not isinstance(value, Mapping) or name not in value]
            if missing:
                self._fail(f"{key} is {shown(value)}; it must be a dictionary with the key {missing[0]!r}")
            return {name: self._conform(part, value[name], f"{key}[{name!r}]") for name, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(space.spaces):
                self._fail(f"{key} is {shown(value)}; it must be a tuple of {len(space.spaces)}")
            pairs = enumerate(zip(space.spaces, value, strict=True))
            return tuple(self._conform(part, one, f"{key}[{index}]") for index, (part, one) in pairs)
        if isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
            return self._array(space, value, key)
        if isinstance(space, spaces.Discrete):
            number = _number(value)
            if number is None or int(space.start) > number or number >= int(space.start + space.n) or number % 1:
                last = int(space.start + space.n) - 1
                self._fail(f"{key} is {shown(value)}; it must be an integer from {int(space.start)} to {last}")
            return np.asarray(int(number), dtype=space.dtype)[()]
        if type(space) is spaces.Text:
            known = isinstance(value, str)
        else:  # subclasses of Text are lrl's own and accept any text; other spaces decide themselves
            known = isinstance(space, spaces.Text) or space.contains(value)
        if not known:
            self._fail(f"{key} is {shown(value)}; it must be in {space}")
        return value

    def _array(self, space: Any, value: Any, key: str) -> np.ndarray:
        if isinstance(value, np.ndarray) and _fits(space, value):
            array = value
        else:
            try:
                array = np.asarray(value)
            except Exception:  # sequences of different lengths, or a class whose conversion fails
                array = np.asarray(None)
            if array.dtype.kind not in "bfiu":
                self._fail(f"{key} is {shown(value)}; it must be an array of numbers")
            if array.shape != space.shape:
                self._fail(f"{key} has shape {array.shape}; it must have shape {space.shape}")
            with np.errstate(all="ignore"):
                cast = array.astype(space.dtype)
            if space.dtype.kind != "f" and not np.array_equal(cast, array):
                self._fail(f"{key} is {shown(value)}, which {space.dtype} cannot represent; its space is {space}")
            array = cast
        if not isinstance(space, spaces.Box) and not space.contains(array.astype(space.dtype)):
            self._fail(f"{key} is {shown(value)}; it must be in {space}")
        return array

    def _reward(self, value: Any) -> float:
        number = _number(value)
        if number is None:
            self._fail(f"reward is {shown(value)}; it must be a number")
        if not math.isfinite(number):
            self._fail(f"reward is {number}; {_NOT_FINITE}")
        return number

    def _flag(self, key: str, value: Any) -> bool:
        """Return a bool for a bool or for the numbers 0 and 1; some environments report success as 1.0."""
        number = _number(value)
        if number is None or number not in (0, 1):
            self._fail(f"{key} is {shown(value)}; {_MUST_BE_FLAG}")
        return bool(number)

    def _fail(self, problem: str) -> NoReturn:
        raise failure(self.name, self._seed, self._step, problem)

    def _raised(self, method: str, error: Exception | SystemExit) -> NoReturn:
        """Raise :class:`EnvironmentFailedError` for an error of the environment.

        Errors that lrl raised, and subclasses of ``SystemExit``, which signal handlers raise, are raised unchanged.
        """
        of_signal = isinstance(error, SystemExit) and type(error) is not SystemExit
        if of_signal or isinstance(error, (EnvironmentFailedError, InvalidActionError)):
            raise error
        raise failure(self.name, self._seed, self._step, f"{method} raised {reason_of(error)}") from error


def _name(env: gym.Env) -> str:
    """Return the registered name of an environment, or the name of its class if it is not registered."""
    spec = env.unwrapped.spec
    return type(env.unwrapped).__name__ if spec is None else spec.id


def _number(value: Any) -> float | None:
    """Convert a real number, or an array with a single number, to a float; return None for any other value."""
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "bfiu":
        return float(value.item())
    return None


def _fits(space: Any, array: np.ndarray) -> bool:
    """Return whether an array can be put into a batch of a Box without conversion."""
    if space.__class__ is not spaces.Box or array.shape != space.shape:
        return False
    return array.dtype == space.dtype or (array.dtype.kind == "f" and space.dtype.kind == "f")


def _not_finite(space: gym.Space, values: Any, key: str) -> str | None:
    """Return a description of the first number of an observation that is not finite; None if all are finite."""
    if isinstance(space, spaces.Dict):
        parts = ((part, values[name], f"{key}[{name!r}]") for name, part in space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        parts = ((part, values[index], f"{key}[{index}]") for index, part in enumerate(space.spaces))
    elif isinstance(space, spaces.Box) and space.dtype.kind == "f":
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.asarray(values, dtype=space.dtype))
        if finite.all():
            return None
        place = tuple(int(index) for index in np.argwhere(~finite)[0])
        index = f"[{', '.join(map(str, place))}]" if place else ""
        value = float(np.asarray(values)[place])
        problem = f", which {space.dtype} cannot represent" if math.isfinite(value) else f"; {_NOT_FINITE}"
        return f"{key}{index} is {value}{problem}"
    else:
        return None
    return next((found for part in parts if (found := _not_finite(*part)) is not None), None)


def check_batch(
    space: gym.Space,
    name: str,
    seeds: Sequence[int] | np.ndarray,
    steps: np.ndarray,
    observations: Any,
    rewards: np.ndarray | None = None,
) -> None:
    """Raise if batched observations or rewards contain a number that is not finite.

    Args:
        space: observation space of a single environment.
        name: name of the environment.
        seeds: seeds of the current episodes, one for each environment.
        steps: number of steps of the current episodes, int64 ``(env,)``.
        observations: a batch of observations of ``space``.
        rewards: float64 ``(env,)``; None after a reset.

    Raises:
        EnvironmentFailedError: If a number is not finite. The message contains its environment, seed, step and index.
    """
    if rewards is not None and not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        problem = f"reward is {rewards[row]}; {_NOT_FINITE}"
        raise failure(f"environment {row} of {name}", seeds[row], int(steps[row]), problem)
    if _not_finite(space, observations, "") is None:
        return
    for row, observation in enumerate(iterate(batch_space(space, len(steps)), observations)):
        problem = _not_finite(space, observation, "observation")
        if problem is not None:
            raise failure(f"environment {row} of {name}", seeds[row], int(steps[row]), problem)


def empty_observation(space: gym.Space) -> Any:
    """Return an observation of zeros, the placeholder for an environment that has not been reset."""
    return next(iter(iterate(batch_space(space, 1), create_empty_array(space, 1, fn=np.zeros))))


SuccessAt = Literal["last_step", "any_step"]
"""Which steps must be a success so that the episode is one: its last step, or at least one step."""


@dataclass(frozen=True, kw_only=True)
class NativeStep:
    """Holds an action of a native environment, the observation before it, and what the step returned.

    Observations and the action are copies, because an environment may overwrite the arrays that it returned.
    """

    context: Any
    """The codec's context, see :meth:`~lrl.codecs.codec.TextCodec.context`; None without a codec."""
    before: Any
    """Observation before the step."""
    action: Any
    observation: Any
    """Observation after the step."""
    reward: float


class NativeEnv(gym.Wrapper):
    """Wrapper that returns the same ``info`` entries for every native environment.

    ``info`` contains ``action_valid`` (True), ``invalid_reason`` (empty) and ``success``. Of the environment's own
    entries it keeps only ``reward_<term>``, as ``reward/<term>``, because vectorizing all of them takes longer than a
    step.

    ``success`` is whether the episode counts as a success if it ends with this step. The first of these rules whose
    condition is met decides whether a step is a success:

    1. If the environment returns ``info["success"]``, or else ``info["is_success"]``: this entry is true.
    2. If ``success_return`` is set: the return up to this step is at least ``success_return``.
    3. If the environment is registered with a ``reward_threshold``: the return up to this step is at least this number.
    4. Otherwise: the step terminates the episode and has its first positive reward.

    With ``success_at="last_step"`` the episode is a success if its last step is one, with ``"any_step"`` if any step
    is one. The return is undiscounted and contains native rewards only.

    Args:
        env: a native environment. What it returns is checked, see :class:`~lrl.envs.native.CheckedEnv`.
        success_return: lowest return at which a step is a success; None selects the registered threshold.
        reset_options: options of every reset; options passed to :meth:`reset` take precedence.
        codec: codec whose context is recorded, so that recorded observations can be converted to text later.
        success_at: see :data:`SuccessAt`.
        checks_finite: see :class:`~lrl.envs.native.CheckedEnv`.

    Attributes:
        records: whether ``info["native"]`` contains a :class:`NativeStep` after each step. Set it before a reset.
        noise_seed: if set, seeds the environment's random number generator after each reset. Environments of one group
            can thereby share their initial state but not their transition noise.
    """

    def __init__(
        self,
        env: gym.Env,
        success_return: float | None = None,
        reset_options: Mapping[str, Any] | None = None,
        codec: TextCodec | None = None,
        success_at: SuccessAt = "last_step",
        checks_finite: bool = False,
    ) -> None:
        self._checked = CheckedEnv(env, reset_options, checks_finite)
        super().__init__(self._checked)
        self._codec, self._any_step = codec, success_at == "any_step"
        self.records = False
        self._context = self._before = None
        self.noise_seed: int | None = None
        spec = env.unwrapped.spec
        registered = None if spec is None else spec.reward_threshold
        self._success_return = registered if success_return is None else success_return
        self._return = 0.0
        self._rewarded = self._succeeded = False

    @property
    def success_so_far(self) -> bool:
        """True if the episode is a success when it ends without another native step."""
        return self._any_step and self._succeeded

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and reseed its random number generator if ``noise_seed`` is set.

        Args:
            seed: seed of the environment.
            options: options of this reset; all except :data:`OWN_OPTIONS` are passed to the environment.
        """
        observation, _ = self.env.reset(seed=seed, options=options)
        if self.noise_seed is not None:
            self.env.unwrapped.np_random = seeding.np_random(int(self.noise_seed))[0]
        self._return, self._rewarded, self._succeeded = 0.0, False, False
        info: dict[str, Any] = {"action_valid": True, "success": False, "invalid_reason": ""}
        if self.records:
            self._context = None if self._codec is None else self._codec.context(self.env)
            self._before = copy.deepcopy(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment with a native action."""
        observation, reward, terminated, truncated, native_info = self._checked.step(action)
        self._return += reward
        reported, terms = self._checked.reported(native_info) if native_info else (None, {})
        success = self._is_success(reward, terminated, reported)
        self._succeeded |= success
        self._rewarded |= reward > 0
        info: dict[str, Any] = {"action_valid": True, "success": success or self.success_so_far, "invalid_reason": ""}
        info |= terms
        if self.records:
            before, self._before = self._before, copy.deepcopy(observation)
            changes: dict[str, Any] = {"action": copy.deepcopy(action), "observation": self._before, "reward": reward}
            info["native"] = NativeStep(context=self._context, before=before, **changes)
        return observation, reward, terminated, truncated, info

    def _is_success(self, reward: float, terminated: bool, reported: bool | None) -> bool:
        """Return whether the step is a success."""
        if reported is not None:
            return reported
        if self._success_return is not None:
            return self._return >= self._success_return
        return terminated and reward > 0 and not self._rewarded

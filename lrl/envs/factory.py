"""Factories of vectorized environments, and HalfCheetah with modified physics."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import logging
import os
import warnings
from abc import ABC, abstractmethod
from typing import Any, Literal, Self

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import VectorEnv

from lrl.codecs.codec import TextCodec
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.registry import codec_for
from lrl.envs.native import NativeEnv, SuccessAt, close_env, shown
from lrl.envs.processes import ProcessEnvs, SeparateEnvs
from lrl.envs.text import TextEnv
from lrl.faults import reason_of
from lrl.files import require
from lrl.ranges import PositiveFloat, PositiveInt, check_arguments, check_kinds, unknown_argument
from lrl.registry import register

_ALWAYS_END = ("lrl/Nim-v0", "Blackjack-v1")
"""Environments without time limit whose episodes always end."""

_TIME_LIMITS = {"CliffWalking-v1": 500, "CliffWalkingSlippery-v1": 500}
"""Time limits of environments that are registered without one and in which an episode may never end."""


class EnvFactory(ABC):
    """Abstract base class of factories of vectorized environments without autoreset (``AutoresetMode.DISABLED``)."""

    success_at: SuccessAt = "last_step"
    """Which step decides whether an episode is a success: the last one, or any."""
    replayable: bool = True
    """Whether :class:`~lrl.training.diagnosis.Diagnosis` may play episodes again in another environment."""

    @property
    @abstractmethod
    def codec(self) -> TextCodec:
        """Codec of the environments."""

    def prepare_data(self) -> None:  # noqa: B027 (most environments have nothing to download)
        """Download what the environments need. Called once per machine, before all other methods."""

    @abstractmethod
    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        """Create a vectorized environment.

        Args:
            num_envs: number of environments; at least 1.
            response_format: name of the format of responses. Observations and actions are then tuples of ``num_envs``
                strings. None creates an environment with native observations and actions.
        """

    @property
    def spaces(self) -> tuple[gym.Space, gym.Space]:
        """Native observation space and action space of a single environment."""
        envs = self.make(1, None)
        envs.close()
        return envs.single_observation_space, envs.single_action_space

    def check(self, key: str, response_format: str | None) -> None:
        """Create one environment, so that an invalid setting is reported at the start of a run.

        Args:
            key: configuration key of the factory, with which the error message begins.
            response_format: see :meth:`make`.

        Raises:
            ValueError: If the environment cannot be created.
        """
        try:
            self.make(1, response_format).close()
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    def with_settings(self, **settings: Any) -> Self:
        """Return a copy with other values of some attributes, such as ``success_at`` or ``vectorization``."""
        factory = copy.copy(self)
        vars(factory).update(settings)
        return factory

    def training_split(self) -> EnvFactory:
        """Return a factory of the same environments without levels that are held out for testing."""
        return self


@register
class GymnasiumEnvs(EnvFactory):
    """Factory of vectorized copies of one registered Gymnasium environment.

    Args:
        id: registered name, or ``module:name``, which imports ``module`` first.
        kwargs: arguments of the environment.
        invalid_penalty: reward of a response without a legal action.
        max_invalid: number of consecutive invalid responses that ends an episode.
        vectorization: ``sync`` steps the copies one after another, ``async`` divides them between processes.
        num_processes: number of processes with ``async``, at most one per copy; None selects one per CPU core.
        timeout: seconds that a process may take for one step or reset of its copies, with ``async``; None waits
            without limit.
        max_episode_steps: number of steps after which an episode is truncated; None selects the registered limit, or
            500 for CliffWalking, which has none.
        success_return: minimum return of an episode that counts as a success; None uses the other criteria of
            :class:`~lrl.envs.native.NativeEnv`.
        success_at: ``last_step``: an episode is a success if its last step is one; ``any_step``: if any step is one.
        codec: the codec of the environment; None selects the registered one.
        numbers: the format of numbers, for environments without a special codec; None selects decimals.
        reset_options: options of every reset, such as ``low`` and ``high`` of CartPole.

    Raises:
        ValueError: If a setting is invalid.
    """

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        invalid_penalty: float = -0.1,
        max_invalid: PositiveInt = 5,
        vectorization: Literal["sync", "async"] = "sync",
        num_processes: PositiveInt | None = None,
        timeout: PositiveFloat | None = None,
        max_episode_steps: PositiveInt | None = None,
        success_return: float | None = None,
        success_at: SuccessAt = "last_step",
        codec: TextCodec | None = None,
        numbers: NumberFormat | None = None,
        reset_options: dict[str, Any] | None = None,
    ) -> None:
        check_arguments(GymnasiumEnvs.__init__, locals(), "env")
        if codec is not None and numbers is not None:
            raise ValueError("env.codec and env.numbers are both set; numbers must be null with a custom codec.")
        self.id = id
        self.kwargs = dict(kwargs or {})
        self.invalid_penalty = invalid_penalty
        self.max_invalid = int(max_invalid)
        self.vectorization: Literal["sync", "async"] = vectorization
        self.num_processes, self.timeout = num_processes, timeout
        self.max_episode_steps = max_episode_steps and int(max_episode_steps)
        self.success_return, self.success_at = success_return, success_at
        self._warned = False
        self.numbers, self.reset_options = numbers, dict(reset_options or {})
        self.codec_config = codec  # compared on resume, unlike the codec that is found for the environment

    @functools.cached_property
    def codec(self) -> TextCodec:
        """The given codec, or the registered codec of the environment."""
        if self.codec_config is not None:
            return self.codec_config
        env = self.make_native()
        codec = codec_for(env, self.numbers)
        close_env(env)
        return codec

    def make_native(self) -> gym.Env:
        """Create one native environment with its time limit, without text.

        Raises:
            ValueError: If the environment is not registered, cannot be created or does not accept ``kwargs``.
        """
        spec = _spec(self.id)
        spec.order_enforce = False  # this wrapper and the environment checker slow down small environments
        if any(name in str(spec.entry_point) for name in ("mujoco", "physics")):
            redirect_mujoco_warnings()
        entry_point: Any = None
        try:
            entry_point = _entry_point(spec)
            check_kinds(entry_point, self.kwargs)
            env = gym.make(spec, max_episode_steps=self.max_episode_steps, disable_env_checker=True, **self.kwargs)
        except Exception as error:
            if self.kwargs and isinstance(error, (TypeError, KeyError, ValueError)):
                reason = unknown_argument(entry_point, self.kwargs, error) or error
                raise ValueError(f"env.kwargs is {self.kwargs}, which {self.id} does not accept: {reason}") from error
            raise ValueError(f"env.id is {self.id!r}, which cannot be created ({reason_of(error)}).") from error
        for name in ("observation_space", "action_space"):
            space = getattr(env, name, None)
            if not isinstance(space, gym.Space):
                raise ValueError(
                    f"env.id is {self.id!r}, whose {name} is {shown(space)}; it must be a space of Gymnasium."
                )
        return env

    def training_split(self) -> GymnasiumEnvs:
        """Return a copy with ``split: train`` if the environment uses another split, else the factory itself."""
        split = self.kwargs.get("split", _spec(self.id).kwargs.get("split", "train"))
        return self if split == "train" else self.with_settings(kwargs=self.kwargs | {"split": "train"})

    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        """Create a vectorized environment; see :meth:`EnvFactory.make`.

        Raises:
            ValueError: If ``num_envs`` is less than 1 or the environment cannot be created.
        """
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
        env = self.make_native()  # raises a single error for an invalid setting, instead of one per process
        self._warn_without_time_limit(env)
        close_env(env)
        # The copy holds the codec, which each process would otherwise create from an environment of its own.
        env_fns = [functools.partial(self.with_settings(codec=self.codec).make_one, response_format)] * num_envs
        if self.vectorization == "sync":
            return SeparateEnvs(env_fns, self.id)
        return ProcessEnvs(env_fns, self.id, self.num_processes or _cores(), self.timeout)

    def make_one(self, response_format: str | None) -> gym.Env:
        """Create one environment, with native observations and actions if ``response_format`` is None."""
        env = self.make_native()
        if response_format is None:
            return NativeEnv(env, self.success_return, self.reset_options, self.codec, self.success_at)
        invalid_rule = self.invalid_penalty, self.max_invalid
        measure = self.success_return, self.reset_options, self.success_at
        return TextEnv(env, self.codec, response_format, *invalid_rule, *measure)

    def _warn_without_time_limit(self, env: gym.Env) -> None:
        """Warn once for each factory if an episode may never end. MiniGrid counts ``max_steps`` itself."""
        limit = _spec(self.id).max_episode_steps if self.max_episode_steps is None else self.max_episode_steps
        own_limit = getattr(env.unwrapped, "max_steps", None)
        if self._warned or (limit is not None and limit > 0) or own_limit is not None or self.id in _ALWAYS_END:
            return
        self._warned = True
        logging.getLogger("lrl").warning(
            "env is %r, for which Gymnasium has no time limit; set env.max_episode_steps, unless all episodes end.",
            self.id,
        )


def _cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spec(id: str) -> EnvSpec:
    """Return a copy of a registered specification, with a time limit.

    Raises:
        ValueError: If no environment is registered under this name, or its package is not installed.
    """
    module, _, name = id.rpartition(":")
    if "BabyAI-" in id or "MiniGrid-" in id:
        require("minigrid", "babyai", f"env.id {id}")
    try:
        if module:
            importlib.import_module(module)
        spec = copy.deepcopy(gym.spec(name))
    except (gym.error.Error, ModuleNotFoundError) as error:
        hint = f"; with lrl[dm-control] installed it is 'shimmy:{id}'" if id.startswith("dm_control/") else ""
        raise ValueError(f"env.id is {id!r}, which is not registered{hint}: {error}") from error
    if spec.max_episode_steps is None:
        spec.max_episode_steps = _TIME_LIMITS.get(spec.id)
    return spec


def _entry_point(spec: EnvSpec) -> Any:
    """Return the class or function that creates an environment."""
    entry = spec.entry_point
    return load_env_creator(entry) if isinstance(entry, str) else entry


def half_cheetah(gravity: float = 1.0, friction: float = 1.0, **kwargs: Any) -> gym.Env:
    """Create Gymnasium's HalfCheetah, version 5, with modified gravity and friction.

    Args:
        gravity: factor of the gravity; positive.
        friction: factor of all friction coefficients of the ground and the body; positive.
        kwargs: arguments of HalfCheetah, such as ``reset_noise_scale``.

    Raises:
        ValueError: If a factor is not positive.
    """
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

    for name, factor in (("gravity", gravity), ("friction", friction)):
        if factor <= 0:
            raise ValueError(f"{name} is {factor}; it must be positive.")
    env = HalfCheetahEnv(**kwargs)
    env.model.opt.gravity[:] *= gravity
    env.model.geom_friction[:] *= friction
    return env


def redirect_mujoco_warnings() -> None:
    """Report MuJoCo's warnings as Python warnings instead of writing a log file; deprecation warnings are dropped."""
    if importlib.util.find_spec("mujoco") is None:
        return
    import mujoco

    bindings: Any = mujoco
    bindings.set_mju_user_warning(_warn)


def _warn(text: str) -> None:
    """Report a warning of MuJoCo, unless it is about a deprecation."""
    if "deprecated" not in text:
        warnings.warn(f"MuJoCo: {text}", RuntimeWarning, stacklevel=2)

"""How vectorised environments are made."""

from __future__ import annotations

import copy
import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from lrl.codecs.codec import TextCodec
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.registry import codec_for
from lrl.envs.mujoco_warnings import redirect_mujoco_warnings
from lrl.envs.native import NativeEnv
from lrl.envs.processes import OnDeath, ProcessEnvs
from lrl.envs.text import TextEnv

_TIME_LIMITS = {"CliffWalking-v1": 500, "CliffWalkingSlippery-v1": 500}
"""Of environments that are registered without one and in which a policy can stay for ever."""


class EnvFactory(ABC):
    """Makes vectorised environments that never reset themselves (``AutoresetMode.DISABLED``)."""

    @property
    @abstractmethod
    def codec(self) -> TextCodec:
        """The text of these environments."""

    @abstractmethod
    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        """Make ``num_envs`` environments side by side.

        Args:
            num_envs: how many.
            response_format: the format in which answers are written, by name; observations are then a tuple of
                ``num_envs`` strings, as are actions. None gives native observations and actions.
        """

    @property
    def spaces(self) -> tuple[gym.Space, gym.Space]:
        """What a policy that acts natively sees of one environment, and what it answers."""
        envs: Any = self.make(1, None)
        envs.close()
        return envs.single_observation_space, envs.single_action_space

    def check(self, key: str, response_format: str | None) -> None:
        """Make one environment, so that a mistake in its settings is reported at the start of a run.

        Raises:
            ValueError: it cannot be made; the message begins with ``key``, under which it is configured.
        """
        try:
            self.make(1, response_format).close()
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    def training_levels(self) -> EnvFactory:
        """The same environments without anything that is held out for testing."""
        return self


class GymnasiumEnvs(EnvFactory):
    """Copies of one registered Gymnasium environment.

    Args:
        id: registered name, or ``module:name`` where importing ``module`` registers it.
        kwargs: handed to the environment.
        invalid_penalty: reward of an answer that is no legal action.
        max_invalid: invalid answers in a row that end an episode.
        vectorization: ``sync`` steps the copies one after another, ``async`` each in a process of its own.
        on_death: of such a process: ``fail`` ends the run, ``restart`` starts it again and plays its episode up to
            where it was.
        max_episode_steps: steps after which an episode is truncated; None keeps what is registered, or 500 for
            CliffWalking, which has no limit of its own.
        success_return: return from which an episode is a success; None: see :class:`~lrl.envs.native.NativeEnv`.
        codec: the environment's text; None looks it up.
        numbers: how its numbers are written, if it is told in numbers; None takes decimals.
        reset_options: handed to every reset, such as CartPole's ``low`` and ``high``.
    """

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        invalid_penalty: float = -0.1,
        max_invalid: int = 5,
        vectorization: Literal["sync", "async"] = "sync",
        on_death: OnDeath = "fail",
        max_episode_steps: int | None = None,
        success_return: float | None = None,
        codec: TextCodec | None = None,
        numbers: NumberFormat | None = None,
        reset_options: dict[str, Any] | None = None,
    ) -> None:
        if codec is not None and numbers is not None:
            raise ValueError("env.codec and env.numbers are both set; a codec of your own writes its numbers itself.")
        if vectorization not in ("sync", "async"):
            raise ValueError(f"env.vectorization is {vectorization!r}; it must be sync or async.")
        if max_invalid < 1:
            raise ValueError(f"env.max_invalid is {max_invalid}; it must be at least 1.")
        self.id = id
        self.kwargs = dict(kwargs or {})
        self.invalid_penalty = invalid_penalty
        self.max_invalid = max_invalid
        if on_death not in ("fail", "restart"):
            raise ValueError(f"env.on_death is {on_death!r}; it must be fail or restart.")
        self.vectorization: Literal["sync", "async"] = vectorization
        self.on_death: OnDeath = on_death
        self.max_episode_steps = max_episode_steps
        self.success_return = success_return
        self._codec, self.numbers, self.reset_options = codec, numbers, dict(reset_options or {})

    @property
    def codec(self) -> TextCodec:
        """The codec that was given, or the one that speaks for this environment."""
        if self._codec is None:
            env = self.make_native()
            self._codec = codec_for(env, self.numbers)
            env.close()
        return self._codec

    def make_native(self) -> gym.Env:
        """One bare environment with its time limit, without text.

        Raises:
            ValueError: it is not registered, or does not accept ``kwargs``.
        """
        return _make_native(self.id, self.kwargs, self.max_episode_steps)

    def training_levels(self) -> GymnasiumEnvs:
        """Itself, or a copy with ``split: train`` where the environment has a split and this is another one."""
        split = self.kwargs.get("split", _spec(self.id).kwargs.get("split", "train"))
        if split == "train":
            return self
        twin = copy.copy(self)
        twin.kwargs = self.kwargs | {"split": "train"}
        return twin

    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        """See :meth:`EnvFactory.make`."""
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
        self.make_native().close()  # a bad setting is one error here, not one per process
        native = functools.partial(_make_native, self.id, self.kwargs, self.max_episode_steps)
        if response_format is None:
            make_one = functools.partial(_make_measured, native, self.success_return, self.reset_options, self.codec)
        else:
            rule = (response_format, self.invalid_penalty, self.max_invalid, self.success_return, self.reset_options)
            make_one = functools.partial(_make_text, native, self.codec, rule)
        copies = [make_one] * num_envs
        if self.vectorization == "sync":
            return SyncVectorEnv(copies, copy=response_format is None, autoreset_mode=AutoresetMode.DISABLED)
        return ProcessEnvs(copies, self.id, self.on_death)


def _spec(id: str) -> EnvSpec:
    module, _, name = id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = copy.deepcopy(gym.spec(name))
    except (gym.error.Error, ModuleNotFoundError) as error:
        hint = f"; it is 'shimmy:{id}' with lrl[dm-control]" if id.startswith("dm_control/") else ""
        raise ValueError(f"env.id is {id!r}, which is not registered{hint}: {error}") from error
    if spec.max_episode_steps is None:
        spec.max_episode_steps = _TIME_LIMITS.get(spec.id)
    return spec


def _make_native(id: str, kwargs: Mapping[str, Any], max_episode_steps: int | None) -> gym.Env:
    spec = _spec(id)
    spec.order_enforce = False  # like the checker, it slows a small environment and finds no fault of a user's
    if any(name in str(spec.entry_point) for name in ("mujoco", "physics")):
        redirect_mujoco_warnings()
    try:
        return gym.make(spec, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"env.kwargs is {dict(kwargs)}, which {id} does not accept: {error}") from error


def _make_measured(native: functools.partial[gym.Env], *settings: Any) -> gym.Env:
    return NativeEnv(native(), *settings)


def _make_text(native: functools.partial[gym.Env], codec: TextCodec, rule: tuple[Any, ...]) -> gym.Env:
    return TextEnv(native(), codec, *rule)

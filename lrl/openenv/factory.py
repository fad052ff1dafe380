"""Factory of text environments that are played by OpenEnv's protocol."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from lrl.addresses import checked_url
from lrl.codecs.codec import InvalidActionError
from lrl.envs.factory import EnvFactory
from lrl.envs.native import EnvironmentFailedError, SuccessAt
from lrl.envs.processes import SeparateEnvs
from lrl.envs.text import AnyText, TextEnv
from lrl.openenv.codec import OpenEnvAction, OpenEnvCodec
from lrl.openenv.sessions import Endpoint, InvalidPayloadError, LocalEndpoint, Outcome, SessionError, UrlEndpoint
from lrl.ranges import PositiveFloat, PositiveInt, check_arguments
from lrl.registry import register


class RejectedActionError(InvalidActionError):
    """Raised for an action that the environment rejected.

    Attributes:
        done: whether the environment ended the episode because of it.
    """

    def __init__(self, reason: str, done: bool = False) -> None:
        super().__init__(reason)
        self.done = done


class OpenEnvEnv(gym.Env):
    """Gymnasium environment whose observations and actions are the JSON objects of one OpenEnv session.

    The protocol has one flag, ``done``. An episode is truncated if ``truncated`` is true in the observation or its
    metadata, and otherwise terminated. ``info`` contains ``success`` and ``reward_<term>`` if the metadata do.

    Args:
        endpoint: where the session is opened.
        reset_options: arguments of every reset, in addition to the seed.

    Raises:
        ValueError: If the environment cannot be reached.
    """

    def __init__(self, endpoint: Endpoint, reset_options: Mapping[str, Any] | None = None) -> None:
        self.observation_space = self.action_space = AnyText()
        self._session, self._reset_options = endpoint.connect(), dict(reset_options or {})
        self._name, self._seed = endpoint.name, None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: sent as ``seed``; None sends none.
            options: only ``noise_seed`` is sent, which only the server of lrl uses.

        Raises:
            EnvironmentFailedError: If the connection is lost or the environment reports an error.
        """
        super().reset(seed=seed)
        self._seed = seed
        sent = {"seed": seed, "noise_seed": (options or {}).get("noise_seed")}
        numbers = {name: int(value) for name, value in sent.items() if value is not None}
        return self._outcome(self._session.reset, self._reset_options | numbers).observation, {}

    def send(self, action: Mapping[str, Any]) -> None:
        """Send an action, whose outcome the next :meth:`step` returns."""
        self._session.send(action)

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            RejectedActionError: If the environment rejected the action.
            EnvironmentFailedError: If the connection is lost or the environment reports an error.
        """
        try:
            outcome = self._outcome(self._session.step, action)
        except InvalidPayloadError as error:
            raise RejectedActionError(str(error)) from error
        facts = {**outcome.observation, **outcome.metadata}
        if facts.get("action_valid") is False:
            raise RejectedActionError(str(facts.get("invalid_reason") or "it is not legal"), outcome.done)
        truncated = outcome.done and bool(facts.get("truncated"))
        terminated = outcome.done and bool(facts.get("terminated", not truncated))
        info = {
            name: value for name, value in outcome.metadata.items() if name == "success" or name.startswith("reward_")
        }
        return outcome.observation, outcome.reward, terminated, truncated, info

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def _outcome(self, ask: Callable[[Mapping[str, Any]], Outcome], data: Mapping[str, Any]) -> Outcome:
        try:
            return ask(data)
        except InvalidPayloadError:
            raise
        except SessionError as error:
            raise EnvironmentFailedError(f"{self._name} (episode seed {self._seed}) failed: {error}.") from error


class OpenEnvTextEnv(TextEnv):
    """Text environment that treats actions that the OpenEnv environment rejects as invalid actions."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the seed of the noise is sent to the OpenEnv environment."""
        return super().reset(seed=seed, options=(options or {}) | {"noise_seed": self.noise_seed})

    def send(self, response: str) -> None:
        """Send the action of a response without waiting for its outcome; send nothing without a legal action."""
        try:
            action = self.codec.text_to_action(self._format.extract(response))
        except InvalidActionError:
            return
        native: Any = self.unwrapped
        native.send(action)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Parse a response and take its action, or reject it with feedback; see :meth:`TextEnv.step`."""
        num_invalid = self._num_invalid
        try:
            return super().step(action)
        except RejectedActionError as error:
            self._num_invalid = num_invalid
            observation, reward, terminated, truncated, info = self._reject(str(error))
            info |= self._agreement(action, None)
            return observation, reward, terminated or error.done, truncated, info


class OpenEnvVectorEnv(SeparateEnvs):
    """Vectorized text environments that send all actions before they wait for an outcome.

    Args:
        env_fns: functions that each create one :class:`OpenEnvTextEnv`.
        name: name of the environment, for error messages.
    """

    def step(self, actions: Any) -> Any:
        """Step all environments.

        Raises:
            EnvironmentFailedError: If a connection is lost or an environment reports an error.
        """
        envs: Any = self.envs
        for env, response, idle in zip(envs, actions, self.idle.tolist(), strict=True):
            if not idle:
                env.send(response)
        return super().step(actions)


@register
class OpenEnvEnvs(EnvFactory):
    """Factory of vectorized sessions with an OpenEnv environment, at a URL or in this process.

    Each environment has its own session. All actions of a turn are sent before the first outcome is awaited.

    Args:
        url: address of a server, ``http://`` or ``https://``, without password and query; None with ``environment``.
        environment: class of an environment in this process, as ``module:Class``; None with ``url``.
        kwargs: arguments of ``environment``.
        action: conversion of a text to an action; None derives it from the environment's schema.
        observation_field: field of the observation that is shown; None shows all fields.
        description: description of the environment, for the system message; None uses the environment's own.
        invalid_penalty: reward of a response without a legal action.
        max_invalid: number of consecutive invalid responses that ends an episode.
        max_episode_steps: number of steps after which an episode is truncated; None leaves it to the environment.
        success_return: minimum return of an episode that counts as a success; None: see
            :class:`~lrl.envs.native.NativeEnv`.
        success_at: ``last_step``: an episode is a success if its last step is one; ``any_step``: if any step is one.
        reset_options: arguments of every reset, in addition to the seed.
        timeout: maximum time to wait for a response, in seconds.

    Raises:
        ValueError: If a setting is invalid.
    """

    replayable = False  # a session of its own would count against the limit of the server

    def __init__(
        self,
        url: str | None = None,
        environment: str | None = None,
        kwargs: dict[str, Any] | None = None,
        action: OpenEnvAction | None = None,
        observation_field: str | None = None,
        description: str | None = None,
        invalid_penalty: float = -0.1,
        max_invalid: PositiveInt = 5,
        max_episode_steps: PositiveInt | None = None,
        success_return: float | None = None,
        success_at: SuccessAt = "last_step",
        reset_options: dict[str, Any] | None = None,
        timeout: PositiveFloat = 60.0,
    ) -> None:
        check_arguments(OpenEnvEnvs.__init__, locals(), "env")
        if url is not None:
            url = checked_url("env.url", url, example="http://127.0.0.1:8000")
        if (url is None) == (environment is None):
            raise ValueError(
                f"env.url is {url!r} and env.environment is {environment!r}; it must be exactly one of them."
            )
        if url is not None and kwargs:
            raise ValueError("env.kwargs is set, but the environment is at env.url; give them to its server.")
        self.url, self.environment, self.kwargs = url, environment, dict(kwargs or {})
        self.action, self.observation_field, self.description = action, observation_field, description
        self.invalid_penalty, self.max_invalid = invalid_penalty, int(max_invalid)
        self.max_episode_steps, self.success_return = max_episode_steps, success_return
        self.success_at: SuccessAt = success_at
        self.reset_options, self.timeout = dict(reset_options or {}), float(timeout)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> OpenEnvEnvs:
        """Create a factory from its settings in a configuration.

        Raises:
            ValueError: If a setting does not exist or is invalid.
        """
        action = settings.get("action")
        try:
            typed = OpenEnvAction(**action) if isinstance(action, Mapping) else action
            return cls(**{**settings, "action": typed})
        except TypeError as error:
            reason = str(error).rpartition(".")[2].removeprefix("__init__() ")
            raise ValueError(f"the settings of OpenEnvEnvs are {sorted(settings)}: {reason}.") from error

    @property
    def id(self) -> str:
        """The URL or the class of the environment."""
        return self.url or str(self.environment)

    @functools.cached_property
    def endpoint(self) -> Endpoint:
        """Endpoint at which sessions are opened."""
        if self.url is not None:
            return UrlEndpoint(self.url, self.timeout)
        return LocalEndpoint(self.id, self.kwargs, None if self.action is None else self.action.type)

    @functools.cached_property
    def codec(self) -> OpenEnvCodec:
        """Codec of the schema of the environment's action, which is requested once.

        Raises:
            ValueError: If the environment cannot be reached, or ``action`` does not fit its schema.
        """
        description, schema = self.endpoint.card()
        if self.description is not None:
            description = self.description
        return OpenEnvCodec(description, schema, self.action, self.observation_field)

    def make(self, num_envs: int, response_format: str | None) -> VectorEnv:
        """Create a vectorized environment; see :meth:`EnvFactory.make`.

        Raises:
            ValueError: If ``num_envs`` is less than 1, the policy does not respond in text, or the environment cannot
                be reached.
        """
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
        if response_format is None:
            raise ValueError(f"env is {self.id!r}, which is played in text only; the policy must respond in text.")
        codec, envs = self.codec, list[OpenEnvTextEnv]()
        try:
            for _ in range(num_envs):
                env: gym.Env = OpenEnvEnv(self.endpoint, self.reset_options)
                if self.max_episode_steps is not None:
                    env = gym.wrappers.TimeLimit(env, int(self.max_episode_steps))
                limits = (self.invalid_penalty, self.max_invalid, self.success_return)
                envs.append(OpenEnvTextEnv(env, codec, response_format, *limits, success_at=self.success_at))
        except BaseException:
            for env in envs:  # otherwise their sessions would remain open
                env.close()
            raise
        return OpenEnvVectorEnv([functools.partial(envs.__getitem__, index) for index in range(num_envs)], self.id)

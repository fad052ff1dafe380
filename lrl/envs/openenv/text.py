"""OpenEnv environments as text environments, one session for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from lrl.codecs.codec import InvalidActionError
from lrl.envs.boundary import EnvironmentFailedError
from lrl.envs.openenv.endpoints import Endpoint
from lrl.envs.openenv.sessions import InvalidPayloadError, Outcome, SessionError
from lrl.envs.separate import SeparateEnvs
from lrl.envs.text import AnyText, TextEnv


class RejectedActionError(InvalidActionError):
    """Raised for an action that the environment did not take.

    Attributes:
        done: Whether the environment ended the episode for it.
    """

    def __init__(self, reason: str, done: bool = False) -> None:
        super().__init__(reason)
        self.done = done


class OpenEnvEnv(gym.Env):
    """Gymnasium environment whose observations and actions are the JSON objects of one OpenEnv session.

    The protocol has one flag, ``done``. An episode is truncated if the observation or its metadata say ``truncated``,
    and otherwise terminated. ``info`` contains ``success`` and ``reward_<term>`` if the metadata do.

    Args:
        endpoint: Where the session is opened.
        index: Index of this environment, for error messages.
        reset_options: Arguments of every reset, beside the seed.

    Raises:
        ValueError: If the environment cannot be reached.
    """

    def __init__(self, endpoint: Endpoint, index: int = 0, reset_options: Mapping[str, Any] | None = None) -> None:
        self.observation_space = self.action_space = AnyText()
        self._session, self._reset_options = endpoint.connect(), dict(reset_options or {})
        self._name, self._seed = f"environment {index} of {endpoint.name}", None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Sent as ``seed``; None sends none.
            options: Only ``noise_seed`` is sent, which servers other than ours ignore.

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
            RejectedActionError: If the environment did not take it.
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
    """Text environment whose invalid-action rule also holds for actions that the other side rejects."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and let the other side know the seed of the noise."""
        return super().reset(seed=seed, options=(options or {}) | {"noise_seed": self.noise_seed})

    def send(self, response: str) -> None:
        """Send the action of a response, if it has one, without waiting for its outcome."""
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
        env_fns: Functions that each create one :class:`OpenEnvTextEnv`.
        name: Name of the environment, for error messages.
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

"""Text environments of lrl, as the messages of OpenEnv's protocol."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from lrl.codecs.codec import TextCodec
from lrl.envs.factory import GymnasiumEnvs

_TEXT = {"type": "string", "description": "What the policy sees, in words."}
_METADATA = {"type": "object", "additionalProperties": True}
OBSERVATION_SCHEMA: Mapping[str, Any] = {
    "title": "TextObservation",
    "type": "object",
    "properties": {
        "text": _TEXT,
        "metadata": _METADATA,
        "done": {"type": "boolean"},
        "reward": {"type": ["number", "null"]},
    },
    "required": ["text"],
    "additionalProperties": False,
}
"""JSON schema of observations."""
STATE_SCHEMA: Mapping[str, Any] = {
    "title": "State",
    "type": "object",
    "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}},
    "required": ["episode_id", "step_count"],
    "additionalProperties": False,
}
"""JSON schema of the state of a session."""


class MessageError(ValueError):
    """Raised for a message that cannot be followed.

    Attributes:
        code: OpenEnv's code of the error.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def action_schema(codec: TextCodec) -> dict[str, Any]:
    """Return the JSON schema of actions: one text, which must be one of the legal actions where these are finite."""
    text: dict[str, Any] = {"type": "string"}
    if codec.action_texts is not None:
        text["enum"] = list(codec.action_texts)
    else:
        _, label, actions = codec.description.rpartition("Actions: ")
        text["description"] = actions.rstrip(".") if label else "the action in words"
        text["examples"] = [codec.default_action_text]
    properties = {"text": text, "metadata": _METADATA}
    fields = {"properties": properties, "required": ["text"], "additionalProperties": False}
    return {"title": "TextAction", "type": "object", **fields}


class ServedEnvironment:
    """One text environment, played by messages.

    A response that is no legal action is an event of the environment, as in :class:`~lrl.envs.text.TextEnv`. The
    metadata of an observation contain what the protocol has no field for: ``terminated``, ``truncated``, ``success``,
    ``action_valid``, ``invalid_reason`` and the terms of the reward.

    Args:
        env: A text environment.
    """

    def __init__(self, env: gym.Env) -> None:
        self._env: Any = env
        self._episode_id: str | None = None
        self._step_count = 0
        self._in_episode = False

    @property
    def state(self) -> dict[str, Any]:
        """Return the identity of the episode and the number of its steps."""
        return {"episode_id": self._episode_id, "step_count": self._step_count}

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Start an episode.

        Args:
            data: ``seed``, ``episode_id``, ``noise_seed`` (see :class:`~lrl.envs.native.NativeEnv`) and options of the
                native environment's reset.

        Raises:
            MessageError: If a seed is not an integer, or the environment raises, as for options that it does not know.
        """
        options = dict(data)
        seed, noise_seed = (_seed(name, options.pop(name, None)) for name in ("seed", "noise_seed"))
        episode_id = options.pop("episode_id", None)
        self._env.noise_seed = noise_seed
        try:
            text, info = self._env.reset(seed=seed, options=options)
        except Exception as error:  # the environment is anybody's code
            raise MessageError("EXECUTION_ERROR", f"reset with {options} failed: {error!r}") from error
        self._episode_id, self._step_count, self._in_episode = str(episode_id or uuid.uuid4()), 0, True
        return _observation(text, None, False, False, info)

    def step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Take an action.

        Args:
            data: The action, which has a ``text``.

        Raises:
            MessageError: If the action does not fit the schema, no episode has begun, the last one is over, or the
                environment raises, which ends the episode.
        """
        unknown = [name for name in data if name not in ("text", "metadata")]
        if unknown or not isinstance(data.get("text"), str):
            raise MessageError("VALIDATION_ERROR", f"the action is {dict(data)}; it must be an object with a text")
        if not self._in_episode:
            raise MessageError("EXECUTION_ERROR", "there is no episode to step; reset starts one")
        try:
            text, reward, terminated, truncated, info = self._env.step(data["text"])
        except Exception as error:  # the environment is anybody's code
            self._in_episode = False
            raise MessageError("EXECUTION_ERROR", f"the step failed: {error!r}") from error
        self._step_count += 1
        self._in_episode = not (terminated or truncated)
        return _observation(text, float(reward), bool(terminated), bool(truncated), info)

    def reply(self, raw: str) -> dict[str, Any] | None:
        """Return the response to one message of a session; None if the message ends it."""
        try:
            message = _message(raw)
            kind, data = message.get("type"), message.get("data", {})
            if kind == "close":
                return None
            if kind == "state":
                return {"type": "state", "data": self.state}
            if kind not in ("reset", "step"):
                raise MessageError("UNKNOWN_TYPE", f"the type is {kind!r}; it must be reset, step, state or close")
            if not isinstance(data, dict):
                raise MessageError("VALIDATION_ERROR", f"the data are {data!r}; they must be an object")
            return {"type": "observation", "data": self.reset(data) if kind == "reset" else self.step(data)}
        except MessageError as error:
            return error_message(error.code, str(error))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def make_environment(envs: GymnasiumEnvs) -> Callable[[], ServedEnvironment]:
    """Return a function that creates environments to serve, one for each session."""

    def make() -> ServedEnvironment:
        vectorized: Any = envs.with_vectorization("sync").make(1, "direct")
        return ServedEnvironment(vectorized.envs[0])

    return make


def error_message(code: str, reason: str) -> dict[str, Any]:
    """Return the message that reports an error."""
    return {"type": "error", "data": {"code": code, "message": reason}}


def _message(raw: str) -> dict[str, Any]:
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:  # also whole numbers of thousands of digits
        raise MessageError("INVALID_JSON", f"the message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise MessageError("INVALID_JSON", "the message is not an object")
    return message


def _seed(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise MessageError("VALIDATION_ERROR", f"{name} is {value!r}; it must be 0 or a positive integer")
    return value


def _observation(text: str, reward: float | None, terminated: bool, truncated: bool, info: Any) -> dict[str, Any]:
    """Return the data of an observation; metadata stand in and beside it, where clients of either kind look."""
    metadata = {"terminated": terminated, "truncated": truncated}
    for name, value in info.items():
        known = name in ("success", "action_valid", "invalid_reason", "clipped_numbers")
        if known or name.startswith("reward/"):
            metadata[name.replace("/", "_")] = value.item() if hasattr(value, "item") else value
    done = terminated or truncated
    return {"observation": {"text": text, "metadata": metadata}, "reward": reward, "done": done, "metadata": metadata}

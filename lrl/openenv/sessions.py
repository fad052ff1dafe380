"""Sessions with OpenEnv environments: over a WebSocket, or with an object in this process."""

from __future__ import annotations

import http.client
import importlib
import inspect
import json
import typing
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from lrl.addresses import is_loopback
from lrl.ranges import unknown_argument

_MAX_BYTES = 100 * 2**20
"""Maximum size of a message, as in OpenEnv's own client."""
_PING_TIMEOUT = 20.0
"""Minimum time to wait for the response to a ping, in seconds; the default of the package websockets."""


class SessionError(ValueError):
    """Raised if a connection is lost, a server reports an error, or an environment in this process raises one."""


class InvalidPayloadError(SessionError):
    """Raised for an action that does not fit the environment's schema; the session continues."""


@dataclass(frozen=True)
class Outcome:
    """Result of a reset or a step."""

    observation: Mapping[str, Any]
    """The observation's fields without ``metadata``."""
    reward: float
    """Reward of the step; 0 after a reset."""
    done: bool
    """Whether the episode has ended."""
    metadata: Mapping[str, Any]
    """Further values that an environment reports, such as ``truncated``."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Outcome:
        """Return the result in the data of a response; metadata may be inside or outside of the observation.

        Raises:
            SessionError: If the data are not an observation.
        """
        try:
            observation = dict(data.get("observation") or {})
            metadata = {**(observation.pop("metadata", None) or {}), **(data.get("metadata") or {})}
            return cls(observation, float(data.get("reward") or 0.0), bool(data.get("done")), metadata)
        except (TypeError, ValueError) as error:
            raise SessionError(f"it sent {str(data)[:80]!r}, which is not an observation") from error


class SocketSession:
    """Session with an environment over a WebSocket.

    Args:
        url: the server's address, ``http://`` or ``https://``.
        timeout: maximum time to wait for a response, in seconds.

    Raises:
        SessionError: If the server cannot be reached.
    """

    def __init__(self, url: str, timeout: float) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._timeout, self._failures, self._sent = timeout, (OSError, EOFError, WebSocketException), False
        address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        settings: dict[str, Any] = {"open_timeout": timeout, "close_timeout": 1, "max_size": _MAX_BYTES}
        settings["ping_timeout"] = max(timeout, _PING_TIMEOUT)  # a server may not answer pings during a long step
        settings |= {"proxy": None if is_loopback(url) else True, "compression": None}
        self._stack = ExitStack()
        try:
            self._socket = self._stack.enter_context(connect(address, **settings))
        except self._failures as error:
            raise SessionError(f"it cannot be reached ({reason_of(error)})") from error

    def reset(self, data: Mapping[str, Any]) -> Outcome:
        """Start an episode.

        Args:
            data: ``seed`` and further arguments of the environment's ``reset``.

        Raises:
            SessionError: If the connection is lost or the environment reports an error.
        """
        if self._sent:  # the outcome of that action must not be taken for the outcome of the reset
            self._sent = False
            with suppress(InvalidPayloadError):
                self._read()
        self._write("reset", data)
        return self._read()

    def send(self, action: Mapping[str, Any]) -> None:
        """Send an action without waiting for its outcome, which the next :meth:`step` returns."""
        self._write("step", action)
        self._sent = True

    def step(self, action: Mapping[str, Any]) -> Outcome:
        """Take an action, or receive the outcome of the one that was sent.

        Raises:
            InvalidPayloadError: If the action does not fit the schema.
            SessionError: If the connection is lost or the environment reports an error.
        """
        if not self._sent:
            self._write("step", action)
        self._sent = False
        return self._read()

    def close(self) -> None:
        """Close the socket. Closing it twice does nothing."""
        with suppress(*self._failures):
            self._stack.close()

    def _write(self, kind: str, data: Mapping[str, Any]) -> None:
        with suppress(*self._failures):  # _read() reports why, or returns the last message of the server
            self._socket.send(json.dumps({"type": kind, "data": dict(data)}))

    def _read(self) -> Outcome:
        try:
            message = json.loads(self._socket.recv(timeout=self._timeout))
        except TimeoutError as error:
            self.close()  # otherwise a late response would be taken for the response to the next message
            raise SessionError(f"it did not respond within {self._timeout:g} seconds") from error
        except self._failures as error:
            raise SessionError(f"the connection was lost ({reason_of(error)})") from error
        except (ValueError, RecursionError) as error:
            raise SessionError("it sent a message that is not JSON") from error
        data = message.get("data") or {} if isinstance(message, dict) else None
        if not isinstance(data, dict) or message.get("type") not in ("observation", "error"):
            raise SessionError(f"it sent {str(message)[:80]!r}, which is not an observation")
        if message["type"] == "error":
            kind = InvalidPayloadError if data.get("code") == "VALIDATION_ERROR" else SessionError
            raise kind(_sentence(data))
        return Outcome.of(data)


class LocalSession:
    """Session with an environment in this process.

    Args:
        environment: an object with OpenEnv's ``reset(seed)`` and ``step(action)``.
        action_type: Pydantic class of the action.
    """

    def __init__(self, environment: Any, action_type: Any) -> None:
        self._environment, self._action_type = environment, action_type

    def reset(self, data: Mapping[str, Any]) -> Outcome:
        """Start an episode; like a server, ignore arguments that the environment's ``reset`` does not have."""
        known = inspect.signature(self._environment.reset).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        accepted = {name: value for name, value in data.items() if takes_all or name in known}
        return self._outcome(self._environment.reset, **accepted)

    def send(self, action: Mapping[str, Any]) -> None:
        """Do nothing, because no other environment is stepped while this one waits."""

    def step(self, action: Mapping[str, Any]) -> Outcome:
        """Take an action.

        Raises:
            InvalidPayloadError: If the action does not fit the schema.
            SessionError: If the environment raises an error.
        """
        try:
            typed = self._action_type.model_validate(dict(action))
        except ValueError as error:  # a pydantic.ValidationError, which lists its reasons
            invalid: Any = error
            raise InvalidPayloadError(_sentence({"errors": invalid.errors()})) from error
        return self._outcome(self._environment.step, typed)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _outcome(self, method: Any, *args: Any, **kwargs: Any) -> Outcome:
        try:
            observation = method(*args, **kwargs).model_dump()
        except Exception as error:  # environments may raise any exception
            raise SessionError(f"it raised {type(error).__name__}: {reason_of(error)}") from error
        return Outcome.of(observation | {"observation": observation})


Session = SocketSession | LocalSession
"""Connection that plays one environment."""


def _sentence(data: Mapping[str, Any]) -> str:
    """Return the message of a server's error with the reasons of a failed validation."""
    reasons = [str(one.get("msg", "")) for one in data.get("errors") or () if isinstance(one, dict)]
    text = "; ".join(filter(None, [str(data.get("message") or ""), *reasons]))
    return reason_of(text) if text else "unknown error"


def reason_of(error: Any) -> str:
    """Return the message of an error on one line, or its kind if it has none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@dataclass(frozen=True)
class UrlEndpoint:
    """Endpoint at the address of an OpenEnv server."""

    name: str
    """The URL."""
    timeout: float
    """Maximum time to wait for a response, in seconds."""

    def card(self) -> tuple[str, Mapping[str, Any]]:
        """Return the description and the action schema of the environment, from ``/metadata`` and ``/schema``.

        Raises:
            ValueError: If the server cannot be reached, or is not an OpenEnv server.
        """
        schema, metadata = self._get("schema"), self._get("metadata")
        if not isinstance(schema.get("action"), dict):
            raise ValueError(f"env.url is {self.name!r}, whose /schema has no action; it must be an OpenEnv server.")
        return str(metadata.get("description") or ""), schema["action"]

    def connect(self) -> Session:
        """Open a WebSocket with its own environment.

        Raises:
            ValueError: If the server cannot be reached.
        """
        try:
            return SocketSession(self.name, self.timeout)
        except SessionError as error:
            raise ValueError(f"env.url is {self.name!r}, but {error}; start the server first.") from error

    def _get(self, path: str) -> dict[str, Any]:
        handlers = [urllib.request.ProxyHandler({})] if is_loopback(self.name) else []
        address = f"{self.name.rstrip('/')}/{path}"
        try:
            with urllib.request.build_opener(*handlers).open(address, timeout=self.timeout) as response:
                found = json.load(response)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(
                f"env.url is {self.name!r}, which cannot be read (/{path}: {reason_of(error)}); start the server first."
            ) from error
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class LocalEndpoint:
    """Endpoint of an environment class in this process."""

    name: str
    """The class, as ``module:Class``."""
    kwargs: Mapping[str, Any]
    """Arguments of the class."""
    action_type: str | None
    """Class of the action, as ``module:Class``; None uses the annotation of ``step``."""

    def card(self) -> tuple[str, Mapping[str, Any]]:
        """Return the description of a new environment, and its action schema.

        Raises:
            ValueError: If the environment cannot be created.
        """
        action_class = self._action_class()
        environment = self._make()
        description = str(environment.get_metadata().description) if hasattr(environment, "get_metadata") else ""
        environment.close()
        return description, action_class.model_json_schema()

    def connect(self) -> Session:
        """Create an environment.

        Raises:
            ValueError: If the environment cannot be created.
        """
        return LocalSession(self._make(), self._action_class())

    def _make(self) -> Any:
        environment = load_object(self.name, "env.environment")
        try:
            return environment(**self.kwargs)
        except TypeError as error:
            reason = unknown_argument(environment, self.kwargs, error) or error
            raise ValueError(
                f"env.kwargs is {dict(self.kwargs)}, which {self.name} does not accept: {reason}"
            ) from error

    def _action_class(self) -> Any:
        if self.action_type is not None:
            return load_object(self.action_type, "env.action.type")
        step = load_object(self.name, "env.environment").step
        names = [name for name in inspect.signature(step).parameters if name != "self"]
        found = typing.get_type_hints(step).get(names[0])
        if not hasattr(found, "model_json_schema"):
            raise ValueError(f"env.action.type is null, and step() of {self.name} does not say it; it must be given.")
        return found


Endpoint = UrlEndpoint | LocalEndpoint
"""Where the sessions of an environment are opened."""


def load_object(path: str, key: str) -> Any:
    """Import the object ``module:Name``, which is the value of the setting ``key``.

    Raises:
        ValueError: If the module cannot be imported or has no object of this name.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key} is {path!r}; it must be module:Class of an installed package ({error}).") from error

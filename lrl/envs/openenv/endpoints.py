"""Places where sessions with OpenEnv environments are opened: a URL, or a class that is imported."""

from __future__ import annotations

import http.client
import importlib
import inspect
import json
import typing
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lrl.addresses import is_loopback
from lrl.envs.openenv.sessions import LocalSession, Session, SessionError, SocketSession, reason_of


@dataclass(frozen=True)
class Card:
    """Holds what an environment says about itself."""

    description: str
    action_schema: Mapping[str, Any]


class Endpoint(ABC):
    """Abstract base class of places where sessions are opened."""

    name: str
    """The place, as error messages call it."""

    @abstractmethod
    def card(self) -> Card:
        """Return what the environment says about itself.

        Raises:
            ValueError: If it cannot be reached or created.
        """

    @abstractmethod
    def connect(self) -> Session:
        """Open a session with an environment of its own.

        Raises:
            ValueError: If it cannot be reached or created.
        """


@dataclass(frozen=True)
class UrlEndpoint(Endpoint):
    """Endpoint at a URL."""

    name: str
    timeout: float

    def card(self) -> Card:
        """Read ``/metadata`` and ``/schema``; see :meth:`Endpoint.card`."""
        schema, metadata = self._get("schema"), self._get("metadata")
        if not isinstance(schema.get("action"), dict):
            raise ValueError(f"env.url is {self.name!r}, whose /schema has no action; it must be an OpenEnv server.")
        return Card(str(metadata.get("description") or ""), schema["action"])

    def connect(self) -> Session:
        """Open a WebSocket; see :meth:`Endpoint.connect`."""
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
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"env.url is {self.name!r}, whose /{path} returns status {error.code}; it must be an OpenEnv server."
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = reason_of(getattr(error, "reason", error))
            raise ValueError(
                f"env.url is {self.name!r}, which cannot be read ({reason}); start the server first."
            ) from error
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class LocalEndpoint(Endpoint):
    """Endpoint in this process: the class of an environment."""

    name: str
    """``module:Class``."""
    kwargs: Mapping[str, Any]
    action_type: str | None

    def card(self) -> Card:
        """Ask an environment and its action's class; see :meth:`Endpoint.card`."""
        session_type = self._action_class()
        environment = self._make()
        description = str(environment.get_metadata().description) if hasattr(environment, "get_metadata") else ""
        environment.close()
        return Card(description, session_type.model_json_schema())

    def connect(self) -> Session:
        """Create an environment; see :meth:`Endpoint.connect`."""
        return LocalSession(self._make(), self._action_class())

    def _make(self) -> Any:
        try:
            return load_object(self.name, "env.environment")(**self.kwargs)
        except TypeError as error:
            raise ValueError(
                f"env.kwargs is {dict(self.kwargs)}, which {self.name} does not accept: {error}"
            ) from error

    def _action_class(self) -> Any:
        if self.action_type is not None:
            return load_object(self.action_type, "env.action.type")
        step = load_object(self.name, "env.environment").step
        hints = typing.get_type_hints(step)
        found = hints.get(next(iter([name for name in inspect.signature(step).parameters if name != "self"]), ""))
        if not hasattr(found, "model_json_schema"):
            raise ValueError(f"env.action.type is null, and step() of {self.name} does not say it; it must be given.")
        return found


def load_object(path: str, key: str) -> Any:
    """Import an object that is named ``module:Name``.

    Raises:
        ValueError: If there is no such object; ``key`` is where the message starts.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key} is {path!r}; it must be module:Class of an installed package ({error}).") from error

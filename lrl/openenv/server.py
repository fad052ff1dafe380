"""Server of text environments of lrl by OpenEnv's protocol, over HTTP and WebSockets."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from lrl.addresses import is_loopback
from lrl.codecs.codec import TextCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.files import require

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.websockets import WebSocket


def _object_schema(title: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object without other properties."""
    fields = {"properties": properties, "required": list(required), "additionalProperties": False}
    return {"title": title, "type": "object", **fields}


_METADATA = {"type": "object", "additionalProperties": True}
OBSERVATION_SCHEMA = _object_schema(
    "TextObservation",
    ["text"],
    text={"type": "string", "description": "What the policy sees, in words."},
    metadata=_METADATA,
    done={"type": "boolean"},
    reward={"type": ["number", "null"]},
)
"""JSON schema of observations."""
STATE_SCHEMA = _object_schema(
    "State",
    ["episode_id", "step_count"],
    episode_id={"type": ["string", "null"]},
    step_count={"type": "integer", "minimum": 0},
)
"""JSON schema of the state of a session."""


class MessageError(ValueError):
    """Raised for an invalid message.

    Attributes:
        code: OpenEnv's code of the error.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def action_schema(codec: TextCodec) -> dict[str, Any]:
    """Return the JSON schema of actions: a text, which is one of the legal actions if there are finitely many."""
    text: dict[str, Any] = {"type": "string"}
    if codec.action_texts is not None:
        text["enum"] = list(codec.action_texts)
    else:
        _, label, actions = codec.description.rpartition("Actions: ")
        text["description"] = actions.rstrip(".") if label else "the action in words"
        text["examples"] = [codec.default_action_text]
    return _object_schema("TextAction", ["text"], text=text, metadata=_METADATA)


class ServedEnvironment:
    """Text environment that is controlled by messages.

    A response without a legal action is a step with feedback, as in :class:`~lrl.envs.text.TextEnv`. The metadata of an
    observation contain values for which the protocol has no field: ``terminated``, ``truncated``, ``success``,
    ``action_valid``, ``invalid_reason`` and the terms of the reward.

    Args:
        env: a text environment.
    """

    def __init__(self, env: gym.Env) -> None:
        self._env: Any = env
        self._episode_id: str | None = None
        self._step_count = 0
        self._in_episode = False

    @property
    def state(self) -> dict[str, Any]:
        """The ID of the episode and the number of its steps, by the names in :data:`STATE_SCHEMA`."""
        return {"episode_id": self._episode_id, "step_count": self._step_count}

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Start an episode.

        Args:
            data: ``seed``, ``episode_id``, ``noise_seed`` (see :class:`~lrl.envs.native.NativeEnv`) and options of the
                native environment's reset.

        Raises:
            MessageError: If a seed is not an integer, or the environment raises, for example for unknown options.
        """
        options = dict(data)
        seed, noise_seed = (_seed(name, options.pop(name, None)) for name in ("seed", "noise_seed"))
        episode_id = options.pop("episode_id", None)
        self._env.noise_seed = noise_seed
        try:
            text, info = self._env.reset(seed=seed, options=options)
        except Exception as error:  # environments may raise any exception
            raise MessageError("EXECUTION_ERROR", f"reset with {options} failed: {error!r}") from error
        self._episode_id, self._step_count, self._in_episode = str(episode_id or uuid.uuid4()), 0, True
        return _observation(text, None, False, False, info)

    def step(self, data: Any) -> dict[str, Any]:
        """Take an action.

        Args:
            data: the action, an object with a ``text``.

        Raises:
            MessageError: If the action does not fit the schema, if there is no current episode, or if the environment
                raises, which ends the episode.
        """
        is_action = isinstance(data, dict) and data.keys() <= {"text", "metadata"}
        if not is_action or not isinstance(data.get("text"), str):
            raise MessageError("VALIDATION_ERROR", f"the action is {data!r}; it must be an object with a text")
        if not self._in_episode:
            raise MessageError("EXECUTION_ERROR", "there is no episode to step; reset starts one")
        try:
            text, reward, terminated, truncated, info = self._env.step(data["text"])
        except Exception as error:  # environments may raise any exception
            self._in_episode = False
            raise MessageError("EXECUTION_ERROR", f"the step failed: {error!r}") from error
        self._step_count += 1
        self._in_episode = not (terminated or truncated)
        return _observation(text, float(reward), bool(terminated), bool(truncated), info)

    def reply(self, raw: str) -> dict[str, Any] | None:
        """Return the response to one message of a session; None if the message ends the session.

        Args:
            raw: the message, as JSON.
        """
        try:
            message = _json_of(raw)
            if not isinstance(message, dict):
                raise MessageError("INVALID_JSON", "the message is not a JSON object")
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


def make_environment(envs: GymnasiumEnvs) -> ServedEnvironment:
    """Create an environment to serve.

    Raises:
        ValueError: If the environment cannot be created.
    """
    vectorized: Any = envs.with_settings(vectorization="sync").make(1, "direct")
    return ServedEnvironment(vectorized.envs[0])


def error_message(code: str, reason: str) -> dict[str, Any]:
    """Return the message that reports an error."""
    return {"type": "error", "data": {"code": code, "message": reason}}


def _json_of(raw: str | bytearray) -> Any:
    """Return the value of a JSON text; None if it is not valid."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # ValueError also for integers with thousands of digits
        return None


def _seed(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise MessageError("VALIDATION_ERROR", f"{name} is {value!r}; it must be 0 or a positive integer")
    return value


def _observation(text: str, reward: float | None, terminated: bool, truncated: bool, info: Any) -> dict[str, Any]:
    """Return the data of an observation.

    The metadata are stored both inside and outside of ``observation``, because clients read either of them.
    """
    metadata = {"terminated": terminated, "truncated": truncated}
    for name, value in info.items():
        known = name in ("success", "action_valid", "invalid_reason", "clipped_numbers")
        if known or name.startswith("reward/"):
            metadata[name.replace("/", "_")] = value.item() if hasattr(value, "item") else value
    done = terminated or truncated
    return {"observation": {"text": text, "metadata": metadata}, "reward": reward, "done": done, "metadata": metadata}


_VERSION = "1.0.0"
"""Version of the protocol's HTTP routes."""
MAX_MESSAGE = 2**20
"""Maximum number of bytes of a message or body that a client sends; an action takes a few hundred."""


class OpenEnvServer:
    """Handlers of the routes by which environments are played.

    Each WebSocket is a session with its own environment. Clients that use HTTP only share one environment.

    Args:
        envs: factory of the environments.
        max_sessions: number of WebSockets that may be open at a time.
    """

    def __init__(self, envs: GymnasiumEnvs, max_sessions: int = 64) -> None:
        self._envs, self._max_sessions = envs, max_sessions
        self.num_sessions = 0

    @functools.cached_property
    def _shared(self) -> ServedEnvironment:
        return make_environment(self._envs)

    async def play(self, websocket: WebSocket) -> None:
        """Play one session until its client closes it."""
        from starlette.websockets import WebSocketDisconnect

        await websocket.accept()
        if self.num_sessions >= self._max_sessions:
            reason = f"all {self._max_sessions} sessions are taken; play fewer environments, or raise max_sessions"
            await websocket.send_text(json.dumps(error_message("CAPACITY_REACHED", reason)))
            await websocket.close()
            return
        self.num_sessions += 1
        try:
            with contextlib.closing(make_environment(self._envs)) as environment:
                while (reply := environment.reply(await _received(websocket))) is not None:
                    await websocket.send_text(json.dumps(reply))
                await websocket.close()
        except WebSocketDisconnect:
            pass
        finally:
            self.num_sessions -= 1

    async def state(self, request: Request) -> Response:
        """Return the state of the shared environment."""
        return _json(self._shared.state)

    async def reset(self, request: Request) -> Response:
        """Start an episode of the shared environment."""
        return await self._respond(request, self._shared.reset)

    async def step(self, request: Request) -> Response:
        """Take an action in the shared environment."""
        return await self._respond(request, lambda body: self._shared.step(body.get("action")))

    async def tools(self, request: Request) -> Response:
        """Return the JSON-RPC error of an environment without tools."""
        body = await _body(request)
        name = body.get("id") if isinstance(body, dict) else None
        error = {"code": -32601, "message": "the environment has no tools; it is played by /ws"}
        return _json({"jsonrpc": "2.0", "id": name if isinstance(name, (str, int)) else None, "error": error})

    async def _respond(self, request: Request, ask: Callable[[Any], dict[str, Any]]) -> Response:
        body = await _body(request)
        try:
            if not isinstance(body, dict):
                raise MessageError("VALIDATION_ERROR", "the body is not a JSON object")
            return _json(ask(body))
        except MessageError as error:
            return _json({"detail": str(error)}, 422 if error.code == "VALIDATION_ERROR" else 409)


def make_app(envs: GymnasiumEnvs, max_sessions: int = 64, origins: Collection[str] = ()) -> Starlette:
    """Return an ASGI application that serves environments.

    Args:
        envs: factory of the environments.
        max_sessions: number of WebSockets that may be open at a time.
        origins: origins of web pages that may connect, such as ``https://example.org``. Requests of other web pages get
            status 403; otherwise any page in a browser on this machine could use a server that listens locally.

    Raises:
        ValueError: If an environment cannot be created, or lrl[openenv] is not installed.
    """
    require_extra()
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route, WebSocketRoute

    envs.check("env", "direct")
    server = OpenEnvServer(envs, max_sessions)
    verbs = dict.fromkeys(("health", "metadata", "schema", "state", "openapi.json"), "get")
    verbs |= dict.fromkeys(("reset", "step", "mcp"), "post")
    paths = {f"/{name}": {verb: {"responses": {"200": {"description": "OK"}}}} for name, verb in verbs.items()}
    schemas = {"action": action_schema(envs.codec), "observation": OBSERVATION_SCHEMA, "state": STATE_SCHEMA}
    endpoints = {
        "health": _json({"status": "healthy"}),
        "metadata": _json({"name": envs.id, "description": envs.codec.description, "version": _VERSION}),
        "schema": _json(schemas | {"reset_observation": OBSERVATION_SCHEMA}),
        "openapi.json": _json({"openapi": "3.1.0", "info": {"title": envs.id, "version": _VERSION}, "paths": paths}),
        "state": server.state,
        "reset": server.reset,
        "step": server.step,
        "mcp": server.tools,
    }
    routes = [Route(f"/{name}", endpoints[name], methods=[verb.upper()]) for name, verb in verbs.items()]
    middleware = [Middleware(_KnownOrigins, origins=frozenset(origins))]
    return Starlette(routes=[*routes, WebSocketRoute("/ws", server.play)], middleware=middleware)


class _KnownOrigins:
    """ASGI middleware that rejects requests of web pages (header ``Origin``) that are not in a list."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with status 403."""
        from starlette.websockets import WebSocketClose

        origins = {value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"origin"}
        app: ASGIApp = self.app
        if origins - self.origins:
            reason = f"the web page {min(origins)} may not play; origins of `lrl serve_env` lists those that may"
            app = WebSocketClose(1008) if scope["type"] == "websocket" else _json({"detail": reason}, 403)
        await app(scope, receive, send)


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a web server of an application, which serves in ``run(sockets=[...])`` until ``should_exit`` is set."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", ws="websockets-sansio", ws_max_size=MAX_MESSAGE, lifespan="off")
    )


def announce(name: str, host: str, port: int) -> None:
    """Print the address of a server, and whether other machines can connect."""
    shown = f"[{host}]" if ":" in host else host
    others = "" if is_loopback(f"http://{shown}") else "; other machines can connect without a password"
    print(f"{name} at http://{shown}:{port} until Ctrl+C{others}", flush=True)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free port.

    Raises:
        ValueError: If the address cannot be used.
    """
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"host is {host!r} and port is {port}, which cannot be used: {error}.") from error


def require_extra() -> None:
    """Check that the packages of the extra ``openenv`` are installed.

    Raises:
        ValueError: If one of these packages is not installed.
    """
    for name in ("starlette", "uvicorn", "websockets"):
        require(name, "openenv", "OpenEnv")


async def _received(websocket: WebSocket) -> str:
    """Return the next message of a session; for a binary message an empty string, which is not valid JSON."""
    try:
        return await websocket.receive_text() or ""
    except KeyError:
        return ""


async def _body(request: Request) -> Any:
    """Return the JSON of a body; None if it is not valid.

    Raises:
        HTTPException: If the body has more than :data:`MAX_MESSAGE` bytes, or its client closes the connection.
    """
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > MAX_MESSAGE:
                raise HTTPException(413, f"the body has more than {MAX_MESSAGE} bytes", {"Connection": "close"})
    except ClientDisconnect:
        raise HTTPException(400, "the client closed the connection within the body") from None
    return _json_of(raw) if raw else {}


def _json(content: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(content), status, media_type="application/json")

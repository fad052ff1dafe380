"""Server of text environments of lrl by OpenEnv's protocol, over HTTP and WebSockets."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from lrl.addresses import is_loopback
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.openenv.served import (
    OBSERVATION_SCHEMA,
    STATE_SCHEMA,
    MessageError,
    ServedEnvironment,
    action_schema,
    error_message,
    make_environment,
)

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.websockets import WebSocket

_VERSION = "1.0.0"
"""Version of the protocol's HTTP routes."""
MAX_MESSAGE = 2**20
"""Maximum number of bytes of a message or body that a client sends; an action takes a few hundred."""


class OpenEnvServer:
    """Handlers of the protocol's routes.

    Each WebSocket is a session with an environment of its own. Clients that use HTTP only share one environment.

    Args:
        envs: Factory of the environments.
        max_sessions: Number of WebSockets that may be open at a time.
    """

    def __init__(self, envs: GymnasiumEnvs, max_sessions: int = 64) -> None:
        self._envs, self._make, self._max_sessions = envs, make_environment(envs), max_sessions
        self.num_sessions = 0

    @functools.cached_property
    def _shared(self) -> ServedEnvironment:
        return self._make()

    async def play(self, websocket: WebSocket) -> None:
        """Play one session until its client closes it."""
        from starlette.websockets import WebSocketDisconnect

        await websocket.accept()
        if self.num_sessions >= self._max_sessions:
            reason = f"all {self._max_sessions} sessions are taken; play fewer environments, or raise --max_sessions"
            await websocket.send_text(json.dumps(error_message("CAPACITY_REACHED", reason)))
            await websocket.close()
            return
        self.num_sessions += 1
        try:
            with contextlib.closing(self._make()) as environment:
                while (reply := environment.reply(await _received(websocket))) is not None:
                    await websocket.send_text(json.dumps(reply))
                await websocket.close()
        except WebSocketDisconnect:
            pass
        finally:
            self.num_sessions -= 1

    async def health(self, request: Request) -> Response:
        """Report that the server runs."""
        return _json({"status": "healthy"})

    async def metadata(self, request: Request) -> Response:
        """Describe the environment."""
        return _json({"name": self._envs.id, "description": self._envs.codec.description, "version": _VERSION})

    async def schema(self, request: Request) -> Response:
        """Return the JSON schemas of actions, observations and state."""
        schemas = {"action": action_schema(self._envs.codec), "observation": OBSERVATION_SCHEMA, "state": STATE_SCHEMA}
        return _json(schemas | {"reset_observation": OBSERVATION_SCHEMA})

    async def state(self, request: Request) -> Response:
        """Return the state of the shared environment."""
        return _json(self._shared.state)

    async def reset(self, request: Request) -> Response:
        """Start an episode of the shared environment."""
        return await self._respond(request, lambda body: self._shared.reset(body))

    async def step(self, request: Request) -> Response:
        """Take an action in the shared environment."""
        return await self._respond(request, lambda body: self._shared.step(_action(body)))

    async def tools(self, request: Request) -> Response:
        """Report that the environment has no tools, as JSON-RPC does."""
        body = await _body(request)
        name = body.get("id") if isinstance(body, dict) else None
        error = {"code": -32601, "message": "the environment has no tools; it is played by /ws"}
        return _json({"jsonrpc": "2.0", "id": name if isinstance(name, (str, int)) else None, "error": error})

    async def openapi(self, request: Request) -> Response:
        """List the routes."""
        found = {f"/{name}": {verb: {"responses": {"200": {"description": "OK"}}}} for name, verb, _ in self.routes()}
        return _json({"openapi": "3.1.0", "info": {"title": self._envs.id, "version": _VERSION}, "paths": found})

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        """Return path, method and handler of each HTTP route."""
        return [
            ("health", "get", self.health),
            ("metadata", "get", self.metadata),
            ("schema", "get", self.schema),
            ("state", "get", self.state),
            ("reset", "post", self.reset),
            ("step", "post", self.step),
            ("mcp", "post", self.tools),
            ("openapi.json", "get", self.openapi),
        ]

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
        envs: Factory of the environments.
        max_sessions: Number of WebSockets that may be open at a time.
        origins: Web pages that may play, such as ``https://example.org``. Other web pages get status 403: otherwise
            any page that is open in a browser on this machine could play a server that listens on it.

    Raises:
        ValueError: If an environment cannot be created, or lrl[openenv] is not installed.
    """
    require_extra()
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route, WebSocketRoute

    envs.check("env", "direct")
    handlers = OpenEnvServer(envs, max_sessions)
    routes = [Route(f"/{name}", handler, methods=[verb.upper()]) for name, verb, handler in handlers.routes()]
    middleware = [Middleware(_KnownOrigins, origins=frozenset(origins))]
    return Starlette(routes=[*routes, WebSocketRoute("/ws", handlers.play)], middleware=middleware)


class _KnownOrigins:
    """ASGI middleware that rejects requests of web pages (header ``Origin``) that are not listed."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with status 403."""
        from starlette.websockets import WebSocketClose

        origins = {value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"origin"}
        app: ASGIApp = self.app
        if origins - self.origins:
            reason = f"the web page {min(origins)} may not play; lrl serve_env --origins lists those that may"
            app = WebSocketClose(1008) if scope["type"] == "websocket" else _json({"detail": reason}, 403)
        await app(scope, receive, send)


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a web server of an application; ``run(sockets=[...])`` serves until ``should_exit`` is set."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", ws="websockets-sansio", ws_max_size=MAX_MESSAGE, lifespan="off")
    )


def announce(name: str, host: str, port: int) -> None:
    """Print where a server listens, and whether other machines can connect."""
    shown = f"[{host}]" if ":" in host else host
    others = "" if is_loopback(f"http://{shown}") else "; other machines can connect, there is no password"
    print(f"{name} at http://{shown}:{port} until Ctrl+C{others}", flush=True)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        ValueError: If the address cannot be used.
    """
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host is {host!r} and --port is {port}, which cannot be used: {error}.") from error


def require_extra() -> None:
    """Check that the packages of the extra ``openenv`` are installed.

    Raises:
        ValueError: If one of them is not.
    """
    try:
        import starlette
        import uvicorn
        import websockets
    except ModuleNotFoundError as error:
        raise ValueError(f"OpenEnv needs {error.name}, which is not installed; pip install 'lrl[openenv]'.") from error
    del starlette, uvicorn, websockets


def _action(body: dict[str, Any]) -> dict[str, Any]:
    action = body.get("action")
    if not isinstance(action, dict):
        raise MessageError("VALIDATION_ERROR", f"the action is {action!r}; it must be an object with a text")
    return action


async def _received(websocket: WebSocket) -> str:
    """Return the next message of a session; "", which is no JSON, for one in bytes."""
    try:
        return await websocket.receive_text() or ""
    except KeyError:
        return ""


async def _body(request: Request) -> Any:
    """Return the JSON of a body; None where it is none.

    Raises:
        HTTPException: the body has more than :data:`MAX_MESSAGE` bytes, of which no more are read, or its client
            has closed the connection.
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
    try:
        return json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return None


def _json(content: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(content), status, media_type="application/json")

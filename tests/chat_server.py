"""OpenAI-compatible chat server on a loopback port with configurable failures.

    with ChatServer(lambda body: "left") as server:
        server.faults = [status(429, **{"Retry-After": "3"}), truncated(), empty()]
        model = ServedChatModel("any", server.url)

Each fault applies to one request, in the order of arrival; ``None`` applies no fault. Responses depend only on the body
of the request, so failures do not change them.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Fault:
    """Replaces or changes the response to a request."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[bytes], bytes] = lambda body: body
    """Function from the correct body to the body that is sent."""
    seconds: float = 0.0
    """Seconds to sleep before the response is sent."""
    close: bool = False
    """Whether to close the connection without a response."""


def status(code, message="stand-in error", error_code=None, **headers):
    """Return an error in OpenAI's format."""
    body = json.dumps({"error": {"message": message, "type": "error", "code": error_code}}).encode()
    return Fault(code, headers, lambda _: body)


def slow(seconds):
    """Return a delay of a correct response."""
    return Fault(seconds=seconds)


def truncated():
    """Return a response with the first half of the JSON."""
    return Fault(change=lambda body: body[: len(body) // 2])


def garbage(text="<html>Bad gateway</html>"):
    """Return a response with status 200 and a body that is not a completion."""
    return Fault(change=lambda _: text.encode())


def empty():
    """Return a completion without text."""
    return Fault(change=lambda body: body.replace(b'"content": ', b'"content": "", "refusal": '))


def dropped():
    """Return a fault that closes the connection before the response."""
    return Fault(close=True)


class KillableServer:
    """Serves requests from a thread inside a ``with`` block; it can be killed and started again on the same port.

    Args:
        handler: class that handles a connection; the ``owner`` of its server is this object.
        root: path at the end of :attr:`url`.
    """

    def __init__(self, handler, root=""):
        self.handler, self.root, self.port = handler, root, 0
        self._server = self._thread = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}{self.root}"

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Start the server; a second call after :meth:`stop` uses the same port."""
        self._server = _Server(("127.0.0.1", self.port), self.handler)
        self._server.owner, self.port = self, self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self):
        """Stop like a killed process: cut open connections, and reject new ones until the next :meth:`start`."""
        server, self._server = self._server, None
        if server is not None:
            server.killed = True
            for connection in list(server.connections):
                _cut(connection)
            server.shutdown()
            server.server_close()
            self._thread.join()


class ChatServer(KillableServer):
    """Serves ``POST /v1/chat/completions`` from a thread inside a ``with`` block.

    Args:
        respond: from the body of a request to the text of the response.
        usage: whether responses say how many tokens (here: words) they have.

    Attributes:
        faults: what happens to the next requests, in the order of their arrival.
        bodies: of all requests so far, failed ones included.
        headers: of the same requests, by lower-case names.
        at_once: the largest number of requests that were under way together.
        finish_reason: of all responses.
    """

    def __init__(self, respond, usage=True):
        super().__init__(_Handler, "/v1")
        self.respond, self.usage, self.finish_reason = respond, usage, "stop"
        self.faults, self.bodies, self.headers = [], [], []
        self.message = {}  # further fields of each message
        self.at_once = self._under_way = 0
        self._lock = threading.Lock()

    def receive(self, headers, body):
        """Record a request and return its fault."""
        with self._lock:
            self._under_way += 1
            self.at_once = max(self.at_once, self._under_way)
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            return self.faults.pop(0) if self.faults else None

    def leave(self):
        with self._lock:
            self._under_way -= 1

    def completion(self, body):
        """Return the correct body of a response."""
        text = self.respond(body)
        words = sum(len(message["content"].split()) for message in body["messages"])
        payload = {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, **self.message},
                    "finish_reason": self.finish_reason,
                }
            ],
        }
        if self.usage:
            counts = {"prompt_tokens": words, "completion_tokens": len(text.split())}
            payload["usage"] = counts | {"total_tokens": sum(counts.values())}
        return json.dumps(payload).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads, allow_reuse_address, request_queue_size = True, True, 64
    owner: ChatServer

    def __init__(self, *args):
        self.connections, self.killed = set(), False
        super().__init__(*args)

    def finish_request(self, request, client_address):
        self.connections.add(request)
        try:
            super().finish_request(request, client_address)
        finally:
            self.connections.discard(request)

    def handle_error(self, request, client_address):
        """Ignore clients that closed their connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):  # noqa: N802 (the name is http.server's)
        owner = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = owner.receive(self.headers, body) or Fault()
        try:
            if fault.seconds:
                time.sleep(fault.seconds)
            if fault.close or self.server.killed:
                self.close_connection = True
                _cut(self.connection)
                return
            payload = fault.change(owner.completion(body))
            self.send_response(fault.status)
            for name, value in {"Content-Type": "application/json", **fault.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
        finally:
            owner.leave()

    def log_message(self, *_):
        """Print nothing."""


def _cut(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

"""A stand-in for an OpenAI-compatible chat server, on a loopback port, that can be told to fail.

    with ChatServer(lambda body: "left") as server:
        server.faults = [status(429, **{"Retry-After": "3"}), truncated(), empty()]
        model = ServedChatModel("any", server.url)

The first requests suffer the faults, one each; ``None`` among them lets one through. Responses depend on the body of
the request alone, so that they are the same whatever fails before.
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
    """Response that is sent instead of a completion."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[bytes], bytes] = lambda body: body
    """From the right body to the one that is sent."""
    seconds: float = 0.0
    """Slept before anything is sent."""
    close: bool = False
    """Close the connection without a word."""


def status(code, message="stand-in error", error_code=None, **headers):
    """An error of OpenAI's format."""
    body = json.dumps({"error": {"message": message, "type": "error", "code": error_code}}).encode()
    return Fault(code, headers, lambda _: body)


def slow(seconds):
    """Right, but late."""
    return Fault(seconds=seconds)


def truncated():
    """Half of the JSON, and the connection stays whole."""
    return Fault(change=lambda body: body[: len(body) // 2])


def garbage(text="<html>Bad gateway</html>"):
    """Status 200 and no JSON."""
    return Fault(change=lambda _: text.encode())


def empty():
    """A completion without text."""
    return Fault(change=lambda body: body.replace(b'"content": ', b'"content": "", "refusal": '))


def dropped():
    """The connection ends before the response."""
    return Fault(close=True)


class ChatServer:
    """Serves ``POST /v1/chat/completions`` from a thread, while its ``with`` block lasts.

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
        self.respond, self.usage, self.finish_reason = respond, usage, "stop"
        self.faults, self.bodies, self.headers = [], [], []
        self.message = {}  # further fields of each message
        self.at_once = self.port = self._under_way = 0
        self._lock, self._server, self._thread = threading.Lock(), None, None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Start, or start again at the same port."""
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.owner, self.port = self, self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self):
        """Stop as if killed: open connections are cut, and new ones fail until the next :meth:`start`."""
        server, self._server = self._server, None
        if server is not None:
            server.killed = True
            for connection in list(server.connections):
                _cut(connection)
            server.shutdown()
            server.server_close()
            self._thread.join()

    def receive(self, headers, body):
        """Note a request and return its fault."""
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
        """The right body of a response."""
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
        """A client that went away is no error here."""


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
        """Suppress the log on the terminal."""


def _cut(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

"""A server of environments by OpenEnv's protocol on a loopback port, in a thread or in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lrl.envs.factory import GymnasiumEnvs
from lrl.openenv.server import listen, make_app, make_server


@contextlib.contextmanager
def serving(envs, max_sessions=64):
    """Serve in a thread, and yield the URL of the server."""
    with serving_app(make_app(envs, max_sessions)) as url:
        yield url


@contextlib.contextmanager
def serving_app(app):
    """Serve any ASGI application in a thread."""
    socket = listen("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)


@contextlib.contextmanager
def serving_process(*words):
    """Serve by ``lrl serve_env`` in a process; its URL, and a function that kills it."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "lrl", "serve_env", "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)})

    def kill():
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    try:
        line = process.stdout.readline()
        yield line.split(" at ")[1].split()[0], kill
    finally:
        kill()
        process.stdout.close()


def frozen_lake(**settings):
    """FrozenLake with the slippery ice."""
    return GymnasiumEnvs("FrozenLake-v1", **settings)

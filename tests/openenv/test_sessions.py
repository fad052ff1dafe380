"""Tests of OpenEnv environments in this process, and behind servers that fail."""

import functools
import json
import random
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from openenv_server import serving_app
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from websockets.sync import client

from lrl.envs.processes import EnvironmentFailedError
from lrl.openenv.codec import OpenEnvAction
from lrl.openenv.factory import OpenEnvEnvs


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("guessing", None)


def game(**settings):
    return OpenEnvEnvs(environment="guessing:GuessingGame", **settings)


def test_an_environment_in_this_process_is_played_as_text():
    factory = game(kwargs={"top": 5}, invalid_penalty=-1.0)
    assert factory.codec.action_texts == tuple("0123456789") and factory.id == "guessing:GuessingGame"
    envs = factory.make(2, "think_answer")
    texts, _ = envs.reset(seed=[1, 2])
    assert texts == ("guess", "guess")
    numbers = [random.Random(seed).randint(0, 5) for seed in (1, 2)]
    right, wrong = (f"<think></think><answer>{n}</answer>" for n in (numbers[0], (numbers[1] + 1) % 6))
    texts, rewards, terminated, truncated, infos = envs.step((right, "3"))
    assert texts[0] == "right" and texts[1].startswith("Invalid action: the answer is not of the form")
    assert rewards.tolist() == [1.0, -1.0] and terminated.tolist() == [True, False] and not truncated.any()
    assert infos["success"].tolist() == [True, False] and infos["action_valid"].tolist() == [True, False]
    for _ in range(4):
        envs.reset(seed=[1, 2], options={"reset_mask": np.array([True, False])})
        _, _, terminated, truncated, _ = envs.step((right, wrong))
    assert truncated.tolist() == [False, True] and terminated.tolist() == [True, False]  # as the metadata say
    native = [env.unwrapped._session._environment for env in envs.envs]
    envs.close()
    assert all(one.closed for one in native) and native[0] is not native[1]


def test_a_limit_of_the_client_truncates():
    envs = game(max_episode_steps=1).make(1, "direct")
    envs.reset(seed=[1])
    wrong = (random.Random(1).randint(0, 9) + 1) % 9
    _, _, terminated, truncated, _ = envs.step((str(wrong),))
    assert truncated.tolist() == [True] and terminated.tolist() == [False]


def test_an_exception_of_an_environment_in_this_process_raises_one_sentence():
    envs = game().make(1, "direct")
    envs.reset(seed=[5])
    message = (
        r"environment 0 of guessing:GuessingGame \(episode seed 5\) failed: it raised RuntimeError: nine is broken\."
    )
    with pytest.raises(EnvironmentFailedError, match=f"^{message}$"):
        envs.step(("9",))


def test_an_action_that_does_not_fit_the_schema_is_an_invalid_action():
    factory = game(action=OpenEnvAction(names={"high": 12, "low": 0}), max_invalid=2)
    envs = factory.make(1, "direct")
    envs.reset(seed=[1])
    (text,), rewards, terminated, _, infos = envs.step(("high",))
    assert text.startswith("Invalid action: Input should be less than or equal to 9")
    assert rewards.tolist() == [-0.1] and not terminated[0] and not infos["action_valid"][0]
    assert envs.step(("high",))[2].tolist() == [True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "env.url is None and env.environment is None; it must be exactly one"),
        ({"url": "localhost:8000"}, "env.url is 'localhost:8000'; it must be an address such as http://127.0.0.1:8000"),
        (
            {"url": "http://me:secret@host"},
            "env.url contains a user name, a password, .* because it is written to files[.]",
        ),
        ({"url": "http:/me:secret@host", "environment": "a:B"}, "env.url contains a user name"),
        ({"url": "http://x", "kwargs": {"a": 1}}, "env.kwargs is set, but the environment is at env.url"),
        ({"environment": "guessing:Nothing"}, "env.environment is 'guessing:Nothing'; it must be module:Class"),
        ({"environment": "no_such_package:Game"}, "env.environment is 'no_such_package:Game'; it must be module:Class"),
        ({"environment": "guessing:Untyped"}, "env.action.type is null, and step.. of guessing:Untyped does not say"),
        (
            {"environment": "guessing:GuessingGame", "kwargs": {"bottom": 1}},
            "env.kwargs is .'bottom': 1., which .* no argument 'bottom'.",
        ),
        ({"url": "http://127.0.0.1:9"}, "env.url is 'http://127.0.0.1:9', which cannot be read .*start the server"),
        ({"url": "http://127.0.0.1:9", "timeout": 0}, "env.timeout is 0; it must be positive"),
    ],
)
def test_an_invalid_setting_raises_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        OpenEnvEnvs(**settings).make(1, "direct")
    assert "\n" not in str(error.value) and "secret" not in str(error.value)


def test_the_class_of_the_action_can_be_named():
    factory = OpenEnvEnvs(environment="guessing:Untyped", action=OpenEnvAction(type="guessing:GuessAction"))
    envs = factory.make(1, "direct")
    envs.reset(seed=[1])
    assert envs.step((str(random.Random(1).randint(0, 9)),))[1].tolist() == [1.0]


def test_a_policy_that_does_not_respond_in_text_raises_one_sentence():
    with pytest.raises(ValueError, match="is played in text only; the policy must respond in text"):
        game().make(1, None)


class Scripted:
    """Server that sends given messages, nothing for None, and disconnects after the last one."""

    def __init__(self, *messages):
        self.messages = messages

    async def play(self, websocket):
        await websocket.accept()
        for message in self.messages:
            await websocket.receive_text()
            if message is not None:
                await websocket.send_text(message if isinstance(message, str) else json.dumps(message))
        if None in self.messages:
            await websocket.receive_text()
        await websocket.close()

    @property
    def app(self):
        schema = {"action": {"properties": {"move": {"type": "string"}}, "required": ["move"]}}
        routes = {"/schema": schema, "/metadata": {"name": "x", "description": "A game."}}
        found = [Route(path, lambda request, body=body: JSONResponse(body)) for path, body in routes.items()]
        return Starlette(routes=[*found, WebSocketRoute("/ws", self.play)])


SEEN = {"type": "observation", "data": {"observation": {"text": "hall"}, "reward": None, "done": False}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("{broken", "it sent a message that is not JSON"),
        ([1, 2], "it sent '.1, 2.', which is not an observation"),
        ({"type": "observation", "data": [1]}, "it sent .*, which is not an observation"),
        ({"type": "observation", "data": {"observation": "hall"}}, "it sent .*, which is not an observation"),
        (
            {"type": "observation", "data": {"observation": {}, "reward": "much"}},
            "it sent .*, which is not an observation",
        ),
        ({"type": "error", "data": ["the wall fell"]}, "it sent .*, which is not an observation"),
        ({"type": "state", "data": {}}, "it sent .*, which is not an observation"),
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "the wall\nfell."}}, "the wall fell"),
        ({"type": "error"}, "unknown error"),
        (None, "it did not respond within 1 seconds"),
    ],
)
def test_a_server_that_fails_raises_one_sentence(message, reason):
    with serving_app(Scripted(SEEN, message).app) as url:
        envs = OpenEnvEnvs(url, timeout=30 if message else 1).make(1, "direct")
        assert envs.reset(seed=[6])[0] == ("hall",)
        failed = rf"^environment 0 of .*\(episode seed 6\) failed: {reason}\.$"
        with pytest.raises(EnvironmentFailedError, match=failed):
            envs.step(("go",))
        envs.close()


@pytest.mark.slow
def test_a_late_response_is_not_taken_for_the_response_to_the_next_message():
    late = {"type": "observation", "data": {"observation": {"text": "late"}}}
    with serving_app(Scripted(SEEN, late, SEEN).app) as url:
        envs = OpenEnvEnvs(url).make(1, "direct")
        envs.reset(seed=[6])
        envs.envs[0].send("go")  # as where another environment failed before this one was stepped
        assert envs.reset(seed=[7])[0] == ("hall",)
        envs.close()
    with serving_app(Scripted(SEEN, None, late).app) as url:
        envs = OpenEnvEnvs(url, timeout=1).make(1, "direct")
        envs.reset(seed=[6])
        with pytest.raises(EnvironmentFailedError, match="did not respond within 1 seconds"):
            envs.step(("go",))
        with pytest.raises(EnvironmentFailedError, match="the connection was lost"):
            envs.reset(seed=[7])
        envs.close()


def test_sessions_are_closed_if_a_later_one_cannot_be_opened(monkeypatch):
    factory, opened = game(), []
    connect = type(factory.endpoint).connect

    def third_fails(endpoint):
        if len(opened) == 2:
            raise ValueError("no more")
        opened.append(connect(endpoint))
        return opened[-1]

    monkeypatch.setattr(type(factory.endpoint), "connect", third_fails)
    with pytest.raises(ValueError, match="no more"):
        factory.make(3, "direct")
    assert [session._environment.closed for session in opened] == [True, True]


@pytest.mark.slow
def test_a_server_in_a_long_step_does_not_lose_its_client(monkeypatch):
    """The event loop does not answer pings during a step; the client pings often here."""
    eager = functools.partial(client.connect, ping_interval=0.05)
    monkeypatch.setattr(client, "connect", lambda *args, **settings: eager(*args, **{"ping_timeout": 0.2} | settings))

    class Slow(Scripted):
        async def play(self, websocket):
            await websocket.accept()
            for message in self.messages:
                await websocket.receive_text()
                time.sleep(1.0)
                await websocket.send_text(json.dumps(message))
            await websocket.close()

    with serving_app(Slow(SEEN).app) as url:
        envs = OpenEnvEnvs(url, timeout=30).make(1, "direct")
        assert envs.reset(seed=[6])[0] == ("hall",)
        envs.close()


def test_an_address_without_a_web_server_raises_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet():
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail ready\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ValueError, match="which cannot be read .*; start the server first"):
            OpenEnvEnvs(url, timeout=10).make(1, "direct")
        thread.join(10)


def test_a_server_that_disconnects_raises_one_sentence():
    with serving_app(Scripted(SEEN).app) as url:
        envs = OpenEnvEnvs(url).make(1, "direct")
        envs.reset(seed=[6])
        with pytest.raises(EnvironmentFailedError, match="failed: the connection was lost"):
            envs.step(("go",))
        envs.close()


def test_a_rejected_action_is_an_invalid_action_and_done_without_truncated_means_terminated():
    problem = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [{"msg": "too far"}]}
    end = {"type": "observation", "data": {"observation": {"text": "exit"}, "reward": 2, "done": True}}
    with serving_app(Scripted(SEEN, {"type": "error", "data": problem}, end).app) as url:
        envs = OpenEnvEnvs(url).make(1, "direct")
        envs.reset(seed=[6])
        (text,), rewards, terminated, _, infos = envs.step(("go",))
        assert text == "Invalid action: Invalid message; too far.\nhall" and rewards.tolist() == [-0.1]
        assert not terminated[0] and infos["invalid_reason"].tolist() == ["Invalid message; too far"]
        (text,), rewards, terminated, truncated, _ = envs.step(("go",))
        assert (text, rewards.tolist(), terminated.tolist(), truncated.tolist()) == ("exit", [2.0], [True], [False])
        envs.close()


def test_an_address_without_the_protocol_raises_one_sentence():
    with serving_app(Starlette()) as url, pytest.raises(ValueError, match="cannot be read ./schema: HTTP Error 404"):
        OpenEnvEnvs(url).make(1, "direct")

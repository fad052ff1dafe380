"""Tests of the server: its messages, its routes and its errors."""

import json
import socket
import urllib.error
import urllib.request

import pytest
from openenv_server import serving, serving_app
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from lrl.envs.factory import GymnasiumEnvs
from lrl.openenv import server
from lrl.openenv.server import action_schema, make_environment


@pytest.fixture
def lake():
    environment = make_environment(GymnasiumEnvs("FrozenLake-v1", {"is_slippery": False}, max_invalid=2))
    yield environment
    environment.close()


def ask(environment, kind, **data):
    return environment.reply(json.dumps({"type": kind, "data": data}))


def test_an_episode_is_played_by_messages(lake):
    start = ask(lake, "reset", seed=3, episode_id="first")
    assert start["type"] == "observation" and start["data"]["reward"] is None and start["data"]["done"] is False
    assert start["data"]["observation"]["text"].startswith("row 0 column 0")
    for turn, text in enumerate(("DOWN", "DOWN", "RIGHT", "RIGHT", "DOWN", "RIGHT")):
        assert ask(lake, "state")["data"] == {"episode_id": "first", "step_count": turn}
        data = ask(lake, "step", text=text)["data"]
    assert data["reward"] == 1.0 and data["done"] is True
    facts = {"terminated": True, "truncated": False, "success": True, "action_valid": True, "invalid_reason": ""}
    assert data["metadata"] == data["observation"]["metadata"] == facts
    assert ask(lake, "step", text="UP")["data"]["code"] == "EXECUTION_ERROR"  # the episode is over
    assert ask(lake, "close") is None


def test_the_rule_of_invalid_actions_holds_for_every_client(lake):
    ask(lake, "reset", seed=3)
    data = ask(lake, "step", text="FLY")["data"]
    assert data["observation"]["text"].startswith("Invalid action: the action must be one of LEFT")
    assert data["reward"] == -0.1 and not data["done"] and data["metadata"]["action_valid"] is False
    assert ask(lake, "step", text="FLY")["data"]["done"] is True  # max_invalid


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[]", "INVALID_JSON"),
        ('{"type": "dance"}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": []}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": "one"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"move": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": "UP"}}', "EXECUTION_ERROR"),
    ],
)
def test_an_invalid_message_is_an_error_of_the_protocol(lake, raw, code):
    reply = lake.reply(raw)
    assert reply["type"] == "error" and reply["data"]["code"] == code and reply["data"]["message"]


def test_an_exception_of_the_environment_is_an_error_of_the_protocol_and_ends_the_episode(lake, monkeypatch):
    def fall(action):
        raise RuntimeError("the ice broke")

    ask(lake, "reset", seed=3)
    monkeypatch.setattr(lake._env, "step", fall)
    reply = ask(lake, "step", text="LEFT")
    assert reply["data"] == {"code": "EXECUTION_ERROR", "message": "the step failed: RuntimeError('the ice broke')"}
    assert "no episode" in ask(lake, "step", text="LEFT")["data"]["message"]


def test_a_session_whose_environment_cannot_be_created_is_released(monkeypatch):
    makers = [lambda: 1 / 0]
    monkeypatch.setattr(server, "make_environment", lambda envs: makers.pop()() if makers else make_environment(envs))
    with serving(GymnasiumEnvs("FrozenLake-v1"), max_sessions=1) as url:
        with connect(f"ws{url[4:]}/ws", proxy=None) as socket, pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)
        with connect(f"ws{url[4:]}/ws", proxy=None) as socket:
            socket.send('{"type": "state"}')
            assert json.loads(socket.recv(timeout=10))["type"] == "state"


def test_a_binary_message_is_an_error_of_the_protocol_and_the_session_continues():
    with serving(GymnasiumEnvs("FrozenLake-v1")) as url, connect(f"ws{url[4:]}/ws", proxy=None) as socket:
        replies = []
        for message in (b'{"type": "state"}', '{"type": ' + "9" * 5000 + "}", '{"type": "state"}'):
            socket.send(message)
            replies.append(json.loads(socket.recv(timeout=10)))
    assert [reply["type"] for reply in replies] == ["error", "error", "state"]
    assert {reply["data"]["code"] for reply in replies[:2]} == {"INVALID_JSON"}


def test_options_of_a_reset_reach_the_environment():
    cart = make_environment(GymnasiumEnvs("CartPole-v1"))
    texts = [ask(cart, "reset", seed=0, **options)["data"]["observation"]["text"] for options in ({}, {"low": 0.04})]
    assert texts[0] != texts[1]
    assert ask(cart, "reset", seed=0, low=1.0, high=0.0)["data"]["code"] == "EXECUTION_ERROR"
    cart.close()


def test_the_schema_describes_actions():
    lake = action_schema(GymnasiumEnvs("FrozenLake-v1").codec)["properties"]["text"]
    assert lake == {"type": "string", "enum": ["LEFT", "DOWN", "RIGHT", "UP"]}
    car = action_schema(GymnasiumEnvs("MountainCarContinuous-v0").codec)["properties"]["text"]
    assert car["description"].endswith("inside <action></action>") and car["examples"] == ["<action>0.000</action>"]


def test_http_routes_return_what_the_protocol_requires():
    def get(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"{url}/{path}", data, timeout=10) as response:
            return json.load(response)

    with serving(GymnasiumEnvs("FrozenLake-v1")) as url:
        assert get("health") == {"status": "healthy"}
        assert get("metadata")["name"] == "FrozenLake-v1" and "Actions: LEFT" in get("metadata")["description"]
        assert set(get("schema")) == {"action", "observation", "reset_observation", "state"}
        assert get("reset", {"seed": 1})["done"] is False
        assert get("step", {"action": {"text": "LEFT"}})["reward"] == 0.0
        assert get("state")["step_count"] == 1
        response = get("mcp", {"id": 4})
        assert response["id"] == 4 and response["error"]["code"] == -32601, "JSON-RPC's code of an unknown method"
        assert get("mcp", {"id": "\ud800"})["id"] == "\ud800"
        for no_id in ({"id": float("nan")}, {"id": ["\ud800"]}, []):
            assert get("mcp", no_id)["id"] is None
        assert {"/reset", "/step", "/state"} <= set(get("openapi.json")["paths"])
        for path, body in (("step", {"action": "LEFT"}), ("step", {"action": {"text": 1}}), ("reset", [])):
            with pytest.raises(urllib.error.HTTPError, match="422"):
                get(path, body)


def test_oversized_bodies_and_messages_are_rejected():
    large = json.dumps({"action": {"text": "L" * server.MAX_MESSAGE}}).encode()
    with serving(GymnasiumEnvs("FrozenLake-v1")) as url:
        for headers in ({}, {"Transfer-Encoding": "chunked"}):
            request = urllib.request.Request(f"{url}/step", iter([large]) if headers else large, headers)
            with pytest.raises(urllib.error.URLError, match="413|reset|Broken"):
                urllib.request.urlopen(request, timeout=10)
        with connect(f"ws{url[4:]}/ws", proxy=None) as socket:
            socket.send(large.decode())
            with pytest.raises(ConnectionClosed, match="1009"):  # too big
                socket.recv(timeout=10)
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            assert json.load(response) == {"status": "healthy"}


@pytest.mark.parametrize("origin", ["https://example.org", "http://127.0.0.1:8000", "null"])
def test_only_listed_web_pages_may_connect(origin):
    for allowed in ((), ("https://other.org", origin)):
        app = server.make_app(GymnasiumEnvs("FrozenLake-v1"), origins=allowed)
        with serving_app(app) as url:
            request = urllib.request.Request(f"{url}/reset", b"{}", {"Origin": origin, "Content-Type": "text/plain"})
            if allowed:
                with urllib.request.urlopen(request, timeout=10) as response:
                    assert "observation" in json.load(response)
                with connect(f"ws{url[4:]}/ws", proxy=None, origin=origin) as socket:
                    socket.send('{"type": "state"}')
                    assert "episode_id" in socket.recv(timeout=10)
            else:
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(request, timeout=10)
                with pytest.raises(InvalidStatus, match="403"):
                    connect(f"ws{url[4:]}/ws", proxy=None, origin=origin)


def test_the_server_prints_its_address(capsys):
    for host, said in (
        ("127.0.0.1", "Ctrl+C\n"),
        ("::1", "Ctrl+C\n"),
        ("0.0.0.0", "other machines can connect without a password"),
    ):
        server.announce("FrozenLake-v1", host, 8000)
        assert said in capsys.readouterr().out


def test_an_address_in_use_raises_one_sentence():
    with (
        server.listen("127.0.0.1", 0) as taken,
        pytest.raises(ValueError, match=r"host is '127.0.0.1' and port is \d+, which cannot be used"),
    ):
        server.listen("127.0.0.1", taken.getsockname()[1])


def test_a_missing_extra_raises_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(
        ValueError, match=r"OpenEnv needs the package uvicorn, which is not installed; run pip install 'lrl\[openenv\]'"
    ):
        server.make_app(GymnasiumEnvs("FrozenLake-v1"))


def test_a_client_that_disconnects_within_its_body_causes_no_traceback(capfd):
    with serving(GymnasiumEnvs("FrozenLake-v1")) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            assert response.status == 200
    assert "Traceback" not in capfd.readouterr().err

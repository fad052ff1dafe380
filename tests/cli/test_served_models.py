"""Tests of ``lrl evaluate`` and ``lrl watch`` with models that another program runs."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from chat_server import ChatServer, garbage, status

from lrl.cli import evaluate, watch
from lrl.cli.options import ModelOptions

KEY = "sk-stand-in-0123456789"
ACTIONS = ("LEFT", "DOWN", "RIGHT", "UP")


def respond(body):
    """Return an action, or sometimes a response without one."""
    number = body["seed"] + len(body["messages"][-1]["content"])
    return "nothing" if number % 5 == 0 else ACTIONS[number % 4]


@pytest.fixture
def server():
    with ChatServer(respond) as server:
        yield server


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """The default cache is below the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def run(command, line, capsys):
    """Run a command; its exit status, and what it printed."""
    code = 0
    try:
        command.main("lrl", line.split())
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out + said.err


def evaluated(server, capsys, more=""):
    line = f"--api_url {server.url} --model stand-in --response_format direct --episodes 3 --seed 7 --temperature 1"
    return run(evaluate, f"{line} --json report.json {more}", capsys)


def without_time(path):
    report = json.loads(Path(path).read_text())
    assert report.pop("command").startswith("lrl evaluate ")
    return {
        name: value for name, value in report.items() if name not in ("env_steps_per_second", "usage", "usage_in_all")
    }


@pytest.mark.slow
def test_a_served_model_is_evaluated_with_counts_and_cost(server, capsys):
    code, said = evaluated(server, capsys, "--prices 1000000 2000000 --history 2 --system Play.")
    report = json.loads(Path("report.json").read_text())
    served = report["usage"]
    assert code == 0 and "stand-in in FrozenLake-v1" in said and "optimum" not in said
    assert f"{served['asked']} prompts" in " ".join(said.split()) and "cost" in said
    assert served["requests"] == len(server.bodies) == served["asked"] + served["further_responses"]
    assert served["cost"] == served["prompt_tokens"] + 2 * served["completion_tokens"] > 0
    assert served["invalid_retries"] == {"max_retries": 10, "temperature": 0.3}
    assert sum(episode["length"] for episode in report["per_episode"]) == served["asked"]
    assert report["invalid_action_rate"] == 0 and served["further_responses"] > 0
    first, *others = server.bodies
    assert first["messages"][0] == {"role": "system", "content": "Play."} and first["temperature"] == 1
    assert max(len(body["messages"]) for body in others) == 6  # two turns of history


def test_at_temperature_0_the_exact_success_needs_few_requests(server, capsys):
    code, said = evaluated(server, capsys, '--temperature 0 --env_kwargs {"is_slippery":false}')
    assert code == 0 and "exact success at temperature 0" in " ".join(said.split())
    distinct = {json.dumps(body["messages"]) for body in server.bodies}
    assert len(distinct) <= 11  # FrozenLake 4x4 has 11 states to act in
    report = json.loads(Path("report.json").read_text())
    asked, in_all = report["usage"], report["usage_in_all"]
    assert all(in_all[name] == asked[name] for name in ("asked", "asked_again", "further_responses", "still_invalid"))
    assert in_all["requests"] + in_all["cached"] == in_all["asked"] + in_all["further_responses"] + 11


@pytest.mark.slow
def test_retries_of_invalid_responses_may_be_off(server, capsys):
    code, _ = evaluated(server, capsys, "--invalid_retries 0")
    report = json.loads(Path("report.json").read_text())
    assert code == 0 and report["usage"]["further_responses"] == 0 and report["invalid_action_rate"] > 0


@pytest.mark.slow
def test_the_same_command_resumes_after_the_server_stopped_it_and_the_key_is_in_no_file(server, capsys):
    """The server repeats the key in responses and errors."""
    evaluated(server, capsys, "--cache none")
    whole, asked = without_time("report.json"), len(server.bodies)
    Path("report.json").unlink()
    server.faults = [None, None, garbage(f"{KEY}!"), *[None] * 5, *[status(401, f"Incorrect key: {KEY}")] * 9]
    code, said = evaluated(server, capsys, "--max_concurrency 1 --max_retries 1")
    assert code == 2 and not Path("report.json").exists() and KEY not in said
    state = "OPENAI_API_KEY contains a key that was not accepted"
    assert f"which requires a valid key; {state} (401: Incorrect key: <API key>)" in said
    server.faults, before = [], len(server.bodies)
    code, said = evaluated(server, capsys)
    assert code == 0 and without_time("report.json") == whole
    assert len(server.bodies) - before == asked - 7 and KEY not in said
    files = [path for path in Path().rglob("*") if path.is_file()]
    assert Path("runs/responses.sqlite") in files and Path("report.json") in files
    assert not any(KEY.encode() in path.read_bytes() for path in files)


@pytest.mark.slow
def test_a_killed_command_resumes_without_repeating_requests(server, capsys):
    """SIGKILL arrives while the responses of a turn are received."""
    evaluated(server, capsys, "--cache none")
    whole, asked = without_time("report.json"), len(server.bodies)
    Path("report.json").unlink()
    arrived = threading.Event()

    def slowly(body):
        if len(server.bodies) - asked > 6:
            arrived.set()
            time.sleep(0.2)
        return respond(body)

    server.respond = slowly
    line = f"--api_url {server.url} --model stand-in --response_format direct --episodes 3 --seed 7 --temperature 1"
    words = [*line.split(), "--max_concurrency", "2"]
    process = multiprocessing.get_context("fork").Process(target=evaluate.main, args=("lrl", words))
    process.start()  # everything is imported already
    assert arrived.wait(60)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    server.respond, before = respond, len(server.bodies)
    code, _ = evaluated(server, capsys)
    again = len(server.bodies) - before
    assert code == 0 and without_time("report.json") == whole
    # Of those that were asked before, only the ones under way when it was killed are asked again.
    assert 6 <= before - asked < asked and asked - (before - asked) <= again <= asked - (before - asked) + 2


def test_a_server_that_is_down_is_one_sentence(server, capsys):
    server.stop()
    code, said = evaluated(server, capsys, "--max_retries 0 --cache none")
    assert code == 2 and "which failed once for the model 'stand-in' (no connection, " in said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--api_url http://x/v1", "--api_url is given without --model; name the model."),
        ("--api_url http://x/v1 --policy random", "--api_url is given without --model"),
        (
            "--api_url http://x/v1 --model a --choose",
            "--choose is given with --api_url; it is for models that lrl loads",
        ),
        ("--api_url http://x/v1 --model a --dtype bfloat16", "--dtype is given with --api_url"),
        ("--api_url http://x/v1 --model a --extra_body 3", "--extra_body is '3'; it must be a JSON object"),
        ("--api_url http://x/v1 --model a --max_retries -1", "--max_retries is -1; it must be 0 or positive"),
        ("--api_url http://x/v1 --model a --max_concurrency 0", "--max_concurrency is 0; it must be at least 1"),
        ("--api_url http://x/v1 --model a --invalid_retries -1", "invalid_retries.max_retries is -1"),
        (
            "--api_url http://x/v1 --model a --retry_temperature 0",
            "invalid_retries.temperature is 0, at which further responses",
        ),
        ("--api_url x --model a", "api_url is 'x'; it must be an address such as"),
        ("--api_url http://x/v1 --model a --devices 2", "--devices is '2'; with --api_url it must be 1"),
        ("--model a --prices 1 2", "--prices is given without --api_url"),
        ("--model a --retry_temperature 0.5", "--retry_temperature is 0.5, but --invalid_retries is 0, so that"),
        (
            "--api_url http://x/v1 --model a --invalid_retries 0 --retry_temperature 0.5",
            "--retry_temperature is 0.5, but --invalid_retries is 0, so that",
        ),
        (
            "--model a --choose --invalid_retries 3",
            "--invalid_retries is given with --choose, which always takes a legal",
        ),
        ("--model a --invalid_retries 3 --devices 2", "--devices is '2'; with --invalid_retries it must be 1"),
        ("--policy random --dtype bfloat16", "--dtype is given without --model; it is for --model"),
        ("--policy random --max_new_tokens 3", "--max_new_tokens is given without --model"),
        ("--policy random --num_videos 2", "--num_videos is given without --capture_video; give both or neither."),
        ("--policy random --capture_video v --num_videos -2", "num_videos"),
        ("--policy random --invalid_retries 3", "but a RandomActor writes no responses that could be invalid"),
    ],
)
def test_a_mistake_is_one_sentence(line, said, capsys):
    code, printed = run(evaluate, line, capsys)
    assert code == 2 and said in printed, printed


def test_an_episode_of_a_served_model_can_be_watched(server, capsys):
    line = f"--api_url {server.url} --model stand-in --response_format direct --turns 2 --cache none"
    code, said = run(watch, line, capsys)
    assert code == 0 and said.startswith("stand-in in FrozenLake-v1") and said.count("--- turn") == 2
    assert "system: " in said and "user: " in said and "\nresponse: " in said


def test_a_local_model_can_be_watched(capsys):
    code, said = run(watch, "--model assets/tiny-lm --turns 1", capsys)
    assert code == 0 and "<|im_start|>user" in said and "stopped" in said


def test_retries_of_a_local_model_are_counted_without_rephrased_episodes(capsys):
    words = Path("words.yaml")
    words.write_text('words: {description: "Walk on the ice."}')
    line = (
        "--model assets/tiny-lm --response_format direct --max_new_tokens 8 --temperature 1 --episodes 4 --num_envs 4"
    )
    line += f" --invalid_retries 2 --retry_temperature 1 --rephrase {words} --json report.json"
    code, said = run(evaluate, line, capsys)
    assert code == 0, said
    report = json.loads(Path("report.json").read_text())
    assert report["usage"]["asked"] == sum(episode["length"] for episode in report["per_episode"])
    assert report["usage"]["invalid_retries"] == {"max_retries": 2, "temperature": 1.0}
    said = " ".join(said.split())
    assert f"{report['usage']['asked']} prompts" in said and "(one map, without retries)" in said and "in all: " in said


def test_retries_of_a_watched_episode_are_shown(capsys, monkeypatch):
    asked, with_retries = [], ModelOptions.with_retries
    monkeypatch.setattr(ModelOptions, "with_retries", lambda *given: asked.append(given) or with_retries(*given))
    code, said = run(watch, "--model assets/tiny-lm --turns 1 --invalid_retries 2", capsys)
    assert code == 0 and len(asked) == 1, said
    code, said = run(watch, "--human --invalid_retries 2", capsys)
    assert code == 2 and "a HumanActor writes no responses that could be invalid" in said


# -- transformers serve -----------------------------------------------------------------------------------------------


@contextmanager
def transformers_serve(folder):
    """Serve a model folder with the real thing, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--port", str(port), "--host", "127.0.0.1"]
    words += ["--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with Path("serve.log").open("w") as log:
        command = [sys.executable, "-m", "transformers.cli.transformers", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + 120
            while not _healthy(port):
                assert process.poll() is None and time.monotonic() < deadline, Path("serve.log").read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait()


def _healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.slow
def test_the_embedded_model_plays_behind_transformers_serve(capsys):
    """At temperature 0 it plays as it does in this process."""
    folder = Path(__file__).parents[2] / "assets" / "tiny-lm"
    line = f"--model {folder} --response_format direct --max_new_tokens 8 --episodes 4 --num_envs 4 --json"
    with transformers_serve(folder) as url:
        code, said = run(evaluate, f"{line} served.json --api_url {url} --invalid_retries 0", capsys)
    assert code == 0, said
    code, said = run(evaluate, f"{line} local.json", capsys)
    assert code == 0, said
    served = json.loads(Path("served.json").read_text())["usage"]
    assert without_time("served.json") == without_time("local.json")
    assert (
        served["requests"] + served["cached"] == served["asked"] > 0
        and served["prompt_tokens"] > served["completion_tokens"] > 0
    )
    assert not any(KEY.encode() in path.read_bytes() for path in Path().rglob("*") if path.is_file())

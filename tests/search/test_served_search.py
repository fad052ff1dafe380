"""Tests of searches with a model behind a server that fails during the search."""

import json
import logging
import os
import signal
import threading
import time

import pytest
import torch
from chat_server import ChatServer, dropped, empty, garbage, slow, status, truncated
from commands import run_command
from search_runs import StopAt, data_of, fit

from lrl.chat import served
from lrl.chat.served import Prices, ServedChatModel
from lrl.search.module import PromptedSearchModule
from lrl.search.pictures import SearchPictures
from lrl.search.policies import LinearPolicy
from lrl.search.prompted import PromptedSearcher
from lrl.search.stand_in import HillClimbingChatModel
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.types import SamplingConfig

pytest.importorskip("openai")


def climb(body):
    """Return the reply of the stand-in to a request."""
    (completion,) = HillClimbingChatModel().complete([body["messages"]], None, [body["seed"]])
    return completion.text


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    """Let retries wait for at most 0.02 seconds."""
    monkeypatch.setattr(served, "_BASE_DELAY", 0.01)
    monkeypatch.setattr(served, "_MAX_DELAY", 0.02)


def module_of(url, cache=None, prices=None, max_retries=12, timeout=5.0, **searcher):
    cache = None if cache is None else str(cache)
    model = ServedChatModel("stand-in", url, cache=cache, max_retries=max_retries, timeout=timeout, prices=prices)
    return PromptedSearchModule(LinearPolicy(), PromptedSearcher(model, **searcher))


@pytest.fixture(scope="module")
def trials():
    """Return the records of an undisturbed search."""
    with ChatServer(climb) as server:
        module = module_of(server.url)
        fit(None, module=module)
        assert len(server.bodies) == 6
    return module.trials


@pytest.mark.slow
def test_faults_in_mid_search_change_nothing(trials, tmp_path):
    with ChatServer(climb) as server:
        server.faults = [None, status(429, **{"Retry-After": "0"}), dropped(), truncated(), None, garbage(), empty()]
        server.faults += [slow(0.2), status(503), None]
        module = module_of(server.url)
        trainer = fit(tmp_path, module=module)
        assert module.trials == trials and len(server.bodies) == 6 + 6
    rows = [row for _, row in trainer.logger.rows if "search/retries" in row]
    assert sum(row["search/retries"] for row in rows) == 0  # they are the server's, not the model's
    assert sum(row["search/prompt_tokens"] for row in rows) > 0


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_changes_nothing(trials, tmp_path, monkeypatch):
    monkeypatch.setattr(served, "_MAX_DELAY", 0.4)
    with ChatServer(climb) as server:

        def kill_and_start_later(body):
            if len(server.bodies) == 3:
                threading.Thread(target=restart).start()
            return climb(body)

        def restart():
            server.stop()
            time.sleep(0.3)
            server.start()

        server.respond = kill_and_start_later
        module = module_of(server.url, max_retries=20)
        fit(tmp_path, module=module)
        assert module.trials == trials


@pytest.mark.slow
def test_an_unavailable_server_ends_the_run_with_one_sentence_and_the_run_can_be_resumed(trials, tmp_path):
    with ChatServer(climb) as server:
        server.faults = [None, None, None, *[status(500)] * 20]
        with pytest.raises(ValueError, match="failed 13 times for the model 'stand-in'") as caught:
            fit(tmp_path / "half", CollectionCheckpoint(1), module=module_of(server.url, tmp_path / "cache.sqlite"))
        assert "\n" not in str(caught.value)
        last = tmp_path / "half" / "checkpoints" / "last.ckpt"
        assert len(torch.load(last, weights_only=True)["lrl"]["search"]["trials"]) == 2 + 3
        server.faults.clear()
        server.bodies.clear()
        module = module_of(server.url, tmp_path / "cache.sqlite")
        fit(tmp_path / "more", CollectionCheckpoint(1), module=module, ckpt_path=last)
        assert module.trials == trials and len(server.bodies) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_interrupts_retries_and_the_search_resumes_with_the_same_proposals(
    trials, number, tmp_path, monkeypatch
):
    monkeypatch.setattr(served, "_BASE_DELAY", 0.5)
    monkeypatch.setattr(served, "_MAX_DELAY", 0.5)
    with ChatServer(climb) as server:
        server.faults = [None, None, None, *[status(503)] * 20]

        def interrupt(body):
            if len(server.bodies) == 5:
                os.kill(os.getpid(), number)
            return climb(body)

        server.respond = interrupt
        with pytest.raises(SystemExit) as caught:
            fit(tmp_path / "half", CollectionCheckpoint(1), module=module_of(server.url))
        assert caught.value.code == 128 + number and len(server.bodies) == 5
        server.respond, server.faults = climb, []
        last = tmp_path / "half" / "checkpoints" / "last.ckpt"
        module = module_of(server.url)
        trainer = fit(tmp_path / "more", CollectionCheckpoint(1), module=module, ckpt_path=last)
        assert module.trials == trials and len(server.bodies) == 5 + 3
    assert module.searcher.usage["requests"] == 8, "those that were broken off as well"
    validated = [row for _, row in trainer.logger.rows if "val/return" in row]
    assert len(validated) == 1


def test_received_replies_are_not_requested_again(trials, tmp_path):
    with ChatServer(climb) as server:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(tmp_path, StopAt(6), module=module_of(server.url, tmp_path / "cache.sqlite"))
        asked = len(server.bodies)
        module = module_of(server.url, tmp_path / "cache.sqlite")
        trainer = fit(tmp_path, module=module)  # from the start
        assert module.trials == trials and asked == 4 and len(server.bodies) == 6
    rows = [row for _, row in trainer.logger.rows if "search/cached" in row]
    assert [row["search/cached"] for row in rows] == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("settings", [{}, {"context_length": 1200}])
def test_a_search_with_a_short_context_leaves_policies_out_and_finishes(settings, tmp_path):
    """With ``settings`` the search knows the limit; without them the server rejects longer prompts."""
    with ChatServer(climb) as server:
        note = server.receive

        def receive(headers, body):
            too_long = len(body["messages"][0]["content"]) > 2400
            return note(headers, body) or (status(400, "maximum context length is 900 tokens") if too_long else None)

        server.receive = receive
        model = ServedChatModel("stand-in", server.url, **settings)
        searcher = PromptedSearcher(model, sampling=SamplingConfig(max_new_tokens=100))
        module = PromptedSearchModule(LinearPolicy(), searcher)
        trainer = fit(tmp_path, module=module, data=data_of(warmup=8), max_epochs=14)
        assert (len(server.bodies) == 6) == bool(settings)
    rows = [row for _, row in trainer.logger.rows if "search/shown" in row]
    assert len(rows) == 6 and all(1 < row["search/shown"] < 8 for row in rows)


@pytest.mark.slow
def test_a_request_that_times_out_changes_nothing(trials, tmp_path):
    with ChatServer(climb) as server:
        server.faults = [None, None, slow(1.5), None, slow(1.5)]
        module = module_of(server.url, timeout=0.5)
        started = time.monotonic()
        trainer = fit(tmp_path, module=module)
        assert module.trials == trials and len(server.bodies) >= 6 + 2
        assert time.monotonic() - started < 60
    usage = module.searcher.chat_model.usage
    assert usage.retries == usage.requests - 6 >= 2
    rows = [row for _, row in trainer.logger.rows if "search/requests" in row]
    assert sum(row["search/requests"] for row in rows) == usage.requests
    assert sum(row["search/request_retries"] for row in rows) == usage.retries


def test_costs_of_a_search_are_logged_and_a_resume_continues_the_counts(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    caplog.set_level(logging.INFO)
    prices = Prices(prompt=2.0, completion=10.0)
    with ChatServer(climb) as server:
        server.faults = [None, status(503)]
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(tmp_path, StopAt(5), CollectionCheckpoint(1), module=module_of(server.url, prices=prices))
        last = tmp_path / "checkpoints" / "last.ckpt"
        resumed = fit(tmp_path, CollectionCheckpoint(1), module=module_of(server.url, prices=prices), ckpt_path=last)
        asked = [body["messages"][0]["content"] for body in server.bodies]
    usage, rows = resumed.lightning_module.searcher.usage, [row for _, row in resumed.logger.rows]
    rows = [row for row in rows if "search/cost" in row]
    cost = 2e-6 * usage["prompt_tokens"] + 1e-5 * usage["completion_tokens"]
    assert usage["prompt_tokens"] == sum(len(text.split()) for text in asked) - len(asked[1].split())  # one failed
    assert usage["cost"] == pytest.approx(cost) and rows[-1]["search/total_cost"] == pytest.approx(cost)
    last_proposals = sum(row["search/cost"] for row in rows)
    assert len(rows) == 3 and 0 < last_proposals < cost
    assert [row["search/requests"] for row in rows] == [1, 1, 1] and usage["requests"] == 7
    said = [
        message
        for message in caplog.messages
        if message.startswith("asked in the whole search: 7 requests, 1 of them retries")
    ]
    assert len(said) == 1 and said[0].endswith(f"; cost {cost:.4g}")


@pytest.mark.slow
def test_rejected_replies_are_in_the_run_directory_before_a_run_stops(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    caplog.set_level(logging.INFO)
    with ChatServer(lambda body: climb(body) if len(server.bodies) < 3 else "I give up.") as server:
        module = module_of(server.url, max_tries=2, prices=Prices(prompt=1, completion=1))
        with pytest.raises(ValueError, match="gave no usable proposal 3 in searcher.max_tries 2 replies"):
            fit(tmp_path, SearchPictures(), module=module)
    lines = [json.loads(line) for line in (tmp_path / "proposals.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[:-1] == module.trials and len(lines) == 2 + 2 + 1
    assert lines[-1]["iteration"] == 3 and lines[-1]["parameters"] is None and lines[-1]["returns"] == []
    assert [one["reply"] for one in lines[-1]["replies"]] == ["I give up."] * 2
    assert "proposals.jsonl" in caplog.text and "asked in the whole search: 4 requests" in caplog.text


KEY = "sk-stand-in-0123456789"
FIT = """python -m lrl fit --config configs/cartpole/props.yaml --run_directory {run} --trainer.accelerator cpu
 --trainer.max_epochs 4 --trainer.check_val_every_n_epoch 4 --data.init_args.num_iterations 3 --data.init_args.warmup 1
 --data.init_args.num_rollouts 2 --data.init_args.max_steps 20 --data.init_args.validation.episodes 2
 --model.init_args.searcher.init_args.chat_model ServedChatModel {chat}.name stand-in {chat}.api_url {url}
 {chat}.cache {run}.sqlite {chat}.max_retries 3"""
CHAT = "--model.init_args.searcher.init_args.chat_model.init_args"


@pytest.mark.slow
@pytest.mark.parametrize("ends_well", [True, False])
def test_no_file_of_a_run_contains_a_key_that_the_server_repeats(ends_well, tmp_path):
    with ChatServer(lambda body: f"{climb(body)} Your key is {KEY}.") as server:
        server.finish_reason = f"stop {KEY}"
        server.faults = [None, status(500, f"bad {KEY}"), garbage(f"{KEY} is no JSON")]
        server.faults += [] if ends_well else [None, status(401, f"Incorrect: {KEY}")]
        command = FIT.format(run=tmp_path / "run", chat=CHAT, url=server.url).replace("\n", "")
        done = run_command(command, OPENAI_API_KEY=KEY)
        assert server.headers[-1]["authorization"] == f"Bearer {KEY}"
    assert done.returncode == (0 if ends_well else 2), done.stderr
    assert "<API key>" in done.stderr and KEY not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "command.txt", "run.log", "metrics.csv", "hparams.yaml", "proposals.jsonl"} <= names
    assert "run.sqlite" in names and any(name.startswith("events.out") for name in names) and "last.ckpt" in names
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    log = (tmp_path / "run" / "run.log").read_text()
    assert "<API key>" in log and "asked in the whole search: " in log


@pytest.mark.slow
def test_no_file_and_no_message_contains_a_key_that_is_given_instead_of_its_variable(tmp_path):
    command = FIT.format(run=tmp_path / "run", chat=CHAT, url="http://127.0.0.1:1/v1").replace("\n", "")
    done = run_command(f"{command} {CHAT}.api_key_env {KEY}")
    assert done.returncode == 2 and "api_key_env is not the name of an environment variable" in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]

"""Searches by a model behind a server that fails in mid-search: the same search, or one sentence and nothing lost."""

import threading
import time

import pytest
import torch
from chat_server import ChatServer, dropped, empty, garbage, slow, status, truncated
from search_runs import StopAt, data_of, fit

from lrl.algorithms.prompted_search import PromptedSearchModule
from lrl.callbacks.checkpoint import CollectionCheckpoint
from lrl.models.chat_retries import RetryConfig
from lrl.models.served_chat import ServedChatModel
from lrl.policies.linear import LinearPolicy
from lrl.search.prompted import PromptedSearcher
from lrl.search.stand_in import HillClimbingChatModel

pytest.importorskip("openai")
QUICK = RetryConfig(base_delay=0.01, max_delay=0.02, max_retries=12, timeout=5.0)


def climb(body):
    """The reply of the stand-in to a request."""
    (completion,) = HillClimbingChatModel().complete([body["messages"]], None, [body["seed"]])
    return completion.text


def module_of(url, cache=None, retries=QUICK):
    model = ServedChatModel("stand-in", url, cache=None if cache is None else str(cache), retries=retries)
    return PromptedSearchModule(LinearPolicy(), PromptedSearcher(model))


@pytest.fixture(scope="module")
def trials():
    """A search that nothing disturbs."""
    with ChatServer(climb) as server:
        module = module_of(server.url)
        fit(None, module=module)
        assert len(server.bodies) == 6
    return module.trials


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


def test_a_server_that_is_killed_and_started_again_changes_nothing(trials, tmp_path):
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
        module = module_of(server.url, retries=RetryConfig(base_delay=0.2, max_delay=0.4, max_retries=20, timeout=5.0))
        fit(tmp_path, module=module)
        assert module.trials == trials


def test_a_server_that_stays_away_ends_the_run_in_a_sentence_and_the_rest_is_resumed(trials, tmp_path):
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


def test_replies_that_were_waited_for_are_not_asked_for_again(trials, tmp_path):
    with ChatServer(climb) as server:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(tmp_path, StopAt(6), module=module_of(server.url, tmp_path / "cache.sqlite"))
        asked = len(server.bodies)
        module = module_of(server.url, tmp_path / "cache.sqlite")
        trainer = fit(tmp_path, module=module)  # from the start
        assert module.trials == trials and asked == 4 and len(server.bodies) == 6
    rows = [row for _, row in trainer.logger.rows if "search/cached" in row]
    assert [row["search/cached"] for row in rows] == [1, 1, 1, 1, 0, 0]


def test_the_key_is_in_no_file_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with ChatServer(climb) as server:
        module, data = module_of(server.url, tmp_path / "cache.sqlite"), data_of(num_iterations=2, warmup=0)
        fit(tmp_path, CollectionCheckpoint(1), module=module, data=data, max_epochs=2)
        assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 2 and not any(b"very-secret" in path.read_bytes() for path in files)

"""Integration tests of prompted search over HTTP, with a stand-in for the language model."""

import csv
import json

import pytest
from chat_server import ChatServer
from commands import run_words

from lrl.search.stand_in import HillClimbingChatModel
from lrl.search.tasks import TASKS

pytest.importorskip("openai")
SIZES = {"mountain_car_continuous": 1, "swimmer": 1, "frozen_lake": 4}
"""Number of proposals of the stand-in on a task with one number as its action, with several, and with a table."""
WARMUP = 2


def climb(body):
    """Return the reply of the stand-in to a request."""
    (completion,) = HillClimbingChatModel().complete([body["messages"]], None, [body["seed"]])
    return completion.text


def search(url, run, name, proposals, *more):
    """Search with a command, and return the rows of the log."""
    task = TASKS[name]
    model = {"class_path": "ServedChatModel", "init_args": {"name": "stand-in", "api_url": url}}
    searcher = {"class_path": "PromptedSearcher", "init_args": {"chat_model": model}}
    options = {
        "model.init_args.policy": "LinearPolicy" if task.policy == "linear" else "TabularPolicy",
        "model.init_args.searcher": json.dumps(searcher),
        "data.init_args.env.init_args.id": task.env_id,
        "data.init_args.max_steps": task.max_steps,
        "data.init_args.num_iterations": proposals,
        "data.init_args.warmup": WARMUP,
        "data.init_args.validation.episodes": 4,
        "data.init_args.validation.num_envs": 4,
        "trainer.max_epochs": proposals + WARMUP,
        "run_directory": run,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    done = run_words(["python", "-m", "lrl", "fit", "--config", "configs/cartpole/search.yaml", *words, *more])
    assert done.returncode == 0, done.stderr
    with (run / "metrics.csv").open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["search/best_return"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_model_behind_a_server_searches_on_tasks_of_every_kind(name, tmp_path):
    with ChatServer(climb) as server:
        short = ("--data.init_args.num_rollouts", "2", "--data.init_args.env.init_args.max_episode_steps", "100")
        rows = search(server.url, tmp_path / "run", name, SIZES[name], *short)
        assert len(server.bodies) >= SIZES[name]
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    found = [json.loads(line) for line in (tmp_path / "run" / "proposals.jsonl").read_text().splitlines()]
    assert len(found) == len(rows) == WARMUP + SIZES[name]
    assert all(len(one["parameters"]) == TASKS[name].num_parameters and len(one["returns"]) == 2 for one in found)


@pytest.mark.slow
def test_a_model_behind_a_server_finds_a_policy_that_balances_the_pole(tmp_path):
    stop = {
        "class_path": "EarlyStopping",
        "init_args": {"monitor": "search/best_return", "mode": "max", "stopping_threshold": 499.9, "patience": 1000},
    }
    with ChatServer(climb) as server:
        rows = search(server.url, tmp_path / "run", "cart_pole", 400, "--trainer.callbacks+", json.dumps([stop]))
        assert float(rows[-1]["search/best_return"]) == 500 and len(rows) < 400 + WARMUP
        assert 0 < len(server.bodies) <= 400

"""Tests of PPO and TRPO on the tasks of searches: settings, budget and records."""

import json

import numpy as np
import pytest
import torch
import yaml

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.algorithms.trpo import TRPOModule
from lrl.evaluation.statistics import headline_seed
from lrl.files import shipped
from lrl.registry import build
from lrl.search.experiments import SearchRun, make_policy, search
from lrl.search.networks import _fit, _fresh_returns, block_means, settings, train
from lrl.search.rollouts import fresh_seeds, make_batched, play_parameters
from lrl.search.table_command import main
from lrl.search.tasks import NETWORKS, TASKS, SearchBudget
from lrl.training.gradient_module import GradientModule

SMALL = SearchBudget(iterations=6, rollouts=3, fresh_episodes=5)


def test_blocks_of_episodes_are_complete_and_do_not_overlap():
    assert block_means([1.0, 3.0, 5.0, 7.0, 100.0], 2).tolist() == [2.0, 6.0]
    assert block_means([1.0, 3.0], 3).tolist() == []


def test_a_record_has_the_blocks_of_training_and_the_last_policy_on_fresh_episodes():
    run, task, seed = SearchRun("nim", "ppo", 1), TASKS["nim"], headline_seed(1)
    record = train(run, SMALL)
    module, data, played = _fit(task, settings(task, "ppo", seed), SMALL, seed)
    assert len(played.returns) == record["episodes"] >= 18 and record["env_steps"] == data.clocks["env_steps"] == 256
    blocks = [sum(played.returns[start : start + 3]) / 3 for start in range(0, 18, 3)]
    assert record["values"] == pytest.approx(blocks, abs=1e-6) and record["best_iteration"] == max(blocks)
    assert blocks[record["best_proposal"]] == max(blocks)
    assert record["fresh"] == pytest.approx(_fresh_returns(task, module.policy, SMALL, seed).mean())
    assert record["fresh_ci95"][0] <= record["fresh"] <= record["fresh_ci95"][1]
    assert record["num_weights"] == (11 * 64 + 64) + 2 * (64 * 64 + 64) + (64 * 3 + 3), "one-hot sticks, three actions"
    assert json.loads(json.dumps(record)) == record
    assert {**train(run, SMALL), "seconds": 0} == {**record, "seconds": 0}
    assert set(search(SearchRun("nim", "ars", 1), SMALL)) <= set(record)


def test_fresh_episodes_equal_those_of_a_search():
    task, seed = TASKS["nim"], headline_seed(0)
    module, _, _ = _fit(task, settings(task, "trpo", seed), SMALL, seed)
    logits = module.policy(torch.eye(11))  # of each number of sticks
    table = make_policy(task)
    actions = logits.argmax(1).numpy() + task.env_factory().spaces[1].start
    trial = play_parameters(table, make_batched(task.env_factory(), 3), actions, fresh_seeds(seed, 5), task.max_steps)
    assert _fresh_returns(task, module.policy, SMALL, seed).tolist() == trial.returns.tolist()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("method", NETWORKS)
def test_settings_follow_the_rule_of_the_module(name, method):
    task = TASKS[name]
    observations, actions = task.env_factory().spaces
    continuous = type(actions).__name__ == "Box"
    file = shipped(f"configs/{'half_cheetah' if continuous else 'cartpole'}/{method}_mlp.yaml")
    with open(file, encoding="utf-8") as text:
        shown = yaml.safe_load(text)
    found = settings(task, method, 7)
    policy = found["model"]["init_args"]["policy"]["init_args"]
    assert policy.pop("init_seed") == 7
    assert policy.pop("normalise_observations") == (type(observations).__name__ == "Box")
    wanted = shown["model"]["init_args"]
    wanted["policy"]["init_args"].pop("normalise_observations", None)
    (wanted if method == "trpo" else wanted["optimizer"])["schedule"] = "constant"
    if method == "trpo":
        dimensions = {"reacher": 2, "swimmer": 2, "hopper": 3, "walker2d": 6}
        wanted["max_kl"] = round(0.01 * dimensions.get(name, 1), 6) if continuous else 0.02
    assert found["model"] == shown["model"]
    assert found["data"].items() <= shown["data"]["init_args"].items() and "num_steps" in found["data"]
    assert found["trainer"] == ({"gradient_clip_val": 0.5} if method == "ppo" else {})


def test_modules_are_built_as_lrl_fit_builds_them():
    for method, kind in (("ppo", PPOValueHeadModule), ("trpo", TRPOModule)):
        module = build(GradientModule, settings(TASKS["reacher"], method, 3)["model"])
        assert type(module) is kind and module.credit.gamma == 0.99 and module.policy.init_seed == 3
        assert module.policy.normalise_observations and module.policy.observation_clip == 5.0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["frozen_lake", "reacher"])
def test_training_ends_with_the_budget_of_steps(task):
    budget = SearchBudget(iterations=1000, rollouts=1, fresh_episodes=2, max_env_steps=1025)
    record = train(SearchRun(task, "trpo", 0), budget)
    assert record["env_steps"] == 2048 and record["episodes"] == len(record["values"]), "until the collection ends"
    assert record["best_iteration"] == pytest.approx(max(record["values"]), abs=1e-6)


def test_too_few_steps_raise_one_sentence(tmp_path, capsys):
    command = ["--folder", str(tmp_path), "--tasks", "nim", "--methods", "ppo", "--seeds", "1", "--max_env_steps", "9"]
    with pytest.raises(SystemExit):
        main("lrl search_table", [*command, "--rollouts", "1000", "--fresh_episodes", "1"])
    assert "--max_env_steps is 9, in which " in capsys.readouterr().err and not list(tmp_path.rglob("*.json"))


def test_the_command_trains_networks_with_searches_and_resumes(tmp_path, capsys):
    command = ["--folder", str(tmp_path), "--iterations", "6", "--rollouts", "3", "--fresh_episodes", "4"]
    command += ["--tasks", "nim", "--seeds", "1", "--methods", "random_search"]
    main("lrl search_table", [*command, "ppo"])
    printed = capsys.readouterr().out
    assert "nim ppo 0: best_iteration " in printed and "| nim | 18 / " in printed and "Of ppo, the best" in printed
    kept = {file.name: file.read_text() for file in tmp_path.rglob("*.json")}
    main("lrl search_table", [*command, "ppo", "trpo"])
    assert capsys.readouterr().out.count("seconds") == 1
    assert {file.name for file in tmp_path.rglob("*.json")} == {*kept, "trpo_0.json"}
    assert all((tmp_path / "nim" / name).read_text() == text for name, text in kept.items())


def test_a_signal_leaves_no_record(monkeypatch):
    """Return from ``fit`` as Lightning does after SIGTERM."""
    import lightning as L

    monkeypatch.setattr(L.Trainer, "fit", lambda *_, **__: None)
    with pytest.raises(SystemExit) as stop:
        train(SearchRun("nim", "ppo", 0), SMALL)
    assert stop.value.code == 143


@pytest.mark.parametrize(
    ("method", "iterations"),
    [pytest.param("ppo", 150, marks=pytest.mark.learning), pytest.param("trpo", 400, marks=pytest.mark.reference)],
)
def test_networks_learn_nim(method, iterations):
    record = train(SearchRun("nim", method, 0), SearchBudget(iterations=iterations))
    assert record["best_iteration"] == 1.0 and np.mean(record["values"][-20:]) > np.mean(record["values"][:20]) + 0.5

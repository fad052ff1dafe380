"""Tests of searches as Lightning runs: steps, the parameters of the policy, and resuming."""

import json
import logging
import signal

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from search_runs import PLUS, SignalAt, StopAt, data_of, fit, fit_until_killed, module_of
from tiny_runs import rollout_data

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.data.run_data import ValidationConfig
from lrl.evaluation.load import load_policy
from lrl.evaluation.statistics import headline_seed
from lrl.policies.mlp import MLPPolicy
from lrl.search.experiments import SearchRun
from lrl.search.experiments import search as plain_search
from lrl.search.module import PromptedSearchModule
from lrl.search.pictures import SearchPictures
from lrl.search.policies import LinearPolicy, TabularPolicy
from lrl.search.prompted import PromptedSearcher
from lrl.search.searchers import CMAES, CrossEntropyMethod, RandomSearch
from lrl.search.stand_in import HillClimbingChatModel
from lrl.search.tasks import SearchBudget
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.progress import ConsoleProgress


def test_a_run_plays_the_same_episodes_as_a_plain_loop(tmp_path):
    run = SearchRun("cart_pole", "cma_es", 0)
    record = plain_search(run, SearchBudget(iterations=12, rollouts=3, fresh_episodes=1))
    data = data_of(num_iterations=12, warmup=0, max_steps=500, seed=headline_seed(0))
    trainer = fit(tmp_path, module=module_of("cma"), data=data, max_epochs=12, limit_val_batches=0)
    module = trainer.lightning_module
    assert [np.mean(trial["returns"]) for trial in module.trials] == pytest.approx(record["values"], abs=1e-6)
    assert module.policy.parameters_vector.tolist() == record["parameters"]
    assert data.clocks["env_steps"] == record["env_steps"] and data.clocks["episodes"] == 12 * 3


def test_the_policy_has_the_first_of_the_best_parameters_and_rows_contain_the_costs(tmp_path):
    trainer = fit(tmp_path, CollectionCheckpoint(1))
    module, rows = trainer.lightning_module, [row for _, row in trainer.logger.rows]
    means = [np.mean(trial["returns"]) for trial in module.trials]
    assert module.best == int(np.argmax(means)) and module.best_return == max(means)
    assert module.policy.parameters_vector.tolist() == module.trials[module.best]["parameters"]
    training = [row for row in rows if "rollout/return" in row]
    assert [row["rollout/return"] for row in training] == pytest.approx(means)
    assert [row["search/best_return"] for row in training] == pytest.approx(np.maximum.accumulate(means))
    assert [trial["iteration"] for trial in module.trials] == [-1, 0, 1, 2, 3, 4, 5, 6]
    proposals = [row for row in training if "search/prompt_tokens" in row]
    assert len(proposals) == 6 and sum(row["search/retries"] for row in proposals) > 0
    tokens = sum(row["search/prompt_tokens"] + row["search/completion_tokens"] for row in proposals)
    assert trainer.datamodule.clocks["tokens"] == tokens > 0
    assert trainer.datamodule.clocks["episodes"] == 8 * 3
    (validated,) = [row for row in rows if "val/return" in row]
    assert validated["clock/episodes"] == 24
    loaded = load_state(tmp_path)
    assert loaded["policy.parameter_values"].tolist() == module.trials[module.best]["parameters"]


def load_state(root):
    return torch.load(root / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def test_prompts_hold_the_history_the_rejection_and_the_environment(tmp_path):
    module = module_of()
    fit(tmp_path, module=module)
    prompts = module.searcher.chat_model.prompts
    assert "A pole stands on a cart" in prompts[0] and "score[0] is that of left" in prompts[0]
    assert "This is proposal 1 of 6." in prompts[0] and "This is proposal 6 of 6." in prompts[-1]
    assert prompts[0].count("f(params): ") == 2 and prompts[-1].count("(mean of 3 episodes)") == 7
    assert prompts[0].count("State | Action | Reward") == 2
    rejected = [prompt for prompt in prompts if "was rejected: 1 values were given; there must be 10" in prompt]
    retried = sum(len(trial["replies"]) - 1 for trial in module.trials if trial["replies"])
    assert len(rejected) == retried > 0


def assert_same_search(resumed, whole):
    ours, theirs = resumed.lightning_module, whole.lightning_module
    assert ours.trials == theirs.trials and ours.best == theirs.best
    assert ours.searcher.state_dict() == theirs.searcher.state_dict()
    assert torch.equal(ours.policy.parameter_values, theirs.policy.parameter_values)
    clocks = {name: (resumed.datamodule.clocks[name], value) for name, value in whole.datamodule.clocks.items()}
    assert all(ours == theirs for name, (ours, theirs) in clocks.items() if name != "minutes")
    varying = ("clock/minutes", "search/proposal_seconds", "throughput/env_steps_per_second", "val/seconds")
    rows = [
        [{name: value for name, value in row.items() if name not in varying} for _, row in trainer.logger.rows]
        for trainer in (resumed, whole)
    ]
    assert rows[0] == rows[1][-len(rows[0]) :]


@pytest.mark.parametrize("kind", ["prompted", "cma", "random"])
@pytest.mark.parametrize(("stop", "played"), [(StopAt, 1), (StopAt, 5), (SignalAt, 4), (SignalAt, 7)])
def test_a_stopped_search_resumes_with_the_same_proposals(kind, stop, played, tmp_path):
    whole = fit(tmp_path / "whole", CollectionCheckpoint(1), module=module_of(kind))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path / "half", stop(played), CollectionCheckpoint(1), module=module_of(kind))
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    resumed = fit(tmp_path / "more", CollectionCheckpoint(1), module=module_of(kind), ckpt_path=last)
    assert_same_search(resumed, whole)


@pytest.mark.distributed
def test_a_killed_search_resumes_with_the_same_history_and_proposals(processes, tmp_path):
    whole = fit(tmp_path / "whole", CollectionCheckpoint(1))
    child = processes.Process(target=fit_until_killed, args=(tmp_path / "half",))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    assert_same_search(fit(tmp_path / "more", CollectionCheckpoint(1), ckpt_path=last), whole)


@pytest.mark.parametrize("max_epochs", [8, 100])
def test_a_finished_search_that_is_resumed_plays_nothing_and_writes_all_records(max_epochs, tmp_path):
    before = fit(tmp_path, CollectionCheckpoint(1))
    last, more = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "more"
    resumed = fit(more, CollectionCheckpoint(1), SearchPictures(), ckpt_path=last, max_epochs=max_epochs)
    assert resumed.lightning_module.trials == before.lightning_module.trials
    assert len(resumed.lightning_module.trials) == 8 and resumed.datamodule.clocks["episodes"] == 24
    lines = (more / "proposals.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == before.lightning_module.trials
    assert (more / "search.png").is_file() and (more / "parameters.png").is_file()


def test_a_search_ends_after_its_last_proposal_or_stops_early(tmp_path):
    trainer = fit(tmp_path, max_epochs=50)
    assert trainer.datamodule.played == 8
    for episodes in (4, 0):
        data = data_of(validation=ValidationConfig(episodes=episodes))
        rows = fit(tmp_path, data=data, check_val_every_n_epoch=400).logger.rows  # as set for more proposals
        validated = [row["clock/episodes"] for _, row in rows if "val/return" in row]
        assert validated == ([24] if episodes else [])
    for monitor in ("search/best_return", "rollout/return"):  # the held-out episodes come after the last policy
        trainer = fit(tmp_path, EarlyStopping(monitor, mode="max", stopping_threshold=1.0))
        assert trainer.datamodule.played == 1
    stopping = EarlyStopping("val/return", mode="max", stopping_threshold=1.0)
    trainer = fit(tmp_path, stopping, check_val_every_n_epoch=3)
    assert trainer.datamodule.played == 3


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (CMAES(), RandomSearch(), "model.searcher is a RandomSearch, in the checkpoint it was a CMAES; resume"),
        (
            CMAES(population_size=4),
            CMAES(population_size=5),
            "a search of CMAES with other proposals than these settings",
        ),
    ],
)
def test_a_search_is_not_resumed_by_another_searcher(before, after, said, tmp_path):
    fit(tmp_path, CollectionCheckpoint(1), module=PromptedSearchModule(LinearPolicy(), before))
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match=said):
        fit(tmp_path / "more", module=PromptedSearchModule(LinearPolicy(), after), ckpt_path=last)


def test_a_resumed_search_has_the_same_policies_and_schedule(tmp_path):
    module, cross_entropy = module_of("cma"), CrossEntropyMethod(population_size=3)
    fit(tmp_path / "cma", CollectionCheckpoint(1), module=module)
    last = tmp_path / "cma" / "checkpoints" / "last.ckpt"
    for setting, value, before in (("warmup", 4, 2), ("num_rollouts", 5, 3), ("max_steps", 61, 60)):
        with pytest.raises(ValueError, match=f"data.{setting} is {value}, in the checkpoint it was {before}; resume"):
            fit(tmp_path, module=module_of("cma"), data=data_of(**{setting: value}), ckpt_path=last)
    more = {"data": data_of(num_iterations=9), "ckpt_path": last, "max_epochs": 11}
    longer = fit(tmp_path / "longer", CollectionCheckpoint(1), module=module_of("cma"), **more)
    assert longer.lightning_module.trials[:8] == module.trials and longer.datamodule.played == 11
    fit(tmp_path, CollectionCheckpoint(1), module=PromptedSearchModule(LinearPolicy(), cross_entropy))
    last = tmp_path / "checkpoints" / "last.ckpt"
    again = PromptedSearchModule(LinearPolicy(), CrossEntropyMethod(population_size=3))  # its noise has a schedule
    with pytest.raises(ValueError, match="other proposals than these settings .* and data.num_iterations."):
        fit(tmp_path / "more", module=again, data=data_of(num_iterations=60), ckpt_path=last, max_epochs=62)


@pytest.mark.slow
def test_a_run_directory_has_all_proposals_and_two_pictures(tmp_path):
    fit(tmp_path / "half", CollectionCheckpoint(1), SearchPictures(), max_epochs=3)
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    trainer = fit(tmp_path / "more", CollectionCheckpoint(1), SearchPictures(), ckpt_path=last)
    lines = (tmp_path / "more" / "proposals.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == trainer.lightning_module.trials and len(lines) == 8
    for picture in ("search.png", "parameters.png"):
        assert (tmp_path / "more" / picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_ends_before_the_search_warns(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    fit(tmp_path, max_epochs=3)
    assert "trainer.max_epochs is 3, which ends the search early: it plays 8 policies" in caplog.text
    caplog.clear()
    fit(tmp_path)
    assert "max_epochs is" not in caplog.text


def test_progress_counts_the_policies_of_the_search(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="lrl"):
        fit(tmp_path, ConsoleProgress(), max_epochs=400)
    lines = [line.split("  ")[0] for line in caplog.messages if line.startswith("collection ")]
    assert lines == [f"collection {number}/8" for number in range(1, 9)]


def test_tables_are_searched_with_trajectories(tmp_path):
    module = PromptedSearchModule(TabularPolicy(), PromptedSearcher(HillClimbingChatModel(), **PLUS))
    fit(tmp_path, module=module, data=data_of("FrozenLake-v1"))
    assert all(len(entry.trajectory) > 0 for entry in module.searcher.entries)
    assert set(np.ravel([trial["parameters"] for trial in module.trials])) <= {0, 1, 2, 3}


def test_data_that_do_not_fit_raise_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="data is a RolloutDataModule; it must be a SearchDataModule"):
        fit(tmp_path, data=rollout_data("prompts"))
    with pytest.raises(ValueError, match="which has nothing for a PPOValueHeadModule to train on"):
        fit(tmp_path, module=PPOValueHeadModule(MLPPolicy()))
    with pytest.raises(ValueError, match="observations are Discrete"):
        fit(tmp_path, data=data_of("FrozenLake-v1"))


def test_evaluate_loads_the_best_policy(tmp_path):
    trainer = fit(tmp_path, CollectionCheckpoint(1))
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    data = "data: {init_args: {env: {class_path: GymnasiumEnvs, init_args: {id: CartPole-v1}}}}"
    policy = "{policy: {class_path: LinearPolicy}}"
    module = f"model: {{class_path: PromptedSearchModule, init_args: {policy}}}"
    checkpoint["lrl"]["config"] = f"{data}\n{module}"
    torch.save(checkpoint, path)
    loaded = load_policy(path)
    best = trainer.lightning_module.trials[trainer.lightning_module.best]
    assert loaded.policy.parameters_vector.tolist() == best["parameters"]

"""Tests of searches on the tasks: records, both rules, and repeated calls."""

import json

import numpy as np
import pytest
from search_runs import play

from lrl.evaluation.statistics import headline_seed
from lrl.search.experiments import METHODS, UNPLAYABLE, SearchRun, make_policy, planned, read_record, search, search_all
from lrl.search.rollouts import fresh_seeds, proposal_seeds
from lrl.search.searchers import RandomSearch
from lrl.search.table_command import main
from lrl.search.tables import budget_table, reached_text, search_tables, unfinished_text
from lrl.search.tasks import NETWORKS, TASKS, SearchBudget

SMALL = SearchBudget(iterations=6, rollouts=3, fresh_episodes=5)


def test_a_record_contains_both_figures():
    record = search(SearchRun("cart_pole", "random_search", 2), SMALL)
    task, searcher = TASKS["cart_pole"], RandomSearch()
    policy, seed, trials = make_policy(task), headline_seed(2), []
    searcher.setup(policy.parameter_space(), seed, 6)
    for proposal in range(6):
        seeds = proposal_seeds(seed, proposal, 3)
        trials.append(play(policy, task.env_factory(), searcher.ask(), seeds, 500))
        searcher.tell(trials[-1])
    values = [trial.value for trial in trials]
    best = trials[int(np.argmax(values))]
    assert record["seed"] == seed and record["values"] == pytest.approx(values, abs=1e-6)
    assert record["best_iteration"] == max(values) and record["parameters"] == best.parameters.tolist()
    assert record["episodes"] == 18 and record["env_steps"] == sum(trial.env_steps for trial in trials)
    fresh = play(policy, task.env_factory(), best.parameters, fresh_seeds(seed, 5), 500)
    again = play(policy, task.env_factory(), best.parameters, proposal_seeds(seed, record["best_proposal"], 3), 500)
    assert record["fresh"] == fresh.value and again.value == record["best_iteration"]
    assert record["fresh_ci95"][0] <= record["fresh"] <= record["fresh_ci95"][1]
    assert json.loads(json.dumps(record)) == record
    repeated = search(SearchRun("cart_pole", "random_search", 2), SMALL)
    assert {**repeated, "seconds": 0} == {**record, "seconds": 0}


def test_every_method_plays_the_same_number_of_episodes():
    records = [search(SearchRun("nim", method, 0), SMALL) for method in METHODS]
    assert {record["episodes"] for record in records} == {18} and {len(record["values"]) for record in records} == {6}
    assert len({record["seed"] for record in records}) == 1
    assert len({json.dumps(record["space"]) for record in records}) == 1


def test_plans_have_the_seeds_of_each_task():
    runs = planned(["maze", "hopper"], ["ars", "cma_es"])
    assert len(runs) == 2 * (10 + 3) and runs[:4] == [
        SearchRun("maze", "ars", 0),
        SearchRun("maze", "cma_es", 0),
        SearchRun("hopper", "ars", 0),
        SearchRun("hopper", "cma_es", 0),
    ]
    assert len(planned(list(TASKS), list(METHODS), 1)) == 60
    assert len(planned(["maze", "hopper"], NETWORKS)) == 2 * (3 + 3), "a network has three seeds on every task"
    assert len(planned(["maze"], ["ars", "ppo"], 2)) == 4


def test_a_second_call_runs_only_what_is_missing(tmp_path, capsys):
    command = ["--folder", str(tmp_path), "--iterations", "4", "--rollouts", "2", "--fresh_episodes", "3"]
    command += ["--tasks", "maze", "nim", "--methods", "random_search", "ars", "--machine", "a test"]
    main("lrl search_table", [*command, "--seeds", "1"])
    first = capsys.readouterr().out
    assert first.count("seconds") == 4 and "All planned runs have finished." in first
    kept = {file: file.read_text() for file in tmp_path.rglob("*.json")}
    assert len(kept) == 4 and not list(tmp_path.rglob("*.partial"))
    lost = tmp_path / "nim" / "ars_0.json"
    lost.unlink()
    main("lrl search_table", [*command, "--seeds", "1", "--show"])
    assert "Unfinished, with the seeds that have finished and those planned: ars nim 0/1." in capsys.readouterr().out
    main("lrl search_table", [*command, "--seeds", "2", "--json", str(tmp_path / "all.json")])
    assert capsys.readouterr().out.count("seconds") == 5
    assert all(file.read_text() == text for file, text in kept.items() if file != lost)
    assert {**json.loads(lost.read_text()), "seconds": 0} == {**json.loads(kept[lost]), "seconds": 0}
    report = json.loads((tmp_path / "all.json").read_text())
    assert len(report["searches"]) == 8 and report["machine"] == "a test"
    assert report["planned"][0] == {"task": "maze", "method": "random_search", "seeds": 2}
    assert report["searches"][0]["machine"] == "a test" and report["searches"][0]["commit"]


@pytest.mark.distributed
def test_several_processes_make_the_same_records_as_one(tmp_path, processes, monkeypatch):
    monkeypatch.setattr("lrl.search.experiments.get_context", lambda _: processes)
    runs = planned(["maze", "nim"], ["ars"], 1)
    found = list(search_all(runs, SMALL, tmp_path, jobs=2))
    for run in runs:
        record = read_record(run, SMALL, tmp_path)
        assert record is not None and record in found
        assert {**record, "seconds": 0} == {**json.loads(json.dumps(search(run, SMALL))), "seconds": 0}


@pytest.mark.distributed
def test_an_error_is_reported_before_all_other_runs_have_finished(tmp_path, processes, monkeypatch):
    """The process with the error may start seconds after the other one, so there are runs for many seconds."""
    monkeypatch.setattr("lrl.search.experiments.get_context", lambda _: processes)
    runs = [SearchRun("maze", "none", 0), *planned(["nim"], ["random_search"], 2000)]
    with pytest.raises(KeyError, match="none"):
        list(search_all(runs, SMALL, tmp_path, jobs=2))
    assert len(list(tmp_path.rglob("*.json"))) < 2000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tasks chess", "--tasks has 'chess'; it must be one of mountain_car_continuous, "),
        (
            "--methods sgd",
            "--methods has 'sgd'; it must be one of random_search, cross_entropy, cma_es, ars, ppo, trpo, in_context.",
        ),
        ("--methods ars in_context", "--methods has in_context; give the run that learned to search by --checkpoint."),
        (
            "--methods ars --checkpoint x",
            "--checkpoint is given, but --methods has no in_context, the only method that uses it.",
        ),
        ("--methods in_context --checkpoint nowhere", "nowhere'; it must be a checkpoint"),
        ("--seeds 0", "--seeds is 0; it must be at least 1."),
        ("--jobs 0", "--jobs is 0; it must be at least 1."),
        ("--rollouts 0", "--rollouts is 0; it must be at least 1."),
    ],
)
def test_a_mistake_is_one_sentence(options, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main("lrl search_table", ["--folder", str(tmp_path), "--tasks", "maze", *options.split(" ")])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_records_of_another_budget_are_not_mixed(tmp_path, capsys):
    command = ["--folder", str(tmp_path), "--tasks", "maze", "--methods", "ars", "--seeds", "1", "--iterations", "2"]
    main("lrl search_table", [*command, "--rollouts", "1"])
    with pytest.raises(SystemExit):
        main("lrl search_table", [*command, "--rollouts", "2"])
    assert "--rollouts is 2, but " in capsys.readouterr().err


def test_only_records_of_networks_depend_on_the_budget_of_steps(tmp_path, monkeypatch):
    for name in ("experiments.search", "networks.train"):
        monkeypatch.setattr(f"lrl.search.{name}", lambda run, budget: budget.entries(run.method))
    budget, other = (SearchBudget(iterations=2, rollouts=1, max_env_steps=steps) for steps in (10, 20))
    for method in ("ars", "ppo"):
        run = SearchRun("nim", method, 0)
        list(search_all([run], budget, tmp_path))
        if method == "ars":
            assert read_record(run, other, tmp_path) == {"iterations": 2, "rollouts": 1, "fresh_episodes": 100}
    with pytest.raises(ValueError, match="max_env_steps is 20, but .*ppo_0.json was made with 10; "):
        read_record(run, other, tmp_path)


def recorded(best, fresh, episodes=8000, env_steps=70_000):
    played = {"iterations": 400, "rollouts": 20, "episodes": episodes, "env_steps": env_steps}
    return {"best_iteration": best, "fresh": fresh, **played}


def test_tables_show_both_rules_and_unfinished_runs():
    seeds = [SearchRun("maze", "ars", index) for index in range(5)]
    records = dict(zip(seeds, [recorded(0.9, 0.5), recorded(1.0, 0.6), *[recorded(0.8, 0.4)] * 3]))
    records |= {SearchRun("maze", "cma_es", index): None for index in range(5)}
    records |= {SearchRun("hopper", "ars", 0): recorded(300.0, 200.0), SearchRun("hopper", "ars", 1): None}
    records |= {SearchRun("hopper", "cma_es", 0): recorded(100.0, 90.0), SearchRun("hopper", "cma_es", 1): None}
    text = search_tables(records)
    best = "| maze | 9 | 0.86 ± 0.08 | 0/5 | 0.55 | 0.97 | -1.11 | 0.53 | 0.97 | 8k episodes |"
    chosen = "| maze | 9 | 0.46 ± 0.08 | 0/5 | 0.55 | 0.97 |  | 0.97 A2C | -1.11 | 0.53 | 0.97 | 8k episodes |"
    assert best in text and chosen in text, "published baselines stand beside chosen policies only"
    assert "| hopper | 36 | 300.0 1/2 | 100.0 1/2 | 284.2 |" in text
    assert "ars 1 and 1 of 1" in reached_text(
        {SearchRun("maze", "ars", 0): recorded(1 - 3 * 0.1 / 9, 0.0)}, "best_iteration"
    ), "the published figure is rounded"
    assert "ars 1 and 0 of 1" in reached_text({SearchRun("maze", "ars", 0): recorded(0.964, 0.0)}, "best_iteration")
    assert unfinished_text(records).endswith("those planned: ars hopper 1/2; cma_es maze 0/5, hopper 1/2.")
    assert "(best iteration): ars 1 and 0 of 1." in reached_text(records, "best_iteration")
    assert "(chosen policy on fresh episodes): ars 0 and 0 of 1." in reached_text(records, "fresh")


def test_tables_count_tasks_that_at_least_one_search_reaches():
    best = {  # published: maze .55 and .97, nim .33 and .97, hopper 284.2 and 356.2
        ("maze", "ars"): 0.97, ("maze", "cma_es"): 0.5, ("maze", "ppo"): 0.6,
        ("nim", "ars"): 0.3, ("nim", "cma_es"): 0.33, ("nim", "ppo"): 1.0,
        ("hopper", "ars"): 300.0, ("hopper", "cma_es"): None, ("hopper", "ppo"): 400.0,
    }  # fmt: skip
    records = {SearchRun(*pair, 0): None if value is None else recorded(value, 0.0) for pair, value in best.items()}
    text = reached_text(records, "best_iteration")
    assert text.endswith("ars 2 and 1 of 3; cma_es 1 and 0 of 2; ppo 3 and 2 of 3; at least one search 2 and 1 of 2.")
    alone = {run: record for run, record in records.items() if run.method != "cma_es"}
    assert reached_text(alone, "best_iteration").endswith("ars 2 and 1 of 3; ppo 3 and 2 of 3.")


def test_tables_show_episodes_and_steps():
    records = {
        SearchRun("maze", "ars", 0): recorded(0.9, 0.5, 8000, 70_000),
        SearchRun("maze", "ppo", 0): recorded(0.9, 0.5, 8010, 61_000),
        SearchRun("maze", "ppo", 1): recorded(0.9, 0.5, 8020, 62_001),
        SearchRun("maze", "trpo", 0): None,
    }
    rows = budget_table(records).split("\n")
    assert rows[0] == "| task | ars | ppo | trpo |" and rows[2] == "| maze | 8,000 / 70,000 | 8,015 / 61,500 |  |"
    text = search_tables(records)
    assert rows[2] in text and "\n\nOf ppo and trpo, the best iteration is the best mean of as many" in text
    assert "the best mean of as many" not in search_tables({run: records[run] for run in list(records)[:1]})


def test_a_task_that_cannot_be_played_is_marked_and_counts_as_not_reached():
    too_large = {UNPLAYABLE: "no room"}
    records = {SearchRun(task, "in_context", seed): too_large for task in ("walker2d", "hopper") for seed in range(2)}
    counts = [{"failed": 6, "warmup": 5}, {"failed": 0, "warmup": 203}]
    records |= {SearchRun("maze", "in_context", seed): recorded(0.97, 0.97) | one for seed, one in enumerate(counts)}
    records |= {SearchRun("nim", "in_context", 0): recorded(0.1, 0.1) | {"failed": 0, "warmup": 5}}
    records |= {SearchRun("maze", "ars", 0): recorded(0.97, 0.97), SearchRun("walker2d", "ars", 0): recorded(1.0, 1.0)}
    text = search_tables(records)
    assert "| walker2d | 108 | unplayable | 1.00 |" in text and "All planned runs have finished." in text
    assert "in_context 1 and 1 of 4; ars 1 and 1 of 2." in text
    assert "Proposals that were random because no reply was usable: maze in_context 0.8%." in text
    assert "or because all earlier returns were the same: maze in_context 26.0%. " in text
    lucky = recorded(0.97, 0.97) | {"failed": 395, "iterations": 400}
    random = records | {SearchRun("maze", "in_context", seed): lucky for seed in range(2)}
    text = search_tables(random)
    assert "| maze | 9 | random replies |" in text and "in_context 0 and 0 of 4; ars 1 and 1 of 2." in text
    some = {**records, SearchRun("walker2d", "in_context", 1): None}
    assert "| walker2d | 108 | unplayable |" in search_tables(some) and unfinished_text(some).startswith("All planned")

"""The report of runs: what it says, what it escapes, and what it says of files that are missing or damaged."""

import csv
import json
from types import SimpleNamespace

import pytest
import yaml

from lrl.cli.report import main
from lrl.diagnosis.metrics import diagnose
from lrl.evaluation.report_page import _several, write_report
from lrl.evaluation.run_report import read_run

NAMES = ["clock/env_steps", "clock/minutes", "rollout/return", "train/entropy", "throughput/env_steps_per_second"]
ALARM = SimpleNamespace(
    cause="entropy collapse", evidence="<i>0.0</i>", remedy="a smaller lr", confidence=0.9, collection=2
)


def make_run(folder, seed=0, lr=1e-3, gain=1.0):
    """Write a run of six collections with two validations."""
    folder.mkdir(parents=True)
    config = {"seed_everything": seed, "model": {"class_path": "GRPOModule", "init_args": {"optimizer": {"lr": lr}}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "commit.txt").write_text("0123abc\n")
    (folder / "run.log").write_text(" INFO run directory x\n DEBUG machine: a box\n INFO finished after 2.50 minutes\n")
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*NAMES, "val/return"])
        writer.writeheader()
        for place in range(6):
            steps = 10 * (place + 1)
            if place in (2, 5):  # logged before the training row of the same collection
                writer.writerow({"clock/env_steps": steps, "val/return": gain * (0.5 if place == 2 else 0.4) + seed})
            writer.writerow(dict(zip(NAMES, (steps, place / 60, place + seed, 1.0, 20.0))))
    turn = {"turn": 0, "observation": "<script>alert(1)</script>", "response": "<b>UP", "reward": 1.0, "valid": True}
    turn |= {"tokens": ["<b>", "UP"], "logprobs": [-1.0, -0.5], "new_logprobs": [-0.2, -0.5], "advantages": [2.0, -1.0]}
    episode = {"collection": 0, "env": 0, "group": 0, "terminated": True, "truncated": False}
    bad = turn | {"valid": False, "new_logprobs": [-1.0, -0.5]}
    episodes = [episode | {"return": 1.0, "turns": [turn]}, episode | {"env": 3, "return": -1.0, "turns": [bad] * 6}]
    (folder / "transcripts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in episodes))
    return folder


def test_the_report_of_a_run_has_verdict_alarms_curves_and_escaped_episodes(tmp_path):
    run = make_run(tmp_path / "run")
    write_report([run], run / "report.html", diagnose=lambda run: [ALARM])
    page = (run / "report.html").read_text()
    assert (
        "best 0.5 at collection 3, last 0.4 at collection 6. 1 alarm; the most certain cause: entropy collapse" in page
    )
    assert ">collection 3</td>" in page and "since collection 3." in page
    assert page.count("<svg") >= 3 and "#dc2626" in page and len(page) < 1_000_000
    assert "alert(1)" in page and "<script" not in page and "<b>" not in page and "<i>" not in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is loaded from the network
    episodes = read_run(run).episodes
    assert [one.title.split()[0] for one in episodes] == ["Best", "Worst", "First", "Most"]
    first = episodes[0].turns[0].tokens[0]
    assert (first.advantage, round(first.change, 3)) == (1.0, 0.451) and episodes[1].omitted == 2
    facts = read_run(run).facts
    assert (facts["machine and versions"], facts["commit"], facts["seed"]) == ("a box", "0123abc", "0")
    assert facts["size"] == "60 env steps"  # the verdict has the minutes of a finished run
    (run / "run.log").unlink()
    assert read_run(run).facts["size"] == "60 env steps, 0 minutes"


def test_the_verdict_says_what_was_compared(tmp_path):
    run = make_run(tmp_path / "run")
    assert read_run(run).verdict.endswith("No alarm in the metrics; turns were not compared.")
    (run / "samples").mkdir()
    (run / "samples" / "000000.npz").touch()
    assert read_run(run).verdict.endswith("No alarm in the metrics or in the turns of 1 collection.")


@pytest.mark.parametrize(
    ("name", "said"),
    [("samples/000000.npz", "file 000000.npz cannot be read or is damaged."), ("metrics.csv", "metrics.csv has ")],
)
def test_a_run_whose_diagnosis_failed_is_not_called_free_of_alarms(name, said, tmp_path):
    run = make_run(tmp_path / "run")
    (run / "samples").mkdir()
    with (run / name).open("ab") as file:
        file.write(b"damaged\n")
    write_report([run], run / "report.html", diagnose=diagnose)
    page = (run / "report.html").read_text()
    assert "No alarm" not in page and "Whether there are alarms is not known" in page
    assert "The run was not diagnosed: ValueError: " in page and said in page


def test_the_original_command_is_that_of_the_first_launch(tmp_path):
    run = make_run(tmp_path / "run")
    first = run / "earlier" / "1" / "command.txt"
    first.parent.mkdir(parents=True)
    first.write_text("lrl fit --config some.yaml\n")
    (run / "command.txt").write_text("lrl fit --resume run\n")
    assert read_run(run).commands["original"] == "lrl fit --config some.yaml"


def test_a_finished_run_is_resumed_with_higher_limits(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    limits = {"trainer": {"max_epochs": 6, "max_steps": -1}, "data": {"init_args": {"max_env_steps": 60}}}
    (run / "config.yaml").write_text(json.dumps(limits))
    command = f"lrl fit --resume {run}"
    assert read_run(run).commands["resume"] == f"{command} --trainer.max_epochs 12 --data.max_env_steps 120"
    for damaged in ("", "trainer: 3\ndata: {init_args: [1]}", "data: abc", "{"):
        (run / "config.yaml").write_text(damaged)
        assert read_run(run).commands["resume"] == command
    (run / "config.yaml").write_text(json.dumps(limits))
    (run / "run.log").unlink()
    assert read_run(run).commands["resume"] == command


def test_a_run_in_which_no_training_episode_has_ended_has_a_report(tmp_path):
    run = make_run(tmp_path / "run")
    rows = (run / "metrics.csv").read_text().replace("rollout/return", "rollout/reward_goal")
    (run / "metrics.csv").write_text(rows)
    write_report([run], run / "report.html", diagnose=lambda run: [])
    assert "reward in training, and result" not in (run / "report.html").read_text()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", "transcripts.jsonl", "commit.txt", "run.log"])
@pytest.mark.parametrize("content", [None, b"", b"\xff{[a,b\n1,x,\n"])
def test_a_missing_or_damaged_file_is_no_error(name, content, tmp_path):
    run = make_run(tmp_path / "run")
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    report = read_run(run)
    assert all(problem.endswith(".") for problem in report.problems)
    assert report.problems or name in ("run.log", "commit.txt", "config.yaml", "transcripts.jsonl")
    assert ("has not finished" in report.verdict) == (name == "run.log")


def test_the_command_names_damaged_files_with_their_run(tmp_path, capsys):
    good, damaged = (make_run(tmp_path / name, seed) for seed, name in enumerate(("good", "damaged")))
    (damaged / "metrics.csv").write_text("nothing")
    main("lrl report", [str(good), str(damaged), "--out", str(tmp_path / "page.html")])
    printed = capsys.readouterr()
    assert printed.out == f"wrote the report to {tmp_path / 'page.html'}\n"
    assert f"{damaged}: metrics.csv has no rows of metrics.\n" in printed.err and f"{good}: " not in printed.err


def test_settings_are_compared_with_those_of_a_baseline_or_the_reason_is_named(tmp_path, capsys):
    run, same, other = (make_run(tmp_path / name, 0, lr=lr) for name, lr in (("a", 1e-3), ("b", 1e-3), ("c", 1e-2)))
    (tmp_path / "empty").mkdir()
    pages = {}
    for baseline in (same, other, tmp_path / "empty"):
        out = tmp_path / "page.html"
        main("lrl report", [str(run), "--baseline", str(baseline), "--out", str(out)])
        pages[baseline.name] = out.read_text()
    assert "The configurations are equal" in pages["b"] and "Differences to the baseline" not in pages["empty"]
    assert "<td>0.01</td>" in pages["c"] and "it has no config.yaml" in pages["empty"]
    assert "empty', which is not a run directory: it has no config.yaml." in capsys.readouterr().err


def test_several_runs_are_grouped_and_paired(tmp_path, capsys):
    small = [str(make_run(tmp_path / f"small{seed}", seed)) for seed in range(5)]
    large = [str(make_run(tmp_path / f"large{seed}", seed, lr=1e-2, gain=2.0)) for seed in range(5)]
    main("lrl report", [*large, "--baseline", *small, "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "+0.400 (+0.400 to +0.400)" in page and "lr=0.01" in page and "2.800 (" in page
    assert page.count("<details") == 10 and "probability of improvement" in page
    with pytest.raises(SystemExit):
        main("lrl report", [str(tmp_path / "absent")])
    assert "name a run directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_baseline_with_the_configuration_of_the_runs_is_a_group_and_a_repeated_seed_counts_once(tmp_path):
    runs = [make_run(tmp_path / f"new{seed}", seed, gain=2.0) for seed in range(3)]
    old = [make_run(tmp_path / f"old{seed}", seed) for seed in range(3)]
    again = make_run(tmp_path / "again", 2, gain=90.0)
    found = _several([*runs, again], old)
    labels, seeds, best = zip(*((row[0], row[1], row[4]) for row in found["table"]))
    assert labels[1] == f"{labels[0]} (baseline)" and seeds == ("3", "3") and best == ("2.000", "1.500")
    assert len(found["pairs"]) == 1 and "+0.4" in " ".join(found["pairs"][0])
    assert [note for note in found["notes"] if "again" in note and "has the seed 2" in note]
    shared = _several([old[0], *runs], [old[0], *old[1:]])
    assert [row[:2] for row in shared["table"]] == [[labels[0], "3"], [labels[1], "3"]] and not shared["notes"]


def test_the_report_of_a_run_of_the_python_interface_names_no_configuration(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    (run / "config.yaml").unlink()
    assert set(read_run(run).commands) == {"evaluate", "watch"}

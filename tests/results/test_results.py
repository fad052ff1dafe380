import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from results.command import main
from results.counts import counts_text, fault_of, run_counts, with_earlier_counts
from results.documentation import benchmark_table, phases_table, pilots_table
from results.summaries import (
    command_of,
    final_values,
    first_episode,
    lasting_of,
    lasting_table,
    learning_table,
    result_curve,
    rules_table,
    screening_table,
    summarise,
)

from lrl.evaluation.report import environments_table, read_result, result_text
from lrl.evaluation.statistics import config_digest, with_earlier_runs


def run_directory(folder, seed, values, minutes="1.50", options=""):
    folder.mkdir(parents=True)
    command = (
        f"/somewhere/lrl/__main__.py fit --config a/b.yaml --seed_everything {seed} --run_directory {folder}{options}"
    )
    (folder / "command.txt").write_text(command + "\n")
    (folder / "commit.txt").write_text("abc\n")
    (folder / "config.yaml").write_text(f"seed_everything: {seed}\n")
    (folder / "run.log").write_text(f"2026-01-01 INFO finished after {minutes} minutes\n" if minutes else "\n")
    rows = [f"{10 * (k + 1)},{k},{value}" for k, value in enumerate(values)]
    (folder / "metrics.csv").write_text("\n".join(["clock/env_steps,clock/minutes,val/exact_success", "5,0,", *rows]))
    return folder


def test_a_summary_contains_command_seeds_minutes_and_curves(tmp_path):
    runs = [run_directory(tmp_path / "b", 1, [0, 0.5]), run_directory(tmp_path / "a", 0, [0.25, 0.75], minutes="")]
    former = run_directory(tmp_path / "a-interrupted-20260101-120000", 0, [1])  # replaced by a run with the same seed
    kept = summarise([*runs, former], "val/exact_success")
    assert kept["command"] == "lrl fit --config a/b.yaml"
    assert [run["seed"] for run in kept["runs"]] == [0, 1]
    assert [run["minutes"] for run in kept["runs"]] == [None, 1.5]
    assert kept["runs"][1]["curve"] == {"env_steps": [10, 20], "minutes": [0, 1], "val/exact_success": [0, 0.5]}
    np.testing.assert_array_equal(final_values(kept), [0.75, 0.5])


def resumed(run, checkpoint, minutes, clocks, config=None):
    """Change a run directory as a further launch in it does."""
    kept = run / "earlier" / str(1 + len(list((run / "earlier").glob("*"))))
    kept.mkdir(parents=True)
    for name in ("command.txt", "commit.txt", "config.yaml"):
        (kept / name).write_text((run / name).read_text())
    first = (run / "earlier" / "1" / "command.txt").read_text().strip()
    (run / "command.txt").write_text(f"{first} --ckpt_path {checkpoint}\n")
    if config is not None:
        (run / "config.yaml").write_text((run / "config.yaml").read_text() + config)
    with (run / "run.log").open("a") as log:
        log.write("2026-01-01 INFO run directory runs/a\n")
        log.write(f"2026-01-01 INFO finished after {minutes} minutes\n" if minutes else "")
    with (run / "metrics.csv").open("a") as rows:
        rows.write("".join(f"\n{10 * clock},{clock},0.5" for clock in clocks))


def test_a_resumed_run_has_the_minutes_of_all_launches_and_the_command_of_the_first(tmp_path):
    run = run_directory(tmp_path / "a", 0, [0] * 71, minutes="")
    once = run_directory(tmp_path / "b", 1, [0], minutes="2.50")
    resumed(run, run / "checkpoints" / "last.ckpt", minutes="", clocks=[71])
    for _ in range(9):  # as many launches as make the order of their names differ from that of their numbers
        resumed(run, run / "checkpoints" / "last.ckpt", minutes="2.49", clocks=[75.718])
    (run / "earlier" / "10" / "command.txt").write_text("lrl fit --config other.yaml")
    kept = summarise([run, once], "val/exact_success")
    assert kept["command"] == "lrl fit --config a/b.yaml"
    assert [run["minutes"] for run in kept["runs"]] == [75.72, 2.5]


def test_the_minutes_of_a_run_whose_last_launch_has_not_finished_are_unknown(tmp_path):
    run = run_directory(tmp_path / "a", 0, [0])
    resumed(run, run / "checkpoints" / "last.ckpt", minutes="", clocks=[2])
    assert summarise([run], "val/exact_success")["runs"][0]["minutes"] is None


def test_a_run_that_was_resumed_with_another_configuration_raises(tmp_path):
    run = run_directory(tmp_path / "a", 0, [0])
    resumed(run, run / "checkpoints" / "last.ckpt", "1.00", [2], config="trainer: {max_epochs: 7}\n")
    with pytest.raises(ValueError, match="was resumed with another configuration than that of .*earlier/1/config"):
        summarise([run], "val/exact_success")


def test_runs_on_further_seeds_are_added_to_a_kept_result(tmp_path):
    first = summarise([run_directory(tmp_path / str(seed), seed, [seed / 4]) for seed in (0, 2)], "val/exact_success")
    second = summarise([run_directory(tmp_path / f"x{seed}", seed, [0.9]) for seed in (1, 2)], "val/exact_success")
    both = with_earlier_runs(second, first)
    assert [run["seed"] for run in both["runs"]] == [0, 1, 2]
    np.testing.assert_array_equal(final_values(both), [0, 0.9, 0.9])
    first["runs"][0]["config"] = "another"
    with pytest.raises(ValueError, match="add: the configuration has changed"):
        with_earlier_runs(second, first)
    with pytest.raises(ValueError, match="add: the metric was 'val/return' and is 'val/exact_success'"):
        with_earlier_runs(second, first | {"metric": "val/return"})


def test_a_result_is_read_back_from_its_text(tmp_path):
    result = {"title": "t", "runs": [{"curve": {"minutes": [0.5, -1e-07, 3]}, "seed": 0}]}
    (tmp_path / "r.json").write_text(result_text(result))
    assert read_result(tmp_path / "r.json") == result and '"minutes": [0.5, -1e-07, 3]' in result_text(result)


def test_a_long_curve_is_thinned_and_keeps_its_last_value(tmp_path):
    values = [number / 400 for number in range(399)]
    kept = summarise([run_directory(tmp_path / "a", 0, values)], "val/exact_success", "val/exact_success")
    curve = kept["runs"][0]["drawn"]["val/exact_success"]
    assert 40 < len(curve) < 70 and curve[0] == 0 and curve[-1] == final_values(kept)[0] == round(values[-1], 5)


def test_runs_that_start_from_runs_with_the_same_seed_are_one_experiment(tmp_path):
    commands, digests = set(), set()
    for seed in (7, 70):
        run = tmp_path / str(seed)
        run.mkdir()
        start = f"runs/weak/seed{seed}"
        options = f"--model.init_args.init_from {start} --lr 7 --seed_everything {seed} --run_directory r"
        (run / "command.txt").write_text(f"lrl fit --config a.yaml {options}")
        commands.add(command_of(run))
        digests.add(config_digest({"seed_everything": seed, "model": {"init_args": {"init_from": start, "lr": 7}}}))
    assert commands == {"lrl fit --config a.yaml --model.init_args.init_from runs/weak/seed{seed} --lr 7"}
    assert len(digests) == 1
    other = {"seed_everything": 7, "model": {"init_args": {"init_from": "runs/weak/seed70", "lr": 7}}}
    assert config_digest(other) not in digests


def test_the_command_of_a_run_keeps_the_quotes_that_a_shell_needs(tmp_path):
    wanted = ["fit", "--config", "a.yaml", "--rewards", '[{"class_path": "some.Reward"}]', "--note", "it's so"]
    places = (
        ["--run_directory", "a b"],
        ["--run_directory=a b"],
        ["--run_directory", "/o'b c/d"],
        ["--run_directory=o'b c"],
    )
    for number, place in enumerate(places):
        run = tmp_path / str(number)
        run.mkdir()
        line = shlex.join(["/my programs/lrl", *wanted, *place, "--seed_everything", "7", "--last", "1"])
        (run / "command.txt").write_text(line)
        assert shlex.split(command_of(run)) == ["lrl", *wanted, "--last", "1"]


def test_runs_of_different_commands_are_not_one_experiment(tmp_path):
    runs = [run_directory(tmp_path / "a", 0, [0]), run_directory(tmp_path / "b", 1, [0], options=" --model.lr 1")]
    assert command_of(runs[1]).endswith("--model.lr 1")
    with pytest.raises(ValueError, match="more than their seed"):
        summarise(runs, "val/exact_success")


def test_a_metric_that_was_not_measured_is_named(tmp_path):
    with pytest.raises(ValueError, match="val/nothing"):
        summarise([run_directory(tmp_path / "a", 0, [0])], "val/nothing")


def test_a_row_shows_the_mean_the_values_of_few_seeds_and_how_many_reach_the_bar(tmp_path):
    runs = [
        run_directory(tmp_path / name, seed, [value]) for seed, (name, value) in enumerate([("a", 0.7), ("b", 0.8)])
    ]
    result = {"title": "ours", "bar": 0.72, **summarise(runs, "val/exact_success")}
    row = learning_table([result]).splitlines()[-1]
    assert "exact success 0.750 (0.700, 0.800)" in row and "1 of 2 reach 0.72" in row and "| 1.5 |" in row


def test_a_comparison_shows_medians_and_the_range_of_ratios():
    one = {
        "name": "x",
        "unit": "u/s",
        "ours": [2, 4, 9],
        "theirs": [1, 2, 3],
        "ratio": 2,
        "ratio_min": 2,
        "ratio_max": 3,
    }
    row = benchmark_table([({"title": "t"}, one)]).splitlines()[-1]
    assert row == "| t, x | 4 u/s | 2 | 2.00 (2.00 to 3.00) |"


def test_a_malformed_result_raises_one_sentence(tmp_path):
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_result(tmp_path / "r.json")
    (tmp_path / "r.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_result(tmp_path / "r.json")


def cell(env_id, policy, success, **env_kwargs):
    means = {"return_mean": 2 * success, "length_mean": 7.25, "success_rate": success}
    intervals = {"return_ci95": [0, 1], "length_ci95": [6, 8.5], "success_ci95": [success - 0.125, success + 0.125]}
    return {"env_id": env_id, "policy": policy} | means | intervals | ({"env_kwargs": env_kwargs} if env_kwargs else {})


def test_one_policy_has_return_length_and_success_of_each_environment():
    table = environments_table([cell("a", "p", 0.5), cell("b", "p", 0.25)])
    assert table.split("\n") == [
        "| environment | return | length | success |",
        "|---|---|---|---|",
        "| `a` | 1.000 (0.000 to 1.000) | 7.2 (6.0 to 8.5) | 0.500 (0.375 to 0.625) |",
        "| `b` | 0.500 (0.000 to 1.000) | 7.2 (6.0 to 8.5) | 0.250 (0.125 to 0.375) |",
    ]


def test_several_policies_have_a_column_each_and_settings_have_a_column_each():
    rows = [
        cell("a", policy, rate, num_things=n) for n in (0, 3) for policy, rate in (("before", 0.25), ("after", 0.5))
    ]
    assert environments_table(rows).split("\n") == [
        "| environment | num_things | before | after |",
        "|---|---|---|---|",
        "| `a` | 0 | 0.250 (0.125 to 0.375) | 0.500 (0.375 to 0.625) |",
        "| `a` | 3 | 0.250 (0.125 to 0.375) | 0.500 (0.375 to 0.625) |",
    ]


def test_a_policy_that_was_not_evaluated_somewhere_has_an_empty_cell():
    rows = [cell("a", "p", 0.5), cell("a", "q", 0.5), cell("b", "q", 0.25)]
    assert environments_table(rows).split("\n")[3] == "| `b` |  | 0.250 (0.125 to 0.375) |"


def test_the_rate_of_invalid_actions_has_no_interval():
    rows = [cell("a", policy, 0.5) | {"invalid_action_rate": rate} for policy, rate in (("p", 0.125), ("q", 1.0))]
    assert environments_table(rows, figure="invalid").split("\n")[2:] == ["| `a` | 0.125 | 1.000 |"]


def test_the_first_episode_is_the_one_at_which_the_mean_of_the_last_ones_reaches_a_value(tmp_path):
    rows = ["clock/episodes,rollout/return,other", "1,,5", "1,10,", "3,4,", "4,,5", "4,10,", "5,,5", "6,10,"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))  # returns: 10 4 4 10 10 10
    assert first_episode(tmp_path, 4, window=2) == 2
    assert first_episode(tmp_path, 10, window=2) == 5
    assert first_episode(tmp_path, 10, window=3) == 6
    assert first_episode(tmp_path, 11, window=2) is None


def test_a_drawn_point_is_the_mean_of_the_last_measurements_under_its_label(tmp_path):
    runs = [run_directory(tmp_path / "a", 0, [0, 1, 2, 6])]
    result = {"title": "a long title", "label": "ours", "window": 3, **summarise(runs, "val/exact_success")}
    curve = result_curve(result, "env_steps")
    assert curve.label == "ours" and curve.centre[-1] == pytest.approx(3)
    assert result_curve(result | {"window": 1}, "env_steps").centre[-1] == pytest.approx(6)


def test_a_curve_is_not_labelled_by_how_the_final_value_was_measured(tmp_path):
    runs = [run_directory(tmp_path / "a", 0, [0, 1])]
    result = {"title": "PPO on CartPole, return of 100 held-out episodes", **summarise(runs, "val/exact_success")}
    assert result_curve(result, "env_steps").label == "PPO on CartPole"


def test_a_profile_has_the_share_of_each_phase_and_of_python_in_it():
    seconds = {"playing": 1.0, "reference": 0.0, "values": 0.0, "update": 3.0}
    profiled = {"playing": 2.0, "reference": 0.0, "values": 0.0, "update": 4.0}
    operators = {"playing": [1.0, 0.5], "reference": [0.0, 0.0], "values": [0.0, 0.0], "update": [2.0, 2.0]}
    one = {"turns": [40, 40], "seconds": seconds, "profiled": {"seconds": profiled, "operators": operators}}
    row = phases_table({"configs/a/b.yaml": one}).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "`a/b`", "100", "25% (50%, 25%, 25%)", "", "", "75% (50%, 50%, 0%)"
    ]  # fmt: skip


def test_a_row_of_pilots_has_the_lowest_validation_after_the_highest():
    one = {
        "name": "a",
        "env_steps": 4000,
        "success": 0.5,
        "entropy": 1.0,
        "explained_variance": 0.25,
        "update_kl": 0.01,
    }
    fell = one | {"held_out": [[1000, 0.1], [2000, 0.9], [3000, 0.2], [4000, 0.8]]}
    rows = pilots_table([fell, one | {"held_out": []}]).splitlines()[-2:]
    assert rows[0] == "| a | 4,000 | 0.50 | 1.00 | 0.25 | 0.010 | 0.9, 0.2, 0.8 | 0.2 (at 3,000) |"
    assert rows[1] == "| a | 4,000 | 0.50 | 1.00 | 0.25 | 0.010 |  |  |"


def test_a_run_that_lasts_is_told_from_one_that_falls(tmp_path):
    """80 rows of 100 env steps, so a trailing mean is over two rows, and a tenth of the run is eight rows."""

    def figures(values):
        lines = [f"{100 * row + 100},{value}" for row, value in enumerate(values)]
        (tmp_path / "metrics.csv").write_text("\n".join(["clock/env_steps,rollout/return", *lines]) + "\n")
        return lasting_of(tmp_path, "rollout/return", 475)

    falls = figures([0] * 20 + [500] * 40 + [100] * 2 + [300] * 18)
    assert falls == {
        "solved": 2200, "steps": 8000, "then": 500, "last": 300, "lowest": 100, "drawdown": 400
    }  # fmt: skip
    lasts = figures([0] * 20 + [460, 490] + [500] * 58)
    assert lasts == {
        "solved": 2200, "steps": 8000, "then": round((490 + 8 * 500) / 9, 4), "last": 500, "lowest": 475, "drawdown": 0
    }  # fmt: skip
    assert figures([474] * 80) is None
    with pytest.raises(ValueError, match="bar -100; it must be positive"):
        lasting_of(tmp_path, "rollout/return", -100)
    assert (
        lasting_table([{"title": "b", "runs": [{"lasting": None}]}]).splitlines()[-1] == "| b | 0 of 1 |  |  |  |  |  |"
    )
    result = {"title": "a", "runs": [{"lasting": falls}, {"lasting": lasts}, {"lasting": None}]}
    assert lasting_table([result]).splitlines()[-1] == (
        "| a | 2 of 3 | 2,200 (2,200 to 2,200) | 8,000 | 400 (300 to 500) | 0.801, 0.600 | 400 |"
    )


def test_a_screening_lists_the_figures_of_each_seed_and_what_was_not_solved():
    lasts = {"solved": 25344.0, "then": 400.0, "last": 500.0, "drawdown": 12.4}
    runs = [{"lasting": last, "entropy": 0.25, "update_kl": 0.01} for last in (lasts, None, lasts | {"last": 100.0})]
    row = screening_table([{"name": "a", "runs": runs}]).splitlines()[-1]
    assert row == (
        "| a | 25,344 / not solved / 25,344 | 1.25 / – / 0.25 | 12 / – / 12 "
        "| 0.25 / 0.25 / 0.25 | 0.010 / 0.010 / 0.010 |"
    )


def keep(*args):
    main("results.py", ["keep", "one", "--title", "t", *map(str, args)])
    return read_result(Path("assets/results/one.json"))


def test_a_kept_result_counts_the_runs_that_are_not_in_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [run_directory(tmp_path / f"seed{seed}", seed, [0.5]) for seed in range(3)]
    reasons = ["--failed", "3: no memory", "--left_out", "4: stopped after an hour", "--left_out", "5: stopped"]
    kept = keep(runs[0], runs[1], *reasons)
    assert (counts_text(kept), kept["counts"]["finished"], fault_of("one", kept)) == ("5 / 1 / 2", 2, "")
    assert kept["counts"]["reasons"][:2] == ["failed: 3: no memory", "left out: 4: stopped after an hour"]
    assert counts_text(keep(runs[1], runs[2], "--all_started", "--add")) == "7 / 1 / 3", "seed 1 was run again"
    run_directory(tmp_path / "seed0-interrupted-20261127-120000", 0, [])
    assert counts_text(keep(runs[0], "--all_started", "--label", "a", "--rows", 10)) == "2 / 1 / 0"
    main("results.py", ["count", "one", "--left_out", "9: stopped"])
    assert counts_text(read_result(Path("assets/results/one.json"))) == "2 / 0 / 1"
    unfinished = run_directory(tmp_path / "seed6", 6, [0.5], minutes="")
    for args, sentence in (
        ([runs[0]], "give either --all_started"),
        ([runs[0], "--all_started", *reasons], "give either --all_started"),
        ([runs[0], unfinished, "--all_started"], "the runs with the seeds 6 have not finished"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            keep(*args)
        assert sentence in capsys.readouterr().err.replace("\n", " ")


def test_a_file_without_the_counts_of_its_runs_is_named():
    result = {"runs": [{}, {}]}
    unknown = {"started": None, "finished": 2, "failed": None, "left_out": 0, "reasons": ["not recorded"]}
    assert fault_of("a", {"environments": []}) == "" and fault_of("a", result | {"counts": unknown}) == ""
    assert counts_text(result | {"counts": unknown}) == counts_text(result) == "–"
    assert "a has no counts of its runs" in fault_of("a", result)
    wrong = {"finished": 3}, {"started": 2}, {"reasons": []}
    sentences = "must count its 2 runs", "must be the sum", "without reasons"
    for change, sentence in zip(wrong, sentences, strict=True):
        assert sentence in fault_of("a", result | {"counts": unknown | change})
    assert with_earlier_counts(run_counts(2, ["x"], []), unknown, 4)["started"] is None


def test_other_rules_of_reporting_are_shown_where_they_give_another_figure(tmp_path):
    values = [0.5] * 18 + [0.25, 0.75]
    one = {"title": "a", **summarise([run_directory(tmp_path / "a", 0, values)], "val/exact_success")}
    assert rules_table([one]).splitlines()[2:] == ["| a | `val/exact_success` | 0.750 | 0.750 | 0.500 |"]
    assert (
        len(rules_table([one | {"runs": [{"curve": {"env_steps": [1], "val/exact_success": [1]}}]}]).splitlines()) == 2
    )
    once = {"curve": {"env_steps": [2], "val/success_rate": [0.5]}}
    once |= {"drawn": {"env_steps": [1, 2], "rollout/success_rate": [0.9, 0.4]}}
    row = rules_table([{"title": "b", "metric": "val/success_rate", "runs": [once]}]).splitlines()[-1]
    assert row == "| b | `rollout/success_rate` | 0.400 | 0.900 | 0.400 |"

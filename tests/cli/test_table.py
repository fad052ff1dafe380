"""Tests of ``lrl table`` on run directories."""

from pathlib import Path

import pytest
import yaml
from commands import run_words

from lrl.cli.run_seeds import write_plan
from lrl.evaluation.comparison import group_by_configuration, short_names


def table(*words):
    done = run_words(["lrl", "table", *map(str, words)])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def config_of(model="PPOValueHeadModule", seed=0, **settings):
    """Return a resolved configuration; the settings are arguments of the model."""
    return {
        "seed_everything": seed,
        "run_directory": f"runs/seed{seed}",
        "model": {"class_path": model, "init_args": {"optimizer": {"lr": 1e-3}, **settings}},
        "data": {"class_path": "RolloutDataModule", "init_args": {"seed": seed}},
        "trainer": {"max_epochs": 2, "logger": [{"init_args": {"save_dir": f"runs/seed{seed}"}}]},
    }


def write_run(run, values, metric="val/success_rate", config=None, log="finished after 2.00 minutes"):
    """Write a run directory with the logged values of a metric, the best of which is the first but one."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config or config_of()))
    (run / "run.log").write_text(log)
    rows = [f"{step},{step},{value},0.5,1\n" for step, value in enumerate(values)]
    (run / "metrics.csv").write_text("".join([f"step,clock/env_steps,{metric},train/loss,train/entropy\n", *rows]))
    return run


def test_runs_with_one_configuration_are_one_row_whatever_their_seeds_and_directories(tmp_path):
    for lr in (0.001, 0.01):
        for seed in range(5):
            config = config_of(seed=seed, optimizer={"lr": lr})
            write_run(tmp_path / f"lr{lr}" / f"seed{seed}", [0, 1, 0.5 + lr * 10], config=config)
    lines = table(tmp_path)
    assert lines == [
        "| lr | seeds | last val/success_rate | best | minutes |",
        "|---|---|---|---|---|",
        "| 0.001 | 5 | 0.510 (0.510 to 0.510) | 1.000 (1.000 to 1.000) | 2.0 |",
        "| 0.01 | 5 | 0.600 (0.600 to 0.600) | 1.000 (1.000 to 1.000) | 2.0 |",
    ]


def test_a_run_and_its_continuation_count_once_and_a_validation_does_not_count(tmp_path):
    write_run(tmp_path / "run", [0, 0.25])
    write_run(tmp_path / "run-resumed-1", [0, 0.25, 0.75])
    validated = write_run(tmp_path / "run-validate-1", [0.5] * 9)
    (validated / "command.txt").write_text("/bin/lrl validate --ckpt_path run\n")
    row, left_out = table(tmp_path)[2:]
    assert row.endswith(" | 1 | 0.750 | 0.750 | 2.0 |")
    assert left_out == "1 of 2 runs: shorter than another run with the same configuration and seed, left out"


def test_an_interrupted_run_that_was_started_again_is_left_out_if_there_are_others(tmp_path):
    run = write_run(tmp_path / "seed0", [0.25])
    former = write_run(tmp_path / "seed0-interrupted-20260101-120000", [0.5] * 9, log="collection 9")
    for arguments in ([tmp_path], [run, former]):
        assert [line.split(" | ")[2] for line in table(*arguments)[2:]] == ["0.250"]
    assert table(former, "--incomplete")[2].split(" | ")[2] == "0.500"


def test_rows_are_sorted_by_the_values_of_their_settings(tmp_path):
    for name, lr in {"a": 0.01, "b": 2e-4, "c": None, "d": 1.0}.items():
        write_run(tmp_path / name, [1], config=config_of(optimizer={"lr": lr}))
    assert [row.split(" | ")[0] for row in table(tmp_path)[2:]] == ["| 0.0002", "| 0.01", "| 1.0", "| null"]


def test_few_seeds_are_listed_and_runs_without_figures_or_an_end_are_counted(tmp_path):
    write_run(tmp_path / "grpo" / "a", [0.25, 0.5])
    write_run(tmp_path / "grpo" / "b", [0.75], config=config_of(seed=1), log="collection 3")
    (write_run(tmp_path / "grpo" / "c", [], config=config_of(seed=2)) / "metrics.csv").unlink()
    assert table(tmp_path, "--incomplete")[2:] == [
        "| grpo | 2 | 0.625 (0.500, 0.750) | 0.625 (0.500, 0.750) | 2.0 |",
        "1 of 3 runs: without val/success_rate, left out",
        "1 of 3 runs: not finished, in the table with the value so far",
    ]


def test_a_table_names_the_runs_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("sweep")
    planned = [folder / name / f"seed{seed}" for name in ("lr=1", "lr=2") for seed in (0, 1)]
    write_plan(planned[:3], folder)
    write_plan(planned, folder)
    write_run(planned[0], [0.5])
    write_run(planned[1], [0.25], config=config_of(seed=1))
    assert len(table(planned[0])) == len(table(folder / "lr=1")) == 3, "all runs of these folders have finished"
    (planned[1] / "run.log").write_text("collection 3")
    for paths, sentence in (
        ((folder,), "3 of 4 runs are missing: sweep/lr=2/seed0 (not started), sweep/lr=2/seed1 (not started), "
                    "sweep/lr=1/seed1 (not finished); let them finish, or give --incomplete"),
        (planned[:2], "1 of 2 runs are missing: sweep/lr=1/seed1 (not finished);"),
    ):  # fmt: skip
        done = run_words(["lrl", "table", *map(str, paths)])
        assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert table(folder, "--incomplete")[2:] == [
        "| lr=1 | 2 | 0.375 (0.500, 0.250) | 0.375 (0.500, 0.250) | 2.0 |",
        "2 of 4 runs: not started",
        "1 of 4 runs: not finished, in the table with the value so far",
    ]


def test_the_best_loss_is_the_smallest_and_the_metric_is_one_that_all_runs_have(tmp_path):
    ours = write_run(tmp_path / "a", [3, 1, 2], "val/loss")
    assert table(ours)[::2] == [
        "| runs | seeds | last val/loss | best | minutes |",
        f"| {tmp_path.name} | 1 | 2.000 | 1.000 | 2.0 |",
    ]
    assert table(ours, "--metric", "train/entropy")[0] == "| runs | seeds | last train/entropy | minutes |"
    theirs = write_run(tmp_path / "b", [3, 1, 2], "val/return", config_of("SFTModule"))
    assert "last train/loss" in table(ours, theirs)[0]


def test_runs_of_the_python_interface_are_named(tmp_path):
    write_run(tmp_path / "a", [3, 1, 2])
    (write_run(tmp_path / "b", [3, 1, 2]) / "config.yaml").unlink()
    done = run_words(["lrl", "table", str(tmp_path)])
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr.strip() == f"{tmp_path / 'b'} is left out: it has no config.yaml, as lrl.train writes none."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((".",), "which holds no run directory, a folder with a config.yaml."),
        (
            ("a", "--metric", "val/x"),
            "metric is 'val/x', which no run has logged; they have train/entropy, train/loss, val/success_rate",
        ),
        (
            ("a", "b"),
            "no metric in common (a has val/success_rate, train/loss; b has none); give a metric, or other runs.",
        ),
    ],
)
def test_runs_that_make_no_table_are_one_sentence(words, sentence, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "a", [1])
    (write_run(tmp_path / "b", []) / "metrics.csv").write_text("my/metric\n1\n")
    monkeypatch.chdir(tmp_path / "empty" if words == (".",) else tmp_path)
    done = run_words(["lrl", "table", *words])
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_runs_without_metrics_are_not_blamed_on_a_metric_that_nobody_gave(tmp_path):
    (write_run(tmp_path / "a", []) / "metrics.csv").write_text("clock/env_steps\n")
    done = run_words(["lrl", "table", str(tmp_path), "--incomplete"])
    assert done.returncode == 2 and "has logged a metric yet" in done.stderr, done.stderr


def groups_of(tmp_path, *configs):
    return group_by_configuration(
        [write_run(tmp_path / str(number), [1], config=config) for number, config in enumerate(configs)]
    )


def test_arguments_of_different_classes_are_no_differences(tmp_path):
    ppo, slow = config_of(clip_range=0.2), config_of(clip_range=0.1)
    grpo = config_of("GRPOModule", group_size=8)
    assert [group.label for group in groups_of(tmp_path, ppo, grpo)] == ["PPOValueHeadModule", "GRPOModule"]
    labels = [group.label for group in groups_of(tmp_path / "three", ppo, grpo, slow)]
    assert labels == ["PPOValueHeadModule, clip_range=0.2", "GRPOModule", "PPOValueHeadModule, clip_range=0.1"]


def test_elements_of_lists_of_objects_are_compared_one_by_one_and_other_lists_as_a_whole(tmp_path):
    first, second = config_of(sizes=[64, 64]), config_of(sizes=[32])
    second["trainer"]["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.EarlyStopping"}]
    assert [dict(group.settings) for group in groups_of(tmp_path, first, second)] == [
        {"sizes": "[64, 64]", "callbacks.0": "not set"},
        {"sizes": "[32]", "callbacks.0": "EarlyStopping"},
    ]


def test_a_short_name_is_as_long_as_it_must_be():
    keys = ["model.init_args.optimizer.lr", "model.init_args.critic.lr", "model.class_path", "lr"]
    assert list(short_names(key.split(".") for key in keys).values()) == ["optimizer.lr", "critic.lr", "model", "lr"]

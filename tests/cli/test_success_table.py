"""A table of policies in several environments."""

import json
from pathlib import Path

import pytest
import torch
from commands import Finished, run_words

import lrl.evaluation.episodes
from lrl.cli.success_table import labelled


def run(*arguments: str) -> Finished:
    return run_words(["lrl", "success_table", "--policy", "expert", "--episodes", "3", *arguments])


def test_each_environment_is_a_line_and_an_entry_with_the_seeds_that_failed(tmp_path: Path) -> None:
    ids = ["lrl/BabyAI-GoToLocal-v0", "FrozenLake-v1"]
    done = run("--env_id", *ids, "--json", str(tmp_path / "table.json"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| `lrl/BabyAI-GoToLocal-v0` | 0.") and "| 1.000 (" in lines[2] and len(lines) == 4
    report = json.loads((tmp_path / "table.json").read_text())
    assert (
        report["complete"]
        and [entry["env_id"] for entry in report["environments"]] == ids
        and "lrl success_table --policy" in report["command"]
    )
    for entry in report["environments"]:
        assert len(entry["failed_seeds"]) == round(3 * (1 - entry["success_rate"]))


def test_a_table_that_ends_with_an_error_has_the_environments_before_it(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    done = run("--env_id", "lrl/BabyAI-GoToLocal-v0", "minigrid:MiniGrid-Empty-5x5-v0", "--json", str(file))
    report = json.loads(file.read_text())
    assert done.returncode == 2 and [len(report["environments"]), report["complete"]] == [1, False]


def test_a_misspelt_environment_is_found_before_any_episode() -> None:
    done = run("--env_id", "FrozenLake-v1", "FrozenLak-v1")
    assert done.returncode == 2 and not done.stdout and "--env_id is 'FrozenLak-v1', which is not reg" in done.stderr


def test_an_interval_of_one_episode_is_null(tmp_path: Path) -> None:
    done = run("--env_id", "FrozenLake-v1", "--episodes", "1", "--json", str(tmp_path / "table.json"))
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads((tmp_path / "table.json").read_text())["environments"]
    assert entry["length_ci95"] == [None, None] and entry["return_ci95"] == [None, None] and "nan" not in done.stdout


def test_an_environment_without_expert_is_one_sentence() -> None:
    done = run("--env_id", "minigrid:MiniGrid-Empty-5x5-v0")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("no expert is known for BabyAICodec; policy must be another actor.")


def test_settings_of_an_environment_are_columns_from_the_first_line_on() -> None:
    done = run("--env_id", "lrl/BabyAI-GoToLocal-v0", "--env_kwargs", "{}", '{"num_distractors": 3}')
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "| environment | num_distractors | return | length | success |"
    assert [line.count("|") for line in lines] == [6] * 4
    assert lines[2].startswith("| `lrl/BabyAI-GoToLocal-v0` |  |") and "| 3 |" in lines[3]


def test_the_policy_plays_in_the_precision_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    play = lrl.evaluation.episodes.evaluate_policy
    monkeypatch.setattr(
        "lrl.evaluation.episodes.evaluate_policy",
        lambda *given, **more: (seen.append(torch.is_autocast_enabled("cpu")), play(*given, **more))[1],
    )
    for options in ((), ("--precision", "bf16-mixed", "--accelerator", "cpu")):
        assert run("--env_id", "FrozenLake-v1", *options).returncode == 0
    assert seen == [False, True]
    refused = run("--env_id", "FrozenLake-v1", "--precision", "fp7")
    assert refused.returncode == 2 and "fp7" in refused.stderr


def test_a_label_that_is_given_twice_is_one_sentence() -> None:
    done = run_words(["lrl", "success_table", "--env_id", "FrozenLake-v1", "--checkpoint", "a=x", "a=y"])
    assert done.returncode == 2
    assert done.stderr.strip() == "lrl success_table: --checkpoint names 'a' twice; give each its own label: LABEL=RUN."


def test_a_path_may_hold_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "lr=1").mkdir()
    path = str(tmp_path / "lr=1")
    assert labelled([path, f"after={path}"]) == [(path, path), ("after", path)]


def test_an_empty_path_is_named_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"--checkpoint is 'a='; it must be RUN or LABEL=RUN\."):
        labelled(["b=run", "a="])

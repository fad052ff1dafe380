"""Figures as a table, as a file, and from the command line."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lrl.cli.program import main
from lrl.evaluation.episodes import EpisodeResults
from lrl.evaluation.report import results_table, write_json

ROOT = Path(__file__).parents[2]


def results(episodes: int) -> EpisodeResults:
    return EpisodeResults(
        seed=5, index=np.arange(episodes), returns=np.arange(episodes) / 2, lengths=np.full(episodes, 4),
        successes=np.arange(episodes) > 0, invalid_actions=np.ones(episodes, dtype=np.int64), seconds=0.5,
    )  # fmt: skip


def printed(rows: dict[str, EpisodeResults]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table(rows, "title", "caption"))
    return console.export_text()


def shown(episodes: int) -> str:
    return printed({"grpo": results(episodes)})


def test_every_mean_is_above_its_interval_in_80_columns() -> None:
    text = shown(3)
    assert all(figure in text for figure in ("0.500", "4.0", "0.667", "0.250", "24", "title", "caption"))
    assert "0.000..1.000" in text and "0.208..0.939" in text and "0.250..0.250" in text


def test_long_episodes_with_large_returns_fit_into_80_columns() -> None:
    cheetah = replace(results(3), lengths=np.full(3, 1000), invalid_actions=np.zeros(3, dtype=np.int64), seconds=0.004)
    rows = {
        "trained": replace(cheetah, returns=np.array([4744.269, 4743.1, 4746.9])),
        "constant": replace(cheetah, returns=np.array([-112345.678, 223456.789, 4744.269])),
    }
    text = printed(rows)
    whole = ("4745", "4743..4747", "1000..1000", "0.208..0.939", "750,000", "38618", "-112346..", "223457")
    assert all(figure in text for figure in whole)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


def test_one_episode_has_no_interval() -> None:
    assert "no interval" in shown(1)
    assert results(1).report("env", "policy")["return_ci95"] == [None, None]


def test_json_is_strict_and_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    write_json(results(1).report("env", "policy"), path)
    first = path.read_text()
    assert json.loads(first)["per_episode"] == [
        {"seed": 5, "return": 0.0, "length": 4, "success": False, "invalid_actions": 1}
    ]
    with pytest.raises(ValueError, match="JSON"):
        write_json({"return_mean": float("nan")}, path)
    assert path.read_text() == first


def evaluate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lrl", "evaluate", *arguments])
    main()


def test_the_command_prints_baselines_beside_the_policy_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    evaluate(monkeypatch, "--policy", "constant", "--episodes", "12", "--num_envs", "5", "--json", str(path))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("constant", "random", "expert", "optimum 0.7442", "temperature 0,"))
    report = json.loads(path.read_text())
    assert (report["env_id"], report["policy"], report["episodes"]) == ("FrozenLake-v1", "constant", 12)
    assert (report["temperature"], report["command"].split()[:4]) == (0.0, ["lrl", "evaluate", "--policy", "constant"])
    assert [episode["seed"] for episode in report["per_episode"]] == list(range(10_000, 10_012))


def test_the_command_reports_errors_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate(monkeypatch, "--policy", "constant", "--env_kwargs", "{map")
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip() == "lrl evaluate: --env_kwargs is '{map'; it must be a JSON object."

"""Tests of the CSV files with demonstrations."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml

from lrl.cli.expert_q import main
from lrl.envs.frozen_lake import COLUMNS, Q_COLUMNS, CsvRows, ExpertQRows, generate_records, parse_rendering, write_csv
from lrl.envs.prompt_env import PromptEnv
from lrl.files import shipped
from lrl.rewards.expert_q import NormalizedAdvantageReward
from lrl.rewards.format import FormatReward

ESC = "\x1b[41m"
ORIGINAL = {
    "state": "10",
    "state_str": f"  (Right)|SFFF|FHFH|FF{ESC}F\x1b[0mH|HFFG|",
    "action": "0",
    "action_text": "LEFT",
    "q_value_left": "0.61",
    "q_value_down": "0.49",
    "q_value_right": "0.4",
    "q_value_up": "0.33",
    "reward": "0.0",
    "next_state": "9",
    "done": "False",
    "batch_idx": "3",
}


def file_with(folder: Path, *records: dict) -> str:
    """Write a CSV file with the columns of the first record and return its path."""
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column for column in COLUMNS if column in records[0]])
        writer.writeheader()
        writer.writerows(records)
    return str(path)


def test_a_row_of_the_original_file_is_parsed(tmp_path: Path) -> None:
    (row,) = CsvRows(file_with(tmp_path, ORIGINAL)).rows()
    assert row.observation == "row 2 column 2\nS F F F\nF H F H\nF F A H\nH F F G"
    assert (row.state, row.action, row.q_values) == (10, 0, (0.61, 0.49, 0.4, 0.33))
    assert row.desc == ("SFFF", "FHFH", "FFFH", "HFFG")


def test_a_row_without_a_last_action_and_with_other_columns_is_parsed(tmp_path: Path) -> None:
    first = ORIGINAL | {"state": "0", "state_str": f"|{ESC}S\x1b[0mFFF|FHFH|FFFH|HFFG|", "next_state": "4.0"}
    path = Path(file_with(tmp_path, first))
    lines = path.read_text().replace("\r", "").splitlines()
    path.write_text("\n".join([f",{lines[0]}", f"0,{lines[1]}"]))
    assert CsvRows(str(path)).rows()[0].state == 0


def test_the_required_columns_are_enough(tmp_path: Path) -> None:
    least = {column: ORIGINAL[column] for column in ("state_str", "action_text", *Q_COLUMNS)}
    assert CsvRows(file_with(tmp_path, least)).rows() == CsvRows(file_with(tmp_path, ORIGINAL)).rows()
    with pytest.raises(ValueError, match="row 1, column action_text: it is 'JUMP'; it must be one of LEFT, DOWN"):
        CsvRows(file_with(tmp_path, least | {"action_text": "JUMP"})).rows()
    with pytest.raises(ValueError, match="row 1, column state_str: .* and one coloured cell"):
        CsvRows(file_with(tmp_path, least | {"state_str": "|SFFF|FHFH|FFFH|HFFG|"})).rows()


def test_repeated_rows_are_dropped(tmp_path: Path) -> None:
    path = file_with(tmp_path, ORIGINAL, ORIGINAL | {"state_str": ORIGINAL["state_str"].replace("Right", "Up")})
    assert len(CsvRows(path).rows()) == 1


@pytest.mark.parametrize("slippery", [True, False])
def test_the_file_written_by_the_script_can_be_read(slippery: bool, tmp_path: Path, capsys) -> None:
    out = tmp_path / "new" / "expert.csv"
    slip = "--slippery" if slippery else "--no-slippery"
    main("lrl expert_q", ["--out", str(out), slip, "--episodes", "60"])
    assert "success of the expert within 100 steps: " + ("0.7402" if slippery else "1.0000") in capsys.readouterr().out
    with out.open(newline="") as file:
        records = list(csv.DictReader(file))
    assert tuple(records[0]) == COLUMNS
    assert records[0]["state_str"] == f"|{ESC}S\x1b[0mFFF|FHFH|FFFH|HFFG|"
    expert = {row.state: row for row in ExpertQRows(is_slippery=slippery).rows()}
    rows = CsvRows(str(out)).rows()
    assert len(rows) == (11 if slippery else 6)
    assert all(row == expert[row.state] for row in rows)
    ends = [record for record in records if record["done"] == "True"]
    assert {float(record["reward"]) for record in ends} == {1.0} and ends[-1]["next_state"] == "15"


SHIPPED = "assets/expert_q/frozen_lake.csv"


def test_the_file_that_ships_holds_every_state_and_is_found_from_any_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = CsvRows(SHIPPED).rows()
    assert sorted(rows, key=lambda row: row.state) == ExpertQRows().rows()
    with Path(shipped(SHIPPED) or "").open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS


def test_the_config_of_the_rubric_rewards_as_the_original_does() -> None:
    """State 14 has the Q-values 0.7325, 0.8628, 0.8211 and 0.7811: normalised 0, 1, 0.6796 and 0.3729.

    One departure: a response without reasoning is invalid here, whereas the original rewards its action.
    """
    path = shipped("configs/frozen_lake/grpo_rubric.yaml")
    env = yaml.safe_load(Path(path or "").read_text())["data"]["init_args"]["env"]["init_args"]
    source = CsvRows(**env["rows"]["init_args"])
    classes = {"FormatReward": FormatReward, "NormalizedAdvantageReward": NormalizedAdvantageReward}
    rewards = [classes[one["class_path"]](**one["init_args"]) for one in env["rewards"]]
    (row,) = [row for row in source.rows() if row.state == 14]
    answers = [f"<think>a</think><answer>{text}</answer>" for text in ("LEFT", "DOWN", "RIGHT", "UP", "JUMP")]
    responses = [*answers, "<answer>DOWN</answer>", "DOWN"]
    envs = PromptEnv([row], rewards, source.codec, "think_answer", len(responses))
    envs.reset(seed=0)
    expected = [0.5, 1, (1 + 0.6796) / 2, (1 + 0.3729) / 2, 0.5, 0, 0]
    np.testing.assert_allclose(envs.step(responses)[1], expected, atol=1e-4)


def test_batch_indices_count_successful_episodes() -> None:
    q_values = np.zeros((16, 4))
    q_values[[0, 4, 8, 9, 13, 14], [1, 1, 2, 1, 2, 2]] = 1
    records = generate_records(q_values, 5, batch_size=2, is_slippery=False)
    assert [record["batch_idx"] for record in records[::6]] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("state_str", "|SFFF|FHF|", "an ansi rendering"),
        ("state_str", "|SFFX|FHFH|", "an ansi rendering"),
        ("state_str", "", "an ansi rendering"),
        ("action_text", "JUMP", "one of LEFT"),
        ("q_value_up", "", "a finite number"),
        ("q_value_left", "inf", "a finite number"),
    ],
)
def test_an_invalid_cell_raises_with_row_and_column(column: str, value: str, message: str, tmp_path: Path) -> None:
    path = file_with(tmp_path, ORIGINAL, ORIGINAL | {column: value})
    with pytest.raises(ValueError) as error:
        CsvRows(path).rows()
    assert f"row 2, column {column}: " in str(error.value) and message in str(error.value)


def test_a_missing_column_a_short_row_and_a_missing_file_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 0 .*column q_value_up: it is missing"):
        CsvRows(file_with(tmp_path, {k: v for k, v in ORIGINAL.items() if k != "q_value_up"})).rows()
    short = Path(file_with(tmp_path, ORIGINAL))
    short.write_text(short.read_text().splitlines()[0] + f"\n10,{ORIGINAL['state_str']},0\n")
    with pytest.raises(ValueError, match="row 1, column action_text: it is None"):
        CsvRows(str(short)).rows()
    with pytest.raises(ValueError, match="no_such.csv"):
        CsvRows(str(tmp_path / "no_such.csv")).rows()
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00state")
    with pytest.raises(ValueError, match="cannot be read as CSV"):
        CsvRows(str(binary)).rows()


@pytest.mark.parametrize("text", ["|SF|FG|", f"|{ESC}S\x1b[0mF|F{ESC}G\x1b[0m|"])
def test_a_rendering_has_one_coloured_cell(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rendering(text)


def test_write_csv_creates_folders(tmp_path: Path) -> None:
    write_csv(tmp_path / "a" / "b.csv", [ORIGINAL])
    assert CsvRows(str(tmp_path / "a" / "b.csv")).rows()[0].state == 10

"""Untrained models beside random actions: every row once, a second call adds what is missing."""

import json

import pytest

from lrl.cli.zero_shot import main


def test_a_second_call_evaluates_only_what_is_missing(tmp_path, capsys):
    file = tmp_path / "report.json"
    args = ["--model", "assets/tiny-lm", "--episodes", "2", "--max_new_tokens", "3", "--json", str(file), "--policies"]
    main("lrl zero_shot", [*args, "random", "chooses", "random"])
    first = json.loads(file.read_text())
    assert [row["policy"] for row in first["environments"]] == ["random", "chooses"]
    assert first["command"].startswith("lrl zero_shot --model ")
    assert all(row["episodes"] == 2 and len(row["failed_seeds"]) <= 2 for row in first["environments"])
    capsys.readouterr()
    main("lrl zero_shot", [*args, "chooses", "writes"])
    second = json.loads(file.read_text())
    assert second["environments"][:2] == first["environments"] and second["environments"][2]["policy"] == "writes"
    assert capsys.readouterr().out.count("\n") == 1


def test_a_missing_model_raises_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main("lrl zero_shot", ["--model", "no/such.gguf", "--policies", "chooses", "--json", str(tmp_path / "a.json")])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "lrl zero_shot: language_model.name is 'no/such.gguf'; there is no such GGUF file, it must be a local one.\n"
    )


def test_a_file_holds_one_model_with_one_setting(tmp_path, capsys):
    file = tmp_path / "report.json"
    args = ["--model", "assets/tiny-lm", "--json", str(file), "--policies", "random", "--episodes"]
    main("lrl zero_shot", [*args, "2"])
    with pytest.raises(SystemExit):
        main("lrl zero_shot", [*args, "3"])
    assert "--episodes is 3, but" in capsys.readouterr().err
    for content in ("{}", '{"environments": []}', '{"environments": [], "command": "lrl success_table"}'):
        file.write_text(content)
        with pytest.raises(SystemExit):
            main("lrl zero_shot", [*args, "2"])
        assert "which is not a report of `lrl zero_shot`" in capsys.readouterr().err
    for content in ("3", "no JSON"):
        file.write_text(content)
        with pytest.raises(SystemExit):
            main("lrl zero_shot", [*args, "2"])
        assert f"--json is {str(file)!r}, which" in capsys.readouterr().err

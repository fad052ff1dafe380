"""Tests of the table of searchers on synthetic functions."""

import json
import sys
from pathlib import Path

import pytest
from results.documentation import fill_tables

from lrl.search.synthetic_command import main
from lrl.search.synthetic_comparison import synthetic_table


def report(tmp_path, monkeypatch, iterations):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    file = tmp_path / f"{iterations}.json"
    main("lrl synthetic_search", f"--functions 5 --iterations {iterations} --json {file}".split())
    return json.loads(file.read_text())


def test_a_table_has_a_row_for_each_searcher_of_each_file(tmp_path, monkeypatch, capsys):
    reports = {f"synthetic_{count}": report(tmp_path, monkeypatch, count) for count in (2, 3)}
    rows = synthetic_table(reports).splitlines()
    assert [row.split(" | ")[:3] for row in rows[2:]] == [
        [f"| {searcher}", functions, count]
        for count in ("2", "3")
        for functions in ("all", "real parameters")
        for searcher in ("random search", "CMA-ES")
    ]
    assert rows[2].endswith(") |  |  |") and rows[3].endswith("% |")
    said = capsys.readouterr().out
    assert all(row.split(" | ")[3] in said for row in rows[2:]), "as it is printed"
    page = "<!-- table: synthetic synthetic_2 synthetic_3 -->\n<!-- end table -->"
    assert "\n".join(rows) in fill_tables(Path("docs/a.md"), page, reports)
    with pytest.raises(ValueError, match="'other' is not a report of"):
        synthetic_table({"other": {"metric": "x"}})


def test_a_file_contains_its_command(tmp_path, monkeypatch, capsys):
    made = report(tmp_path, monkeypatch, 2)
    assert made["command"].startswith("lrl synthetic_search --functions 5 --iterations 2") and made["commit"]

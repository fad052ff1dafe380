"""Tests of reports of searches: planned runs, the best value so far, and tables of a kept file."""

import json
from pathlib import Path

import pytest
from results import command as results
from results.documentation import fill_tables, narrow

from lrl.search.experiments import SearchRun, best_so_far, report_records, search, search_report, write_report
from lrl.search.table_command import main
from lrl.search.tables import budget_table, rule_table, search_tables
from lrl.search.tasks import SearchBudget

SMALL = SearchBudget(iterations=6, rollouts=3, fresh_episodes=5)


def record(values, **others):
    figures = {"best_iteration": max(values), "fresh": 0.5, "episodes": 2 * len(values), "env_steps": 40}
    return {"iterations": 4, "rollouts": 2, "values": values, **figures, **others}


RECORDS = {
    SearchRun("maze", "ars", 0): record([0.1, 0.3, 0.2, 0.5]),
    SearchRun("maze", "ars", 1): None,
    SearchRun("maze", "ppo", 0): record([0.4, 0.1], env_steps=1_000_000),
    SearchRun("nim", "ars", 0): None,
    SearchRun("nim", "ars", 1): None,
    SearchRun("nim", "ppo", 0): None,
}


def test_the_best_so_far_is_kept_at_improvements_and_at_the_end():
    series = best_so_far(record([0.1, 0.3, 0.2, 0.3, 0.5, 0.4]))
    assert series.clock.tolist() == [2, 4, 10, 12] and series.values.tolist() == [0.1, 0.3, 0.5, 0.5]
    assert best_so_far(record([2.0])).clock.tolist() == [2]


def test_a_report_contains_planned_runs_and_the_same_curves(tmp_path):
    write_report(search_report(RECORDS, {"command": "x"}), tmp_path / "new" / "a.json")
    report = json.loads((tmp_path / "new" / "a.json").read_text())
    assert report["command"] == "x" and report["planned"] == [
        {"task": "maze", "method": "ars", "seeds": 2},
        {"task": "maze", "method": "ppo", "seeds": 1},
        {"task": "nim", "method": "ars", "seeds": 2},
        {"task": "nim", "method": "ppo", "seeds": 1},
    ]
    found = report_records(report)
    assert set(found) == set(RECORDS)
    for run, kept in found.items():
        whole = RECORDS[run]
        assert (kept is None) == (whole is None)
        if kept is not None and whole is not None:
            assert "values" not in kept and kept["best_iteration"] == whole["best_iteration"]
            one, other = best_so_far(kept), best_so_far(whole)
            assert one.clock.tolist() == other.clock.tolist() and one.values.tolist() == other.values.tolist()
    assert search_tables(found) == search_tables(RECORDS)


def test_a_report_of_real_records_is_compact():
    run = SearchRun("nim", "random_search", 0)
    whole = search(run, SearchBudget(iterations=40, rollouts=2, fresh_episodes=2))
    (kept,) = search_report({run: whole}, {})["searches"]
    assert len(kept["best_so_far"]["values"]) < 10 and best_so_far(kept).clock[-1] == 80


def test_a_table_of_the_documentation_is_made_from_a_kept_file():
    results = {"searches": search_report(RECORDS, {}), "other": {"metric": "x"}}

    def filled(kind):
        return fill_tables(Path("docs/a.md"), f"<!-- table: {kind} -->\n<!-- end table -->", results)

    text = filled("search searches best_iteration")
    assert narrow(rule_table(report_records(results["searches"]), "best_iteration")) in text
    assert "| maze | 9 | 0.50 1/2 | 0.40 |" in text and "| nim | 11 | 0/2 | 0/1 |" in text
    assert "(best iteration): ppo 0 and 0 of 1." in text
    assert "those planned: ars maze 1/2, nim 0/2; ppo nim 0/1." in text
    assert budget_table(RECORDS) in filled("search_budget searches")
    for kind, said in {
        "search searches nothing": "rule 'nothing'; it must be best_iteration or fresh",
        "search searches": "rule ''; it must be",
        "search other fresh": "'other' is not a report of `lrl search_table`",
        "search missing fresh": "must be a file of assets/results",
    }.items():
        with pytest.raises(ValueError, match=said):
            filled(kind)


def test_a_row_contains_all_reference_returns_and_the_budget():
    table = rule_table(RECORDS, "fresh").splitlines()
    heads = "| nothing | random | ceiling | budget |"
    names = "published ProPS | published ProPS+"
    assert table[0].endswith(f"| {names} | published PPO | published best baseline {heads}")
    assert rule_table(RECORDS, "best_iteration").splitlines()[0].endswith(f"| ppo | {names} {heads}"), (
        "baselines at the end of training do not belong beside best iterations"
    )
    assert table[2].endswith("| -1.11 | 0.53 | 0.97 | 8 episodes; ppo 1M env steps (4 episodes) |")
    assert table[3].endswith("| 1.00 |  |"), "nothing was played"
    whole = {SearchRun("maze", name, 0): record([0.1] * 4, iterations=400, rollouts=20, episodes=8010) for name in "ab"}
    assert rule_table(whole, "fresh").endswith("| 8k episodes |")


def test_a_kept_report_is_drawn_with_the_other_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PICTURES", tmp_path)
    monkeypatch.setattr(results, "kept_results", lambda _: {"table": search_report(RECORDS, {"command": "x"})})
    monkeypatch.setattr(results, "_filled", dict)
    results.write()
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_of_a_kept_report_are_not_run_again(tmp_path, capsys):
    words = "--iterations 3 --rollouts 1 --fresh_episodes 2 --tasks nim --methods random_search ars"
    one, two, report = tmp_path / "one", tmp_path / "two", tmp_path / "all.json"
    main("lrl search_table", [*words.split(), "--folder", str(one), "--seeds", "1", "--json", str(report)])
    assert capsys.readouterr().out.count("seconds") == 2
    again = [*words.split(), "--folder", str(two), "--seeds", "2", "--finished", str(report)]
    main("lrl search_table", again)
    printed = capsys.readouterr().out
    assert printed.startswith("2 of 4 runs were copied from ")
    assert printed.count("seconds") == 2 and "nim ars 1:" in printed and "nim ars 0:" not in printed
    kept = json.loads((two / "nim" / "ars_0.json").read_text())
    assert kept["best_iteration"] == json.loads((one / "nim" / "ars_0.json").read_text())["best_iteration"]
    (two / "nim" / "ars_0.json").write_text(json.dumps(kept | {"commit": "mine"}))
    main("lrl search_table", again)
    assert json.loads((two / "nim" / "ars_0.json").read_text())["commit"] == "mine", "a record is not overwritten"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "--finished is "),
        ("{", "which cannot be read"),
        ("[]", "which must hold a JSON object"),
        ('{"planned": [{}], "searches": []}', "all.json' has entries in another format; give "),
        ("another budget", "--iterations is 7, but finished has nim random_search 0, which was made with 6; "),
    ],
)
def test_an_unsuitable_report_raises(tmp_path, capsys, text, sentence):
    report, folder = tmp_path / "all.json", tmp_path / "records"
    if text == "another budget":
        run = SearchRun("nim", "random_search", 0)
        write_report(search_report({run: search(run, SMALL)}, {}), report)
    elif text is not None:
        report.write_text(text)
    words = f"--folder {folder} --tasks nim --methods random_search --seeds 1 --iterations 7 --rollouts 3"
    with pytest.raises(SystemExit):
        main("lrl search_table", [*words.split(), "--fresh_episodes", "5", "--finished", str(report)])
    assert sentence in capsys.readouterr().err and not folder.exists()

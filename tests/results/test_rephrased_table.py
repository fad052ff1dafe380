"""Tests of the table of rephrased prompts."""

from results.documentation import rephrased_table


def report(success, **rephrased):
    return {"success_rate": success, "rephrased": {name: {"success_rate": value} for name, value in rephrased.items()}}


def test_each_phrasing_has_a_column_and_each_seed_its_own_value():
    table = rephrased_table(
        {
            "chooses": [report(0.75, words=0.5, names=0.0), report(0.5, words=0.25, names=0.125)],
            "writes": [report(1.0, words=0.0, names=1.0)],
        }
    )
    assert table.split("\n") == [
        "| policy | as trained | words | names |",
        "|---|---|---|---|",
        "| chooses | 0.750, 0.500 | 0.500, 0.250 | 0.000, 0.125 |",
        "| writes | 1.000 | 0.000 | 1.000 |",
    ]

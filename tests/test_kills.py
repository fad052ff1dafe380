"""The campaign of killed runs, and one of its cases; ``python tests/kills.py`` runs all."""

import json

import pytest
import torch
from kills import MOMENTS, ROOT, RUNS, Campaign, unequal


def test_killed_runs_that_were_resumed_ended_bit_identical():
    counts = json.loads((ROOT / "assets" / "results" / "kills.json").read_text(encoding="utf-8"))
    assert counts["kills"] == counts["identical"] == 60 and counts["different"] == []
    assert counts["by_algorithm_and_moment"].keys() == RUNS.keys()
    assert all(counts["by_moment"][moment] > 0 for moment in MOMENTS[:5])


def test_parts_of_nested_values_that_differ_are_named():
    one = {"weights": torch.zeros(2), "rates": [0.1, {"best": None}]}
    other = {"weights": torch.tensor([0.0, -0.0]), "rates": [0.1, {"best": 1.0, "last": 2.0}], "minutes": 3.0}
    assert unequal(one, other, "") == [".rates.1.best", ".rates.1.last", ".weights"]
    assert unequal(one, {"weights": torch.zeros(2), "rates": (0.1, {"best": None})}, "") == []


@pytest.mark.reference
def test_a_killed_run_that_is_resumed_ends_bit_identical(processes, tmp_path):
    case = Campaign(tmp_path, processes).kill(number=1, seed=1)
    assert case["algorithm"] == "PPO" and case["differences"] == []

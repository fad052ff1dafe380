"""The first two updates of every algorithm are those that were recorded."""

import json

import pytest
from first_updates import GOLDEN, RUNS, figures
from tiny_runs import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_the_first_two_updates_are_those_that_were_recorded(folder, tmp_path, kind):
    recorded = json.loads(GOLDEN.read_text())[kind]
    seen = figures(kind, folder, tmp_path)
    assert len(recorded) == len(seen) == 2
    for before, now in zip(recorded, seen, strict=True):
        assert now == pytest.approx(before, rel=1e-4, abs=1e-5)

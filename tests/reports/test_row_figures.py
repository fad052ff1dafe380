"""Results against the number of rows that they were trained on."""

import numpy as np
import pytest
from matplotlib.image import imread

from lrl.cli.results import main
from lrl.evaluation.statistics import t_interval
from lrl.reports.results import draw_picture
from lrl.reports.row_figures import rows_curve


def test_points_are_means_over_seeds_and_have_an_interval_from_five_seeds_on():
    five = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
    curve = rows_curve("clone", {1000: five, 10: np.array([2.0, 6.0])})
    assert (curve.label, curve.num_runs, curve.clock.tolist(), curve.centre.tolist()) == (
        "clone",
        5,
        [10, 1000],
        [4, 4],
    )
    assert np.isnan([curve.lower[0], curve.upper[0]]).all()
    assert (curve.lower[1], curve.upper[1]) == pytest.approx(t_interval(five))
    assert curve.runs[:, 1].tolist() == five.tolist() and np.isnan(curve.runs[2:, 0]).all()


def result(label, rows, *values):
    runs = [{"seed": seed, "curve": {"minutes": [1.0], "val/return": [value]}} for seed, value in enumerate(values)]
    return {"label": label, "rows": rows, "metric": "val/return", "drawn": "val/return", "runs": runs, "baselines": {}}


def test_results_with_rows_are_one_figure_whatever_their_order(tmp_path):
    results = [result("a", 100, 5.0, 6.0), result("b", 10, 1.0), result("a", 10, 2.0, 3.0)]
    (first,) = draw_picture("rows", results, tmp_path)
    seen = imread(first)
    assert first.name == "rows.png" and (seen < 0.9).any()
    (second,) = draw_picture("again", [results[2], results[0], results[1]], tmp_path)
    assert np.array_equal(seen, imread(second))


@pytest.mark.parametrize("options", [["--rows", "0", "--label", "a"], ["--rows", "10"]])
def test_rows_need_a_label_and_a_number_above_zero(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main("results.py", ["keep", "name", "runs/a", "--title", "t", *options])
    assert "it must be positive and come with a --label" in capsys.readouterr().err.replace("\n", " ")

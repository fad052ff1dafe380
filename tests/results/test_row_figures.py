"""Tests of figures against the number of training rows, and of figures of two metrics."""

import numpy as np
import pytest
from matplotlib.image import imread
from results.command import main
from results.summaries import draw_picture, rows_curve

from lrl.evaluation.statistics import t_interval


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


def test_results_with_rows_are_one_figure_in_any_order(tmp_path):
    results = [result("a", 100, 5.0, 6.0), result("b", 10, 1.0), result("a", 10, 2.0, 3.0)]
    (first,) = draw_picture("rows", results, tmp_path)
    seen = imread(first)
    assert first.name == "rows.png" and (seen < 0.9).any()
    results = [result("a", 10, 2.0), *results[:2], result("a", 10, 3.0)]
    (second,) = draw_picture("again", results, tmp_path)
    assert np.array_equal(seen, imread(second))


@pytest.mark.parametrize("options", [["--rows", "0", "--label", "a"], ["--rows", "10"]])
def test_rows_need_a_label_and_a_positive_number(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main("results.py", ["keep", "name", "runs/a", "--title", "t", *options])
    assert "it must be positive and come with a --label" in capsys.readouterr().err.replace("\n", " ")


def twin(returns, rewards):
    run = {"curve": {"env_steps": [0, 10], "val/return": returns}}
    run |= {"drawn": {"env_steps": [0, 5, 10], "rollout/return": rewards}}
    return {"metric": "val/return", "drawn": "rollout/return", "twin": True, "runs": [run], "baselines": {}}


@pytest.mark.slow
def test_two_metrics_of_a_run_are_one_figure(tmp_path):
    figures = {"both": ([0.0, 1.0], [0, 1, 2]), "return": ([0.9, 1.0], [0, 1, 2]), "reward": ([0.0, 1.0], [0, 2, 2])}
    seen = {name: imread(draw_picture(name, [twin(*values)], tmp_path)[0]) for name, values in figures.items()}
    assert not np.array_equal(seen["both"], seen["return"]) and not np.array_equal(seen["both"], seen["reward"])


def test_results_of_one_figure_must_be_drawn_in_the_same_way(tmp_path):
    with pytest.raises(ValueError, match="picture is 'x', whose results differ in rows; they must be drawn alike"):
        draw_picture("x", [result("a", 10, 1.0), twin([0, 1], [0, 1, 2])], tmp_path)


def test_the_interval_of_a_rate_stays_in_its_range():
    curve = rows_curve("a", {10: np.array([0.99, 1, 0.8, 1, 1])}, (0.0, 1.0))
    assert curve.lower[0] >= 0.8 and curve.upper[0] <= 1


@pytest.mark.parametrize("ignored", [["--twin"], ["--drawn", "train/loss"], ["--window", "3"]])
def test_options_that_a_figure_against_rows_ignores_raise(ignored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main("results.py", ["keep", "n", "runs/a", "--title", "t", "--rows", "10", "--label", "a", *ignored])
    assert f"{ignored[0]} is given, which the figure of --rows does not read" in capsys.readouterr().err.replace(
        "\n", " "
    )


def test_two_metrics_must_differ(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main("results.py", ["keep", "name", "runs/a", "--title", "t", "--metric", "val/return", "--twin"])
    assert "--drawn is None; it must be another metric" in capsys.readouterr().err.replace("\n", " ")

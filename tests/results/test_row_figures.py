"""Tests of figures against the number of training rows, and of figures of two metrics."""

import numpy as np
import pytest
from matplotlib.image import imread
from results.command import main
from results.summaries import draw_picture, final_values, result_curve, result_panels, rows_curve

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


def measured(returns, rewards, **about):
    run = {"curve": {"env_steps": [*range(len(returns))], "val/return": returns}, "seed": 0}
    run |= {"drawn": {"env_steps": [0, 5, 10], "rollout/return": rewards}}
    return {"title": "t", "metric": "val/return", "drawn": "rollout/return", "runs": [run], "baselines": {}} | about


def test_the_metric_of_the_tables_is_drawn_and_another_one_beside(tmp_path):
    path = tmp_path / "both.png"
    assert draw_picture("both", [measured([0.0, 1.0], [0, 1, 2])], tmp_path) == [path] and imread(path).min() < 0.5
    (single, training) = result_panels([measured([0.0, 7.0], [0, 1, 2])], "env_steps")
    assert (single.metric, single.final, single.curves[0].centre.tolist()) == ("val/return", True, [7])
    assert (training.metric, training.final) == ("rollout/return", False)
    (several, _) = result_panels([measured([0.0, 1.0, 7.0], [0, 1, 2], window=3)], "env_steps")
    assert not several.final and several.curves[0].centre.tolist() == [0, 1, 7], "the window is for training episodes"


def test_the_other_metric_can_have_its_own_baselines(tmp_path):
    shared = measured([0.0, 1.0], [0, 1, 2], baselines={"random": 0.1})
    assert [panel.baselines for panel in result_panels([shared], "env_steps")] == [{"random": 0.1}] * 2
    own = shared | {"drawn_baselines": {"best action always": 1.0}}
    assert [panel.baselines for panel in result_panels([own], "env_steps")] == [
        {"random": 0.1},
        {"best action always": 1.0},
    ]


def test_the_curve_of_runs_that_stopped_early_ends_at_the_figure_of_the_table(tmp_path):
    results = measured([0.0, 1.0, 480.0], [0, 1, 2])
    later = {"env_steps": [0, 1, 2, 3, 4], "val/return": [0.0, 0.0, 0.0, 200.0, 500.0]}
    results["runs"].append(results["runs"][0] | {"curve": later})
    (panel, _) = result_panels([results], "env_steps")
    assert panel.curves[0].clock[-1] == 4 and panel.curves[0].centre[-1] == final_values(results).mean() == 490


def test_runs_of_different_speed_are_drawn_to_the_end_of_the_slowest(tmp_path):
    runs = [{"curve": {"minutes": [speed, 2 * speed, 3 * speed], "train/loss": [2.0, 0.2, 0.1]}} for speed in (1, 2)]
    result = {"title": "t", "metric": "train/loss", "drawn": "train/loss", "runs": runs}
    curve = result_curve(result, "minutes")
    assert curve.clock.tolist() == [1.5, 3, 4.5] and curve.centre == pytest.approx([2.0, 0.2, 0.1])


def test_a_title_is_not_split_at_the_comma_of_a_number(tmp_path):
    result = measured([0.0], [0, 1, 2], title="GRPO from a weak clone with a return of 1,067, likelihood, 20 episodes")
    assert result_curve(result, "env_steps").label == "GRPO from a weak clone with a return of 1,067"


def test_results_of_one_figure_must_be_drawn_in_the_same_way(tmp_path):
    with pytest.raises(ValueError, match="picture is 'x', whose results differ in rows; they must be drawn alike"):
        draw_picture("x", [result("a", 10, 1.0), measured([0, 1], [0, 1, 2])], tmp_path)


def test_the_interval_of_a_rate_stays_in_its_range():
    curve = rows_curve("a", {10: np.array([0.99, 1, 0.8, 1, 1])}, (0.0, 1.0))
    assert curve.lower[0] >= 0.8 and curve.upper[0] <= 1


@pytest.mark.parametrize("ignored", [["--clocks", "minutes"], ["--drawn", "train/loss"], ["--window", "3"]])
def test_options_that_a_figure_against_rows_ignores_raise(ignored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main("results.py", ["keep", "n", "runs/a", "--title", "t", "--rows", "10", "--label", "a", *ignored])
    assert f"{ignored[0]} is given, which the figure of --rows does not read" in capsys.readouterr().err.replace(
        "\n", " "
    )

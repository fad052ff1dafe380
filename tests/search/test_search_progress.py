"""Tests of the figure of the best mean return so far: curves, bands and panels."""

import numpy as np
import pytest

from lrl.search.experiments import UNPLAYABLE, SearchRun
from lrl.search.pictures import draw_progress, progress_curve
from lrl.search.table_command import main
from lrl.search.tasks import TASKS


def record(*values, rollouts=2):
    return {"values": list(values), "rollouts": rollouts}


def test_few_seeds_have_a_band_from_the_minimum_to_the_maximum():
    curve = progress_curve("ars", [record(0.0, 4.0, 2.0), record(1.0, 1.0, 3.0)])
    assert curve.clock.tolist() == [2, 4, 6] and curve.centre.tolist() == [0.5, 2.5, 3.5]
    assert curve.lower.tolist() == [0, 1, 3] and curve.upper.tolist() == [1, 4, 4] and curve.num_runs == 2


def test_a_seed_that_ended_earlier_keeps_its_best():
    curve = progress_curve("ppo", [record(2.0), record(1.0, 0.0, 5.0)])
    assert curve.clock.tolist() == [2, 6] and curve.centre.tolist() == [1.5, 3.5]


def test_five_seeds_have_an_interval():
    values = np.random.default_rng(0).random((8, 30))
    curve = progress_curve("ars", [record(*row) for row in values.tolist()])
    best = np.maximum.accumulate(values, 1)
    kept = (curve.clock / 2 - 1).astype(int)
    np.testing.assert_allclose(curve.centre, best[:, kept].mean(0))
    assert (curve.lower <= curve.centre).all() and (curve.centre <= curve.upper).all()
    assert (curve.lower > best[:, kept].min(0)).any() and (curve.upper < best[:, kept].max(0)).any()


def test_a_curve_has_at_most_four_hundred_points():
    curve = progress_curve("ars", [record(*np.arange(900.0))])
    assert len(curve.clock) == 400 and curve.clock[[0, -1]].tolist() == [2, 1800]


def panels(records, path, monkeypatch):
    kept = []
    monkeypatch.setattr("lrl.search.pictures.save_figure", lambda figure, path: kept.append(figure))
    draw_progress(records, path)
    return kept[0]


def test_there_is_a_panel_for_each_task_and_the_published_figure(tmp_path, monkeypatch):
    records = {SearchRun(task, "ars", 0): record(1.0, 2.0) for task in TASKS}
    records |= {SearchRun("maze", "ppo", 0): None, SearchRun("maze", "in_context", 0): {UNPLAYABLE: "too long"}}
    records[SearchRun("reacher", "ars", 0)] = record(-1e6, *[-10.0] * 98, -4.0)
    figure = panels(records, tmp_path / "a.png", monkeypatch)
    assert [axes.get_title() for axes in figure.axes] == [name.replace("_", " ") for name in TASKS]
    for axes, task in zip(figure.axes, TASKS.values()):
        (level,) = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert list(level.get_ydata()) == [task.published["props"]] * 2
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ars", "published ProPS"]
    assert figure.axes[3].get_ylim()[0] > -20, "the first policy does not set the axis"


def test_many_methods_of_a_task_are_drawn_in_panels_with_equal_axes(tmp_path, monkeypatch):
    methods = ["ars", "random_search", "cma_es", "cross_entropy", "ppo", "trpo"]
    records = {SearchRun("maze", method, 0): record(1.0, 2.0 + place) for place, method in enumerate(methods)}
    figure = panels(records, tmp_path / "a.png", monkeypatch)
    assert [axes.get_title() for axes in figure.axes] == ["maze", "maze"]
    assert [len(axes.lines) for axes in figure.axes] == [4 + 1, 2 + 1]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() and figure.axes[0].get_ylim()[1] > 7
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*methods, "published ProPS"]


def test_unfinished_and_random_runs_are_not_drawn(tmp_path, monkeypatch):
    lucky = record(1.0, 2.0) | {"failed": 395, "iterations": 400}
    records = {SearchRun("maze", "in_context", 0): lucky, SearchRun("maze", "ars", 0): record(0.5, 1.0)}
    records |= {SearchRun("nim", "in_context", 0): lucky, SearchRun("pong", "ars", 0): None}
    figure = panels(records, tmp_path / "a.png", monkeypatch)
    assert [axes.get_title() for axes in figure.axes] == ["maze"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ars", "published ProPS"]
    with pytest.raises(ValueError, match="picture is given, but no run has finished"):
        panels({SearchRun("nim", "in_context", 0): lucky}, tmp_path / "b.png", monkeypatch)


@pytest.mark.slow
def test_the_command_draws_the_picture(tmp_path):
    words = f"--folder {tmp_path} --tasks maze nim --methods ars random_search --iterations 3 --rollouts 2"
    main("lrl search_table", f"{words} --seeds 2 --fresh_episodes 2 --picture {tmp_path}/new/a.png".split())
    assert (tmp_path / "new/a.png").read_bytes().startswith(b"\x89PNG")

"""Tests of learning curves."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrl.cli.program import main
from lrl.evaluation import pictures as plots
from lrl.evaluation.comparison import group_runs
from lrl.evaluation.pictures import Series, aggregate, draw_curves, read_series
from lrl.evaluation.run_records import metrics_file

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"


def write_run(run: Path, successes: list[float], every: int = 100) -> Path:
    """Rows of the loggers: training and validation rows, each with the clocks."""
    run.mkdir(parents=True)
    lines = ["clock/env_steps,clock/minutes,step,train/loss,val/success_rate"]
    for row, success in enumerate(successes):
        clocks = f"{row * every},{row / 2},{row * every}"
        lines += [f"{clocks},{1 - success},", f"{clocks},,{success}"]
    (run / "metrics.csv").write_text("\n".join(lines) + "\n")
    return run


def series(clock: list[float], values: list[float]) -> Series:
    return Series(clock=np.array(clock, dtype=float), values=np.array(values, dtype=float))


def test_a_metric_is_read_against_any_clock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.5, 0.9])
    against_steps, against_minutes = (read_series(run, "val/success_rate", clock) for clock in ("env_steps", "minutes"))
    assert against_steps.clock.tolist() == [0, 100, 200]
    assert against_minutes.clock.tolist() == [0, 0.5, 1]
    assert against_steps.values.tolist() == against_minutes.values.tolist() == [0.1, 0.5, 0.9]


def test_a_resumed_run_that_logged_a_row_twice_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1, 0.5])
    with (run / "metrics.csv").open("a") as file:
        file.write("100,.5,100,,0.6\n200,1,200,,0.7\n")
    assert read_series(run, "val/success_rate").values.tolist() == [0.1, 0.6, 0.7]


def test_an_unknown_metric_names_those_that_exist(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.1])
    with pytest.raises(ValueError, match=r"metric is 'val/sucess', which .* has .*train/loss, val/success_rate"):
        read_series(run, "val/sucess")


def test_metrics_are_found_below_the_run_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "run" / "csv", [0.1])
    assert metrics_file(tmp_path / "run") == tmp_path / "run" / "csv" / "metrics.csv"
    former = write_run(tmp_path / "run" / "csv-interrupted-20260101-120000", [0.1])  # not a result
    assert metrics_file(tmp_path / "run") == tmp_path / "run" / "csv" / "metrics.csv"
    assert metrics_file(former) == former / "metrics.csv"
    with pytest.raises(ValueError, match="holds 0 files"):
        metrics_file(tmp_path / "nothing")


def test_every_point_is_an_average_over_all_runs_and_a_run_that_has_ended_keeps_its_last_value() -> None:
    curve = aggregate("two", [series([0, 10, 20], [0, 1, 2]), series([5, 15], [1, 3])], "mean")
    assert curve.clock.tolist() == [5, 10, 15, 20] and curve.ended == 15
    assert curve.centre == pytest.approx([(0.5 + 1) / 2, (1 + 2) / 2, (1.5 + 3) / 2, (2 + 3) / 2])
    assert np.isnan(curve.runs[1]).tolist() == [False, False, False, True], "the run itself ends"
    assert aggregate("two", [series([0, 100], [0, 1]), series([0, 99], [0, 1])], "mean").ended == np.inf


def test_rows_of_a_slow_and_a_fast_run_are_averaged_one_by_one() -> None:
    fast, slow = series([1, 2, 3], [2.0, 0.2, 0.1]), series([2, 4, 6], [2.0, 0.2, 0.1])
    curve = aggregate("two", [fast, slow], "mean", by_row=True)
    assert curve.clock.tolist() == [1.5, 3, 4.5]
    assert curve.centre == pytest.approx([2.0, 0.2, 0.1]), "interpolation between the rows would add other values"
    assert len(aggregate("two", [fast, series([2, 4], [2.0, 0.2])], "mean", by_row=True).clock) == 3, (
        "other numbers of rows"
    )
    assert aggregate("two", [series([10], [0.5]), series([11], [0.7])], "mean").clock.tolist() == [10.5]


def test_iqm_ignores_a_run_that_failed() -> None:
    runs = [series([0, 1], [0, value]) for value in (0.7, 0.7, 0.7, 0.0)]
    assert aggregate("grpo", runs, "iqm").centre == pytest.approx([0, 0.7])
    assert aggregate("grpo", runs, "mean").centre == pytest.approx([0, 0.525])


def test_interval_holds_the_centre_and_fewer_than_five_runs_have_none() -> None:
    runs = [series([0, 1], [0, value]) for value in (0.2, 0.4, 0.5, 0.6, 0.8)]
    curve = aggregate("grpo", runs, "mean")
    assert curve.lower[1] < curve.centre[1] < curve.upper[1] and curve.lower[0] == curve.upper[0] == 0
    assert curve.lower[1] >= 0.2 and curve.upper[1] <= 0.8
    assert np.isnan(aggregate("four", runs[:4], "mean").lower).all()


def test_runs_without_common_range_are_an_error() -> None:
    with pytest.raises(ValueError, match="'a' share no range"):
        aggregate("a", [series([0, 1], [0, 0]), series([2, 3], [0, 0])])


def test_runs_are_labelled_by_argument_or_folder(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "grpo" / f"seed{seed}", [0.1]) for seed in range(2)]
    assert group_runs([str(run) for run in runs]) == {"grpo": runs}
    former = write_run(tmp_path / "grpo" / "seed0-interrupted-20260101-120000", [0.1])  # started again
    assert group_runs(map(str, [*runs, former])) == {"grpo": runs} and group_runs([str(former)]) == {"grpo": [former]}
    assert group_runs([f"mine={runs[0]}", str(runs[1])]) == {"mine": runs[:1], "grpo": runs[1:]}
    assert group_runs([f"mine={tmp_path}/grpo/*", f"{tmp_path}/g*/seed[1]"]) == {"mine": runs, "grpo": runs[1:]}
    odd = write_run(tmp_path / "a" / "lr[1]", [0.1])
    assert group_runs([f"mine={odd}"]) == {"mine": [odd]}, "a name is a name before it is a pattern"
    equal = write_run(tmp_path / "lr=0.1" / "x", [0.1])
    assert group_runs([str(equal)]) == {"lr=0.1": [equal]}
    assert group_runs([f"a={equal}", f"b={equal.parent}/*"]) == {"a": [equal], "b": [equal]}
    for missing in ("no/where", "no/where/*"):
        with pytest.raises(ValueError, match=f"run is {missing!r}, which does not exist".replace("*", r"\*")):
            group_runs([f"a={missing}"])


def test_a_picture_is_written_without_a_display(tmp_path: Path) -> None:
    curve = aggregate("grpo", [series([0, 1], [0, 1]), series([0, 1], [0, 0.5])])
    path = tmp_path / "new" / "curve.png"
    draw_curves([curve], "val/success_rate", "env_steps", path, {"optimum": 0.744, "random": 0.014}, "FrozenLake")
    assert path.read_bytes().startswith(PNG)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that are drawn, instead of files."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    return drawn


def test_the_legend_lies_below_the_axes_however_long_a_label_is(figures: list[Any], tmp_path: Path) -> None:
    label = "PPO with a small network on CartPole, 100,000 env steps, return of 100 held-out episodes, and so on " * 2
    curve = aggregate(label, [series([0, 1], [0, 1]), series([0, 1], [0, 0.5])])
    draw_curves([curve], "rollout/return", "episodes", tmp_path / "x.png", {"random": 0.1})
    figures[0].canvas.draw()
    (legend,) = figures[0].legends
    box, page, axes = (shown.get_window_extent() for shown in (legend, figures[0], figures[0].axes[0]))
    assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= axes.y0
    assert legend.get_texts()[0].get_text().endswith("(2 runs)")


@pytest.mark.parametrize(
    ("metric", "label"),
    [
        ("rollout/return", "return of training episodes (sum of rewards)"),
        ("val/return", "return of held-out episodes (sum of rewards)"),
        ("val/success_rate", "success rate of held-out episodes"),
        ("val/exact_success", "success, computed exactly"),
        ("train/loss", "training loss"),
        ("update/kl", "kl (update)"),
        ("accuracy", "accuracy"),
        ("rollout/return\ntrain/loss", "return of training episodes (sum of rewards)\ntraining loss"),
    ],
)
def test_the_axis_says_which_episodes_were_measured(
    metric: str, label: str, figures: list[Any], tmp_path: Path
) -> None:
    draw_curves([aggregate("a", [series([0, 1], [0, 1])])], metric, "env_steps", tmp_path / "x.png")
    assert figures[0].axes[0].get_ylabel() == label


def test_numbers_on_axes_have_no_offset_and_colours_differ_in_grey(figures: list[Any], tmp_path: Path) -> None:
    curves = [aggregate(f"{count}", [series([0, 2e6], [count, 1e6 * count])]) for count in range(4)]
    draw_curves(curves, "val/return", "env_steps", tmp_path / "x.png")
    figures[0].canvas.draw()
    axes = figures[0].axes[0]
    assert [axis.get_offset_text().get_text() for axis in (axes.xaxis, axes.yaxis)] == ["", ""]
    assert "1,000,000" in [text.get_text() for text in axes.get_xticklabels()]
    lightness = [float(np.dot(shade[:3], (0.2126, 0.7152, 0.0722))) for shade in plots.shades(4)]
    assert (np.diff(lightness) > 0.1).all()


def test_many_curves_are_drawn_in_axes_of_their_own_with_the_others_in_grey(figures: list[Any], tmp_path: Path) -> None:
    curves = [aggregate(f"c{count}", [series([0, 1], [0, count])]) for count in range(5)]
    draw_curves(curves, "val/return", "env_steps", tmp_path / "x.png", {"random": 0.5})
    shown = [axes for axes in figures[0].axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [f"c{count}" for count in range(5)]
    assert all(len(axes.lines) == 5 + 1 + 1 for axes in shown)
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["random (0.5)"]


@pytest.mark.parametrize(("lowest", "limits"), [(0.82, (0.7, 1.01)), (0.3, (0, 1.04))])
def test_the_axes_of_many_high_rates_do_not_begin_at_zero(
    lowest: float, limits: tuple[float, float], figures: list[Any], tmp_path: Path
) -> None:
    curves = [aggregate(f"curve {n}", [series([0, 10], [lowest + 0.01 * n, 0.9])]) for n in range(8)]
    draw_curves(curves, "val/success_rate", "env_steps", tmp_path / "a.png")
    assert figures[0].axes[0].get_ylim() == pytest.approx(limits)


def test_where_runs_have_ended_the_line_is_dotted_and_the_legend_says_so(figures: list[Any], tmp_path: Path) -> None:
    curve = aggregate("a", [series([0, 10, 20], [0, 1, 2]), series([0, 10], [1, 3])], "mean")
    draw_curves([curve], "val/return", "env_steps", tmp_path / "x.png")
    dotted = next(line for line in figures[0].axes[0].lines if line.get_linestyle() == ":")
    assert dotted.get_xdata().tolist() == [10, 20] and dotted.get_ydata().tolist() == [2, 2.5]
    assert "ended" in figures[0].legends[0].get_texts()[-1].get_text()


@pytest.mark.parametrize(("count", "lines", "bands"), [(1, 1, 0), (4, 5, 0), (5, 1, 1)])
def test_few_runs_are_drawn_singly_and_five_with_an_interval(
    count: int, lines: int, bands: int, figures: list[Any], tmp_path: Path
) -> None:
    curve = aggregate("a", [series([0, 1], [0, value]) for value in range(count)], "mean")
    draw_curves([curve], "val/return", "env_steps", tmp_path / "x.png")
    axes = figures[0].axes[0]
    assert (len(axes.lines), len(axes.collections)) == (lines, bands)


def plot(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lrl", "plot", *arguments])
    main()


def test_the_command_draws_runs_with_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(write_run(tmp_path / "grpo" / f"seed{seed}", [0.1, 0.5])) for seed in range(2)]
    path = tmp_path / "curve.png"
    plot(monkeypatch, *runs, "--baseline", "optimum=.744", "--clock", "minutes", "--out", str(path))
    assert path.read_bytes().startswith(PNG)


def test_runs_with_different_configurations_are_different_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Any]
) -> None:
    runs = []
    for number, (model, lr) in enumerate([("PPO", 0.1), ("GRPO", 0.1), ("PPO", 0.2), ("PPO", 0.1)]):
        runs.append(str(write_run(tmp_path / "all" / str(number), [0.1, 0.2])))
        config = {"seed_everything": number, "model": {"class_path": model, "init_args": {"lr": lr}}}
        (Path(runs[-1]) / "config.yaml").write_text(json.dumps(config))
    plot(monkeypatch, *runs[:3], f"{runs[3]}/metrics.csv")
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == ["PPO, lr=0.1 (2 runs)", "GRPO, lr=0.1", "PPO, lr=0.2"]
    assert figures[0].axes[0].get_ylabel() == "success rate of held-out episodes"
    assert list(group_runs([runs[0], runs[3]])) == ["all"]
    assert list(group_runs([f"mine={runs[0]}", f"mine={runs[1]}", runs[2]])) == ["mine", "all"]


def test_runs_without_env_steps_are_drawn_against_another_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Any]
) -> None:
    runs = [write_run(tmp_path / "sft" / str(number), [0.1, 0.5]) for number in range(2)]
    plot(monkeypatch, *map(str, runs))
    table = (runs[0] / "metrics.csv").read_text()
    (runs[0] / "metrics.csv").write_text(table.replace("clock/env_steps", "epoch"))
    plot(monkeypatch, *map(str, runs))
    assert [figure.axes[0].get_xlabel() for figure in figures] == ["env steps", "minutes"]


def test_the_command_reports_errors_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path / "run", [0.1]))
    with pytest.raises(SystemExit) as ended:
        plot(monkeypatch, run, "--baseline", "optimum")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("lrl plot: --baseline is 'optimum'; it must be LABEL=VALUE")

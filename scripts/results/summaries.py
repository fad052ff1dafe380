"""Summaries of experiments as JSON files, and the tables and figures that are made from them.

A file contains a title, the command, and for each run its seed, commit, minutes and learning curve. All numbers in
tables of the documentation are computed from such files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lrl.evaluation.pictures import CLOCKS, Curve, Panel, Series, aggregate, draw_curves, draw_panels
from lrl.evaluation.report import markdown_table, read_result
from lrl.evaluation.run_records import earlier_launches, logged_rows, minutes_of, minutes_range
from lrl.evaluation.statistics import (
    MIN_SEEDS,
    best_of,
    bootstrap_interval,
    bounds_of,
    config_digest,
    mean_with_spread,
    t_interval,
    without_seed,
)
from lrl.files import is_replaced
from results.counts import HEADING, counts_text

_POINTS = 50
"""Approximate number of points in a saved curve."""
_WORD = r"""(?:'[^']*'|"[^"]*"|\S)+"""  # one word of a shell command, with quotes
_PROGRAM = re.compile(rf"^{_WORD}")
_SEED = re.compile(r" --seed_everything[ =](\d+)")
_START, _RUN_OPTIONS = (
    re.compile(rf" (?:--(?:{names})[ =]{_WORD}|'--(?:{names})=[^']*'(?:{_WORD})?)")
    for names in (r"model\.init_args\.init_from", "run_directory|seed_everything")
)


def summarise(
    runs: Sequence[Path],
    metric: str,
    drawn: str | None = None,
    reach: float | None = None,
    lasting: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """Summarise the runs of one experiment.

    Args:
        runs: run directories, which differ only in their seeds.
        metric: column of ``metrics.csv`` whose last value is the result, and whose curve is saved.
        drawn: another column whose curve is saved for the figure; None draws ``metric``.
        reach: return for which :func:`first_episode` of each run is saved; None saves nothing.
        lasting: metric and bar for which :func:`lasting_of` each run is saved; None saves nothing.

    Raises:
        ValueError: If no run is given, a run has no such metric, or the commands differ.
    """
    runs = [run for run in runs if not is_replaced(run)]  # a pattern such as seed* also matches these
    if not runs:
        raise ValueError("no run is given; at least one run directory is needed.")
    commands = sorted({command_of(run) for run in runs}, key=len, reverse=True)  # older versions wrote no quotes
    if len({re.sub(r"['\"]", "", command) for command in commands}) > 1:
        raise ValueError(f"the runs differ in more than their seeds: {commands[0]!r} and {commands[1]!r}.")
    kept = []
    for run in runs:
        first = {} if reach is None else {"first_episode": {f"{reach:g}": first_episode(run, reach)}}
        lasts = {} if lasting is None else {"lasting": lasting_of(run, *lasting)}
        kept.append(_run(run, metric, drawn) | first | lasts)
    kept.sort(key=lambda run: run["seed"])
    return {"command": commands[0], "metric": metric, "drawn": drawn or metric, "runs": kept}


def command_of(run: Path) -> str:
    """Return the command of a run without its seed and run directory; of a resumed run, that of its first launch.

    If the run starts from the weights of another run, the seed in the name of that run is replaced by ``{seed}``.

    Raises:
        ValueError: If the folder contains no command.
    """
    if not (run / "command.txt").is_file():
        raise ValueError(f"run is {str(run)!r}, which holds no command.txt; it must be a run directory.")
    first = next((folder for folder in earlier_launches(run) if (folder / "command.txt").is_file()), run)
    options = _PROGRAM.sub("", (first / "command.txt").read_text(encoding="utf-8").strip())
    seed = _SEED.search(options)
    options = _RUN_OPTIONS.sub("", options)
    if seed is not None:
        options = _START.sub(lambda start: without_seed(start[0], seed[1]), options)
    return "lrl" + options


def _run(run: Path, metric: str, drawn: str | None) -> dict[str, Any]:
    """Summarise one run.

    Raises:
        ValueError: If the run was resumed with another configuration, which the recorded command would not show.
    """
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    for file in (folder / "config.yaml" for folder in earlier_launches(run)):
        if file.is_file() and config_digest(yaml.safe_load(file.read_text(encoding="utf-8"))) != config_digest(config):
            raise ValueError(
                f"run is {str(run)!r}, which was resumed with another configuration than that of {str(file)!r}; give a "
                "run whose launches have the same configuration."
            )
    return {
        "seed": config["seed_everything"],
        "commit": (run / "commit.txt").read_text(encoding="utf-8").strip(),
        "minutes": minutes_of(run),
        "config": config_digest(config),
        "curve": _curve(run, metric),
        **({"drawn": _curve(run, drawn)} if drawn else {}),
    }


def _curve(run: Path, metric: str) -> dict[str, list[float]]:
    """Return the metric and the clocks of about ``_POINTS`` rows that contain the metric."""
    rows = logged_rows(run, metric)
    clocks = [clock for clock in CLOCKS if rows[0].get(f"clock/{clock}")]
    rows = [*rows[: -1 : max(1, len(rows) // _POINTS)], rows[-1]]
    curve = {clock: [round(float(row[f"clock/{clock}"]), 3) for row in rows] for clock in clocks}
    return curve | {metric: [round(float(row[metric]), 5) for row in rows]}


def first_episode(run: Path, value: float, window: int = 25) -> int | None:
    """Return the first episode at which the mean return of the last ``window`` training episodes reaches ``value``.

    The return of each episode is taken to be the mean return of its collection. The result is None if ``value`` is
    never reached.
    """
    returns: list[float] = []
    before = 0
    for row in logged_rows(run, "rollout/return", "clock/episodes"):
        episodes = int(float(row["clock/episodes"]))
        for _ in range(before, episodes):
            returns.append(float(row["rollout/return"]))
            if len(returns) >= window and np.mean(returns[-window:]) >= value - 1e-6:
                return len(returns)
        before = episodes
    return None


def lasting_of(run: Path, metric: str, bar: float) -> dict[str, float] | None:
    """Return whether a run keeps what it has reached; None if the mean of a fortieth of the run never reaches the bar.

    Args:
        run: a run directory.
        metric: column of ``metrics.csv``, such as the return of training episodes.
        bar: value of a trailing mean over a fortieth of the rows at which the task counts as solved.

    Returns:
        ``solved``, env steps at which the task is solved; ``steps``, those of the whole run; ``then`` and ``last``, the
        means of the metric over the tenth of the run after solving, and over the last tenth; ``lowest``, the lowest
        trailing mean after solving; ``drawdown``, the largest fall of the trailing mean below its previous maximum.

    Raises:
        ValueError: If the bar is not positive, because ratios of negative returns have no meaning.
    """
    if bar <= 0:
        raise ValueError(
            f"--lasting has the bar {bar:g}; it must be positive, because its ratios have no other meaning."
        )
    rows = logged_rows(run, metric, "clock/env_steps")
    steps = np.array([float(row["clock/env_steps"]) for row in rows])
    values = np.array([float(row[metric]) for row in rows])
    means = _trailing_mean(values, max(1, len(values) // 40))
    if not (means >= bar).any():
        return None
    first = int(np.argmax(means >= bar))
    tenth, after = steps[-1] / 10, means[first:]
    figures = {
        "solved": steps[first],
        "steps": steps[-1],
        "then": values[(steps >= steps[first]) & (steps <= steps[first] + tenth)].mean(),
        "last": values[steps > steps[-1] - tenth].mean(),
        "lowest": after.min(),
        "drawdown": (np.maximum.accumulate(after) - after).max(),
    }
    return {name: round(float(figure), 4) for name, figure in figures.items()}


def lasting_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of whether runs keep what they have reached, see :func:`lasting_of`."""
    rows = []
    for result in results:
        runs = [run["lasting"] for run in result["runs"] if run["lasting"] is not None]
        solving = f"{len(runs)} of {len(result['runs'])}"
        if not runs:
            rows.append([result["title"], solving, *[""] * 5])
            continue
        shares = [run["last"] / run["then"] for run in runs]
        columns = ("solved", "{:,.0f}"), ("steps", "{:,.0f}"), ("last", "{:.4g}"), ("drawdown", "{:.3g}")
        solved, steps, last, drawdown = (
            [form.format(choose([run[name] for run in runs])) for choose in (np.median, min, max)]
            for name, form in columns
        )
        cells = f"{solved[0]} ({solved[1]} to {solved[2]})", steps[0], f"{last[0]} ({last[1]} to {last[2]})"
        share = f"{np.median(shares):.3f}, {min(shares):.3f}"
        rows.append([result["title"], solving, *cells, share, drawdown[2]])
    names = ["experiment", "seeds that solve", "solved after env steps", "env steps", "mean of the last tenth"]
    shares = "last tenth / tenth after solving: median, lowest"
    return markdown_table([*names, shares, "largest drawdown"], rows)


def rules_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the last value, the best one and the mean over the last tenth of the env steps.

    If a bounded metric was measured once per run, the same metric of training episodes is shown instead. Results
    without a curve, and those in which the three figures are equal, are left out.
    """
    rows = []
    for result in results:
        metric, kind = result["metric"], "curve"
        if max(len(run["curve"][metric]) for run in result["runs"]) == 1 and bounds_of(result) is not None:
            metric, kind = f"rollout/{metric.partition('/')[2]}", "drawn"
        curves = [run.get(kind, {}) for run in result["runs"]]
        choose = best_of(metric)
        if choose is None or not all(metric in curve and "env_steps" in curve for curve in curves):
            continue
        values = [[curve[metric][-1], choose(curve[metric]), _last_tenth(curve, metric)] for curve in curves]
        bounds = bounds_of(result | {"metric": metric})
        cells = [mean_with_spread(np.array(column), bounds) for column in zip(*values, strict=True)]
        if len(set(cells)) > 1:
            rows.append([result["title"], f"`{metric}`", *cells])
    return markdown_table(["experiment", "figure", "last", "best", "mean of the last tenth"], rows)


def _last_tenth(curve: Mapping[str, Sequence[float]], metric: str) -> float:
    """Return the mean of a metric over the last tenth of the env steps of a curve."""
    steps = np.array(curve["env_steps"])
    return float(np.array(curve[metric])[steps > 0.9 * steps[-1]].mean())


def screening_table(options: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a row per option, whose cells list the figures of its runs in the order of seeds.

    Args:
        options: ``name`` and ``runs``. Each run has the result of :func:`lasting_of` as ``lasting``, and the means of
            ``entropy`` and ``update_kl`` over the last tenth of the run.
    """
    rows = []
    for option in options:
        runs = [(run, run["lasting"]) for run in option["runs"]]
        cells = (
            ["not solved" if last is None else f"{last['solved']:,.0f}" for _, last in runs],
            ["–" if last is None else f"{last['last'] / last['then']:.2f}" for _, last in runs],
            ["–" if last is None else f"{last['drawdown']:.0f}" for _, last in runs],
            [f"{run['entropy']:.2f}" for run, _ in runs],
            [f"{run['update_kl']:.3f}" for run, _ in runs],
        )
        rows.append([option["name"], *(" / ".join(values) for values in cells)])
    names = ["solved after env steps", "last tenth / tenth after solving", "largest drawdown", "entropy, nats"]
    return markdown_table(["option", *names, "KL per collection"], rows)


def final_values(result: dict[str, Any]) -> np.ndarray:
    """Return the last value of the metric in each run, float64 ``(run,)``."""
    return np.array([run["curve"][result["metric"]][-1] for run in result["runs"]])


def result_curve(result: dict[str, Any], clock: str, drawn: bool = True) -> Curve:
    """Return a curve of a result: the mean over its runs with an interval.

    The label is the result's ``label``, or its title up to the first comma that is followed by a space; the rest of the
    title describes the final value.

    Args:
        result: a kept result.
        clock: the x axis, one of :data:`lrl.evaluation.pictures.CLOCKS`.
        drawn: whether the curve shows the ``drawn`` metric, each point being the mean of as many previous measurements
            of a run as the ``window`` says, if the result has one; otherwise it shows the ``metric``.
    """
    metric, window = (result["drawn"], result.get("window", 1)) if drawn else (result["metric"], 1)
    series = [
        Series(clock=np.array(curve[clock]), values=_trailing_mean(curve[metric], window))
        for curve in (run.get("drawn", run["curve"]) if drawn else run["curve"] for run in result["runs"])
    ]
    return aggregate(_label(result), series, "mean", by_row=clock == "minutes")


def _label(result: Mapping[str, Any]) -> str:
    return result.get("label", result["title"].partition(", ")[0])


def _trailing_mean(values: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Return the mean of at most ``window`` values up to each position, ``(value,)``."""
    return np.array([np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)])


def kept_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return all results of a folder by name, sorted.

    Raises:
        ValueError: If a success table is not complete.
    """
    results = {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}
    if cut := [name for name, result in results.items() if result.get("complete") is False]:
        raise ValueError(f"{cut[0]}.json is the table of a command that ended with an error; run it again.")
    return results


def pictures(results: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group results by the name of their picture, which several results may share."""
    drawn: dict[str, list[dict[str, Any]]] = {}
    for name, result in results.items():
        if "metric" in result:
            drawn.setdefault(result.get("picture", name), []).append(result)
    return drawn


def draw_picture(name: str, results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the results of one picture against their ``clocks``, by default env steps, or minutes without env steps.

    The picture shows the ``metric`` of the tables: its curve, or its final values if no run has three of them. If the
    ``drawn`` metric is another one, its curve is drawn beside. Results with a number of demonstrated ``rows`` are drawn
    against it, with a point per result and a line per label.

    Returns:
        The files: ``<name>.png`` for the first clock, ``<name>_<clock>.png`` for the others.

    Raises:
        ValueError: If the results cannot be drawn in one picture, for example because their metrics differ.
    """
    first = results[0]
    for key in ("rows", "metric", "drawn"):
        if len({result.get(key) if key != "rows" else key in result for result in results}) > 1:
            raise ValueError(f"picture is {name!r}, whose results differ in {key}; they must be drawn alike.")
    if "rows" in first:
        return [draw_rows(results, folder / f"{name}.png")]
    clocks = first.get("clocks") or ["env_steps" if "env_steps" in first["runs"][0]["curve"] else "minutes"]
    paths = []
    for clock in clocks:
        paths.append(folder / f"{name}{'' if clock == clocks[0] else f'_{clock}'}.png")
        draw_panels(result_panels(results, clock), clock, paths[-1])
    return paths


def result_panels(results: Sequence[dict[str, Any]], clock: str) -> list[Panel]:
    """Return the panel of the ``metric`` of results, and that of their ``drawn`` metric if it is another one."""
    metric, drawn = results[0]["metric"], results[0]["drawn"]
    measurements = max(len(run["curve"][metric]) for result in results for run in result["runs"])
    if measurements < 3:
        bounds = bounds_of(results[0])
        curves = [rows_curve(_label(result), {0: final_values(result)}, bounds) for result in results]
    else:
        curves = [result_curve(result, clock, drawn=drawn == metric) for result in results]
    baselines = [
        {label: height for result in results for label, height in result.get(key, result["baselines"]).items()}
        for key in ("baselines", "drawn_baselines")
    ]
    panels = [Panel(metric=metric, curves=curves, baselines=baselines[0], final=measurements < 3)]
    if drawn != metric:
        curves = [result_curve(result, clock) for result in results]
        panels.append(Panel(metric=drawn, curves=curves, baselines=baselines[1]))
    return panels


def rows_curve(
    label: str, values_by_rows: Mapping[int, np.ndarray], bounds: tuple[float, float] | None = None
) -> Curve:
    """Return final values against the number of rows, with intervals at points of at least five seeds.

    Args:
        label: label of the curve.
        values_by_rows: final values ``(run,)`` by the number of rows; the numbers of seeds may differ.
        bounds: range of the metric, for which a bootstrap interval is used; None uses Student's interval.
    """
    rows = sorted(values_by_rows)
    runs = np.array(list(zip_longest(*(values_by_rows[count] for count in rows), fillvalue=np.nan)))
    interval = np.full((2, len(rows)), np.nan)
    for point, values in enumerate(values_by_rows[count] for count in rows):
        if len(values) >= MIN_SEEDS:
            interval[:, point] = t_interval(values) if bounds is None else bootstrap_interval(values)
    clock, centre = np.array(rows, dtype=np.float64), np.nanmean(runs, axis=0)
    return Curve(label=label, clock=clock, centre=centre, lower=interval[0], upper=interval[1], runs=runs)


def draw_rows(results: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw results against their numbers of ``rows`` on a logarithmic axis, with a line per label.

    Several results with the same label and number of rows are one point.

    Args:
        results: kept results with ``label``, ``rows``, ``metric`` and ``runs``; the first determines the y axis.
        path: path of the PNG file.

    Returns:
        ``path``.
    """
    points: dict[str, dict[int, np.ndarray]] = {}
    for result in results:
        values = final_values(result)
        by_rows = points.setdefault(result["label"], {})
        by_rows[int(result["rows"])] = np.concatenate([by_rows.get(int(result["rows"]), values[:0]), values])
    baselines = {label: height for result in results for label, height in result["baselines"].items()}
    curves = [rows_curve(label, values, bounds_of(results[0])) for label, values in points.items()]
    draw_curves(curves, results[0]["metric"], "demonstrated rows", path, baselines, log=True)
    return path


def learning_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per experiment: mean, interval over seeds, counts of runs, and minutes.

    The interval is a bootstrap interval if the metric is bounded, else Student's interval. The values of fewer than
    five seeds are listed instead.
    """
    rows = [[one["title"], figure_text(one), seeds_text(one), counts_text(one), minutes_text(one)] for one in results]
    return markdown_table(["experiment", "result", "seeds", HEADING, "minutes"], rows)


def commands_list(results: Sequence[dict[str, Any]]) -> str:
    """Return a folded Markdown list with the command of each experiment."""
    lines = [f"- {one['title']}: `{one['command']}`" for one in results]
    return folded(f"Command{'s' * (len(lines) > 1)}", "\n".join(lines))


def folded(summary: str, text: str) -> str:
    """Return a Markdown text that a page shows after a click on its summary."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def figure_text(result: dict[str, Any]) -> str:
    """Return the metric's name and mean with its interval over seeds, or with the values of fewer than five seeds."""
    name = result["metric"].partition("/")[2].replace("_", " ")
    return f"{name} {mean_with_spread(final_values(result), bounds_of(result))}"


def seeds_text(result: dict[str, Any]) -> str:
    """Return the number of seeds, and how many of them reach the bar if the result has one."""
    values, bar = final_values(result), result.get("bar")
    return f"{len(values)}" if bar is None else f"{int((values >= bar).sum())} of {len(values)} reach {bar:g}"


def minutes_text(result: dict[str, Any]) -> str:
    """Return the shortest and longest duration of a run in minutes; empty if none was measured."""
    return minutes_range(run["minutes"] for run in result["runs"])


def baselines_table(reports: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table of the returns of several policies in the same environments.

    Args:
        reports: result of ``lrl success_table --json`` by the name of the policy.
    """
    lines = []
    for rows in zip(*(report["environments"] for report in reports.values()), strict=True):
        cells = []
        for row in rows:
            low, high = row["return_ci95"]
            cells.append(f"{row['return_mean'] + 0.0:.2f} ({low:.2f} to {high:.2f})".replace("-0.00", "0.00"))
        lines.append([f"`{rows[0]['env_id']}`", *cells])
    return markdown_table(["environment", *reports], lines)

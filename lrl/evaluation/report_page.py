"""The report of one or several runs as one HTML file that needs neither a server nor the network."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrl.evaluation.comparison import compare, group_by_configuration, read_figures, smallest_effect
from lrl.evaluation.pictures import aggregate, axis_label, common_clock, read_series, styled
from lrl.evaluation.run_records import known_minutes, last_and_best, minutes_range, read_config
from lrl.evaluation.run_report import Finding, Metrics, RunReport, read_run
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_bounds, bounds_of, interquartile_mean, mean_with_spread
from lrl.faults import reason_of
from lrl.files import write_whole

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_COLOURS = ("#3b82f6", "#ea7317", "#16a34a", "#b266d9", "#0ea5a5", "#a3803a")
"""Colours of curves, which differ from a white and from a dark background."""
_ALARM = "#dc2626"
_PANELS: Mapping[str, Sequence[str]] = {
    "return": ("rollout/return", "val/return"),
    "success": ("rollout/success_rate", "val/success_rate", "val/exact_success"),
    "search": ("search/best_return",),
    "loss": ("train/loss", "val/loss"),
    "entropy (nats)": ("train/entropy",),
    "standard deviation of actions": ("train/std",),
    "KL divergence (nats)": ("train/update_kl", "train/approx_kl", "train/kl"),
    "KL to the reference (nats)": ("train/kl_to_reference",),
    "clip fraction": ("train/clip_fraction",),
    "error of the first ratio": ("train/ratio_error",),
    "explained variance": ("train/explained_variance",),
    "value loss": ("train/value_loss",),
    "advantages": ("train/advantage_abs", "train/advantage_std"),
    "gradient norm": ("train/grad_norm",),
    "learning rate": ("train/lr",),
    "spread of returns in groups": ("rollout/group_return_std",),
    "token limit, invalid actions": (
        "rollout/token_limit_rate",
        "rollout/invalid_action_rate",
        "val/invalid_action_rate",
    ),
    "tokens per response": ("rollout/response_tokens",),
    "turns per episode": ("rollout/length", "val/length"),
    "reward model": ("val/r2", "val/disagreement"),
    "proposals": ("search/retries", "search/failed", "search/duplicates"),
    "skipped steps": ("train/skipped_steps",),
}
"""Titles of the panels and the metrics of their curves; ``rollout/reward_*`` and throughput are added."""
_LOGARITHMIC = ("error of the first ratio",)
_COMPARED = ("rollout/return", "rollout/success_rate", "train/entropy", "train/update_kl", "train/loss")
"""Metrics that are drawn for several runs besides their common result."""
_MAX_STATES = 40


def write_report(
    runs: Sequence[Path],
    out: Path,
    baseline: Sequence[Path] = (),
    diagnose: Callable[[Path], Sequence[Finding]] = lambda run: (),
) -> list[str]:
    """Write the report of runs.

    Args:
        runs: at least one run directory.
        out: the HTML file to write.
        baseline: run directories with which they are compared.
        diagnose: returns the findings of a run, the most certain first.

    Returns:
        Sentences on what the page cannot show, such as damaged files with their run; the page has them as well.

    Raises:
        OSError: If the file cannot be written.
    """
    shown = [*runs, *baseline] if len(runs) > 1 else runs
    reports = [read_run(run, *_diagnosed(run, diagnose)) for run in shown]
    further = _several(runs, baseline) if len(runs) > 1 else _differences(runs[0], baseline)
    page = _render(
        title="Report of " + _named(reports[0].name, len(runs), len(baseline)),
        single=len(runs) == 1,
        reports=[(report, _figures(report) if len(runs) == 1 else []) for report in reports],
        **further,
    )
    with write_whole(out) as file:
        file.write(page)
    named = [f"{run}: {problem}" for run, read in zip(shown, reports, strict=True) for problem in read.problems]
    return list(dict.fromkeys([*named, *further.get("notes", ())]))


def _named(first: str, runs: int, baselines: int) -> str:
    """Return what a report is about."""
    return (first if runs == 1 else f"{runs} runs") + (f" and {baselines} of the baseline" if baselines else "")


def _diagnosed(run: Path, diagnose: Callable[[Path], Sequence[Finding]]) -> tuple[Sequence[Finding], str]:
    """Return the findings of a run, and why there are none if the diagnosis failed."""
    try:
        return diagnose(run), ""
    except (OSError, ValueError, KeyError) as error:
        return (), reason_of(error)


def _render(**values: Any) -> str:
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        **{"table": None, "differences": None, "figures": [], "settings": [], "notes": [], "pairs": []} | values
    )


# -- one run -----------------------------------------------------------------------------------------------------


def _figures(report: RunReport) -> list[tuple[str, str]]:
    """Return the panels of a run as titles and SVG."""
    metrics, figures = report.metrics, list[tuple[str, str]]()
    alarms = [(number, finding.collection + 1) for number, finding in enumerate(report.findings, 1)]
    for title, lines in _panels(report).items():
        figures.append((title, _panel(lines, metrics.unit, alarms, title in _LOGARITHMIC)))
    if len(report.states) > 1:
        figures.append(("mean return by initial state", _heatmap(report, 1, metrics.unit)))
        figures.append(("entropy of actions by initial state", _heatmap(report, 2, metrics.unit)))
    return figures


def _panels(report: RunReport) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the curves of each panel by label, without the panels for which nothing was logged."""
    metrics = report.metrics
    rewards = [name for name in metrics.columns if name.startswith("rollout/reward_")]
    panels = {
        title: {_label(name): metrics.columns[name] for name in names if name in metrics}
        for title, names in {**_PANELS, "reward terms": rewards}.items()
    }
    compared = ["rollout/return", metrics.result or ""]
    if rewards and compared[1].startswith("val/") and compared[0] in metrics:
        panels["reward in training, and result"] = {_label(name): metrics.columns[name] for name in compared}
    if report.dead_groups is not None:
        panels["share of dead groups"] = {"groups with equal returns": report.dead_groups}
    panels["seconds by phase"] = _phases(metrics)
    return {title: lines for title, lines in panels.items() if any(_is_shown(name, lines[name][1]) for name in lines)}


def _is_shown(label: str, values: np.ndarray) -> bool:
    """Return whether a curve contains anything; counts of failures do only if there are some."""
    return len(values) > 0 and (label not in ("skipped steps", "failed", "duplicates") or bool(values.any()))


def _label(name: str) -> str:
    group, _, noun = name.partition("/")
    where = {"rollout": "training: ", "val": "held-out: "}.get(group, "")
    return where + noun.replace("_", " ")


def _phases(metrics: Metrics) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the seconds of each collection that were spent on collecting, and on everything else."""
    names = ("clock/minutes", "clock/env_steps", "throughput/env_steps_per_second")
    if any(name not in metrics for name in names):
        return {}
    (places, minutes), (_, steps), (known, rates) = (metrics.columns[name] for name in names)
    collected = np.isin(places, known)
    if collected.sum() < 3 or collected.sum() != len(rates):
        return {}
    minutes, steps = minutes[collected], steps[collected]
    seconds, collecting = np.diff(minutes) * 60, np.diff(steps) / np.maximum(rates[1:], 1e-9)
    return {"collecting": (known[1:], collecting), "the rest": (known[1:], np.maximum(seconds - collecting, 0))}


def _panel(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]], unit: str, alarms: Sequence[tuple[int, int]], log: bool
) -> str:
    figure, axes = _axes()
    for colour, (label, (places, values)) in zip(_COLOURS, lines.items()):
        order = np.argsort(places, kind="stable")
        few = len(places) < 25
        marker = {"marker": "o", "markersize": 3} if few else {}
        axes.plot(places[order], values[order], color=colour, label=label, linewidth=1.4, **marker)
    positive = [values[values > 0] for _, values in lines.values()]
    if log and any(map(len, positive)):
        axes.set_yscale("log")
    for number, collection in alarms:
        if collection > 0:
            axes.axvline(collection, color=_ALARM, linestyle="--", linewidth=1)
            axes.annotate(f"{number}", (collection, 1), xycoords=("data", "axes fraction"), color=_ALARM, fontsize=8)
    axes.set_xlabel(unit)
    if len(lines) > 1:
        figure.legend(loc="outside lower center", ncols=min(2, len(lines)), frameon=False, fontsize=8)
    return _svg(figure)


def _heatmap(report: RunReport, row: int, unit: str) -> str:
    names = list(report.states)[:_MAX_STATES]
    collections = np.unique(np.concatenate([report.states[name][0] for name in names]))
    image = np.full((len(names), len(collections)), np.nan)
    for place, name in enumerate(names):
        image[place, np.searchsorted(collections, report.states[name][0])] = report.states[name][row]
    figure, axes = _axes(1.2 + 0.16 * len(names))
    axes.grid(visible=False)
    span = (collections[0] - 0.5, collections[-1] + 0.5, len(names) - 0.5, -0.5)
    shown = axes.imshow(image, aspect="auto", cmap="viridis", interpolation="none", extent=span)
    axes.set_yticks(range(len(names)), [_short(name, 22) for name in names], fontsize=7)
    axes.set_xlabel(unit)
    figure.colorbar(shown).ax.tick_params(labelsize=7)
    return _svg(figure)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _axes(height: float = 2.3) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9, height), layout="constrained")
    axes = styled(figure.add_subplot())
    axes.locator_params(axis="y", nbins=5)
    return figure, axes


def _svg(figure: Any) -> str:
    """Return a figure as SVG whose black parts have the colour of the text around it."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lrl", "font.family": "sans-serif"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"#000000|#262626|#b0b0b0\b", "currentColor", svg)
    svg = re.sub(r"<text ([^>]*)style=\"(?![^\"]*fill)", r'<text \1style="fill: currentColor; ', svg)
    prefix = f"f{abs(hash(svg)) % 10**9}-"  # ids of several figures in one page must differ
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\1{prefix}", svg)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"|', r"\1\2", svg, count=1)


def _differences(run: Path, baseline: Sequence[Path]) -> dict[str, Any]:
    """Return the settings in which a run and its baseline differ, each with their values, or why that is unknown."""
    if not baseline:
        return {}
    try:
        groups = group_by_configuration([run, baseline[0]])
    except ValueError as error:
        return {"notes": [str(error)]}
    return {"differences": [(name, [group.settings[name] for group in groups]) for name in groups[0].settings]}


# -- several runs ------------------------------------------------------------------------------------------------


def _several(runs: Sequence[Path], baseline: Sequence[Path]) -> dict[str, Any]:
    """Return the table, the curves and the comparisons of several runs, and sentences on what cannot be shown."""
    from lrl.evaluation.comparison import common_metric

    notes: list[str] = []
    usable = [run for run in dict.fromkeys((*runs, *baseline)) if _is_readable(run, notes)]
    try:
        metric = common_metric(usable)
        configurations = group_by_configuration(usable)
    except ValueError as error:
        return {"notes": [*notes, str(error)]}
    groups: dict[str, list[Path]] = {}
    settings: list[Mapping[str, str]] = []
    for group in configurations:  # a baseline may have the configuration of the runs, for example at another commit
        parts = [run for run in group.runs if run not in baseline], [run for run in group.runs if run in baseline]
        for members, suffix in zip(parts, ("", " (baseline)" if all(parts) else ""), strict=True):
            if members:
                groups[group.label + suffix] = members
                settings.append(group.settings)
    values = {label: _values(members, metric, notes) for label, members in groups.items()}
    return {
        "metric": metric,
        "table": [_row(label, members, values[label], metric) for label, members in groups.items()],
        "pairs": _pairs(groups, values, baseline, metric, notes),
        "settings": [(name, [own[name] for own in settings]) for name in settings[0]],
        "labels": list(groups),
        "figures": list(_curves(groups, metric)),
        "notes": notes,
    }


def _is_readable(run: Path, notes: list[str]) -> bool:
    try:
        read_config(run)
    except (ValueError, OSError) as error:
        notes.append(f"{run} is left out: {error}")
        return False
    return True


def _values(members: Sequence[Path], metric: str, notes: list[str]) -> dict[int, float]:
    """Return the last value of each run by seed; a run whose seed another run of the group has is left out."""
    values: dict[int, float] = {}
    for run in members:
        try:
            ((seed, value),) = read_figures([run], metric)[0].items()
        except (ValueError, KeyError) as error:
            notes.append(f"{run} is left out: {error}")
            continue
        if seed in values:
            notes.append(f"{run} is left out, because another run with the same configuration has the seed {seed}.")
        else:
            values[seed] = value
    return values


def _seed(run: Path) -> int | None:
    return read_config(run).get("seed_everything")


def _row(label: str, members: Sequence[Path], values: Mapping[int, float], metric: str) -> list[str]:
    """Return a row of the table of groups."""
    numbers = np.array(list(values.values()))
    if not len(numbers):
        return [label, "0", "", "", "", "", ""]
    bounds = bounds_of({"metric": metric})
    low, high = bootstrap_bounds((numbers,), interquartile_mean) if len(numbers) >= MIN_SEEDS else (math.nan, math.nan)
    middle = f"{float(interquartile_mean(numbers)):.3f}"
    if not math.isnan(float(low)):
        middle += f" ({float(low):.3f} to {float(high):.3f})"
    kept = {seed: run for run in reversed(members) if (seed := _seed(run)) in values}  # the first one of each seed
    best = np.array([last_and_best(run, metric)[1] for run in kept.values()])
    shown = "" if len(numbers) < 2 else f"{smallest_effect(len(numbers)) * math.sqrt(2) * numbers.std(ddof=1):.3f}"
    durations = minutes_range(known_minutes(run) for run in members)
    return [label, str(len(numbers)), mean_with_spread(numbers, bounds), middle, f"{best.mean():.3f}", shown, durations]


def _pairs(
    groups: Mapping[str, Sequence[Path]],
    values: Mapping[str, Mapping[int, float]],
    baseline: Sequence[Path],
    metric: str,
    notes: list[str],
) -> list[list[str]]:
    """Return a row for each comparison of a group with the baseline, which is the first group if none is given."""
    first = next((label for label, members in groups.items() if set(members) & set(baseline)), next(iter(groups)))
    rows = []
    for label, own in values.items():
        if label == first or not own or not values[first]:
            continue
        better = _probability_of_improvement(
            np.array(list(own.values())), np.array(list(values[first].values())), metric
        )
        try:
            found = compare(own, values[first], bounds_of({"metric": metric}) is not None)
        except ValueError as error:
            notes.append(f"{label} and {first} are not paired: {error}")
            rows.append([label, first, "0", "", "", better])
            continue
        interval = found.interval(found.bounded)
        within = "" if interval is None else f" ({interval[0]:+.3f} to {interval[1]:+.3f})"
        smallest = f"{found.smallest_effect():.3f}" if len(found.seeds) > 1 else ""
        rows.append([label, first, str(len(found.seeds)), f"{found.mean:+.3f}{within}", smallest, better])
    return rows


def _probability_of_improvement(ours: np.ndarray, theirs: np.ndarray, metric: str) -> str:
    """Return the probability that a run is better than a baseline run (arXiv:2108.13264), with a 95% interval."""
    sign = -1.0 if metric.endswith("loss") else 1.0

    def probability(a: np.ndarray, b: np.ndarray, axis: int = 0) -> np.ndarray:
        a, b = np.moveaxis(a, axis, -1)[..., :, None] * sign, np.moveaxis(b, axis, -1)[..., None, :] * sign
        return ((a > b) + 0.5 * (a == b)).mean((-1, -2))

    centre = f"{float(probability(ours, theirs)):.2f}"
    if min(len(ours), len(theirs)) < MIN_SEEDS:
        return centre
    low, high = bootstrap_bounds((ours, theirs), probability, resamples=2000)
    return f"{centre} ({float(low):.2f} to {float(high):.2f})"


def _curves(groups: Mapping[str, Sequence[Path]], metric: str) -> Any:
    """Yield titles and SVG of the curves that all runs have, with bands."""
    every = [run for members in groups.values() for run in members]
    for name in dict.fromkeys((metric, *_COMPARED)):
        try:
            clock = common_clock(every, name)
            curves = [
                aggregate(label, [read_series(run, name, clock) for run in members])
                for label, members in groups.items()
            ]
        except ValueError:
            continue
        figure, axes = _axes(2.6)
        for place, curve in enumerate(curves):
            colour = _COLOURS[place % len(_COLOURS)]
            style = "-" if place < len(_COLOURS) else "--"
            axes.plot(curve.clock, curve.centre, style, color=colour, label=_short(curve.label, 40), linewidth=1.5)
            if curve.num_runs >= MIN_SEEDS:
                axes.fill_between(curve.clock, curve.lower, curve.upper, color=colour, alpha=0.25, linewidth=0)
            elif curve.num_runs > 1:
                axes.plot(curve.clock, curve.runs.T, color=colour, alpha=0.5, linewidth=0.7)
        axes.set_xlabel(clock.replace("_", " "))
        if len(curves) > 1:
            figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=8)
        yield axis_label(name), _svg(figure)

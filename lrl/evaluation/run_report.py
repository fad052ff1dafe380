"""Read what the report of a run shows from its run directory: verdict, curves, episodes, settings and commands.

A missing or damaged file never raises; it becomes one sentence in :attr:`RunReport.problems`.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lrl.diagnosis.sample import Finding
from lrl.evaluation.pictures import axis_label
from lrl.evaluation.report_episodes import ShownEpisode, chosen_episodes, counted, read_transcripts
from lrl.evaluation.run_records import commands_of, earlier_launches, known_minutes, metrics_file, section
from lrl.evaluation.statistics import RESULT_METRICS

_MAX_PICTURE_BYTES = 300_000


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Holds the metrics of a run by collection."""

    columns: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """For each metric the collection, counted from 1, and the value of each row, both float64 ``(row,)``."""
    unit: str = "collection"
    """What a row of training metrics stands for."""

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def result(self) -> str | None:
        """The most important metric that was logged."""
        return next((name for name in RESULT_METRICS if name in self.columns), None)

    @property
    def count(self) -> int:
        """Number of collections so far."""
        return int(max((places[-1] for places, _ in self.columns.values()), default=0))


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Holds what is shown of one run."""

    path: Path
    name: str
    verdict: str
    metrics: Metrics
    findings: Sequence[Finding] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Environment, commit, seed, machine and the like."""
    commands: Mapping[str, str] = field(default_factory=dict)
    episodes: Sequence[ShownEpisode] = ()
    pictures: Sequence[tuple[str, str]] = ()
    """Titles and data URLs."""
    states: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    """For each initial state the collections, counted from 1, the mean returns and the entropies, each ``(row,)``."""
    dead_groups: tuple[np.ndarray, np.ndarray] | None = None
    """Collections, and the share of initial states all of whose episodes have the same return."""
    config: str = ""
    problems: Sequence[str] = ()


def read_run(run: Path, findings: Sequence[Finding] = (), failure: str = "") -> RunReport:
    """Read what is shown of a run, which may still be running.

    Args:
        run: the run directory.
        findings: what the detectors found.
        failure: why the detectors failed, if they did.
    """
    problems = [f"The run was not diagnosed: {failure.rstrip('.')}."] if failure else []
    config_text = _text(run / "config.yaml", problems)
    config = _config(config_text, problems)
    metrics = read_metrics(run, problems)
    transcripts = read_transcripts(run / "transcripts.jsonl", problems) if metrics.unit == "collection" else []
    states = _states(run / "groups.csv", problems)
    return RunReport(
        path=run,
        name=run.resolve().name,
        verdict=_verdict(run, metrics, findings, bool(failure), problems),
        metrics=metrics,
        findings=findings,
        facts=_facts(run, config, metrics, problems),
        commands=_commands(run),
        episodes=list(chosen_episodes(transcripts)),
        pictures=list(_pictures(run, problems)),
        states={name: (rows[0], rows[1], rows[3]) for name, rows in states.items()},
        dead_groups=_dead_groups(states),
        config=config_text,
        problems=problems,
    )


def _text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        known = path.name == "config.yaml" and isinstance(error, FileNotFoundError)
        hint = " (runs of lrl.train have no such file, because their settings are in a script)" if known else ""
        problems.append(f"{path.name} cannot be read: {error.strerror}{hint}.")
        return ""


def _config(text: str, problems: list[str]) -> dict[str, Any]:
    try:
        config = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        problems.append("config.yaml is not valid YAML.")
        return {}
    return config if isinstance(config, dict) else {}


# -- metrics -----------------------------------------------------------------------------------------------------


def read_metrics(run: Path, problems: list[str]) -> Metrics:
    """Read ``metrics.csv`` of a run, in which each training row is one collection.

    A row of held-out episodes belongs to the collection with the same clock.

    Args:
        run: the run directory.
        problems: a sentence is added for a file that is missing or damaged.
    """
    try:
        with metrics_file(run).open(newline="", encoding="utf-8", errors="replace") as lines:
            rows = [_numbers(row) for row in csv.DictReader(lines)]
    except (OSError, ValueError, csv.Error):
        problems.append("metrics.csv cannot be read, so there are no curves.")
        return Metrics(columns={})
    if not any(name.startswith("clock/") for row in rows for name in row):
        problems.append("metrics.csv has no rows of metrics.")
    clock = next((name for name in ("env_steps", "optimizer_steps") if any(f"clock/{name}" in row for row in rows)), "")
    places = _collections([row.get(f"clock/{clock}", math.nan) for row in rows], [_is_training(row) for row in rows])
    columns: dict[str, dict[float, float]] = {}
    for place, row in zip(places, rows, strict=True):
        for name, value in row.items():
            columns.setdefault(name, {})[place] = value  # a resumed run may have written a row again
    unit = "proposal" if "search/best_return" in columns else "collection" if clock == "env_steps" else "training row"
    arrays = {name: (np.array(list(found)), np.array(list(found.values()))) for name, found in columns.items()}
    return Metrics(columns=arrays, unit=unit)


def _numbers(row: Mapping[str | None, Any]) -> dict[str, float]:
    """Return the numbers of a row of a CSV file; what is not a number is left out."""
    found = {}
    for name, text in row.items():
        try:
            found[str(name)] = float(text)
        except (TypeError, ValueError):
            continue
    return found


def _is_training(row: Mapping[str, float]) -> bool:
    return any(name.startswith(("train/", "rollout/", "search/")) for name in row)


def _collections(clock: Sequence[float], training: Sequence[bool]) -> list[float]:
    """Return the collection of each row, counted from 1, given its clock and whether it is a training row."""
    own = np.array([time for time, trains in zip(clock, training, strict=True) if trains])
    places, count = [], 0
    for time, trains in zip(clock, training, strict=True):
        count += trains
        later = 1 + np.searchsorted(own, time) if len(own) and not math.isnan(time) else count
        places.append(float(count if trains else max(1, min(int(later), len(own)))))
    return places


# -- verdict, facts and commands ---------------------------------------------------------------------------------


def _verdict(run: Path, metrics: Metrics, findings: Sequence[Finding], failed: bool, problems: list[str]) -> str:
    """Return in one paragraph whether the run finished, its best and last result, and the alarms."""
    minutes = known_minutes(run)
    ended = f"The run finished after {minutes:.1f} minutes" if minutes is not None else "The run has not finished"
    sentences = [f"{ended}, with {counted(metrics.count, metrics.unit)}."]
    if metrics.result is not None:
        places, values = metrics.columns[metrics.result]
        finite = np.isfinite(values)
        label = axis_label(metrics.result)
        if finite.any():
            places, values = places[finite], values[finite]
            best = int(values.argmin() if metrics.result.endswith("loss") else values.argmax())
            sentences.append(
                f"{label[:1].upper()}{label[1:]} ({metrics.result}): best {values[best]:.4g} at {metrics.unit} "
                f"{places[best]:.0f}, last {values[-1]:.4g} at {metrics.unit} {places[-1]:.0f}."
            )
        if not finite.all():
            sentences.append(f"{int((~finite).sum())} of its {len(finite)} values are not finite.")
    sentences.append(_evaluated(run / "evaluation.json", problems))
    if findings:
        first = findings[0]
        since = f", since {metrics.unit} {first.collection + 1}" if first.collection >= 0 else ""
        sentences.append(f"{counted(len(findings), 'alarm')}; the most certain cause: {first.cause}{since}.")
    elif failed:
        sentences.append("Whether there are alarms is not known, because the diagnosis failed.")
    else:
        samples = len(list((run / "samples").glob("*.npz")))
        compared = f"in the turns of {counted(samples, 'collection')}" if samples else "; turns were not compared"
        sentences.append(f"No alarm in the metrics{' or ' if samples else ''}{compared}.")
    return " ".join(filter(None, sentences))


def _evaluated(path: Path, problems: list[str]) -> str:
    """Return the result of ``lrl evaluate --json`` as a sentence; empty without such a file."""
    if not path.exists():
        return ""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        report = report[0] if isinstance(report, list) else report
        shown = []
        for noun, mean, interval in (
            ("return", "return_mean", "return_ci95"),
            ("success rate", "success_rate", "success_ci95"),
        ):
            if report.get(mean) is not None:
                bounds = [bound for bound in report.get(interval) or () if bound is not None]
                within = f" ({bounds[0]:.3g} to {bounds[1]:.3g})" if len(bounds) == 2 else ""
                shown.append(f"{noun} {report[mean]:.4g}{within}")
        return f"On {report['episodes']} held-out episodes (evaluation.json): {', '.join(shown)}."
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        problems.append("evaluation.json is not a result of lrl evaluate.")
        return ""


def _facts(run: Path, config: Mapping[str, Any], metrics: Metrics, problems: list[str]) -> dict[str, str]:
    """Return what identifies a run."""
    model, data = section(config, "model"), section(config, "data")
    env, policy = section(data, "env"), section(model, "policy")
    log = _text(run / "run.log", []) if (run / "run.log").exists() else ""
    machines = re.findall(r" DEBUG machine: (.*)", log)
    names = ("env_steps", "tokens", "minutes") if known_minutes(run) is None else ("env_steps", "tokens")
    clocks = {name: metrics.columns[f"clock/{name}"][1] for name in names if f"clock/{name}" in metrics}
    task = section(env, "init_args")
    facts = {
        "run directory": str(run),
        "algorithm": str(config.get("model", {}).get("class_path", ""))
        if isinstance(config.get("model"), dict)
        else "",
        "policy": " ".join(filter(None, (_class(policy), str(section(policy, "language_model").get("name") or "")))),
        "environment": " ".join(
            filter(None, (_class(env), str(task.get("id") or _class(section(task, "rows")) or "")))
        ),
        "seed": str(config.get("seed_everything", "")),
        "commit": _text(run / "commit.txt", problems).strip(),
        "machine and versions": machines[-1] if machines else "not recorded",
        "size": ", ".join(f"{np.nanmax(values):,.0f} {name.replace('_', ' ')}" for name, values in clocks.items()),
    }
    return {name: value for name, value in facts.items() if value}


def _class(part: Mapping[str, Any]) -> str:
    return str(part.get("class_path", "")).rpartition(".")[2]


def _commands(run: Path) -> dict[str, str]:
    """Return the commands that use a run, and those that began it or would repeat it."""
    commands = commands_of(run, ("resume", "evaluate", "watch"))
    if (run / "config.yaml").exists():
        commands["reproduce"] = (
            f"lrl fit --config {shlex.quote(str(run / 'config.yaml'))} --run_directory {shlex.quote(str(run))}-again"
        )
    first = next((file for one in (*earlier_launches(run), run) if (file := one / "command.txt").exists()), None)
    if first is not None:
        commands["original"] = _text(first, []).strip()
    return commands


# -- pictures and groups -----------------------------------------------------------------------------------------


def _pictures(run: Path, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the first, a middle and the last picture of the policy with their titles."""
    files = sorted(run.glob("policy*.png"), key=lambda path: path.stat().st_mtime)
    chosen = [files[place] for place in sorted({0, len(files) // 2, len(files) - 1})] if files else []
    for file in chosen:
        content = file.read_bytes()
        if content[:8] != b"\x89PNG\r\n\x1a\n" or len(content) > _MAX_PICTURE_BYTES:
            problems.append(
                f"{file.name} is not a PNG of less than {_MAX_PICTURE_BYTES // 1000} kB, so it is left out."
            )
        else:
            yield file.name, "data:image/png;base64," + base64.b64encode(content).decode()


def _states(path: Path, problems: list[str]) -> dict[str, np.ndarray]:
    """Return for each initial state of ``groups.csv`` collections, counted from 1, and three figures, ``(4, row)``."""
    if not path.exists():
        return {}
    found: dict[str, list[list[float]]] = {}
    names = ("collection", "return_mean", "return_std", "action_entropy")
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as lines:
            for row in csv.DictReader(lines):
                collection, *figures = (float(row[name]) for name in names)
                found.setdefault(str(row["state"]), []).append([collection + 1, *figures])
    except (KeyError, TypeError, ValueError, csv.Error):
        problems.append("groups.csv is damaged, so only the rows before the damage are shown.")
    return {state: np.array(rows).T for state, rows in found.items() if rows}


def _dead_groups(states: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return for each collection the share of initial states whose episodes all have the same return."""
    if not states:
        return None
    rows = np.concatenate([*states.values()], axis=1)
    collections = np.unique(rows[0])
    return collections, np.array([float((rows[2, rows[0] == one] == 0).mean()) for one in collections])

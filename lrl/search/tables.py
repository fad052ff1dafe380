"""Tables that compare searches and networks with the published figures of ProPS."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from lrl.evaluation.report import markdown_table
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_interval
from lrl.search.experiments import METHODS, UNPLAYABLE, Records, SearchRun, is_random
from lrl.search.tasks import IN_CONTEXT, NETWORKS, TASKS

CONTROL = "random_search"
"""Name of the method with which the language model is compared."""
RULES = {"best_iteration": "best iteration", "fresh": "chosen policy on fresh episodes"}
"""The two rules by which the return of a run is determined: their key in a record, and their title in tables.

:func:`~lrl.search.experiments.record_of` defines both returns.
"""


def gains(records: Records, task: str, rule: str) -> np.ndarray:
    """Return the returns of the language model minus those of random search with the same seeds, ``(seed,)``.

    Seeds for which only one of the two runs has finished are left out.

    Args:
        records: records of all planned runs.
        task: name of the task.
        rule: key of :data:`RULES`.
    """
    differences = []
    for run, record in records.items():
        control = records.get(SearchRun(task, CONTROL, run.index))
        if (run.task, run.method) == (task, IN_CONTEXT) and record and control and UNPLAYABLE not in record:
            differences.append(record[rule] - control[rule])
    return np.array(differences)


def is_better(differences: np.ndarray) -> bool:
    """Return whether differences of returns, ``(seed,)``, count as an improvement.

    With five or more seeds the lower end of the 95% bootstrap interval of the mean must be above 0. With three or four
    seeds every difference must be positive. Fewer seeds are never sufficient.
    """
    if len(differences) < 3:
        return False
    least = bootstrap_interval(differences)[0] if len(differences) >= MIN_SEEDS else differences.min()
    return bool(least > 0)


def gains_table(records: Records) -> str:
    """Return a table of the gains of the language model over random search, and the number of tasks with a gain.

    The Markdown table has a row for each task on which both have finished a run with the same seed. A cell contains the
    mean of :func:`gains` with its 95% bootstrap interval over seeds, or the difference of each seed if there are fewer
    than five. A task counts as one without a gain if most proposals of the model were random on a seed, because no
    reply was usable. Tasks that the model cannot play are left out. The text is empty if no task is left.
    """
    rows, better = list[list[str]](), dict.fromkeys(RULES, 0)
    for task in _names(records, "task"):
        differences = {rule: gains(records, task, rule) for rule in RULES}
        count = len(differences["fresh"])
        if not count:
            continue
        lost = any(map(is_random, _played(records, task, IN_CONTEXT)))
        for rule in RULES:
            better[rule] += not lost and is_better(differences[rule])
        rows.append([task, str(count), *(_RANDOM if lost else _gain_cell(differences[rule]) for rule in RULES)])
    if not rows:
        return ""
    sentence = (
        f"The language model is better than random search on {better['best_iteration']} of {len(rows)} tasks by the "
        f"best iteration and on {better['fresh']} by the chosen policy. A task counts if the interval is above 0, or, "
        "with three or four seeds, if all differences are positive."
    )
    return f"{markdown_table(['task', 'seeds', *RULES.values()], rows)}\n\n{sentence}"


def _gain_cell(differences: np.ndarray) -> str:
    shown = [differences.mean(), *bootstrap_interval(differences)] if len(differences) >= MIN_SEEDS else differences
    texts = [f"{value:+.3g}" if abs(value) < 999.5 else f"{value:+.0f}" for value in shown]
    return f"{texts[0]} ({texts[1]} to {texts[2]})" if len(differences) >= MIN_SEEDS else ", ".join(texts)


_PUBLISHED = {"best_iteration": ("props", "props_plus"), "fresh": ("props", "props_plus", "ppo", "best_baseline")}
"""Published figures in the table of each rule. Those of baselines are probably returns at the end of training."""
_PUBLISHED_HEADS = {"props": "ProPS", "props_plus": "ProPS+", "ppo": "PPO", "best_baseline": "best baseline"}
_PUBLISHED_RULES = (
    "The sources that we could read do not state how the published figures were computed. We assume that those of "
    "ProPS and ProPS+ are the return of the best iteration, as a mean over repeated runs, and those of the baselines "
    "are returns at the end of training."
)
_NETWORK_RULES = (
    "the best iteration is the best mean of as many consecutive training episodes as a proposal has, in blocks that do "
    "not overlap. During training the policy samples its actions and is updated. The chosen policy is the last one, "
    "and it does not sample its actions."
)
_RANDOM = "random replies"
"""Text of a cell if most proposals of the language model were random."""
_RANDOM_COUNTS = {
    "warmup": "Proposals that were random because they were the first, or because all earlier returns were the same",
    "failed": "Proposals that were random because no reply was usable",
}
"""Descriptions of the counts in the record of a language model."""
_MAX_UNREPORTED_SHARE = 0.02
"""Maximum share of random proposals at the beginning of searches that :func:`random_text` does not report."""
_YARDSTICKS = (
    "nothing: return if all parameters are zero, or the action is always the first. random: largest return among 400 "
    "random policies, whose actions are not clipped, as in the original. ceiling: upper bound of the return, or "
    "approximate return of good policies. budget: number of episodes or environment steps after which a search or the "
    "training of a network ended."
)


def search_tables(records: Records) -> str:
    """Return all Markdown tables, with notes: returns by both rules, budgets, comparisons, and unfinished runs."""
    heading = "mean ± standard deviation over seeds, or mean and value of each seed for fewer than five seeds"
    parts = [f"{title.capitalize()}, {heading}:\n\n{rule_table(records, rule)}" for rule, title in RULES.items()]
    parts += [_PUBLISHED_RULES, _YARDSTICKS, f"Episodes / env steps, mean over seeds:\n\n{budget_table(records)}"]
    networks = [method for method in _names(records, "method") if method in NETWORKS]
    if networks:
        parts.append(f"Of {' and '.join(networks)}, {_NETWORK_RULES}")
    parts += [reached_text(records, rule) for rule in RULES]
    if gained := gains_table(records):
        parts.append(f"{IN_CONTEXT} minus {CONTROL} on the same seeds:\n\n{gained}")
    parts += [text for text in (random_text(records), unfinished_text(records)) if text]
    return "\n\n".join(parts)


def rule_table(records: Records, rule: str) -> str:
    """Return a Markdown table with a row per task: our methods, published figures, reference returns and the budget.

    The table of best iterations does not contain published baselines, which are probably values at the end of training.

    A cell contains the mean and standard deviation over seeds, or the mean and the value of each seed if there are
    fewer than five, followed by ``n/m`` if only n of m planned seeds have finished.

    Args:
        records: records of all planned runs.
        rule: key of :data:`RULES`.
    """
    methods = _names(records, "method")
    heads = ["task", "parameters", *methods, *(f"published {_PUBLISHED_HEADS[name]}" for name in _PUBLISHED[rule])]
    heads += ["nothing", "random", "ceiling", "budget"]
    rows = []
    for name in _names(records, "task"):
        task = TASKS[name]
        cells = [name, str(task.num_parameters), *(_cell(records, name, method, rule) for method in methods)]
        cells += [_number(task.published[row]) for row in _PUBLISHED[rule]]
        if "best_baseline" in _PUBLISHED[rule]:
            cells[-1] += f" {task.published['best_name']}"
        cells += map(_number, map(task.yardsticks.get, ("nothing", "random", "ceiling")))
        rows.append([*cells, _budget(records, name)])
    return markdown_table(heads, rows)


def _cell(records: Records, task: str, method: str, rule: str) -> str:
    planned = _of(records, task, method)
    if lost := _lost(planned):
        return lost
    values = np.array([record[rule] for record in planned if record is not None])
    if not len(values):
        return f"0/{len(planned)}" if planned else ""
    spread = f" ± {_number(values.std())}" if len(values) >= MIN_SEEDS else f" ({', '.join(map(_number, values))})"
    finished = "" if len(values) == len(planned) else f" {len(values)}/{len(planned)}"
    return f"{_number(values.mean())}{spread if len(values) > 1 else ''}{finished}"


def _lost(planned: Sequence[dict[str, Any] | None]) -> str:
    """Return why a method has no return on a task, for a cell of a table; empty if it has one.

    The reason is that the method cannot play the task, or that most of its proposals were random with some seed.
    """
    found = [record for record in planned if record is not None]
    if any(UNPLAYABLE in record for record in found):
        return UNPLAYABLE
    return _RANDOM if any(map(is_random, found)) else ""


def _played(records: Records, task: str, method: str) -> list[dict[str, Any]]:
    """Return the records of the runs that have finished, unless the method cannot play the task."""
    return [record for record in _of(records, task, method) if record is not None and UNPLAYABLE not in record]


def _budget(records: Records, task: str) -> str:
    """Return the number of episodes or steps after which the runs of a task ended.

    Numbers that differ from the number of the first method are listed together with their methods.
    """
    ended: dict[str, list[str]] = {}
    for method in _names(records, "method"):
        played = _played(records, task, method)
        if not played:
            continue
        episodes, env_steps = _mean_budget(played)
        planned = played[0]["iterations"] * played[0]["rollouts"]
        text = f"{_short(env_steps)} env steps ({_short(episodes)} episodes)"
        ended.setdefault(f"{_short(planned)} episodes" if episodes >= planned else text, []).append(method)
    first, *others = ended.items() or [("", [])]
    return "; ".join([first[0], *(f"{', '.join(methods)} {text}" for text, methods in others)])


def _mean_budget(played: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean numbers of episodes and of environment steps over one or more records."""
    episodes, env_steps = np.mean([[record["episodes"], record["env_steps"]] for record in played], axis=0)
    return float(episodes), float(env_steps)


def budget_table(records: Records) -> str:
    """Return a Markdown table of the mean numbers of episodes and environment steps per seed, for each method.

    The numbers do not include the fresh episodes of the chosen policy.
    """
    methods, rows = _names(records, "method"), []
    for task in _names(records, "task"):
        finished = [_played(records, task, method) for method in methods]
        rows.append(
            [task, *(" / ".join(f"{mean:,.0f}" for mean in _mean_budget(one)) if one else "" for one in finished)]
        )
    return markdown_table(["task", *methods], rows)


def reached_text(records: Records, rule: str) -> str:
    """Return a sentence with the number of tasks on which each method reaches the published ProPS and ProPS+ returns.

    Methods that have finished no task are left out. Means are rounded to two decimals, like the published figures. The
    last count is the number of tasks on which at least one search reaches them, among the tasks that all have finished.
    """
    methods, parts = _names(records, "method"), []
    searches = [method for method in methods if method in METHODS]
    groups = [(method, [method]) for method in methods]
    for title, group in [*groups, ("at least one search", searches)] if len(searches) > 1 else groups:
        best = {task: _best(records, task, group, rule) for task in _names(records, "task")}
        whole = {task: round(mean, 2) for task, mean in best.items() if mean is not None}
        counts = [
            sum(mean >= TASKS[task].published[row] for task, mean in whole.items()) for row in ("props", "props_plus")
        ]
        if whole:
            parts.append(f"{title} {counts[0]} and {counts[1]} of {len(whole)}")
    counted = "; ".join(parts) or "none is finished"
    return f"Tasks on which the mean reaches the published ProPS and ProPS+ ({RULES[rule]}): {counted}."


def _best(records: Records, task: str, methods: Sequence[str], rule: str) -> float | None:
    """Return the highest mean return over seeds among methods; None if one of them has not finished.

    The mean of a method that cannot play the task, or whose proposals were mostly random, is minus infinity.
    """
    best = -np.inf
    for method in methods:
        planned = _of(records, task, method)
        lost = _lost(planned)
        if not planned or (None in planned and not lost):
            return None
        if not lost:
            best = max(best, float(np.mean([record[rule] for record in planned if record is not None])))
    return best


def random_text(records: Records) -> str:
    """Return a sentence for each kind of random proposals of a language model, with their share by task.

    The text is empty if there are none, or only a few at the beginning of searches.
    """
    sentences = []
    for name, title in _RANDOM_COUNTS.items():
        found = []
        for task, method in product(_names(records, "task"), _names(records, "method")):
            played = _played(records, task, method)
            share = sum(one.get(name, 0) for one in played) / max(1, sum(one["iterations"] for one in played))
            if share > (_MAX_UNREPORTED_SHARE if name == "warmup" else 0):
                found.append(f"{task} {method} {share:.1%}")
        if found:
            sentences.append(f"{title}: {', '.join(found)}.")
    return " ".join(sentences)


def unfinished_text(records: Records) -> str:
    """Return a sentence about the runs that have not finished."""
    found = []
    for method in _names(records, "method"):
        planned = {task: _of(records, task, method) for task in _names(records, "task")}
        tasks = [
            f"{task} {sum(record is not None for record in seeds)}/{len(seeds)}"
            for task, seeds in planned.items()
            if None in seeds and _lost(seeds) != UNPLAYABLE
        ]
        if tasks:
            found.append(f"{method} {', '.join(tasks)}")
    if not found:
        return "All planned runs have finished."
    return f"Unfinished, with the seeds that have finished and those planned: {'; '.join(found)}."


def _of(records: Records, task: str, method: str) -> list[dict[str, Any] | None]:
    return [record for run, record in records.items() if (run.task, run.method) == (task, method)]


def _names(records: Records, part: str) -> Sequence[str]:
    """Return the tasks or methods of the planned runs in order."""
    return list(dict.fromkeys(getattr(run, part) for run in records))


def _number(value: float | None) -> str:
    """Return a number with about three digits as text; empty if it is None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _short(count: float) -> str:
    """Return a count with three digits, in thousands or millions."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"

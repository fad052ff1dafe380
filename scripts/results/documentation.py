"""Tables of the documentation and the notebook of figures, from ``assets/results``, the configurations and the code.

The text between ``<!-- table: KIND WORD ... -->`` and ``<!-- end table -->`` of a page is replaced by a table. The
kinds are:

- ``results PATTERN ...``: experiments whose file names match a pattern, a table per environment, with their commands.
- ``rules PATTERN ...``: last value, best value and mean of the last tenth of experiments in which these differ.
- ``headlines NAME ...``: results in short, with rows of :data:`results.headlines.HEADLINES`.
- ``configs``: all configurations, with their results.
- ``benchmarks`` and ``speed NAME:NUMBER ...``: all comparisons of speed, or single ones, counted from 0.
- ``phases``: shares of playing, reference, values and update in the time of collections.
- ``credit NAME TOKENS [averaged]``: estimated advantages compared with exact ones, with a number of tokens per turn.
- ``environments NAME [FIGURE]``, ``baselines`` and ``text_cost``: results of policies in several environments, and the
  cost of text in environments.
- ``boards NAME``: exact success of a random and of an optimal policy on RAGEN's boards, and published figures.
- ``ranks NAME``: largest differences between weights of two ranks and of one process.
- ``rephrased NAME``: success rates of trained policies on rephrased prompts.
- ``search NAME RULE``: results of ``lrl search_table --json`` by the rule ``best_iteration`` or ``fresh``.
- ``search_budget NAME``: episodes and environment steps of these searches.
- ``search_exact NAME``: exact success on FrozenLake of the tables that these searches chose.
- ``search_gains NAME``: returns of the language model in these searches minus those of random search.
- ``synthetic NAME ...``: results of ``lrl synthetic_search --json``.

A table with more than :data:`MOST_COLUMNS` columns is split into several.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.report import environments_table, markdown_table
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_interval
from lrl.search.experiments import UNPLAYABLE, Records, report_records
from lrl.search.synthetic_comparison import synthetic_table
from lrl.search.tables import RULES, budget_table, gains_table, random_text, reached_text, rule_table, unfinished_text
from lrl.search.tasks import NETWORKS, TASKS
from results.boards import boards_table
from results.credit_truth import credit_table
from results.headlines import headlines_table
from results.summaries import (
    baselines_table,
    commands_list,
    figure_text,
    folded,
    lasting_table,
    learning_table,
    minutes_text,
    pictures,
    rules_table,
    screening_table,
)

Results = Mapping[str, dict[str, Any]]
"""Kept results by name."""

_TABLE = re.compile(r"<!-- table: ([^>]*?) -->\n(.*?)<!-- end table -->", re.DOTALL)
_ENVIRONMENTS = {
    "babyai": "BabyAI-Text",
    "boards": "FrozenLake and Sokoban",
    "cartpole": "CartPole",
    "frozen_lake": "FrozenLake",
    "half_cheetah": "HalfCheetah",
}
"""Names of environments by the folder of their configurations."""

MOST_COLUMNS = 7
"""Maximum number of columns of a table, so that a page shows it without scrolling."""
_CELLS = re.compile(r"(?<!\\)\|")
_SEED_VALUES = re.compile(r" \((?:-?[\d.]+, )+-?[\d.]+\)")
"""Values of single seeds in a cell, for example `` (69.4, 64.6, 81.2)``."""


def documentation_pages(root: Path) -> list[Path]:
    """Return the pages that contain tables, among the two READMEs and those in ``docs``."""
    pages = [root / "README.md", root / "configs/README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in pages if _TABLE.search(page.read_text(encoding="utf-8"))]


def fill_tables(page: Path, text: str, results: Results) -> str:
    """Return the text of a page with new tables.

    Args:
        page: path of the page, to which links are relative; the working directory is the repository's root.
        text: current text of the page.
        results: kept results by name.

    Raises:
        ValueError: If the kind of a table is unknown, or it names a result that does not exist.
    """

    def made(found: re.Match[str]) -> str:
        kind, *words = found[1].split()
        if kind not in _KINDS:
            raise ValueError(f"{page} has a table of the kind {kind!r}; it must be one of {', '.join(_KINDS)}.")
        return f"<!-- table: {found[1]} -->\n{narrow(_KINDS[kind](words, results, page))}\n<!-- end table -->"

    return _TABLE.sub(made, text)


def narrow(text: str) -> str:
    """Return a Markdown text whose tables with more than :data:`MOST_COLUMNS` columns are split into several.

    Each part repeats the first column, or as many as are needed to distinguish the rows.
    """
    return re.sub(r"^\|.*(?:\n\|.*)+", lambda table: _narrow_table(table[0]), text, flags=re.MULTILINE)


def _narrow_table(table: str) -> str:
    heads, *rows = _cells_of(table)
    if len(heads) <= MOST_COLUMNS:
        return table
    keys = next(count for count in range(1, len(heads)) if len({tuple(row[:count]) for row in rows}) == len(rows))
    count = -(-(len(heads) - keys) // (MOST_COLUMNS - keys))  # number of parts
    bounds = [keys + round(part * (len(heads) - keys) / count) for part in range(count + 1)]
    parts = [[*range(keys), *range(*bound)] for bound in pairwise(bounds)]
    return "\n\n".join(_with_columns(heads, rows, part) for part in parts)


def _cells_of(table: str) -> list[list[str]]:
    """Return the cells of a Markdown table: its titles, then its rows."""
    lines = [[cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in table.splitlines()]
    return [lines[0], *lines[2:]]


def _with_columns(heads: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int]) -> str:
    return markdown_table([heads[at] for at in columns], [[row[at] for at in columns] for row in rows])


def seed_values_table(table: str) -> str:
    """Return a Markdown table of the first column and of those that have values of single seeds; empty without them."""
    heads, *rows = _cells_of(table)
    columns = [at for at in range(1, len(heads)) if any(_SEED_VALUES.search(row[at]) for row in rows)]
    rows = [row for row in rows if any(_SEED_VALUES.search(cell) for cell in row)]
    return _with_columns(heads, rows, [0, *columns]) if columns else ""


def _named(name: str, results: Results) -> dict[str, Any]:
    if name not in results:
        raise ValueError(f"a table names {name!r}; it must be a file of assets/results, without .json.")
    return results[name]


def _searched(name: str, results: Results) -> Records:
    return report_records(_named(name, results), name)


def _measured(patterns: Sequence[str], results: Results) -> list[str]:
    """Return the names of the results of training runs that match a pattern."""
    # The command of a result with "removed" has an option that was removed because of it.
    measured = [name for name, result in results.items() if "metric" in result and "removed" not in result]
    return [name for name in measured if any(fnmatch(name, pattern) for pattern in patterns)]


def _results(patterns: Sequence[str], results: Results, page: Path) -> str:
    picked = _measured(patterns, results)
    if not picked:
        raise ValueError(f"a table of {page} asks for {' '.join(patterns)}; no file of assets/results matches.")
    groups: dict[str, list[dict[str, Any]]] = {}
    for name in picked:
        groups.setdefault(_ENVIRONMENTS[_config_of(results[name]).parent.name], []).append(results[name])
    titles = {name: f"**{name}**\n\n" if len(groups) > 1 else "" for name in groups}
    texts = (f"{titles[name]}{learning_table(group)}\n\n{commands_list(group)}" for name, group in groups.items())
    return "\n\n".join(texts)


def _headlines(names: Sequence[str], results: Results, page: Path) -> str:
    return headlines_table(names, lambda name: _named(name, results), lambda target: _link(target, page))


def _configs(words: Sequence[str], results: Results, page: Path) -> str:
    rows, costs = [], results.get("benchmark_configurations", {}).get("configurations", ())
    cost_of = {cost["config"]: _cost_text(cost) for cost in costs if "line" in cost}
    for config in sorted(Path("configs").glob("*/*.yaml")):
        if config.parent.name == "overlays":
            continue
        result = next((one for one in results.values() if "metric" in one and _is_result_of(one, config)), None)
        name = str(config.relative_to("configs"))
        cells = [f"[`{name}`]({_link(config, page)})", *_shown(config), cost_of.get(name, "")]
        cells += ["", "not measured"] if result is None else [minutes_text(result), figure_text(result)]
        rows.append([*cells, f"[notebook]({_link(_notebook(config), page)})"])
    heads = ["config", "what it shows", "hardware", "memory, first line", "minutes", "result", "link"]
    return markdown_table(heads, rows)


def _cost_text(cost: dict[str, Any]) -> str:
    """Return the memory until the first line of a run and its CPU seconds, measured by ``benchmark.py runs``."""
    seconds = f"{cost['cpu_seconds']:.0f} s"
    return f"{cost['peak_gb']:.1f} GB, {seconds if cost['line'] else f'over {seconds}'}"


def _shown(config: Path) -> tuple[str, str]:
    """Return what a configuration shows, according to its first comment, and the hardware that it needs."""
    text = config.read_text(encoding="utf-8")
    gpu = re.search(r"one GPU( with \d+ GB)?|GPU", text.partition("\nmodel:")[0])
    hardware = "two CPU cores" if gpu is None else gpu[0] if gpu[0] != "GPU" else "one GPU"
    return text.partition("\n")[0].removeprefix("# ").rstrip("."), hardware


def _is_result_of(result: dict[str, Any], config: Path) -> bool:
    """Return whether a result was measured with a configuration, apart from the precision.

    A value with ``{seed}``, such as a different initial checkpoint for each seed, does not count as a change.
    """
    if _config_of(result) != config:
        return False
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    changed = dict(re.findall(r" --([a-z_]+\.\S+) (\S+)", result["command"]))
    changed.pop("trainer.precision", None)
    return all("{seed}" in value or _same(content, key, value) for key, value in changed.items())


def _same(content: Any, key: str, value: str) -> bool:
    for name in key.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    try:
        return content is not None and float(content) == float(value)
    except (TypeError, ValueError):
        return str(content) == value


def benchmark_table(comparisons: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return a Markdown table of comparisons of ``scripts/benchmark.py``, each given with its report."""
    rows = []
    for report, one in comparisons:
        ours, theirs = (_rate(float(np.median(one[side]))) for side in ("ours", "theirs"))
        ratios = f"{one['ratio']:.2f} ({one['ratio_min']:.2f} to {one['ratio_max']:.2f})"
        rows.append([f"{report['title']}, {one['name']}", f"{ours} {one['unit']}", theirs, ratios])
    return markdown_table(["comparison", "ours", "theirs", "ratio (repeats)"], rows)


def _rate(rate: float) -> str:
    """Return a rate without decimals, or with two digits below 10."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _benchmarks(words: Sequence[str], results: Results, page: Path) -> str:
    return benchmark_table([(report, one) for report in results.values() for one in report.get("comparisons", ())])


def _speed(names: Sequence[str], results: Results, page: Path) -> str:
    pairs = [name.partition(":") for name in names]
    reports = [(_named(name, results), int(number or 0)) for name, _, number in pairs]
    return benchmark_table([(report, report["comparisons"][number]) for report, number in reports])


def phases_table(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table of the phases of collections, by configuration, measured by ``benchmark.py phases``.

    A cell has the share of a phase in the CPU time, and in brackets the shares of matrix products and attention, of
    other operators, and of Python in the phase.
    """
    rows = []
    for config, one in profiles.items():
        total, profiled = sum(one["seconds"].values()), one["profiled"]
        cells = [f"`{config.removeprefix('configs/').removesuffix('.yaml')}`"]
        cells.append(f"{1000 * total / float(np.median(one['turns'])):.3g}")
        for phase, seconds in one["seconds"].items():
            parts = [part / max(profiled["seconds"][phase], 1e-9) for part in profiled["operators"][phase]]
            shares = ", ".join(f"{share:.0%}" for share in (*parts, max(0.0, 1 - sum(parts))))
            cells.append(f"{seconds / total:.0%} ({shares})" if seconds > 0.005 * total else "")
        rows.append(cells)
    return markdown_table(["configuration", "CPU ms per turn", "playing", "reference", "values", "update"], rows)


def _phases(words: Sequence[str], results: Results, page: Path) -> str:
    return phases_table(
        {config: one for report in results.values() for config, one in report.get("phases", {}).items()}
    )


def pilots_table(pilots: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of single runs: means over the last fifth of the run, and held-out figures.

    The last column has the lowest validation after the highest one, and the turn at which it took place.
    """
    rows = []
    for one in pilots:
        found = (one[name] for name in ("success", "entropy", "explained_variance"))
        figures = ("" if value is None else f"{value:.2f}" for value in found)
        values = [value for _, value in one["held_out"]]
        later = one["held_out"][values.index(max(values)) + 1 :] if values else []
        lowest = "{1:.3g} (at {0:,})".format(*min(later, key=lambda point: point[1])) if later else ""
        last = ", ".join(f"{value:.3g}" for value in values[-3:])
        rows.append([one["name"], f"{one['env_steps']:,}", *figures, f"{one['update_kl']:.3f}", last, lowest])
    names = ["run", "turns", "success in training", "entropy, nats", "explained variance", "KL per collection"]
    return markdown_table([*names, "last validations", "lowest after the highest"], rows)


def _text_cost(words: Sequence[str], results: Results, page: Path) -> str:
    rows = []
    for one in _named("benchmark_text", results)["environments_in_text"]:
        cost = np.array(one["text_layer_us"])
        spread = f"{np.median(cost):.1f} ({cost.min():.1f} to {cost.max():.1f})"
        rates = (f"{np.median(one[name]):,.0f}" for name in ("steps_per_second", "native_steps_per_second"))
        rows.append([f"`{one['env_id']}`", spread, *rates])
    return markdown_table(["environment", "text layer, microseconds per step", "steps/s in text", "native"], rows)


def _environments(names: Sequence[str], results: Results, page: Path) -> str:
    result = _named(names[0], results)
    figure = names[1] if len(names) > 1 else result.get("figure", "success")
    return environments_table(result["environments"], figure=figure)


def rephrased_table(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a Markdown table of success rates on rephrased prompts: a row per kind of policy, a column per phrasing.

    Args:
        reports: for each kind of policy one report of ``lrl evaluate --rephrase FILE --json`` per seed.
    """
    phrasings = list(
        dict.fromkeys(name for seeds in reports.values() for report in seeds for name in report["rephrased"])
    )
    rows = []
    for policy, seeds in reports.items():
        known = ([report["rephrased"][name] for report in seeds if name in report["rephrased"]] for name in phrasings)
        columns = [seeds, *known]
        rows.append([policy, *(", ".join(f"{report['success_rate']:.3f}" for report in one) for one in columns)])
    return markdown_table(["policy", "as trained", *phrasings], rows)


def ranks_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the rows of ``tests/distributed/ranks.py``, with a column per strategy.

    A row is a case of an algorithm: the largest absolute difference between a weight of two ranks and of one process,
    the largest one that is allowed, and the largest change of a weight in the run.
    """
    cases: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["algorithm"], row["case"]), {})[row["strategy"]] = row
    cells = []
    for (algorithm, case), by_strategy in cases.items():
        found = [by_strategy.get(strategy) for strategy in ("ddp", "fsdp2")]
        differences = ["not supported" if row is None else f"{row['difference']:.1e}" for row in found]
        first = next(iter(by_strategy.values()))
        cells.append([algorithm, case, *differences, f"{first['tolerance']:.0e}", f"{first['largest_change']:.1g}"])
    return markdown_table(["algorithm", "case", "`ddp`", "`fsdp`", "allowed", "change in the run"], cells)


def _search(words: Sequence[str], results: Results, page: Path) -> str:
    rule = words[1] if len(words) > 1 else ""
    if rule not in RULES:
        raise ValueError(f"a table of {page} has the rule {rule!r}; it must be {' or '.join(RULES)}.")
    records = _searched(words[0], results)
    texts = reached_text(records, rule), random_text(records), unfinished_text(records)
    table = rule_table(records, rule)
    seeds = seed_values_table(table)
    parts = _SEED_VALUES.sub("", table), seeds and folded("Values of each seed", seeds), *texts
    return "\n\n".join(filter(None, parts))


TASK = "frozen_lake"
"""Name of the task of a search whose transition table is known."""
_EQUAL = 1e-6
"""Largest difference between two probabilities of success that count as equal."""


@cache
def lake() -> Lake:
    """Return the map of :data:`TASK` with its time limit."""
    return lakes_of(TASKS[TASK].env_factory())[0]


def exact_success(parameters: Sequence[float]) -> float:
    """Return the probability that a table of one action for each state reaches the goal within the time limit."""
    table = lake().table
    return lake().success(np.eye(table.num_actions)[np.asarray(parameters, dtype=np.int64)])


def exact_table(records: Records) -> str:
    """Return a Markdown table with a row per search: the exact success of its tables beside both measured returns.

    A cell contains the mean with its 95% bootstrap interval over seeds, or the values of fewer than five seeds. A count
    of ``n/m`` says that n of m planned seeds have finished. Networks are left out, because they have no table.
    """
    planned: dict[str, list[dict[str, Any] | None]] = {}
    for run, record in records.items():
        if run.task == TASK and run.method not in NETWORKS:
            planned.setdefault(run.method, []).append(record)
    rows, heads = list[list[str]](), list[str]()
    best = lake().best_stationary - _EQUAL
    for method, seeds in planned.items():
        found = [record for record in seeds if record is not None and UNPLAYABLE not in record]
        if not found:
            continue
        exact = [exact_success(record["parameters"]) for record in found]
        heads = [f"best mean of {found[0]['rollouts']} episodes", f"{found[0]['fresh_episodes']} fresh episodes"]
        columns = [[record["best_iteration"] for record in found], [record["fresh"] for record in found], exact]
        count = f"{len(found)}" if len(found) == len(seeds) else f"{len(found)}/{len(seeds)}"
        rows.append([method, count, *map(_exact_cell, columns), str(sum(value > best for value in exact))])
    return markdown_table(["search", "seeds", *heads, "exact success", "optimal tables"], rows)


def _exact_cell(values: Sequence[float]) -> str:
    if len(values) < MIN_SEEDS:
        return ", ".join(f"{value:.3f}" for value in values)
    low, high = bootstrap_interval(values)
    return f"{np.mean(values):.3f} ({low:.2f} to {high:.2f})"


def _config_of(result: dict[str, Any]) -> Path:
    """Return the configuration in the command of a result."""
    found = re.search(r"--config (\S+)", result["command"])
    assert found is not None
    return Path(found[1])


def _notebook(config: Path) -> Path:
    return Path("docs/experiments") / f"{config.parent.name}.md"


def _link(target: Path, page: Path) -> str:
    return os.path.relpath(target, page.parent)


_KINDS: dict[str, Callable[[Sequence[str], Results, Path], str]] = {
    "results": _results,
    "headlines": _headlines,
    "configs": _configs,
    "benchmarks": _benchmarks,
    "speed": _speed,
    "phases": _phases,
    "credit": lambda words, results, _: credit_table(_named(words[0], results), int(words[1]), "averaged" in words),
    "environments": _environments,
    "baselines": lambda _, results, __: baselines_table(
        {name: _named(f"baselines_{name}", results) for name in ("random", "constant")}
    ),
    "text_cost": _text_cost,
    "boards": lambda words, results, _: boards_table(_named(words[0], results)),
    "pilots": lambda words, results, _: pilots_table(_named(words[0], results)["pilots"]),
    "rules": lambda words, results, _: rules_table([results[name] for name in _measured(words, results)]),
    "lasting": lambda words, results, _: lasting_table([_named(name, results) for name in words]),
    "screening": lambda words, results, _: screening_table(_named(words[0], results)["screening"]),
    "ranks": lambda words, results, _: ranks_table(_named(words[0], results)["two_ranks"]),
    "rephrased": lambda words, results, _: rephrased_table(_named(words[0], results)["rephrased"]),
    "search": _search,
    "search_budget": lambda words, results, _: budget_table(_searched(words[0], results)),
    "search_exact": lambda words, results, _: exact_table(_searched(words[0], results)),
    "search_gains": lambda words, results, _: gains_table(_searched(words[0], results)),
    "synthetic": lambda words, results, _: synthetic_table({name: _named(name, results) for name in words}),
}
"""Functions that return a table, given the words after its kind, all results and the page."""


def filled_notebook(text: str, results: Mapping[str, dict[str, Any]]) -> str:
    """Return the notebook of figures: its first two cells, which define functions, and cells for each figure."""
    document = json.loads(text)
    cells = document["cells"][:2]
    for name, drawn in pictures(results).items():
        cells.append(_cell("markdown", f"## {' / '.join(result['title'] for result in drawn)}"))
        cells.append(_cell("code", f'table("{name}")\npicture("{name}")'))
        others = range(1, len(drawn[0].get("clocks") or [""]))
        cells += [_cell("code", f'picture("{name}", {number})') for number in others]
    return json.dumps(document | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})

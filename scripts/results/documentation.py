"""The tables of the documentation, made from ``assets/results``, the configurations and the code.

A page holds ``<!-- table: KIND WORD ... -->`` and ``<!-- end table -->``; what stands between them is replaced. The
kinds:

- ``results PATTERN ...``: experiments whose file names match, with their commands.
- ``headlines NAME ...``: experiments in short, with the page that tells of them.
- ``configs``: every configuration, with its result.
- ``algorithms``: every algorithm, with the lines of its loss and its advantages.
- ``benchmarks`` and ``speed NAME:NUMBER ...``: all comparisons, or single ones, counted from 0.
- ``credit NAME TOKENS [averaged]``: advantages compared with the exact ones, at a number of tokens per turn.
- ``environments NAME [FIGURE]``, ``baselines``, ``text_cost``: what policies reach in environments, and what text
  costs there.
- ``rephrased NAME``: success of trained policies on rephrased prompts.
- ``search NAME RULE`` and ``search_budget NAME``: what ``lrl search_table --json`` wrote, by the rule
  ``best_iteration`` or ``fresh``, and what was played for it.
- ``search_exact NAME``: the exact success on FrozenLake of the tables that the searches of such a file chose.
- ``search_gains NAME``: how much better the language model of such a file is than random search.
- ``synthetic NAME ...``: what ``lrl synthetic_search --json`` wrote.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lrl.evaluation.report import environments_table
from lrl.search.synthetic_comparison import synthetic_table
from results.credit_truth import credit_table
from results.summaries import baselines_table, figure_text, learning_table, minutes_text, pictures, seeds_text
from results.tables import benchmark_table, comparisons_table, rephrased_table, text_cost_table

if TYPE_CHECKING:
    from lrl.search.experiments import Records


Results = Mapping[str, dict[str, Any]]
"""Kept results by name."""

_TABLE = re.compile(r"<!-- table: ([^>]*?) -->\n(.*?)<!-- end table -->", re.DOTALL)
_ENVIRONMENTS = {
    "babyai": "BabyAI-Text",
    "cartpole": "CartPole",
    "frozen_lake": "FrozenLake",
    "half_cheetah": "HalfCheetah",
}
"""Folders of ``configs`` to the names of what is in them."""


def documentation_pages(root: Path) -> list[Path]:
    """Return the pages that hold tables: the two READMEs and those in ``docs``."""
    pages = [root / "README.md", root / "configs/README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in pages if _TABLE.search(page.read_text(encoding="utf-8"))]


def fill_tables(page: Path, text: str, results: Results) -> str:
    """Return the text of a page with all its tables made anew.

    Args:
        page: Path of the page, from which links are relative; the working directory is the repository's root.
        text: Current text of the page.
        results: Kept results by name.

    Raises:
        ValueError: If a table's kind is unknown, or it names a result that does not exist.
    """

    def made(found: re.Match[str]) -> str:
        kind, *words = found[1].split()
        if kind not in _KINDS:
            raise ValueError(f"{page} has a table of the kind {kind!r}; it must be one of {', '.join(_KINDS)}.")
        return f"<!-- table: {found[1]} -->\n{_KINDS[kind](words, results, page)}\n<!-- end table -->"

    return _TABLE.sub(made, text)


def _named(name: str, results: Results) -> dict[str, Any]:
    if name not in results:
        raise ValueError(f"a table names {name!r}; it must be a file of assets/results, without .json.")
    return results[name]


def _results(patterns: Sequence[str], results: Results, page: Path) -> str:
    measured = {name: result for name, result in results.items() if "metric" in result}
    picked = [name for name in measured if any(fnmatch(name, pattern) for pattern in patterns)]
    if not picked:
        raise ValueError(f"a table of {page} asks for {' '.join(patterns)}; no file of assets/results matches.")
    return learning_table([measured[name] for name in picked])


def _headlines(names: Sequence[str], results: Results, page: Path) -> str:
    lines = ["| environment | algorithm, policy | result | seeds | minutes | more |", "|---|---|---|---|---|---|"]
    for name in names:
        result = _named(name, results)
        config = _config_of(result)
        kinds = ", ".join(_algorithm_and_policy(config))
        more = f"[notebook]({_link(_notebook(config), page)})"
        cells = [_ENVIRONMENTS[config.parent.name], kinds, figure_text(result), seeds_text(result)]
        lines.append(f"| {' | '.join([*cells, minutes_text(result), more])} |")
    return "\n".join(lines)


def _configs(words: Sequence[str], results: Results, page: Path) -> str:
    lines = ["| config | what it shows | hardware | minutes | result | link |", "|---|---|---|---|---|---|"]
    for config in sorted(Path("configs").glob("*/*.yaml")):
        if config.parent.name == "overlays":
            continue
        result = next((one for one in results.values() if "metric" in one and _is_result_of(one, config)), None)
        cells = [f"[`{config.relative_to('configs')}`]({_link(config, page)})", *_shown(config)]
        cells += ["", "not measured"] if result is None else [minutes_text(result), figure_text(result)]
        lines.append(f"| {' | '.join([*cells, f'[notebook]({_link(_notebook(config), page)})'])} |")
    return "\n".join(lines)


def _shown(config: Path) -> tuple[str, str]:
    """Return what a configuration shows, by its first comment, and the hardware that it needs."""
    text = config.read_text(encoding="utf-8")
    gpu = re.search(r"one GPU( with \d+ GB)?|GPU", text.partition("\nmodel:")[0])
    hardware = "two CPU cores" if gpu is None else gpu[0] if gpu[0] != "GPU" else "one GPU"
    return text.partition("\n")[0].removeprefix("# ").rstrip("."), hardware


def _is_result_of(result: dict[str, Any], config: Path) -> bool:
    """Return whether a result was measured with a configuration of which its command changes at most the precision.

    A value with ``{seed}``, such as a start for each seed, does not count as a change.
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


def _algorithms(words: Sequence[str], results: Results, page: Path) -> str:
    lines = ["| algorithm | file |", "|---|---|"]
    for file in [*sorted(Path("lrl/algorithms").glob("[!_]*.py")), Path("lrl/search/module.py")]:
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.stem).partition("\n")[0]
        document = Path("docs/algorithms") / ("prompted_search.md" if file.stem == "module" else f"{file.stem}.md")
        name = f"[{first.rstrip('.')}]({_link(document, page)})" if document.exists() else first.rstrip(".")
        lines.append(f"| {name} | [`{file}`]({_link(file, page)}) |")
    return "\n".join(lines)


def _speed(names: Sequence[str], results: Results, page: Path) -> str:
    picked = []
    for name in names:
        report = _named(name.partition(":")[0], results)
        picked.append((report, report["comparisons"][int(name.partition(":")[2] or 0)]))
    return comparisons_table(picked)


def _benchmarks(words: Sequence[str], results: Results, page: Path) -> str:
    return benchmark_table([result for result in results.values() if "comparisons" in result])


def _credit(words: Sequence[str], results: Results, page: Path) -> str:
    return credit_table(_named(words[0], results), int(words[1]), "averaged" in words)


def _environments(names: Sequence[str], results: Results, page: Path) -> str:
    result = _named(names[0], results)
    figure = names[1] if len(names) > 1 else result.get("figure", "success")
    return environments_table(result["environments"], figure=figure)


def _baselines(words: Sequence[str], results: Results, page: Path) -> str:
    return baselines_table({name: _named(f"baselines_{name}", results) for name in ("random", "constant")})


def _text_cost(words: Sequence[str], results: Results, page: Path) -> str:
    return text_cost_table(_named("benchmark_text", results))


def _rephrased(names: Sequence[str], results: Results, page: Path) -> str:
    return rephrased_table(_named(names[0], results)["rephrased"])


def _search(words: Sequence[str], results: Results, page: Path) -> str:
    from lrl.search.tables import RULES, random_text, reached_text, rule_table, unfinished_text  # import torch

    rule = words[1] if len(words) > 1 else ""
    if rule not in RULES:
        raise ValueError(f"a table of {page} has the rule {rule!r}; it must be {' or '.join(RULES)}.")
    records = _searched(words[0], results)
    texts = reached_text(records, rule), random_text(records), unfinished_text(records)
    return "\n\n".join([rule_table(records, rule), *filter(None, texts)])


def _search_budget(words: Sequence[str], results: Results, page: Path) -> str:
    from lrl.search.tables import budget_table

    return budget_table(_searched(words[0], results))


def _search_exact(words: Sequence[str], results: Results, page: Path) -> str:
    from results.tables import exact_table

    return exact_table(_searched(words[0], results))


def _search_gains(words: Sequence[str], results: Results, page: Path) -> str:
    from lrl.search.tables import gains_table

    return gains_table(_searched(words[0], results))


def _searched(name: str, results: Results) -> Records:
    from lrl.search.experiments import report_records

    return report_records(_named(name, results), name)


def _synthetic(names: Sequence[str], results: Results, page: Path) -> str:
    return synthetic_table({name: _named(name, results) for name in names})


def _config_of(result: dict[str, Any]) -> Path:
    """Return the configuration that a result's command trains."""
    found = re.search(r"--config (\S+)", result["command"])
    assert found is not None
    return Path(found[1])


def _algorithm_and_policy(config: Path) -> tuple[str, str]:
    model = yaml.safe_load(config.read_text(encoding="utf-8"))["model"]
    names = [one["class_path"].rpartition(".")[2] for one in (model, model["init_args"]["policy"])]
    return re.sub(r"(ValueHead)?Module$", "", names[0]), names[1]


def _notebook(config: Path) -> Path:
    return Path("docs/experiments") / f"{config.parent.name}.md"


def _link(target: Path, page: Path) -> str:
    return os.path.relpath(target, page.parent)


_KINDS: dict[str, Callable[[Sequence[str], Results, Path], str]] = {
    "results": _results,
    "headlines": _headlines,
    "configs": _configs,
    "algorithms": _algorithms,
    "benchmarks": _benchmarks,
    "speed": _speed,
    "credit": _credit,
    "environments": _environments,
    "baselines": _baselines,
    "text_cost": _text_cost,
    "rephrased": _rephrased,
    "search": _search,
    "search_budget": _search_budget,
    "search_exact": _search_exact,
    "search_gains": _search_gains,
    "synthetic": _synthetic,
}


# The notebook of figures, made from kept results.


def filled_notebook(text: str, results: Mapping[str, dict[str, Any]]) -> str:
    """Return the notebook's first two cells, which define how figures are drawn, followed by one cell per figure."""
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

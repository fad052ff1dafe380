"""The documentation's tables and the notebook of figures, filled in from kept results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lrl.reports.results import (
    baselines_table,
    benchmark_table,
    environments_table,
    fill,
    learning_table,
    pictures,
    text_cost_table,
)

Results = Mapping[str, dict[str, Any]]
"""Kept results by name."""


def filled_page(page: str, results: Results) -> str:
    """Return a Markdown page with every table that it has marks for, made anew from ``results``.

    Raises:
        ValueError: the page lacks the marks of the learning results.
    """
    page = fill(page, "results", learning_table([result for result in results.values() if "metric" in result]))
    for name, result in results.items():
        if "environments" in result and f"<!-- {name} -->" in page:
            page = fill(page, name, environments_table(result["environments"], figure=result.get("figure", "success")))
    if "<!-- baselines -->" in page:
        policies = {name: results[f"baselines_{name}"] for name in ("random", "constant")}
        page = fill(page, "baselines", baselines_table(policies))
    if "<!-- text cost -->" in page:
        page = fill(page, "text cost", text_cost_table(results["benchmark_text"]))
    if "<!-- benchmarks -->" in page:
        compared = [result for result in results.values() if "comparisons" in result]
        page = fill(page, "benchmarks", benchmark_table(compared))
    return page


def filled_notebook(text: str, results: Results) -> str:
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

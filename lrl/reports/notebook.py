"""The notebook of figures, made from kept results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lrl.reports.results import pictures


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

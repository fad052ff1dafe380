"""The lines of ``lrl`` that define its classes, functions and constants."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def definitions() -> dict[str, list[tuple[str, int]]]:
    """Return every name that ``lrl`` defines, with the files and lines where it does."""
    found: dict[str, list[tuple[str, int]]] = {}
    for file in sorted((ROOT / "lrl").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        for name, line in lines_of(path).items():
            found.setdefault(name, []).append((path, line))
    return found


@cache
def lines_of(path: str) -> dict[str, int]:
    """Return every dotted name that a Python file of the repository defines, with the number of its line."""
    lines: dict[str, int] = {}
    _collect(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, "", lines)
    return lines


def _collect(body: list[ast.stmt], prefix: str, lines: dict[str, int]) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines.setdefault(prefix + node.name, node.lineno)
            if isinstance(node, ast.ClassDef):
                _collect(node.body, f"{prefix}{node.name}.", lines)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    lines.setdefault(prefix + target.id, node.lineno)

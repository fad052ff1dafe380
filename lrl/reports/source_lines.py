"""The line on which a name is defined, read from the source text, so that links to code cannot rot."""

from __future__ import annotations

import ast
from pathlib import Path


def definition_line(file: Path, name: str) -> int:
    """Return the number of the line on which a class, function, method or constant is defined, from 1.

    Args:
        file: a Python file.
        name: a dotted name inside of it, such as ``PPOValueHeadModule.loss``; a name without a dot is also looked up
            in the file's classes, in their order.

    Raises:
        ValueError: the file defines no such name.
    """
    lines = definition_lines(file)
    found = lines.get(name) or next((line for full, line in lines.items() if full.endswith(f".{name}")), None)
    if found is None:
        raise ValueError(f"{file} defines no {name!r}; name a class, function, method or constant of that file.")
    return found


def definition_lines(file: Path) -> dict[str, int]:
    """Return every dotted name that a Python file defines, with the number of its line."""
    lines: dict[str, int] = {}
    _collect(ast.parse(file.read_text(encoding="utf-8")).body, "", lines)
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

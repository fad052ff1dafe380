"""Links from the documentation to lines of the code, found while the documentation is built.

- ``{source}`GRPOModule.loss``` links to the line that defines that name, in whichever file of ``lrl`` it is, and shows
  the name; ``{source}`text <GRPOModule.loss>``` shows ``text``. ``{source}`lrl/types.py``` links to a file.
- Every page of the API reference links its objects to the same lines (:mod:`sphinx.ext.linkcode`).
- Each file of ``lrl`` becomes a page of highlighted source with an anchor for every line.

A name that no file or more than one file defines is a warning, and so an error of ``make docs``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import ReferenceRole

ROOT = Path(__file__).resolve().parents[2]


class SourceRole(ReferenceRole):
    """Link to the definition of a name, or to the top of a file."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the link, or a warning where the target does not exist."""
        found = [(self.target, 1)] if self.target.endswith(".py") else definitions().get(self.target, [])
        if len(found) != 1 or not (ROOT / found[0][0]).exists():
            places = ", ".join(f"{path}:{line}" for path, line in found) or "nothing of that name in lrl"
            sentence = f"source link to {self.target!r}: one definition is needed, there is {places}"
            return [], [self.inliner.reporter.warning(sentence, line=self.lineno)]
        path, line = found[0]
        address = page_of(path, line, self.env.docname.count("/"))
        text = nodes.literal(self.title, self.title)
        return [nodes.reference("", "", text, refuri=address, internal=True, reftitle=f"{path}, line {line}")], []


@cache
def definitions() -> dict[str, list[tuple[str, int]]]:
    """Return every name that ``lrl`` defines, with the files and lines where it does."""
    found: dict[str, list[tuple[str, int]]] = {}
    for file in sorted((ROOT / "lrl").rglob("*.py")):
        path = str(file.relative_to(ROOT))
        for name, line in _lines(path).items():
            found.setdefault(name, []).append((path, line))
    return found


def page_of(path: str, line: int, depth: int) -> str:
    """Return the address of a line of a source page, as seen from a page ``depth`` folders down."""
    return f"{'../' * depth}source/{path.removesuffix('.py')}.html#L-{line}"


@cache
def _lines(path: str) -> dict[str, int]:
    return definition_lines(ROOT / path)


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


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the source line of an object of the API reference, whose pages lie one folder down."""
    stem = ROOT / info["module"].replace(".", "/")
    file = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
    path = str(file.relative_to(ROOT))
    line = _lines(path).get(info["fullname"]) if domain == "py" and file.exists() else None
    return page_of(path, line, 1) if line else None


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield one page per source file of the package, with an anchor ``L-<number>`` on every line."""
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    for file in sorted((ROOT / "lrl").rglob("*.py")):
        path = file.relative_to(ROOT)
        body = highlight(file.read_text(encoding="utf-8"), PythonLexer(), formatter)
        yield f"source/{path.with_suffix('')}", {"title": str(path), "body": f"<h1>{path}</h1>{body}"}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the role and the source pages."""
    app.add_role("source", SourceRole())
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

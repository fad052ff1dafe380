"""Links from the documentation to lines of the code, found while the documentation is built.

- ``{source}`GRPOModule.loss``` links to the line of ``lrl`` that defines the name, and shows the name;
  ``{source}`text <GRPOModule.loss>``` shows ``text``. ``{source}`lrl/types.py``` links to a file.
- Every page of the API reference links its objects to the same lines (:mod:`sphinx.ext.linkcode`).
- Each file of ``lrl`` becomes a page of highlighted source with an anchor for every line.

A name that no file or more than one file defines is a warning, and so an error of ``make docs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from definitions import ROOT, definitions, lines_of
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import ReferenceRole


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


def page_of(path: str, line: int, depth: int) -> str:
    """Return the address of a line of a source page, as seen from a page ``depth`` folders down."""
    return f"{'../' * depth}source/{path.removesuffix('.py')}.html#L-{line}"


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the source line of an object of the API reference, whose pages lie one folder down."""
    stem = ROOT / info["module"].replace(".", "/")
    file = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
    path = str(file.relative_to(ROOT))
    line = lines_of(path).get(info["fullname"]) if domain == "py" and file.exists() else None
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

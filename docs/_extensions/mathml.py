"""Equations as MathML, which browsers show without a script and without a network.

LaTeX that cannot be converted, or of which a command is left over, is a warning, and so an error of ``make docs``.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def mathml(latex: str, display: str, node: nodes.Node) -> str:
    """Return an equation as MathML; ``display`` is ``inline`` or ``block``."""
    try:
        found = convert(re.sub(r"\s+", " ", latex), display=display)
        left = re.search(r"\\[A-Za-z]+", found)
        problem = left and f"{left[0]} is not converted"
    except Exception as error:  # the converter raises many kinds of errors
        found, problem = escape(latex), f"{type(error).__name__} {error}"
    if problem:
        LOGGER.warning("equation %r cannot be shown: %s", latex, problem, location=node)
    return found


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write an equation in a sentence."""
    translator.body.append(mathml(node.astext(), "inline", node))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """Write an equation in a line of its own."""
    translator.body.append(f'<div class="equation">{mathml(node.astext(), "block", node)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer as the one of HTML pages."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Tests that docstrings, comments and error messages of lrl use plain English and the field's own terms.

``python tests/test_words.py`` prints the findings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lrl"
FRAGMENT = re.compile(r"(Of|As|Behind|Whether|What|Where|By which|In nats|Nothing)\b")
"""Beginnings of fragments."""
NOT_IMPERATIVE = re.compile(r"(The|An?|Each|Every|All|One|Its|This|How|Before|By|To|In|With|If|See)\b")
"""Beginnings that are allowed except for functions, which begin with a verb in the imperative."""
BANNED = {
    r"paid|pays for|is worth|are worth": "rewarded, or value",
    r"behind the (prompt|point|velocities|turn)|behind a turn": "after the ...",
    r"fisher's matrix": "Fisher matrix",
    r"fit apart": "fit separately",
    r"meters": "metric means, or metres",
    r"(?<!auto_)requeue\w*": "deferred signals",
    r"zero loss": "no-op step",
    r"gist": "summary",
    r"drawn (at|from|by|per|anew|apart|ones?)": "sampled",
    r"told (in|by|apart)": "described, or written",
    r"(an|the|each|of|every|invalid|its|their) answers?(?! tags)|answers (in|that|are|of|to)": "response",
    r"refuse[sd]?": "raises, or invalid",
    r"nobody|for ever|all the same|goes without": "plain English",
    r"running episode": "current episode",
    r"noisy": "with noise",
}
"""Own words as regular expressions, and what to write instead."""
_BANNED = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): instead for pattern, instead in BANNED.items()}
_COMMENT = re.compile(r"(?:^|\s)# (.*)$", re.MULTILINE)
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_line_findings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and description of each docstring whose first line is not a sentence."""
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, _OWNERS) else None
        if docstring is None:
            continue
        first, line = docstring.split("\n")[0], getattr(node, "lineno", 1)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_property = is_function and any("property" in ast.unparse(one) for one in node.decorator_list)
        if not (first[:1].isupper() and first.endswith(".") and len(first.split()) >= 3):
            yield line, f"not a capitalized sentence of three words on one line: {first!r}"
        elif FRAGMENT.match(first):
            yield line, f"a fragment: {first!r}"
        elif is_function and not is_property and NOT_IMPERATIVE.match(first):
            yield line, f"not in the imperative: {first!r}"


def texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, comment and error message, except errors shown to policies."""
    for match in _COMMENT.finditer(source):
        yield source.count("\n", 0, match.start(1)) + 1, match.group(1)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Raise) and node.exc is not None and "InvalidActionError" not in ast.dump(node.exc):
            parts = [part for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            yield from ((part.lineno, part.value) for part in parts if isinstance(part.value, str))


def findings(source: str) -> list[tuple[int, str]]:
    """Return the line and description of each docstring, comment and error message to rewrite."""
    tree = ast.parse(source)
    found = list(first_line_findings(tree))
    for line, text in texts(source, tree):
        prose = " ".join(text.split())
        found += [
            (line, f"{match.group()!r}; write {instead}")
            for pattern, instead in _BANNED.items()
            for match in pattern.finditer(prose)
        ]
    return sorted(found)


def package_findings() -> list[str]:
    """Return the findings in all files of lrl."""
    names = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    return [
        f"{name}:{line}: {what}"
        for name, path in names.items()
        for line, what in findings(path.read_text(encoding="utf-8"))
    ]


def test_docstrings_comments_and_errors_use_plain_english() -> None:
    found = package_findings()
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """Of all."""', "three words"),
        ('def f():\n    """As every module, but quick."""', "a fragment"),
        ('def f():\n    """Whether it is so."""', "a fragment"),
        ('def f():\n    """The sum of all."""', "not in the imperative"),
        ('def f():\n    """Return the\n    sum."""', "not a capitalized sentence"),
        ("x = 1  # what the answers are paid", "'paid'; write rewarded"),
        ("raise ValueError(f'{x} is refused')", "'refused'; write raises"),
    ],
)
def test_the_check_finds(source: str, expected: str) -> None:
    found = [what for _, what in findings(source)]
    assert any(expected in what for what in found), found


if __name__ == "__main__":
    print("\n".join(package_findings()))

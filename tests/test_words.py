"""Tests that docstrings, comments, error messages, configurations and documentation use plain technical English.

``python tests/test_words.py`` prints the findings.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "lrl", ROOT / "tests"
DOCUMENTS = ("*.md", "assets/**/*.md", "assets/**/*.yaml", "configs/**/*.md", "configs/**/*.yaml", "docs/**/*.md")
"""Patterns of the files that :func:`document_findings` reads."""
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
BANNED_IN_DOCUMENTS = {
    r"for want of": "because there is no ...",
    r"yardsticks?": "baseline, or reference value",
    r"earn(s|ed|ing)?": "return, or reward",
    r"of the way (to|from|between)": "normalised return",
    r"(is|are|was|it) told( in)?(?! of)|how it is told": "text format, or has in its prompt",
    r"sa(y|ys|id) so": "states that ...",
    r"errs?|erred": "makes errors",
    r"does it help": "does ... improve",
    r"no legal actions?": "not a legal action, or without a legal action",
    r"the lake": "FrozenLake",
    r"the pole stands": "the policy balances the pole",
    r"as it (likes?|liked|is meant)": "without limit, or corrected",
    r"worth (nothing|having|keeping|reading)": "name the effect",
    r"(stands?|stood) (in|on|at|beside|below|between|there)": "is",
    r"stands? for": "is, or means",
    r"at hand": "available",
    r"heed\w*": "used",
    r"of (its|their|your|his|our) own(?! episodes| init)": "its own ..., or separate",
    r"go(es)? on": "continues",
    r"whatever": "independent of ..., or for any",
    r"is (only |mostly )?luck": "chance",
    r"anew": "again",
    r"settles? on noise|on noise alone": "the updates fit noise",
    r"drowns?": "dominates",
    r"beats? (a|the|it)": "is better than",
    r"what (was|is) seen": "result",
    r"not by us|could be had": "not available",
    r"knows? no": "has no",
    r"one in (four|five|ten)|(three|four|eight|nine) (of|in) ten actions": "a share in percent",
}
"""Further expressions that documents must not contain, and what to write instead."""
_compile = functools.partial(re.compile, flags=re.IGNORECASE)
_BANNED = {_compile(rf"\b(?:{pattern})\b"): instead for pattern, instead in BANNED.items()}
_BANNED_IN_DOCUMENTS = _BANNED | {
    **{_compile(rf"\b(?:{pattern})\b"): instead for pattern, instead in BANNED_IN_DOCUMENTS.items()},
    re.compile(r"(?<![\w./\\-])-?\.\d+"): "a digit before the decimal point",
}
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|</?answer>")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(?:^|\s)# (.*)$", re.MULTILINE)
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_line_findings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and description of each docstring whose first line is not a sentence."""
    for node in nodes:
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


def texts(source: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, comment and error message, except errors shown to policies."""
    for match in _COMMENT.finditer(source):
        yield source.count("\n", 0, match.start(1)) + 1, match.group(1)
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Raise) and node.exc is not None and "InvalidActionError" not in ast.dump(node.exc):
            parts = [part for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            yield from ((part.lineno, part.value) for part in parts if isinstance(part.value, str))


def banned(text: str, patterns: Mapping[re.Pattern[str], str]) -> Iterator[str]:
    """Yield the description of each banned expression of a text."""
    for pattern, instead in patterns.items():
        for match in pattern.finditer(text):
            yield f"{match.group()!r}; write {instead}"


def findings(source: str) -> list[tuple[int, str]]:
    """Return the line and description of each docstring, comment and error message to rewrite."""
    nodes = list(ast.walk(ast.parse(source)))
    found = list(first_line_findings(nodes))
    for line, text in texts(source, nodes):
        found += [(line, what) for what in banned(" ".join(text.split()), _BANNED)]
    return sorted(found)


def fragment_findings(source: str) -> list[tuple[int, str]]:
    """Return the findings in a test, whose docstrings may have other first lines but must not be fragments."""
    return [(line, what) for line, what in findings(source) if not what.startswith("not ")]


def document_findings(text: str, is_yaml: bool) -> list[tuple[int, str]]:
    """Return the line and description of each expression to rewrite in a page, or in the comments of a configuration.

    Code is skipped: fenced blocks, code spans, and the targets of links.
    """
    if not is_yaml:
        text = _FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)
    lines = enumerate(text.split("\n"), 1)
    prose = ((number, _CODE.sub("", line.partition("#")[2] if is_yaml else line)) for number, line in lines)
    return [(number, what) for number, line in prose for what in banned(line, _BANNED_IN_DOCUMENTS)]


def code_findings(folder: Path, find: Callable[[str], list[tuple[int, str]]]) -> list[str]:
    """Return what ``find`` finds in the Python files of a folder, except this one."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted(folder.rglob("*.py"))
        if path != Path(__file__)
        for line, what in find(path.read_text(encoding="utf-8"))
    ]


def documents() -> list[Path]:
    """Return all pages and configurations, without generated folders."""
    found = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if not {"_build", "api"} & set(path.relative_to(ROOT).parts))


def all_document_findings() -> list[str]:
    """Return the findings in all documents."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in documents()
        for line, what in document_findings(path.read_text(encoding="utf-8"), path.suffix == ".yaml")
    ]


CHECKS: dict[str, Callable[[], list[str]]] = {
    "package": lambda: code_findings(PACKAGE, findings),
    "tests": lambda: code_findings(TESTS, fragment_findings),
    "documents": all_document_findings,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_prose_is_plain_english(check: Callable[[], list[str]]) -> None:
    found = check()
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


@pytest.mark.parametrize(
    ("text", "is_yaml", "expected"),
    [
        ("lr: .5  # with .98 it works", True, [(1, "'.98'; write a digit before the decimal point")]),
        ("a policy\nearns 3", False, [(2, "'earns'; write return, or reward")]),
        ("what it is paid", False, [(1, "'paid'; write rewarded, or value")]),
        ("```\nearns .5\n```\n`earns` [x](paid.md) <answer>", False, []),
    ],
)
def test_the_check_of_documents_finds(text: str, is_yaml: bool, expected: list[tuple[int, str]]) -> None:
    assert document_findings(text, is_yaml) == expected


if __name__ == "__main__":
    print("\n".join(line for check in CHECKS.values() for line in check()))

"""Parse the parameters that a language model proposes in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from lrl.search.searcher import ParameterSpace

_MINUS = dict.fromkeys(map(ord, "−–‒﹣－"), "-")  # noqa: RUF001 (models write them for a minus)
# Every quantifier over characters that may repeat is possessive, and no two in a row match the same character: the
# time that a reply takes is linear in its length.
_NUMBER = r"[+-]?+(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?+\d++)?+"
_MARKS = r"[\s`*\"'_]*+"
_ALONE = (
    rf"(?!,\d|{_MARKS}(?:[-=]>|[→⇒±=^×]|(?:\+/)?+[-+/]\s*+<?+\.?+\d|to\s++<?+[-+\d.])"
    r"|[\s`*\"'_]*\*\s*+<?+\.?+\d)"  # a product, unlike the end of bold text
)
"""Not behind a number: a decimal comma, a sum, a range or a change from one value to another (``1.0 -> 1.5``)."""
_ASSIGNMENT = re.compile(
    rf"params?+{_MARKS}\[\s*+(\d{{1,9}})\s*+\]{_MARKS}(?::=|[:=]){_MARKS}(<\s*+)?+({_NUMBER})(?![\w.]*\w)"
    rf"(?(2)\s*+>){_ALONE}",
    re.IGNORECASE,
)
"""For example ``params[0]: 1.2``, ``params[0] = .5``, ``**params[0]**: -1e-1`` or ``params[0]: <1.2>``."""
_SEPARATOR = r"(?:\s++(?:[,;]\s*+)?+|[,;]\s*+)"
_LIST = rf"{_NUMBER}(?:{_SEPARATOR}{_NUMBER})*+"
_BRACKETED = re.compile(rf"(params?+{_MARKS})?+(?:\[|(?<!\w)\()\s*+({_LIST})\s*+[,;]?+\s*+[\])]", re.IGNORECASE)
"""A list in brackets; group 1 where it is an index, as in ``params[0]``."""
_BARE_LINE = re.compile(
    rf"{_MARKS}(?:line\s++1{_MARKS}:{_MARKS})?+(?:params?+{_MARKS}[:=]{_MARKS})?+"  # the prompt speaks of line 1
    rf"({_LIST})[\s,;.`*]*+",
    re.IGNORECASE,
)
_LAST_NUMBER = re.compile(r"(?:(?<![\d.])|(?=[+-]))[+-]?+[\d.]++(?:[eE][+-]?+\d*+)?+$")
_REASONING_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


class ProposalError(ValueError):
    """Raised for a response without a legal proposal. The message is one sentence, shown to the model."""


def parse_parameters(text: str, space: ParameterSpace, cut: bool = False) -> list[float]:
    """Return the values that a response proposes, as they were written.

    Values are read by their index, in any order, from anywhere in the response; every index is needed once. A complete
    list from ``params[0]`` to the last counts, whatever else is said of single parameters in other lines. What is no
    single number (``1/2``, ``1.0 -> 1.5``) is not read. Without indices, a list of numbers in brackets or on a line of
    its own is read. Reasoning between ``<think>`` and ``</think>`` is skipped.

    Args:
        text: the response.
        space: what may be proposed.
        cut: whether the response ended because it reached its maximum length; its last number may be incomplete.

    Raises:
        ProposalError: there are no values, not all, too many, contradictory or illegal ones.
    """
    said = without_reasoning(text).translate(_MINUS)
    if cut:
        said = _LAST_NUMBER.sub("", said.rstrip())
    try:
        values = _indexed(said, space.size)
        if values is None:
            values = _listed(said, space.size)
        complaint = space.complaint(values)
    except ProposalError as error:
        complaint, values = str(error), []
    if complaint:
        raise ProposalError("The reply was cut at its maximum length: " * cut + complaint)
    return values


def without_reasoning(text: str) -> str:
    """Remove the reasoning of a model that thinks aloud; what is not closed was cut, and is removed to its end."""
    before, *tagged = _REASONING_TAG.split(text)
    said, reasoning = [before], False
    for slash, part in zip(tagged[::2], tagged[1::2], strict=True):
        if slash and not reasoning:  # the prompt may have opened it
            said = []
        reasoning = not slash
        if not reasoning:
            said.append("\n" + part)
    return "".join(said)


def _indexed(text: str, size: int) -> list[float] | None:
    """Return the values of ``params[i]: value``; None where there are none."""
    lines = [[(int(match[1]), float(match[3])) for match in _ASSIGNMENT.finditer(line)] for line in text.splitlines()]
    found = [pair for line in lines for pair in line]
    if not found:
        return None
    indices = [index for index, _ in found]
    if len(set(indices)) < len(indices):
        lists = {tuple(values) for values in _complete_lists(lines, size)}
        if len(lists) == 1:
            return list(lists.pop())
        twice = next(index for index, count in Counter(indices).items() if count > 1)
        raise ProposalError(f"params[{twice}] was given more than once; give every index once.")
    by_index = dict(found)
    unknown = [index for index in indices if index >= size]
    if unknown and len(indices) <= size:
        raise ProposalError(f"params[{unknown[0]}] does not exist; the indices are 0 to {size - 1}.")
    missing = [index for index in range(size) if index not in by_index]
    if missing and len(missing) < size:
        raise ProposalError(
            f"{len(indices)} values were given; there must be {size}, and params[{missing[0]}] is missing."
        )
    return [by_index[index] for index in sorted(by_index)]


def _complete_lists(lines: Sequence[Sequence[tuple[int, float]]], size: int) -> Iterator[list[float]]:
    """Yield the values of lists from 0 to ``size - 1``, each on one or more lines that hold nothing else."""
    for start, first in enumerate(lines):
        if not first or first[0][0] != 0:
            continue
        pairs: list[tuple[int, float]] = []
        for place in range(start, len(lines)):
            line = lines[place]
            if len(pairs) >= size or not (pairs == [] or not line or line[0][0] == len(pairs)):
                break
            pairs.extend(line)
        if [index for index, _ in pairs] == list(range(size)):
            yield [value for _, value in pairs]


def _listed(text: str, size: int) -> list[float]:
    """Return a list of numbers without indices.

    Raises:
        ProposalError: there is none, or there are several different ones.
    """
    found: list[tuple[float, ...]] = []
    for match in _BRACKETED.finditer(text):
        if not match[1]:
            found.append(_numbers(match[2]))
    for line in text.splitlines():
        match = _BARE_LINE.fullmatch(line)
        if match:
            found.append(_numbers(match[1]))
    if not found:
        raise ProposalError("No parameters were found in the reply.")
    fitting = list(dict.fromkeys(values for values in found if len(values) == size))
    if len(fitting) > 1:
        raise ProposalError("Several different lists of parameters were given; give one.")
    return list(fitting[0] if fitting else max(found, key=len))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, re.findall(_NUMBER, text)))

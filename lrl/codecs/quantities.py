"""Names, units and ranges of the numbers of an observation or an action, and their description in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from lrl.codecs.numbers import NUM_BINS, NumberFormat, Range

_NUMBERED = re.compile(r"(.*?)(\d+)")


class Quantity(NamedTuple):
    """Describes one number of an observation or an action."""

    name: str
    unit: str = ""
    """Unit, or what is measured; empty for numbers without unit."""
    range: Range | None = None
    """Values that the number usually takes, which 0 and 999 represent; None selects the bounds of the space."""


def describe_quantities(quantities: Sequence[Quantity], qualifier: str = "") -> str:
    """List names, units and ranges, once for all successive numbers that share unit and range.

    Args:
        quantities: One per number. Numbered names in succession, ``force 0`` to ``force 77``, are abbreviated.
        qualifier: What precedes ranges, such as ``usually``.

    Returns:
        For example ``height (m, from -4 to 4), pitch, thigh (rad, from -4 to 4)``.
    """
    parts: list[tuple[str, str]] = []
    for (unit, limits), group in groupby(quantities, key=lambda one: one[1:]):
        names = ", ".join(_abbreviated([one.name for one in group]))
        span = "" if limits is None else f"{qualifier} from {limits[0]:g} to {limits[1]:g}".strip()
        parts.append((names, ", ".join(filter(None, (unit, span)))))
    if len(parts) == 1 and not parts[0][1]:
        return parts[0][0]
    return ", ".join(f"{names} ({about or 'no unit'})" for names, about in parts)


def _abbreviated(names: list[str]) -> Iterator[str]:
    """Yield names, with ``force 0``, ``force 1`` and ``force 2`` in succession as ``force 0 to 2``."""
    start = 0
    while start < len(names):
        match, count = _NUMBERED.fullmatch(names[start]), 1
        while match and names[start + count : start + count + 1] == [f"{match[1]}{int(match[2]) + count}"]:
            count += 1
        if match is None or count < 3:
            count = 1
            yield names[start]
        else:
            yield f"{names[start]} to {int(match[2]) + count - 1}"
        start += count


def describe_box(
    space: spaces.Box,
    numbers: NumberFormat,
    bounds: tuple[np.ndarray, np.ndarray],
    known: Sequence[Quantity] | None,
    is_action: bool,
) -> str:
    """Describe the numbers of a Box: names, units, ranges, and how each is written.

    Args:
        space: The Box.
        numbers: The format of the numbers.
        bounds: Lower and upper ends of the ranges, each ``(dimension,)``: what 0 and 999 represent.
        known: Names and units; None names dimensions by their position.
        is_action: Whether the numbers are those of an action, which are never normalised.
    """
    low, high = bounds
    known = known or [Quantity(str(number)) for number in range(1, len(low) + 1)]
    limits = [pair if np.isfinite(pair).all() else None for pair in zip(low.tolist(), high.tolist(), strict=True)]
    listed = [one._replace(range=pair) for one, pair in zip(known, limits, strict=True)]
    if numbers.kind == "integers":
        last = NUM_BINS - 1
        form = f"an integer from 0 to {last}, where 0 is the smallest and {last} the largest value of its range"
        return f"{describe_quantities(listed)}, each {form}"
    if numbers.kind == "normalised" and not is_action:
        form = "minus its mean and divided by its standard deviation"
        return f"{describe_quantities([one._replace(range=None) for one in known])}, each {form}"
    are_bounds = np.array_equal(low, space.low.ravel()) and np.array_equal(high, space.high.ravel())
    return f"{describe_quantities(listed, '' if are_bounds else 'usually')}, each a decimal number"

"""Vectors of numbers as text: decimals, or integers from 0 to 999 that stand for a range."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lrl.codecs.codec import InvalidActionError

BINS = 1000
"""Integers that a range is divided into: 0 is its lower end, 999 its upper one."""

_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,2}")

Range = tuple[float, float]
"""Lower and upper end."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """How the numbers of an environment are written; part of the configuration, so that evaluation writes the same."""

    kind: str = "decimals"
    """``decimals``, or ``integers`` from 0 to 999 (one token each in many vocabularies)."""
    precision: int = 3
    """Digits behind the point of decimals."""
    ranges: Sequence[Range] | None = None
    """What 0 and 999 stand for, per observed dimension; null takes what is known of the environment, or its bounds."""
    names: bool = False
    """Whether each number is written behind its dimension's name, where names are known."""

    def __post_init__(self) -> None:
        if self.kind not in ("decimals", "integers"):
            raise ValueError(f"numbers.kind is {self.kind!r}; it must be decimals or integers.")
        if not 0 <= self.precision <= 15:
            raise ValueError(f"numbers.precision is {self.precision}; it must be from 0 to 15.")
        for index, (low, high) in enumerate(self.ranges or ()):
            if not (np.isfinite(low) and np.isfinite(high) and low < high):
                raise ValueError(f"numbers.ranges[{index}] is {(low, high)}; it must be two numbers, least first.")

    def writer(self, low: Any, high: Any, where: str) -> Numbers:
        """What writes vectors of this format.

        Args:
            low: the space's lower bounds, ``(dimension,)``.
            high: its upper bounds.
            where: whose numbers they are, for errors.
        """
        if self.kind == "decimals":
            return Decimals(len(low), self.precision)
        return Integers(low, high, where)


class Numbers(ABC):
    """Writes and reads vectors of one length."""

    size: int

    @abstractmethod
    def write(self, values: Sequence[float]) -> list[str]:
        """One text per number."""

    @abstractmethod
    def read(self, texts: Sequence[str]) -> np.ndarray:
        """The numbers of such texts, float64 ``(dimension,)``.

        Raises:
            InvalidActionError: one is not written that way.
        """


class Decimals(Numbers):
    """``-0.125``: a fixed number of digits behind the point; a round trip is exact to half of the last digit.

    Args:
        size: numbers per vector.
        precision: digits behind the point.
    """

    def __init__(self, size: int, precision: int = 3) -> None:
        self.size, self.precision = size, precision
        self._form = f"%.{precision}f"
        self._zeros = {self._form % -0.0: self._form % 0.0}

    def write(self, values: Sequence[float]) -> list[str]:
        """What is not finite is written ``inf``, ``-inf`` and ``nan``; zero has no sign."""
        form, zeros = self._form, self._zeros
        return [zeros.get(text, text) for text in [form % value for value in values]]

    def read(self, texts: Sequence[str]) -> np.ndarray:
        """Any number of digits will do; what is not finite is refused."""
        for text in texts:
            if not _DECIMAL.fullmatch(text):
                raise InvalidActionError(f"{_shown(text)} is not a decimal number")
        return np.array([float(text) for text in texts])


class Integers(Numbers):
    """``0`` to ``999``: bins of equal width between two ends, written by rounding.

    Between the ends a round trip is exact to half a bin, ``(high - low) / 999 / 2``; beyond them values are clipped.

    Args:
        low: what 0 stands for, ``(dimension,)``.
        high: what 999 stands for.
        where: whose numbers they are, for errors.

    Raises:
        ValueError: a range is not finite.
    """

    def __init__(self, low: Any, high: Any, where: str = "numbers") -> None:
        self.low, self.high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        self.size = len(self.low)
        for index, (least, most) in enumerate(zip(self.low, self.high, strict=True)):
            if not (np.isfinite(least) and np.isfinite(most) and least < most):
                raise ValueError(
                    f"{where}: dimension {index} goes from {least} to {most}, which integers cannot stand for; give "
                    "numbers.ranges, one [low, high] per dimension, or numbers.kind decimals."
                )
        self._scale = (BINS - 1) / (self.high - self.low)

    def write(self, values: Sequence[float]) -> list[str]:
        """``nan`` stays ``nan``."""
        places = np.clip((np.asarray(values, dtype=np.float64) - self.low) * self._scale, 0, BINS - 1)
        return ["nan" if place != place else str(round(place)) for place in places.tolist()]

    def read(self, texts: Sequence[str]) -> np.ndarray:
        """The middle of each bin."""
        for text in texts:
            if not _INTEGER.fullmatch(text):
                raise InvalidActionError(f"{_shown(text)} is not an integer from 0 to {BINS - 1}")
        return self.low + np.array([int(text) for text in texts]) / self._scale


def split(text: str, size: int) -> list[str]:
    """The parts of a comma-separated text, blanks around them left out.

    Raises:
        InvalidActionError: there are not ``size`` of them.
    """
    parts = [part.strip(" ") for part in text.split(",")]
    if len(parts) != size:
        raise InvalidActionError(f"there must be {size} numbers separated by commas, not {len(parts)}")
    return parts


def _shown(text: str) -> str:
    return repr(text[:20])

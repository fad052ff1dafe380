"""Vectors of numbers as text: decimals, or integers from 0 to 999 that stand for a range."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from lrl.codecs.codec import InvalidActionError

BINS = 1000
"""Integers that a range is divided into: 0 is its lower end, 999 its upper one."""

_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_WHOLE_DECIMAL = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,15})?")
"""64 bits take 20 digits."""
_INTEGER = re.compile(r"0|[1-9][0-9]{0,2}")

Range = tuple[float, float]
"""Lower and upper end."""

Ranges = Sequence[Range] | Mapping[str, Sequence[Range]]
"""One per dimension of a Box, or of each Box of a Dict or Tuple by its key."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """How the numbers of an environment are written; part of the configuration, so that evaluation writes the same."""

    kind: str = "decimals"
    """``decimals``, or ``integers`` from 0 to 999 (one token each in many vocabularies)."""
    precision: int = 3
    """Digits behind the point of decimals."""
    ranges: Ranges | None = None
    """What 0 and 999 stand for, per observed dimension: a list of ``[low, high]``, and for a Dict or Tuple one list per
    key (``position: [[-1, 1], [0, 5]]``). A list of one is for all dimensions. Null, or a key that is left out, takes
    what is known of the environment, or its bounds."""
    names: bool = False
    """Whether each number is written behind its dimension's name, where names are known."""

    def __post_init__(self) -> None:
        if self.kind not in ("decimals", "integers"):
            raise ValueError(f"numbers.kind is {self.kind!r}; it must be decimals or integers.")
        if not 0 <= self.precision <= 15:
            raise ValueError(f"numbers.precision is {self.precision}; it must be from 0 to 15.")
        for name, low, high in self._named_ranges():
            if not _is_range(low, high):
                raise ValueError(
                    f"numbers.{name} is {(low, high)}; it must be two numbers, least first, a finite width apart."
                )

    def _named_ranges(self) -> Iterator[tuple[str, float, float]]:
        lists = self.ranges if isinstance(self.ranges, Mapping) else {"": self.ranges or ()}
        for key, ranges in lists.items():
            for index, (low, high) in enumerate(ranges):
                yield f"ranges{key and '.'}{key}[{index}]", low, high

    def writer(self, low: Any, high: Any, where: str, whole: bool = False) -> Numbers:
        """What writes vectors of this format.

        Args:
            low: the space's lower bounds, ``(dimension,)``.
            high: its upper bounds.
            where: whose numbers they are, for errors.
            whole: whether all numbers are integers.
        """
        if self.kind == "decimals":
            return (WholeDecimals if whole else Decimals)(len(low), self.precision)
        return (WholeIntegers if whole else Integers)(low, high, where)


class Numbers(ABC):
    """Writes and reads vectors of one length."""

    size: int

    @abstractmethod
    def write(self, values: Sequence[float]) -> list[str]:
        """One text per number."""

    @abstractmethod
    def read(self, texts: Sequence[str]) -> np.ndarray:
        """The numbers of such texts, ``(dimension,)``: float64, or Python's integers where all are whole.

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


class WholeDecimals(Decimals):
    """Decimals that are all integers, up to 64 bits: written and read exactly, which float64 could not."""

    def write(self, values: Sequence[float]) -> list[str]:
        """With zeros behind the point."""
        zeros = (self._form % 0)[1:]
        return [f"{value}{zeros}" if isinstance(value, int) else self._form % value for value in values]

    def read(self, texts: Sequence[str]) -> np.ndarray:
        """What is not an integer is rounded, half to even."""
        for text in texts:
            if not _WHOLE_DECIMAL.fullmatch(text):
                raise InvalidActionError(f"{_shown(text)} is not a decimal number")
        return np.array([round(Fraction(text)) for text in texts], dtype=object)


class Integers(Numbers):
    """``0`` to ``999``: bins of equal width between two ends, written by rounding.

    Between the ends a round trip is exact to half a bin, ``(high - low) / 999 / 2``; beyond them values are clipped.

    Args:
        low: what 0 stands for, ``(dimension,)``.
        high: what 999 stands for.
        where: whose numbers they are, for errors.

    Raises:
        ValueError: a range is not finite, or so wide that its width is not.
    """

    def __init__(self, low: Any, high: Any, where: str = "numbers") -> None:
        self.low, self.high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        self.size = len(self.low)
        for index, (least, most) in enumerate(self._ends(low, high)):
            if not _is_range(least, most):
                raise ValueError(
                    f"{where}: dimension {index} goes from {least} to {most}, which integers cannot stand for; "
                    f"{_remedy(where)}."
                )

    @staticmethod
    def _ends(low: Any, high: Any) -> list[Range]:
        """Both ends of each dimension as Python's numbers, which hold 64-bit integers exactly."""
        return list(zip(np.asarray(low).tolist(), np.asarray(high).tolist(), strict=True))

    def write(self, values: Sequence[float]) -> list[str]:
        """``nan`` stays ``nan``."""
        places = np.clip(self._places(values), 0, BINS - 1)
        return ["nan" if place != place else str(round(place)) for place in places.tolist()]

    def _places(self, values: Sequence[float]) -> np.ndarray:
        """Where numbers lie on the scale from 0 to 999, not rounded, float64 ``(dimension,)``."""
        return (np.asarray(values, dtype=np.float64) - self.low) * self._scale

    @cached_property
    def _scale(self) -> np.ndarray:
        return (BINS - 1) / (self.high - self.low)

    def read(self, texts: Sequence[str]) -> np.ndarray:
        """The middle of each bin; 0 and 999 are the ends themselves, which rounding must not carry out of a space."""
        share = np.array(self._bins(texts)) / (BINS - 1)
        return self.low * (1 - share) + self.high * share

    @staticmethod
    def _bins(texts: Sequence[str]) -> list[int]:
        for text in texts:
            if not _INTEGER.fullmatch(text):
                raise InvalidActionError(f"{_shown(text)} is not an integer from 0 to {BINS - 1}")
        return [int(text) for text in texts]


class WholeIntegers(Integers):
    """``0`` to ``999`` for numbers that are all integers: computed exactly, which float64 could not up to 64 bits.

    A round trip gives back the very number where the range is at most 999 wide.

    Args:
        low: what 0 stands for, ``(dimension,)``.
        high: what 999 stands for.
        where: whose numbers they are, for errors.
    """

    def __init__(self, low: Any, high: Any, where: str = "numbers") -> None:
        super().__init__(low, high, where)
        self._exact = self._ends(low, high)

    def _places(self, values: Sequence[float]) -> np.ndarray:
        pairs = zip(values, self._exact, strict=True)
        return np.array([(value - low) * (BINS - 1) / (high - low) for value, (low, high) in pairs], dtype=np.float64)

    def read(self, texts: Sequence[str]) -> np.ndarray:
        """The integer nearest to the middle of each bin."""
        pairs = zip(self._bins(texts), self._exact, strict=True)
        middles = [Fraction(low) + (Fraction(high) - Fraction(low)) * bin / (BINS - 1) for bin, (low, high) in pairs]
        return np.array([round(middle) for middle in middles], dtype=object)


def split(text: str, size: int) -> list[str]:
    """The parts of a comma-separated text, blanks around them left out.

    Raises:
        InvalidActionError: there are not ``size`` of them.
    """
    parts = [part.strip(" ") for part in text.split(",")]
    if len(parts) != size:
        raise InvalidActionError(f"there must be {size} numbers separated by commas, not {len(parts)}")
    return parts


def _is_range(low: float, high: float) -> bool:
    """Whether both ends are numbers, the least first, and no further apart than the largest number."""
    return low < high and math.isfinite(float(high) - float(low))


def _remedy(where: str) -> str:
    """What to do about a dimension that integers cannot stand for."""
    if where.startswith("action"):
        return "numbers.kind must be decimals"
    key = where.partition(" ")[2]
    ranges = f"{{{key}: one [low, high] per dimension}}" if key else "one [low, high] per dimension"
    return f"give numbers.ranges, {ranges}, or numbers.kind decimals"


def _shown(text: str) -> str:
    return repr(text[:20])

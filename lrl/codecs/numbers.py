"""Text formats of number vectors: decimals, or integers from 0 to 999 that divide a range into bins."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from lrl.codecs.codec import InvalidActionError

NUM_BINS = 1000
"""Number of bins of a range: 0 represents its lower bound, 999 its upper bound."""

_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_EXACT_DECIMAL = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,15})?")
"""Allows 20 digits, because 64-bit integers have up to 20."""
_BIN = re.compile(r"0|[1-9][0-9]{0,2}")

Range = tuple[float, float]
"""Lower and upper bound."""

Ranges = Sequence[Range] | Mapping[str, Sequence[Range]]
"""One range per dimension of a Box, or a list of ranges per Box of a Dict or Tuple, by path."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Configures how the numbers of an environment are written. Evaluation reads it from the run's configuration."""

    kind: str = "decimals"
    """``decimals``, or ``integers`` from 0 to 999 (a single token each in many vocabularies)."""
    precision: int = 3
    """Number of digits after the decimal point of decimals."""
    ranges: Ranges | None = None
    """Values that 0 and 999 represent, per observed dimension: a list of ``[low, high]``, or for a Dict or Tuple one
    list per key (``position: [[-1, 1], [0, 5]]``). A list of one applies to all dimensions. Null, or a missing key,
    selects the known ranges of the environment, or the bounds of its space."""
    names: bool = False
    """Whether each number follows the name of its dimension, for environments with known names."""

    def __post_init__(self) -> None:
        if self.kind not in ("decimals", "integers"):
            raise ValueError(f"numbers.kind is {self.kind!r}; it must be decimals or integers.")
        if not 0 <= self.precision <= 15:
            raise ValueError(f"numbers.precision is {self.precision}; it must be from 0 to 15.")
        for name, low, high in self._named_ranges():
            if not _is_valid_range(low, high):
                raise ValueError(
                    f"numbers.{name} is {(low, high)}; it must be [low, high] with low < high and a finite width."
                )

    def _named_ranges(self) -> Iterator[tuple[str, float, float]]:
        lists = self.ranges if isinstance(self.ranges, Mapping) else {"": self.ranges or ()}
        for key, ranges in lists.items():
            for index, (low, high) in enumerate(ranges):
                yield f"ranges{key and '.'}{key}[{index}]", low, high

    def codec(self, low: ArrayLike, high: ArrayLike, role: str, integer: bool = False) -> NumberCodec:
        """Create the codec for vectors of numbers with given bounds.

        Args:
            low: Lower bounds, ``(dimension,)``.
            high: Upper bounds, ``(dimension,)``.
            role: ``observation`` or ``action``, for error messages.
            integer: Whether the numbers have an integer dtype.

        Raises:
            ValueError: If integers are selected for bounds that are not finite.
        """
        if self.kind == "decimals":
            return (ExactDecimalCodec if integer else DecimalCodec)(len(np.asarray(low)), self.precision)
        return (ExactBinCodec if integer else BinCodec)(low, high, role)


class NumberCodec(ABC):
    """Abstract base class that converts vectors of ``size`` numbers to texts and back."""

    size: int

    @abstractmethod
    def encode(self, values: Sequence[float]) -> list[str]:
        """Convert each number to text.

        Args:
            values: The numbers, ``(dimension,)``.

        Returns:
            One text per number.
        """

    @abstractmethod
    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Parse one number per text.

        Returns:
            The numbers, ``(dimension,)``: float64, or Python integers (dtype object) for exact codecs.

        Raises:
            InvalidActionError: If a text is not a number in this format.
        """


class DecimalCodec(NumberCodec):
    """Writes decimals such as ``-0.125``. A round trip is exact to half of the last digit.

    Args:
        size: The number of dimensions.
        precision: The number of digits after the decimal point.
    """

    def __init__(self, size: int, precision: int = 3) -> None:
        self.size, self.precision = size, precision
        self._form = f"%.{precision}f"
        self._zeros = {self._form % -0.0: self._form % 0.0}

    def encode(self, values: Sequence[float]) -> list[str]:
        """Write each number; non-finite ones as ``inf``, ``-inf`` or ``nan``, and zero without a sign."""
        form, zeros = self._form, self._zeros
        return [zeros.get(text, text) for text in [form % value for value in values]]

    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Parse finite decimals with any number of digits; float64 ``(dimension,)``."""
        return np.array([float(text) for text in _matched(_DECIMAL, texts)])


class ExactDecimalCodec(DecimalCodec):
    """Writes integers of up to 64 bits as decimals, exactly, which float64 cannot represent."""

    def encode(self, values: Sequence[float]) -> list[str]:
        """Write each integer with zeros after the decimal point."""
        zeros = (self._form % 0)[1:]
        return [f"{value}{zeros}" if isinstance(value, int) else self._form % value for value in values]

    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Parse decimals and round them half to even; Python integers ``(dimension,)``."""
        return np.array([round(Fraction(text)) for text in _matched(_EXACT_DECIMAL, texts)], dtype=object)


class BinCodec(NumberCodec):
    """Writes the nearest of 1000 equidistant values between two bounds as an integer from ``0`` to ``999``.

    A round trip is exact to half a bin, ``(high - low) / 999 / 2``. Values out of bounds are clipped.

    Args:
        low: Values that 0 represents, ``(dimension,)``.
        high: Values that 999 represents, ``(dimension,)``.
        role: ``observation`` or ``action``, for error messages.

    Raises:
        ValueError: If a range or its width is not finite.
    """

    def __init__(self, low: ArrayLike, high: ArrayLike, role: str = "numbers") -> None:
        self.low, self.high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        self.size = len(self.low)
        # Python numbers represent 64-bit bounds exactly.
        self._ranges: list[Range] = list(zip(np.asarray(low).tolist(), np.asarray(high).tolist(), strict=True))
        for index, (least, most) in enumerate(self._ranges):
            if not _is_valid_range(least, most):
                raise ValueError(
                    f"{role}: dimension {index} goes from {least} to {most}, which integers cannot represent; "
                    f"{_suggestion(role)}."
                )

    def encode(self, values: Sequence[float]) -> list[str]:
        """Write the bin of each number; NaN is written as ``nan``."""
        positions = np.clip(self._positions(values), 0, NUM_BINS - 1)
        return ["nan" if math.isnan(position) else str(round(position)) for position in positions.tolist()]

    def _positions(self, values: Sequence[float]) -> np.ndarray:
        """Return the positions of numbers on the scale from 0 to 999, not rounded, float64 ``(dimension,)``."""
        return (np.asarray(values, dtype=np.float64) - self.low) * self._scale

    @cached_property
    def _scale(self) -> np.ndarray:
        return (NUM_BINS - 1) / (self.high - self.low)

    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the values that bins represent; float64 ``(dimension,)``.

        The weighted sum returns the bounds themselves for 0 and 999, without rounding errors that would leave a Box.
        """
        weight = np.array(self._bins(texts)) / (NUM_BINS - 1)
        return self.low * (1 - weight) + self.high * weight

    @staticmethod
    def _bins(texts: Sequence[str]) -> list[int]:
        for text in texts:
            if not _BIN.fullmatch(text):
                raise InvalidActionError(f"{text[:20]!r} is not an integer from 0 to {NUM_BINS - 1}")
        return [int(text) for text in texts]


class ExactBinCodec(BinCodec):
    """A :class:`BinCodec` for integers of up to 64 bits, computed exactly, which float64 could not.

    A round trip is exact if the range is at most 999 wide.
    """

    def _positions(self, values: Sequence[float]) -> np.ndarray:
        pairs = zip(values, self._ranges, strict=True)
        return np.array(
            [(value - low) * (NUM_BINS - 1) / (high - low) for value, (low, high) in pairs], dtype=np.float64
        )

    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the integers nearest to the values that bins represent; Python integers ``(dimension,)``."""
        pairs = zip(self._bins(texts), self._ranges, strict=True)
        values = [Fraction(low) + (Fraction(high) - Fraction(low)) * bin / (NUM_BINS - 1) for bin, (low, high) in pairs]
        return np.array([round(value) for value in values], dtype=object)


def split_numbers(text: str, size: int) -> list[str]:
    """Split a comma-separated text and strip blanks.

    Raises:
        InvalidActionError: If there are not ``size`` items.
    """
    items = [item.strip(" ") for item in text.split(",")]
    if len(items) != size:
        raise InvalidActionError(f"there must be {size} numbers separated by commas, not {len(items)}")
    return items


def _matched(pattern: re.Pattern[str], texts: Sequence[str]) -> Sequence[str]:
    for text in texts:
        if not pattern.fullmatch(text):
            raise InvalidActionError(f"{text[:20]!r} is not a decimal number")
    return texts


def _is_valid_range(low: float, high: float) -> bool:
    return low < high and math.isfinite(float(high) - float(low))


def _suggestion(role: str) -> str:
    """Return how to configure a dimension that integers cannot represent."""
    if role.startswith("action"):
        return "numbers.kind must be decimals"
    path = role.partition(" ")[2]
    ranges = f"{{{path}: one [low, high] per dimension}}" if path else "one [low, high] per dimension"
    return f"set numbers.ranges to {ranges}, or numbers.kind to decimals"

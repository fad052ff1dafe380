"""Text formats of number vectors: decimals, normalised decimals, or integers from 0 to 999 that divide a range."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import ArrayLike

from lrl.codecs.codec import InvalidActionError
from lrl.ranges import check_fields, check_finite

NUM_BINS = 1000
"""Number of bins of a range: 0 represents its lower bound, 999 its upper bound."""

_CLIP = 10.0
"""Number of standard deviations that normalised numbers are clipped to."""

_DECIMAL = re.compile(r"-?[0-9]{1,309}(\.[0-9]{1,15})?")
"""Allows 309 digits, which the largest number of 64 bits has."""
_PLAIN_DECIMAL = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,15})?")
"""Matches a number that :func:`plain_numbers` leaves unchanged."""
_BIN = re.compile(r"0|[1-9][0-9]{0,2}")
_DIGITS = 15
"""Maximum number of digits after the decimal point that codecs read."""

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?![\w.])")
"""Matches a number in the notation of programming languages."""

Range = tuple[float, float]
"""Lower and upper bound."""


class NumberCodec(ABC):
    """Abstract base class that converts vectors of numbers to texts and back."""

    size: int
    """Length of the vectors."""

    @abstractmethod
    def encode(self, values: Sequence[float]) -> list[str]:
        """Convert each number to text.

        Args:
            values: the numbers, ``(dimension,)``.

        Returns:
            One text per number.
        """

    @abstractmethod
    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Parse one number per text.

        Returns:
            The numbers, float64 ``(dimension,)``.

        Raises:
            InvalidActionError: If a text is not a number in this format.
        """


class DecimalCodec(NumberCodec):
    """Writes decimals such as ``-0.125``. A round trip is exact to half of the last digit, up to numbers of 2**53.

    Args:
        size: the number of dimensions.
        precision: the number of digits after the decimal point.
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
        """Parse finite decimals with any number of digits; float64 ``(dimension,)``.

        Raises:
            InvalidActionError: If a text is not a decimal number, or the number is too large for 64 bits.
        """
        for text in texts:
            if not _DECIMAL.fullmatch(text):
                raise InvalidActionError(f"{text[:20]!r} is not a decimal number")
        numbers = [float(text) for text in texts]
        for number, text in zip(numbers, texts, strict=True):
            if math.isinf(number):
                raise InvalidActionError(f"{text[:20]!r}.. is beyond the largest number of 64 bits")
        return np.array(numbers)


class NormalisedCodec(DecimalCodec):
    """Writes decimals minus their mean and divided by their standard deviation, clipped to 10 deviations.

    Args:
        mean: the mean of each dimension, ``(dimension,)``.
        deviation: the standard deviation of each dimension, ``(dimension,)``.
        precision: the number of digits after the decimal point.
    """

    def __init__(self, mean: ArrayLike, deviation: ArrayLike, precision: int = 3) -> None:
        self.mean, self.deviation = np.asarray(mean, dtype=np.float64), np.asarray(deviation, dtype=np.float64)
        super().__init__(len(self.mean), precision)

    def encode(self, values: Sequence[float]) -> list[str]:
        """Normalise and write each number; NaN is written as ``nan``."""
        normalised = (np.asarray(values, dtype=np.float64) - self.mean) / self.deviation
        return super().encode(np.clip(normalised, -_CLIP, _CLIP).tolist())

    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the numbers whose normalised values are given; float64 ``(dimension,)``."""
        return super().decode(texts) * self.deviation + self.mean


class BinCodec(NumberCodec):
    """Writes the nearest of 1000 equidistant values between two bounds as an integer from ``0`` to ``999``.

    A round trip is exact to half a bin, ``(high - low) / 999 / 2``. Values out of bounds are clipped.

    Args:
        low: values that 0 represents, ``(dimension,)``.
        high: values that 999 represents, ``(dimension,)``.
        role: ``observation`` or ``action``, for error messages.
        integer: whether the numbers are integers.

    Raises:
        ValueError: If a range or its width is not finite.
    """

    def __init__(self, low: ArrayLike, high: ArrayLike, role: str = "numbers", integer: bool = False) -> None:
        self.low, self.high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        self.size, self._integer = len(self.low), integer
        for index, (least, most) in enumerate(zip(self.low.tolist(), self.high.tolist(), strict=True)):
            if not is_valid_range(least, most):
                raise ValueError(
                    f"{role}: dimension {index} goes from {least} to {most}, which integers cannot represent; "
                    f"{_suggestion(role)}."
                )

    def encode(self, values: Sequence[float]) -> list[str]:
        """Write the bin of each number; NaN is written as ``nan``."""
        distance = np.asarray(values, dtype=np.float64) - self.low
        # The quotient of integers is exact in the middle between two bins, which is rounded to the even one.
        positions = distance * (NUM_BINS - 1) / (self.high - self.low) if self._integer else distance * self._scale
        positions = np.clip(positions, 0, NUM_BINS - 1)
        return ["nan" if math.isnan(position) else str(round(position)) for position in positions.tolist()]

    @cached_property
    def _scale(self) -> np.ndarray:
        return (NUM_BINS - 1) / (self.high - self.low)

    def decode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the values that bins represent; float64 ``(dimension,)``.

        The weighted sum returns the bounds themselves for 0 and 999, without rounding errors that would leave a Box.

        Raises:
            InvalidActionError: If a text is not an integer from 0 to 999.
        """
        for text in texts:
            if not _BIN.fullmatch(text):
                raise InvalidActionError(f"{text[:20]!r} is not an integer from 0 to {NUM_BINS - 1}")
        bins = np.array([int(text) for text in texts], dtype=np.int64)
        if self._integer:  # a sum of integers is exact, also where float64 has no fractions
            offset = np.rint((self.high - self.low) * bins / (NUM_BINS - 1))
            return np.where(bins == NUM_BINS - 1, self.high, np.minimum(self.low + offset, self.high))
        weight = bins / (NUM_BINS - 1)
        return self.low * (1 - weight) + self.high * weight


def plain_numbers(text: str) -> str:
    """Rewrite each number in a text without plus sign or exponent, with at most 15 digits after the point."""
    return NUMBER.sub(lambda found: _plain_number(found[0]), text)


def _plain_number(number: str) -> str:
    if _PLAIN_DECIMAL.fullmatch(number):
        return number
    value = float(number)
    return f"{value:.{_DIGITS}f}".rstrip("0").rstrip(".") if math.isfinite(value) else number


def split_numbers(text: str, size: int, separator: str = ",") -> list[str]:
    """Split a text into items, and strip blanks from each.

    Args:
        text: the text.
        size: required number of items.
        separator: text between two items.

    Raises:
        InvalidActionError: If there are not ``size`` items.
    """
    items = [item.strip(" ") for item in text.split(separator)]
    if len(items) != size:
        form = "numbers separated by commas" if separator == "," else "lines"
        raise InvalidActionError(f"there must be {size} {form}, not {len(items)}")
    return items


def _is_real(value: Any) -> bool:
    """Return whether a value is a real number and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_valid_range(low: float, high: float) -> bool:
    """Return whether integers can represent the numbers from ``low`` to ``high``: the range is finite, not empty."""
    return low < high and math.isfinite(float(high) - float(low))


def _suggestion(role: str) -> str:
    """Return how to configure a dimension that integers cannot represent."""
    if role.startswith("action"):
        return "numbers.kind must be decimals"
    path = role.partition(" ")[2]
    ranges = f"{{{path}: one [low, high] per dimension}}" if path else "one [low, high] per dimension"
    return f"set numbers.ranges to {ranges}, or numbers.kind to decimals"


Ranges = Sequence[Range] | Mapping[str, Sequence[Range]]
"""One range per dimension of a Box, or a list of ranges per Box of a Dict or Tuple, by path."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Configures how the numbers of an environment are written. Evaluation reads it from the run's configuration."""

    kind: Literal["decimals", "integers", "normalised"] = "decimals"
    """``decimals``, ``integers`` from 0 to 999 (a single token each in many vocabularies), or ``normalised``: decimals
    minus their mean and divided by their standard deviation. Actions are not normalised, but plain decimals."""
    precision: int = 3
    """Number of digits after the decimal point of decimals."""
    ranges: Ranges | None = None
    """Values that 0 and 999 represent, per observed dimension: a list of ``[low, high]``, or for a Dict or Tuple one
    list per key (``position: [[-1, 1], [0, 5]]``). A list of one applies to all dimensions. Null, or a missing key,
    selects the known ranges of the environment, or the bounds of its space."""
    statistics: Ranges | None = None
    """Mean and standard deviation of normalised numbers, given like ``ranges``, ``[mean, deviation]`` per observed
    dimension. They are fixed for a run and saved with it. ``lrl collect --statistics`` prints the statistics of a data
    set."""
    names: bool = False
    """Whether each observed number follows the name of its dimension, for environments with known names."""
    action_names: bool = False
    """Whether each number of an action follows the name of its dimension, as in ``back thigh 512,back shin 3``, for
    environments with known names. A small model that writes only numbers may write too many or too few of them."""
    tags: bool = True
    """Whether the numbers of an observation are enclosed in ``<observation></observation>``, unless ``names`` is set.
    Tags can double the number of tokens of an observation, for example of CartPole."""
    describe: bool = False
    """Whether the system message lists the numbers with their ranges, and with names and units if these are known. For
    integers, the ranges are the values that 0 and 999 represent."""

    def __post_init__(self) -> None:
        check_fields(self, "numbers")
        for name in ("names", "action_names", "tags", "describe"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"numbers.{name} is {getattr(self, name)!r}; it must be true or false.")
        if type(self.precision) is not int or not 0 <= self.precision <= 15:
            raise ValueError(f"numbers.precision is {self.precision!r}; it must be an integer from 0 to 15.")
        unused = "ranges" if self.kind == "normalised" else "statistics"
        if getattr(self, unused) is not None:
            raise ValueError(f"numbers.{unused} is set, but numbers.kind is {self.kind!r}; it must be null.")
        self._check_pairs("statistics" if self.kind == "normalised" else "ranges")

    @classmethod
    def parse(cls, text: str) -> NumberFormat:
        """Parse a kind or a YAML mapping of these fields.

        Raises:
            ValueError: If the text is neither, or if a value is out of range.
        """
        try:
            given = yaml.safe_load(text)
            settings: Any = {"kind": given} if isinstance(given, str) else given
            return cls(**settings)
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(
                f"numbers is {text!r}; it must be decimals, integers, or a mapping of keys of env.numbers such as "
                "'{kind: decimals, precision: 5}'."
            ) from error

    @property
    def pairs_key(self) -> str:
        """Configuration key of the pairs of numbers per dimension: ranges, or statistics of normalised numbers."""
        return "numbers.statistics" if self.kind == "normalised" else "numbers.ranges"

    def _check_pairs(self, field: str) -> None:
        """Raise if an entry of ``ranges`` or ``statistics`` is not a pair of suitable numbers."""
        given: Ranges | None = getattr(self, field)
        form = "[low, high] with low < high and a finite width"
        if field == "statistics":
            form = "[mean, deviation] with a positive deviation"
        for key, pairs in (given if isinstance(given, Mapping) else {"": given or ()}).items():
            for index, pair in enumerate(pairs):
                name = f"numbers.{field}{key and '.'}{key}[{index}]"
                if not (isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_real, pair))):
                    raise ValueError(f"{name} is {pair!r}; it must be two numbers.")
                first, second = pair
                is_deviation = math.isfinite(first) and 0 < second < math.inf
                if not (is_deviation if field == "statistics" else is_valid_range(first, second)):
                    raise ValueError(f"{name} is {(first, second)}; it must be {form}.")
                for number in pair:
                    check_finite(name, number)

    def codec(self, low: ArrayLike, high: ArrayLike, role: str, integer: bool = False) -> NumberCodec:
        """Create the codec for vectors of numbers with given bounds.

        Args:
            low: lower bounds, ``(dimension,)``.
            high: upper bounds, ``(dimension,)``.
            role: ``observation`` or ``action``, for error messages.
            integer: whether the numbers have an integer dtype.

        Raises:
            ValueError: If integers are selected for bounds that are not finite.
        """
        if self.kind == "integers":
            return BinCodec(low, high, role, integer)
        return DecimalCodec(len(np.asarray(low)), self.precision)

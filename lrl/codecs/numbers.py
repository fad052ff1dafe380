"""Configuration of how numbers are written: as decimals, normalised decimals, or integers from 0 to 999."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import yaml
from numpy.typing import ArrayLike

from lrl.codecs.number_codecs import (
    BinCodec,
    DecimalCodec,
    ExactBinCodec,
    ExactDecimalCodec,
    NumberCodec,
    Range,
    is_valid_range,
)

Ranges = Sequence[Range] | Mapping[str, Sequence[Range]]
"""One range per dimension of a Box, or a list of ranges per Box of a Dict or Tuple, by path."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Configures how the numbers of an environment are written. Evaluation reads it from the run's configuration."""

    kind: str = "decimals"
    """``decimals``, ``integers`` from 0 to 999 (a single token each in many vocabularies), or ``normalised``: decimals
    minus their mean and divided by their standard deviation. Actions are normalised by none: they are plain decimals.
    """
    precision: int = 3
    """Number of digits after the decimal point of decimals."""
    ranges: Ranges | None = None
    """Values that 0 and 999 represent, per observed dimension: a list of ``[low, high]``, or for a Dict or Tuple one
    list per key (``position: [[-1, 1], [0, 5]]``). A list of one applies to all dimensions. Null, or a missing key,
    selects the known ranges of the environment, or the bounds of its space."""
    statistics: Ranges | None = None
    """Mean and standard deviation of normalised numbers, given like ``ranges``, ``[mean, deviation]`` per observed
    dimension. They are fixed for a run and saved with it; ``collect.py --statistics`` prints those of a data set."""
    names: bool = False
    """Whether each observed number follows the name of its dimension, for environments with known names."""
    action_names: bool = False
    """Whether each number of an action follows the name of its dimension, as in ``back thigh 512,back shin 3``, for
    environments with known names. A small model that writes numbers alone may lose count of them."""
    tags: bool = True
    """Whether the numbers of an observation are enclosed in ``<observation></observation>``. With ``names`` they never
    are. A short prompt is cheap: with tags, an observation of CartPole may have twice as many tokens."""
    describe: bool = False
    """Whether the system message lists the numbers, with names and units where they are known, and what they range
    over: for integers the values that 0 and 999 represent."""

    def __post_init__(self) -> None:
        if self.kind not in ("decimals", "integers", "normalised"):
            raise ValueError(f"numbers.kind is {self.kind!r}; it must be decimals, integers or normalised.")
        for name in ("names", "action_names", "tags", "describe"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"numbers.{name} is {getattr(self, name)!r}; it must be true or false.")
        if type(self.precision) is not int or not 0 <= self.precision <= 15:
            raise ValueError(f"numbers.precision is {self.precision!r}; it must be an integer from 0 to 15.")
        unused = "ranges" if self.kind == "normalised" else "statistics"
        if getattr(self, unused) is not None:
            raise ValueError(f"numbers.{unused} is set, but numbers.kind is {self.kind!r}; it must be null.")
        for name, mean, deviation in self._named_pairs("statistics"):
            if not (math.isfinite(mean) and 0 < deviation < math.inf):
                raise ValueError(
                    f"numbers.{name} is {(mean, deviation)}; it must be [mean, deviation] with a positive deviation."
                )
        for name, low, high in self._named_pairs("ranges"):
            if not is_valid_range(low, high):
                raise ValueError(
                    f"numbers.{name} is {(low, high)}; it must be [low, high] with low < high and a finite width."
                )

    @classmethod
    def parse(cls, text: str) -> NumberFormat:
        """Return the format that a command line names: a kind, or a YAML mapping of these fields.

        Raises:
            ValueError: it is neither, or a value is out of its range.
        """
        try:
            given = yaml.safe_load(text)
            return cls(kind=given) if isinstance(given, str) else cls(**given)
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(
                f"--numbers is {text!r}; it must be decimals, integers, or a mapping of keys of env.numbers such as "
                "'{kind: decimals, precision: 5}'."
            ) from error

    @property
    def pairs_key(self) -> str:
        """Configuration key of what is given per dimension: ranges, or the statistics of normalised numbers."""
        return "numbers.statistics" if self.kind == "normalised" else "numbers.ranges"

    def _named_pairs(self, field: str) -> Iterator[tuple[str, float, float]]:
        """Yield the key and both numbers of each entry of ``ranges`` or ``statistics``."""
        given: Ranges | None = getattr(self, field)
        lists = given if isinstance(given, Mapping) else {"": given or ()}
        for key, pairs in lists.items():
            for index, pair in enumerate(pairs):
                if not (isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(x, Real) for x in pair)):
                    raise ValueError(f"numbers.{field}{key and '.'}{key}[{index}] is {pair!r}; it must be two numbers.")
                first, second = pair
                yield f"{field}{key and '.'}{key}[{index}]", first, second

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
        if self.kind != "integers":
            return (ExactDecimalCodec if integer else DecimalCodec)(len(np.asarray(low)), self.precision)
        return (ExactBinCodec if integer else BinCodec)(low, high, role)

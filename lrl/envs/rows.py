"""Interface of the data sets behind one-turn environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lrl.codecs.codec import TextCodec
from lrl.rewards.row import Row


class RowSource(ABC):
    """Abstract base class of data sets of states with expert values."""

    @property
    @abstractmethod
    def codec(self) -> TextCodec:
        """Codec of the environment that the states belong to."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return all rows, in the same order at each call."""

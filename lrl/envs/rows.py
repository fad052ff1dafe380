"""Where the rows of a one-turn environment come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lrl.codecs.codec import TextCodec
from lrl.rewards.row import Row


class RowSource(ABC):
    """A data set of states with expert values."""

    @property
    @abstractmethod
    def codec(self) -> TextCodec:
        """The text of the environment that the states are from."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """All rows, in an order that does not change from call to call."""

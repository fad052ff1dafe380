"""Interface of the data sets behind one-turn environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import gymnasium as gym

from lrl.codecs.codec import TextCodec
from lrl.envs.factory import EnvFactory
from lrl.rewards.row import Row


class RowSource(ABC):
    """Abstract base class of data sets of states with an expert's actions, and maybe its values."""

    @property
    @abstractmethod
    def codec(self) -> TextCodec:
        """Codec of the environment that the states belong to."""

    @property
    def spaces(self) -> tuple[gym.Space, gym.Space] | None:
        """Native observation and action space; None if the rows hold texts only, which networks cannot read."""
        return None

    def prepare_data(self) -> None:  # noqa: B027 (most sources have nothing to download)
        """Download the data set if needed. Called once per machine, before all else; :meth:`rows` reports failures."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return all rows, in the same order at each call; a large data set returns a lazy sequence."""


class EnvRows(RowSource):
    """Abstract base class of data sets that were recorded in an environment, whose codec and spaces they have."""

    env: EnvFactory
    """The environment."""

    @property
    def codec(self) -> TextCodec:
        """Codec of the environment."""
        return self.env.codec

    @cached_property
    def spaces(self) -> tuple[gym.Space, gym.Space]:
        """Native observation and action space of the environment."""
        return self.env.spaces


class EpisodeRows(Sequence[Row]):
    """Abstract lazy sequence of rows that are steps of recorded episodes."""

    @abstractmethod
    def past_turns(self, index: int, length: int) -> tuple[tuple[str, str], ...]:
        """Return the turns before a row in its episode, oldest first.

        Args:
            index: Index of the row.
            length: Maximum number of turns.

        Returns:
            The texts of observation and action of each turn.
        """

"""Base class of reward functions that ask a network which was trained on a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.rewards.reward import NativeAction, Reward
from lrl.rewards.row import Row


class NetworkReward(Reward):
    """Abstract base class of rewards that a network computes from the native observation and the native action.

    Args:
        path: Run directory or checkpoint of the network.
        weight: Factor of this function in the sum.
    """

    def __init__(self, path: str, weight: float) -> None:
        super().__init__(weight)
        self.path = path

    @property
    @abstractmethod
    def invalid_reward(self) -> float:
        """Reward of an invalid response."""

    @abstractmethod
    def load(self, codec: TextCodec) -> None:
        """Load the network for the environment of a codec.

        Raises:
            ValueError: the checkpoint is damaged or of something else, or the environment does not fit it.
        """

    @abstractmethod
    def predict(self, observations: Sequence[Any], actions: Sequence[Any]) -> np.ndarray:
        """Return the rewards of native actions in native observations, float64 ``(row,)``, in one forward pass.

        Raises:
            ValueError: observations or actions do not fit the network.
        """

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Load the network, and raise if it cannot reward actions in this row.

        Raises:
            ValueError: the checkpoint is damaged or of something else, the row holds no native observation, or its
                observation or action does not fit the network.
        """
        super().connect(codec, response_format, row)
        name = type(self).__name__
        if row.native_observation is None:
            raise ValueError(
                f"env.rewards has a {name}, but env.rows hold no native observations; it needs rows that do, such as "
                "MinariRows."
            )
        self.load(codec)
        try:
            self.predict([row.native_observation], [row.action])
        except ValueError as error:
            raise ValueError(
                f"env.rewards has a {name} of {self.path!r}, which does not fit env.rows: {error}"
            ) from error

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response in one forward pass; float64 ``(row,)``.

        Raises:
            ValueError: observations or actions do not fit the network.
        """
        rewards = np.full(len(rows), self.invalid_reward)
        valid = [index for index, action in enumerate(actions) if action is not None]
        if valid:
            observations: list[Any] = [rows[index].native_observation for index in valid]
            rewards[valid] = self.predict(observations, [actions[index] for index in valid])
        return rewards

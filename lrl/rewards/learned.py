"""Reward function that asks a reward model, which was trained on a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.ranges import NonNegativeFloat, check_arguments
from lrl.registry import register
from lrl.rewards.reward import NativeAction, Reward, Row
from lrl.rewards.reward_model import RewardModel, load_reward_model, reward_model_file

# Base class of reward functions that ask a network which was trained on a data set.


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


@register
class LearnedReward(NetworkReward):
    """Reward that a reward model predicts for the action in the row's state, and a constant for an invalid response.

    A policy that maximises it finds where the model errs. Compare it with the environment's own return, and subtract
    the disagreement of an ensemble.

    Args:
        path: Run directory or checkpoint of :class:`~lrl.algorithms.reward_model.RewardModelModule`; of a run
            directory ``best.ckpt`` is read, or ``last.ckpt`` without it.
        invalid: Reward of an invalid response. The default is the original experiment's, the smallest reward of its
            HalfCheetah data; null takes the smallest reward of the data that the model was trained on.
        weight: Factor of this function in the sum.
        disagreement_coef: How many standard deviations over the members of an ensemble to subtract.

    Raises:
        ValueError: there is no checkpoint at ``path``.
    """

    name = "learned"

    def __init__(
        self, path: str, invalid: float | None = -3.15, weight: float = 1.0, disagreement_coef: NonNegativeFloat = 0.0
    ) -> None:
        check_arguments(LearnedReward.__init__, locals(), "rewards")
        super().__init__(path, weight)
        reward_model_file(path, "rewards.path")
        self.invalid, self.disagreement_coef = invalid, float(disagreement_coef)
        self._model: RewardModel | None = None

    @property
    def model(self) -> RewardModel:
        """The reward model, loaded when it is first needed.

        Raises:
            ValueError: the checkpoint is damaged or of something else, or has no members that could disagree.
        """
        if self._model is None:
            model = load_reward_model(self.path, "rewards.path")
            if self.disagreement_coef and len(model.members) == 1:
                raise ValueError(
                    f"rewards.disagreement_coef is {self.disagreement_coef:g}, but the model of {self.path!r} has one "
                    "member; it must be 0, or the model trained with model.init_args.members of 2 or more."
                )
            self._model = model
        return self._model

    @property
    def invalid_reward(self) -> float:
        """Reward of an invalid response."""
        return float(self.model.minimum) if self.invalid is None else self.invalid

    def load(self, codec: TextCodec) -> None:
        """Load the model, whatever the environment."""
        _ = self.model

    def predict(self, observations: Sequence[Any], actions: Sequence[Any]) -> np.ndarray:
        """Return the predicted rewards, float64 ``(row,)``, less the disagreement.

        Raises:
            ValueError: observations or actions do not fit the model.
        """
        return self.model.predict(observations, actions, self.disagreement_coef)

"""Reward function that asks a reward model, which was trained on a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.models.reward_model import RewardModel, load_reward_model, reward_model_file
from lrl.ranges import NonNegativeFloat, check_arguments
from lrl.rewards.reward import NativeAction, Reward
from lrl.rewards.row import Row


class LearnedReward(Reward):
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
        super().__init__(weight)
        reward_model_file(path, "rewards.path")
        self.path, self.invalid, self.disagreement_coef = path, invalid, float(disagreement_coef)
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

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Load the model, and raise if it cannot reward actions in this row.

        Raises:
            ValueError: the checkpoint is damaged or of something else, the row holds no native observation, or its
                observation or action does not fit the model.
        """
        super().connect(codec, response_format, row)
        model = self.model
        if row.native_observation is None:
            raise ValueError(
                "env.rewards has a LearnedReward, but env.rows hold no native observations; it needs rows that do, "
                "such as MinariRows."
            )
        try:
            model.predict([row.native_observation], [row.action])
        except ValueError as error:
            raise ValueError(
                f"env.rewards has a LearnedReward of {self.path!r}, which does not fit env.rows: {error}"
            ) from error

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response in one forward pass; float64 ``(row,)``.

        Raises:
            ValueError: observations or actions do not fit the model.
        """
        model = self.model
        rewards = np.full(len(rows), float(model.minimum) if self.invalid is None else self.invalid)
        valid = [index for index, action in enumerate(actions) if action is not None]
        if valid:
            observations: list[Any] = [rows[index].native_observation for index in valid]
            rewards[valid] = model.predict(observations, [actions[index] for index in valid], self.disagreement_coef)
        return rewards

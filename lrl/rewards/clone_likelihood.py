"""Reward function that asks a network how likely the demonstrator's data make an action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from lrl.codecs.codec import TextCodec
from lrl.models.cloned_network import ClonedNetwork, cloned_network_file, load_cloned_network
from lrl.ranges import NonNegativeFloat, check_arguments
from lrl.rewards.reward import NativeAction, Reward
from lrl.rewards.row import Row


class CloneLikelihoodReward(Reward):
    """Reward of the log-likelihood of an action under a network that was cloned from demonstrations.

    For a Box that is ``-1/2 mean(((action - clone's action) / std)^2)`` over the dimensions: the log-density of a
    Gaussian around the clone's greedy action, per dimension and without its constant, so that the clone's own action
    has 0. Of a Discrete action it is the log-probability. Unlike
    :class:`~lrl.rewards.behaviour_cloning.BehaviourCloningReward` it needs no action of the demonstrator in the row, so
    the rows may be of any policy.

    Args:
        path: Run directory or checkpoint of an :class:`~lrl.policies.mlp.MLPPolicy` that was cloned
            (``configs/half_cheetah/clone_mlp.yaml``).
        min_std: Least standard deviation of a dimension, in the unit of the actions. The clone of a deterministic
            demonstrator is so sure of itself that with its own, 0 here, nearly all other actions have the least reward.
        minimum: Least reward, that of an invalid response too: log-likelihoods have no bound.
        weight: Factor of this function in the sum.

    Raises:
        ValueError: there is no checkpoint at ``path``, or ``minimum`` is no finite number.
    """

    name = "clone_likelihood"

    def __init__(self, path: str, min_std: NonNegativeFloat = 0.1, minimum: float = -50.0, weight: float = 1.0) -> None:
        check_arguments(CloneLikelihoodReward.__init__, locals(), "rewards")
        super().__init__(weight)
        if not math.isfinite(minimum):
            raise ValueError(f"rewards.minimum is {minimum}; it must be finite.")
        cloned_network_file(path, "rewards.path")
        self.path, self.min_std, self.minimum = path, float(min_std), float(minimum)
        self._network: ClonedNetwork | None = None

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Load the clone, and raise if it cannot reward actions in this row.

        Raises:
            ValueError: the checkpoint is damaged, of something else or of other spaces, or the row holds no native
                observation.
        """
        super().connect(codec, response_format, row)
        if row.native_observation is None:
            raise ValueError(
                "env.rewards has a CloneLikelihoodReward, but env.rows hold no native observations; it needs rows that "
                "do, such as MinariRows."
            )
        space = codec.action_space
        if not isinstance(space, (spaces.Box, spaces.Discrete)):
            raise ValueError(
                f"env.rewards has a CloneLikelihoodReward, but actions are of {space}; they must be Discrete or a Box."
            )
        self._network = load_cloned_network(self.path, space, "rewards.path")
        try:
            self._network.log_likelihoods([row.native_observation], [row.action])
        except ValueError as error:
            raise ValueError(
                f"env.rewards has a CloneLikelihoodReward of {self.path!r}, which does not fit env.rows: {error}"
            ) from error

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response in one forward pass; float64 ``(row,)``."""
        assert self._network is not None, "connect() comes first"
        rewards = np.full(len(rows), self.minimum)
        valid = [index for index, action in enumerate(actions) if action is not None]
        if valid:
            observations: list[Any] = [rows[index].native_observation for index in valid]
            found = self._network.log_likelihoods(observations, [actions[index] for index in valid], self.min_std)
            rewards[valid] = np.maximum(found, self.minimum)
        return rewards

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
from lrl.rewards.network import NetworkReward


class CloneLikelihoodReward(NetworkReward):
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
        super().__init__(path, weight)
        if not math.isfinite(minimum):
            raise ValueError(f"rewards.minimum is {minimum}; it must be finite.")
        cloned_network_file(path, "rewards.path")
        self.min_std, self.minimum = float(min_std), float(minimum)
        self._network: ClonedNetwork | None = None

    @property
    def invalid_reward(self) -> float:
        """Reward of an invalid response: the least one."""
        return self.minimum

    def load(self, codec: TextCodec) -> None:
        """Load the clone.

        Raises:
            ValueError: the checkpoint is damaged, of something else or of another action space.
        """
        space = codec.action_space
        if not isinstance(space, (spaces.Box, spaces.Discrete)):
            raise ValueError(
                f"env.rewards has a CloneLikelihoodReward, but actions are of {space}; they must be Discrete or a Box."
            )
        self._network = load_cloned_network(self.path, space, "rewards.path")

    def predict(self, observations: Sequence[Any], actions: Sequence[Any]) -> np.ndarray:
        """Return the log-likelihoods of native actions, float64 ``(row,)``, at least the least reward."""
        assert self._network is not None, "connect() comes first"
        return np.maximum(self._network.log_likelihoods(observations, actions, self.min_std), self.minimum)

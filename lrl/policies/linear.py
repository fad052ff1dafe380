"""The linear policy whose weights are searched."""

from __future__ import annotations

import math
from typing import final

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from lrl.policies.searched import Decide, SearchedPolicy
from lrl.ranges import NonNegativeInt, PositiveFloat, check_arguments
from lrl.search.space import ParameterSpace


@final
class LinearPolicy(SearchedPolicy):
    """Compute scores or actions ``s W + b`` of the raw observation ``s``: one weight per dimension and output.

    With Discrete actions the highest score is taken, the first of equal ones; values of a Box are clipped to it, so
    that an environment never charges for more than it can do. Flat order of the parameters: all outputs of the first
    dimension of the observation, all of the second, ..., then the biases (ProPS, arXiv:2511.21928).

    Args:
        bias: whether there are biases.
        low: smallest weight, with no more than ``decimals`` decimal places.
        high: largest weight, likewise.
        decimals: decimal places of the weights; null does not round.
        scale: standard deviation of random weights.

    Raises:
        ValueError: ``low`` is not below ``high``, or one of them is infinite or would be rounded.
    """

    def __init__(
        self,
        bias: bool = True,
        low: float = -6.0,
        high: float = 6.0,
        decimals: NonNegativeInt | None = 1,
        scale: PositiveFloat = 3.0,
    ) -> None:
        check_arguments(LinearPolicy.__init__, locals(), "policy")
        super().__init__()
        if not low < high:
            raise ValueError(f"policy.low is {low:g} and policy.high is {high:g}; low must be below high.")
        for name, value in {"low": low, "high": high}.items():
            if not math.isfinite(value):
                raise ValueError(f"policy.{name} is {value:g}; it must be finite.")
            if decimals is not None and round(value, decimals) != value:
                raise ValueError(
                    f"policy.{name} is {value:g}; it must have at most policy.decimals {decimals} decimals."
                )
        self.bias, self.low, self.high, self.decimals, self.scale = bias, low, high, decimals, scale

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, from which the number of weights follows.

        Raises:
            ValueError: observations are not a Box, actions neither Discrete nor a Box, or there are too many weights.
        """
        if not isinstance(observation_space, spaces.Box):
            raise ValueError(
                f"model.policy is a LinearPolicy, but observations are {observation_space}; they must be a Box (a "
                "TabularPolicy reads Discrete ones)."
            )
        if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
            raise ValueError(
                f"model.policy is a LinearPolicy, but actions are {action_space}; they must be Discrete or a Box."
            )
        self._connect(observation_space, action_space)

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases."""
        inputs, outputs = self.shape
        return (inputs + self.bias) * outputs

    @property
    def shape(self) -> tuple[int, int]:
        """Number of inputs and of outputs."""
        observed, acted = self.spaces
        return int(np.prod(observed.shape or ())), int(
            acted.n if isinstance(acted, spaces.Discrete) else np.prod(acted.shape or ())
        )

    def parameter_space(self) -> ParameterSpace:
        """Return the range of the weights and biases."""
        return ParameterSpace(
            size=self.num_parameters, low=self.low, high=self.high, decimals=self.decimals, scale=self.scale
        )

    def decider(self, parameters: np.ndarray) -> Decide:
        """Return the function from observations ``(row, ...)`` to clipped actions, or to those of the highest score."""
        inputs, outputs = self.shape
        rows = np.asarray(parameters, dtype=np.float64).reshape(inputs + self.bias, outputs)
        weights, bias = rows[:inputs], rows[inputs:].sum(0)  # no row of biases: zeros

        def scores(observations: np.ndarray) -> np.ndarray:
            # The sum of a product, not a matrix product, whose rounding depends on the number of rows.
            return (observations.reshape(len(observations), inputs, 1) * weights).sum(1) + bias

        acted = self.spaces[1]
        if isinstance(acted, spaces.Discrete):
            start = int(acted.start)
            return lambda observations: scores(observations).argmax(1) + start
        assert isinstance(acted, spaces.Box)
        low, high, shape, dtype = acted.low.ravel(), acted.high.ravel(), acted.shape, acted.dtype
        return lambda observations: (
            np.minimum(np.maximum(scores(observations), low), high).astype(dtype).reshape(-1, *shape)
        )

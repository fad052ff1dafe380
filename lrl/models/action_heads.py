"""Between the last layer of a network and a native action space: what MLPs and trunks with a head share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lrl.functional.distributions import Categorical, Distribution, Gaussian
from lrl.functional.random import token_bits, token_uniforms
from lrl.models.sampling import sample_tokens, sampling_logprobs
from lrl.types import RandomKeys, SamplingConfig

_TINY = 2.0**-54
"""Half a step of the uniform numbers: the normal quantile of 0 is infinite."""


class ActionHead(nn.Module):
    """A softmax over a Discrete space; for a Box a Gaussian whose standard deviation does not depend on the state.

    Args:
        space: Discrete or Box; samples are clipped to a Box before the environment sees them.
        initial_log_std: of the Gaussian.
    """

    def __init__(self, space: gym.Space, initial_log_std: float) -> None:
        super().__init__()
        assert isinstance(space, (spaces.Discrete, spaces.Box))
        self.space: Any = space
        self.is_box = isinstance(space, spaces.Box)
        self.size = int(np.prod(space.shape or ())) if isinstance(space, spaces.Box) else int(space.n)
        """Numbers that the network puts out."""
        self.log_std = nn.Parameter(torch.full((self.size,), initial_log_std)) if self.is_box else None

    def distribution(self, outputs: Tensor) -> Distribution:
        """Of one token per turn.

        Args:
            outputs: ``(turn, size)``: logits or means.
        """
        if self.log_std is None:
            return Categorical(outputs[:, None])
        return Gaussian(outputs[:, None], self.log_std.to(outputs.dtype))

    def logprobs(self, distribution: Distribution, actions: Tensor) -> Tensor:
        """``(turn, 1)`` of actions ``(turn,)`` or ``(turn, dimension)``."""
        return distribution.logprobs(actions[:, None])

    def sample(self, outputs: Tensor, keys: RandomKeys, sampling: SamplingConfig) -> tuple[Any, Tensor, Tensor]:
        """One action per row; at temperature 0 the best one, or the mean.

        Returns:
            What the environment takes, ``(row, ...)``; the actions as they were drawn; their log-probabilities
            ``(row, 1)``.
        """
        if self.log_std is None:
            choices = sampling_logprobs(outputs, sampling)
            actions = sample_tokens(choices, token_bits(keys, 1)[:, 0].to(outputs.device))
            return actions.cpu().numpy() + int(self.space.start), actions, choices.gather(-1, actions[:, None])
        if sampling.temperature == 0:
            actions, logprobs = outputs, torch.zeros_like(outputs[:, :1])
        else:
            noise = torch.special.ndtri(token_uniforms(keys, self.size) + _TINY).to(outputs)
            actions = outputs + noise * self.log_std.exp() * sampling.temperature
            spread = Gaussian(outputs[:, None], self.log_std + float(np.log(sampling.temperature)))
            logprobs = self.logprobs(spread, actions)
        native = actions.cpu().numpy().reshape(-1, *self.space.shape)
        native = np.clip(native, self.space.low, self.space.high)
        whole = np.issubdtype(self.space.dtype, np.integer)
        return (np.rint(native) if whole else native).astype(self.space.dtype, copy=False), actions, logprobs


def check_spaces(policy: str, observation_space: gym.Space, action_space: gym.Space, numbers: bool) -> None:
    """Refuse what a head cannot see or do.

    Args:
        policy: its class's name.
        observation_space: of one environment.
        action_space: of one environment.
        numbers: whether observations must be numbers.

    Raises:
        ValueError: the observations are no numbers where they must be, or the actions neither Discrete nor a Box.
    """
    if numbers and not is_numbers(observation_space):
        raise ValueError(
            f"model.policy is an {policy}, but observations are {observation_space}; they must be numbers."
        )
    if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
        raise ValueError(
            f"model.policy is an {policy}, but actions are {action_space}; they must be Discrete or a Box."
        )


def is_numbers(space: gym.Space) -> bool:
    """Whether all of an observation can be flattened to a vector of numbers."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return all(is_numbers(part) for part in (space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def vector_size(space: gym.Space) -> int:
    """Length of the vector that an observation is flattened to; Discrete parts are one-hot."""
    return int(np.prod(spaces.flatten_space(space).shape or ()))


def vectors(space: gym.Space, observations: Sequence[Any], like: Tensor) -> Tensor:
    """Observations as ``(row, size)`` of the type of ``like``, where that is."""
    if isinstance(space, spaces.Box):
        rows = np.asarray(observations)
    else:
        rows = np.stack([np.asarray(spaces.flatten(space, observation)) for observation in observations])
    return torch.as_tensor(rows, dtype=like.dtype, device=like.device).reshape(len(observations), -1)

"""Distributions over native actions, and observations as vectors, for policies that act natively."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lrl.functional.distributions import Categorical, Distribution, Gaussian
from lrl.functional.random import token_bits, token_uniforms
from lrl.lm.logprobs import sample_tokens, sampling_logprobs
from lrl.lm.networks import ACTIVATIONS, at_least_float32, mlp, seeded_init
from lrl.ranges import PositiveFloat, check_fields
from lrl.types import Inputs, RandomKeys, SamplingConfig

_TINY = 2.0**-54
"""Half a step of the uniform numbers: the normal quantile of 0 is infinite."""


@dataclass(frozen=True, kw_only=True)
class ObservationCriticConfig:
    """A value network on the observation's numbers, which shares nothing with the actor."""

    hidden_sizes: Sequence[int] = (64, 64)
    """Sizes of its hidden layers; their activation is that of the head."""
    normalise_observations: bool = True
    """Whether observations are normalised by running mean and standard deviation."""
    observation_clip: PositiveFloat = 5.0
    """Largest absolute value of a normalised observation."""

    def __post_init__(self) -> None:
        check_fields(self, "policy.critic")
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"policy.critic.hidden_sizes is {list(self.hidden_sizes)}; all must be positive.")


class ActionHead(nn.Module):
    """A softmax over a Discrete space, or for a Box a Gaussian whose standard deviation does not depend on the state.

    Args:
        space: Discrete or Box; samples are clipped to a Box before the environment sees them.
        initial_log_std: initial logarithm of the Gaussian's standard deviation.
    """

    def __init__(self, space: gym.Space, initial_log_std: float) -> None:
        super().__init__()
        assert isinstance(space, (spaces.Discrete, spaces.Box))
        self.space: Any = space
        self.is_box = isinstance(space, spaces.Box)
        self.size = int(np.prod(space.shape or ())) if isinstance(space, spaces.Box) else int(space.n)
        """Number of outputs of the network."""
        self.log_std = nn.Parameter(torch.full((self.size,), initial_log_std)) if self.is_box else None

    def distribution(self, outputs: Tensor) -> Distribution:
        """Return the distribution over actions, with one token per turn.

        Args:
            outputs: logits or means, ``(turn, size)``.
        """
        if self.log_std is None:
            return Categorical(outputs[:, None])
        return Gaussian(outputs[:, None], self.log_std.to(outputs))

    def logprobs(self, distribution: Distribution, actions: Tensor) -> Tensor:
        """Return the log-probabilities ``(turn, 1)`` of actions ``(turn,)`` or ``(turn, dimension)``."""
        return distribution.logprobs(actions[:, None])

    def encode(self, actions: Sequence[Any]) -> dict[str, Tensor]:
        """Return demonstrated native actions as inputs of a turn, which :meth:`logprobs_of` reads.

        Args:
            actions: as an environment received them: of a Box clipped.

        Returns:
            ``action``, int64 ``(turn,)``, or for a Box ``clipped_action`` ``(turn, dimension)``, never in 16 bits.
        """
        if self.log_std is None:
            return {"action": torch.as_tensor(np.asarray(actions, dtype=np.int64) - int(self.space.start))}
        rows = np.asarray(actions).reshape(len(actions), -1)
        return {"clipped_action": torch.as_tensor(rows, dtype=at_least_float32(self.log_std).dtype)}

    def logprobs_of(self, distribution: Distribution, inputs: Inputs) -> Tensor:
        """Return the log-probabilities ``(turn, 1)`` of the actions of some turns, sampled or demonstrated.

        Of a sampled action of a Box that is its density before clipping; of a demonstrated one only the clipped action
        is known, so it has the likelihood of what is clipped
        (:meth:`~lrl.functional.distributions.Gaussian.clipped_logprobs`).
        """
        if "clipped_action" not in inputs:
            return self.logprobs(distribution, inputs["action"])
        assert isinstance(distribution, Gaussian)
        actions = inputs["clipped_action"][:, None]
        low, high = (torch.as_tensor(bound).flatten().to(actions) for bound in (self.space.low, self.space.high))
        return distribution.clipped_logprobs(actions, low, high)

    def sample(self, outputs: Tensor, keys: RandomKeys, sampling: SamplingConfig) -> tuple[Any, Tensor, Tensor]:
        """Sample one action per row; at temperature 0 take the most probable one, or the mean.

        Args:
            outputs: logits or means, ``(row, size)``.
            keys: the counters from which random numbers follow.
            sampling: the temperature.

        Returns:
            The native actions ``(row, ...)``; the actions as sampled, ``(row,)`` or ``(row, dimension)``; their
            log-probabilities ``(row, 1)``.
        """
        if self.log_std is None:
            choices = sampling_logprobs(outputs, sampling)
            actions = sample_tokens(choices, token_bits(keys, 1)[:, 0].to(outputs.device))
            native = (actions.cpu().numpy() + int(self.space.start)).astype(self.space.dtype)
            return native, actions, choices.gather(-1, actions[:, None])
        if sampling.temperature == 0:
            actions, logprobs = outputs, torch.zeros_like(outputs[:, :1])
        else:
            noise = torch.special.ndtri(token_uniforms(keys, self.size) + _TINY).to(outputs)
            log_std = self.log_std.to(outputs)  # before exp(): the standard deviation would be rounded to 16 bits
            actions = outputs + noise * log_std.exp() * sampling.temperature
            spread = Gaussian(outputs[:, None], log_std + float(np.log(sampling.temperature)))
            logprobs = self.logprobs(spread, actions)
        native = actions.cpu().numpy().reshape(-1, *self.space.shape)
        native = np.clip(native, self.space.low, self.space.high)
        whole = np.issubdtype(self.space.dtype, np.integer)
        return (np.rint(native) if whole else native).astype(self.space.dtype, copy=False), actions, logprobs


def check_spaces(policy: str, observation_space: gym.Space, action_space: gym.Space, numbers: bool) -> None:
    """Raise if a policy that acts natively does not support the spaces.

    Args:
        policy: name of its class.
        observation_space: of one environment.
        action_space: of one environment.
        numbers: whether observations must be numeric.

    Raises:
        ValueError: the observations are not numeric where they must be, or the actions neither Discrete nor a Box.
    """
    if numbers and not is_numbers(observation_space):
        raise ValueError(
            f"model.policy is an {policy}, but observations are {observation_space}; they must be numeric."
        )
    if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
        raise ValueError(
            f"model.policy is an {policy}, but actions are {action_space}; they must be Discrete or a Box."
        )


def is_numbers(space: gym.Space) -> bool:
    """Return whether observations of a space can be flattened to a vector of numbers."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return all(is_numbers(part) for part in (space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def vector_size(space: gym.Space) -> int:
    """Return the length of a flattened observation; Discrete parts are one-hot."""
    return int(np.prod(spaces.flatten_space(space).shape or ()))


def vectors(space: gym.Space, observations: Sequence[Any], like: Tensor) -> Tensor:
    """Return observations as vectors ``(row, size)`` with the dtype and device of ``like``, of any shape."""
    if isinstance(space, spaces.Box):
        rows = np.asarray(observations)
    else:
        rows = np.stack([np.asarray(spaces.flatten(space, observation)) for observation in observations])
    return torch.as_tensor(rows, dtype=like.dtype, device=like.device).reshape(len(observations), -1)


# The value head: a critic on the hidden states of a language model that it shares with the actor.

VALUE_HEAD_FILE = "value_head.safetensors"
"""Name of the file that ``lrl merge --value_head`` writes, and that ``init_from`` reads."""
VALUE_HEAD_FOLDER = "value_head"
"""Folder of that file in the folder of a model: vLLM would take every ``*.safetensors`` beside the model for a part."""


@dataclass(frozen=True, kw_only=True)
class ValueHeadConfig:
    """A critic on the hidden state from which a token is predicted: it depends on all tokens before that one."""

    hidden_sizes: Sequence[int] = ()
    """Sizes of the hidden layers; none is a linear head."""
    activation: str = "relu"
    """The activation between layers."""
    per_token: bool = True
    """Whether each token of a response has a value of its own; else all have that of the prompt's last token."""
    adapter: bool = False
    """Whether the critic has an adapter of its own in the language model, of the shape of ``language_model.lora``, that
    starts at zero. Values then need a pass of their own."""
    detach: bool = False
    """Whether the value loss stops at the head. ``trainer.gradient_clip_val`` still clips one norm over both."""
    init_seed: int | None = None
    """Seed of the weights; null takes the run's seed."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"value_head.hidden_sizes is {list(self.hidden_sizes)}; all must be positive.")
        if self.adapter and self.detach:
            raise ValueError("value_head.adapter and detach are both true: the adapter would learn nothing; unset one.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"value_head.activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}."
            )


class ValueHead(nn.Module):
    """Computes values from hidden states, never in half precision, whatever the language model computes in.

    Args:
        config: the shape of the head.
        hidden_size: size of the hidden states.
    """

    def __init__(self, config: ValueHeadConfig, hidden_size: int) -> None:
        super().__init__()
        self.per_token, self.detach = config.per_token, config.detach
        with seeded_init(config.init_seed):
            self.layers = mlp((hidden_size, *config.hidden_sizes, 1), config.activation, 0.01)

    def view(self, states: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
        """Return values ``(turn, token)`` as a function of indices of turns ``(turn,)``.

        Args:
            states: ``(turn, token, hidden)``, which do not change with the head.
            mask: bool ``(turn, token)``.
        """
        return lambda index: self(states[index], mask[index])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Compute values ``(turn, token)``, 0 where masked.

        Args:
            states: ``(turn, token, hidden)``.
            mask: bool ``(turn, token)``.
        """
        if self.detach:
            states = states.detach()
        if not self.per_token:
            states = states[:, :1]
        with torch.autocast(states.device.type, enabled=False):
            weights = next(self.layers.parameters())
            values = at_least_float32(self.layers(states.to(weights.dtype)).squeeze(-1))
        return values.expand(mask.shape) * mask

    def save(self, folder: Path) -> None:
        """Write the weights into the folder of a model, as :data:`VALUE_HEAD_FILE` in a folder of their own."""
        from safetensors.torch import save_file

        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        (folder / VALUE_HEAD_FOLDER).mkdir()
        save_file(state, folder / VALUE_HEAD_FOLDER / VALUE_HEAD_FILE, metadata={"format": "pt"})

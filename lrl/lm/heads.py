"""Small networks: multilayer perceptrons, running normalisation, action heads, and the value head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lrl.functional.distributions import Categorical, Distribution, Gaussian
from lrl.functional.random import token_bits, token_uniforms
from lrl.lm.attention import HALVED
from lrl.lm.logprobs import sample_tokens, sampling_logprobs
from lrl.ranges import PositiveFloat, check_fields
from lrl.types import Inputs, RandomKeys, SamplingConfig

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


def mlp(
    sizes: Sequence[int],
    activation: str = "relu",
    output_gain: float = 1.0,
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build a multilayer perceptron with orthogonal weights and zero biases.

    Args:
        sizes: sizes of the input, the hidden layers and the output.
        activation: ``relu``, ``tanh``, ``gelu`` or ``silu``.
        output_gain: gain of the last layer's weights; the others have the gain of the activation.
        batch_norm: whether there is batch normalisation between each hidden layer and its activation.
        dropout: probability of dropout after each activation.

    Raises:
        ValueError: If the activation is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"policy.activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")
    gain = nn.init.calculate_gain("tanh" if activation == "tanh" else "relu")
    layers: list[nn.Module] = []
    for index, (size_in, size_out) in enumerate(pairwise(sizes)):
        last = index == len(sizes) - 2
        layer = nn.Linear(size_in, size_out)
        weight = torch.empty(size_out, size_in, dtype=torch.float32)  # orthogonal: 16 bits have no factorisation
        with torch.no_grad():
            layer.weight.copy_(nn.init.orthogonal_(weight, output_gain if last else gain))
        nn.init.zeros_(layer.bias)
        layers.append(layer)
        if not last:
            layers += [nn.BatchNorm1d(size_out)] if batch_norm else []
            layers += [ACTIVATIONS[activation]()]
            layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert a tensor of any shape to float32 if it is in half precision."""
    return tensor.float() if tensor.dtype in HALVED else tensor


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off; if it is off already, nothing is entered, which saves time."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def seeded_init(seed: int | None) -> Iterator[None]:
    """Initialise the weights created in a ``with`` block from their own seed; None uses the run's random state."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class RunningStatistics(nn.Module, ABC):
    """Normalises vectors by the mean and spread of all vectors so far; saved with the policy.

    New vectors take effect at the next :meth:`settle`, so that the statistics do not change during a collection and its
    updates.

    Args:
        size: length of the vectors.
        clip: largest absolute value of the result.
    """

    reads: ClassVar[str]
    """Name of the turns' input that holds the vectors."""
    counting: Tensor
    learned: Tensor
    learned_in: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        spread = self.spread(torch.zeros(1, size, dtype=torch.float64))
        for name in ("counting", "learned"):  # rows: number of vectors, mean, and from the third on their spread
            self.register_buffer(name, spread.new_zeros(2 + len(spread), size))
        self.register_buffer("learned_in", torch.tensor(-1))

    @property
    def is_empty(self) -> bool:
        """Return whether no vectors have taken effect yet."""
        return bool(self.counting[0, 0] == 0)

    @abstractmethod
    def spread(self, deviations: Tensor) -> Tensor:
        """Return the sum of squares or products of deviations from the mean ``(row, size)``, as ``(some, size)``."""

    @abstractmethod
    def forward(self, vectors: Tensor) -> Tensor:
        """Normalise vectors ``(row, size)``; return them unchanged before the first :meth:`settle`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device, but never convert to 16 bits, where counts above 1,000 would stop growing."""
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @torch.no_grad()
    def learn(self, vectors: Tensor, collection: int, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """Update the statistics with a collection (Chan et al., 1979); idempotent.

        Args:
            vectors: of this rank, ``(row, size)``.
            collection: index of the collection.
            reduce: sums a tensor over ranks; None for a single process.
        """
        reduce = reduce or (lambda tensor: tensor)
        vectors = vectors.to(self.counting)
        number = reduce(vectors.new_tensor(float(len(vectors))))
        if number == 0:
            return
        count, mean, spread = self.counting[0], self.counting[1], self.counting[2:]
        own_mean = reduce(vectors.sum(0)) / number
        own_spread = reduce(self.spread(vectors - own_mean))
        total, shift = count + number, own_mean - mean
        spread = spread + own_spread + self.spread(shift[None]) * count * number / total
        self.learned.copy_(torch.cat([torch.stack([total, mean + shift * number / total]), spread]))
        self.learned_in.fill_(collection)

    @torch.no_grad()
    def settle(self, collection: int) -> None:
        """Apply what was learned before ``collection``; after a resume, not what was learned in it."""
        if self.learned_in < collection:
            self.counting.copy_(self.learned)


class RunningNorm(RunningStatistics):
    """Normalises observations: ``(x - mean) / std``, clipped."""

    reads = "observation"

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__(size, clip)
        self._moments: tuple[Tensor, Tensor] | None = None

    def spread(self, deviations: Tensor) -> Tensor:
        """Return the sum of squares ``(1, size)`` of deviations ``(row, size)``."""
        return deviations.square().sum(0, keepdim=True)

    def forward(self, vectors: Tensor) -> Tensor:
        """Normalise observations ``(row, size)``."""
        if self._moments is None:
            count, mean, squares = self.counting
            if count[0] < 2:
                return vectors
            self._moments = mean, (squares / count).sqrt() + 1e-8
        mean, std = self._moments
        return ((vectors - mean) / std).clamp(-self.clip, self.clip).to(vectors.dtype)

    def settle(self, collection: int) -> None:
        """Apply what was learned before ``collection``."""
        super().settle(collection)
        self._moments = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._moments = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._moments = None
        super()._load_from_state_dict(*args, **kwargs)


class RunningWhitening(RunningStatistics):
    """Whitens hidden states: ``(x - mean) C^-1/2`` with the covariance C, clipped.

    The states of language models have most of their variance in a few directions (arXiv:2103.15316 whitens sentence
    embeddings), so that a network on top of them hardly uses the others. The symmetric root changes least when C
    changes.

    Args:
        size: length of the vectors.
        clip: largest absolute value of the result.
        floor: smaller standard deviations are replaced by this share of the largest one.
    """

    reads = "states"
    matrix: Tensor

    def __init__(self, size: int, clip: float = 10.0, floor: float = 1e-3) -> None:
        super().__init__(size, clip)
        self.floor = floor
        self.register_buffer("matrix", torch.eye(size))

    def spread(self, deviations: Tensor) -> Tensor:
        """Return the sum of outer products ``(size, size)`` of deviations ``(row, size)``."""
        return deviations.T @ deviations

    def forward(self, vectors: Tensor) -> Tensor:
        """Whiten states ``(row, size)``."""
        if self.counting[0, 0] < 2:
            return vectors
        centred = (vectors - self.counting[1]).to(vectors.dtype)
        return (centred @ self.matrix.to(vectors.dtype)).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def settle(self, collection: int) -> None:
        """Apply what was learned before ``collection``, and compute the root."""
        super().settle(collection)
        count = self.counting[0, 0]
        if count < 2:
            return
        variances, directions = torch.linalg.eigh(self.counting[2:] / count)
        deviations = variances.clamp(min=0).sqrt()
        stretch = 1 / deviations.clamp(min=self.floor * float(deviations[-1]) + 1e-8)
        self.matrix.copy_((directions * stretch) @ directions.T)


# Heads of policies that act natively.

_TINY = 2.0**-54
"""Half the spacing of the uniform numbers; avoids the normal quantile of 0, which is infinite."""


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

        For a sampled action of a Box this is the density before clipping. Of a demonstrated action only the clipped
        value is known, see :meth:`~lrl.functional.distributions.Gaussian.clipped_logprobs`.
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
    """Check that a policy that acts natively supports the spaces.

    Args:
        policy: name of its class.
        observation_space: of one environment.
        action_space: of one environment.
        numbers: whether observations must be numeric.

    Raises:
        ValueError: If observations must be numeric and are not, or actions are neither Discrete nor a Box.
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
"""Name of the file that ``lrl merge`` writes with ``value_head`` and ``init_from`` reads."""
VALUE_HEAD_FOLDER = "value_head"
"""Subfolder for that file: vLLM treats every ``*.safetensors`` next to the model as a part of it."""


@dataclass(frozen=True, kw_only=True)
class ValueHeadConfig:
    """A critic on the hidden state from which a token is predicted: it depends on all tokens before that one."""

    hidden_sizes: Sequence[int] = ()
    """Sizes of the hidden layers, which are followed by ReLU; none is a linear head."""
    adapter: bool = False
    """Whether the critic has its own adapter in the language model, with the shape of ``language_model.lora``. Values
    then need an additional forward pass."""
    detach: bool = False
    """Whether the gradient of the value loss stops at the head. ``trainer.gradient_clip_val`` clips one norm over
    both."""
    init_seed: int | None = None
    """Seed of the weights; null takes the run's seed."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"value_head.hidden_sizes is {list(self.hidden_sizes)}; all must be positive.")
        if self.adapter and self.detach:
            raise ValueError("value_head.adapter and detach are both true: the adapter would learn nothing; unset one.")


class ValueHead(nn.Module):
    """Computes values from hidden states, never in half precision.

    Args:
        config: the shape of the head.
        hidden_size: size of the hidden states.
    """

    def __init__(self, config: ValueHeadConfig, hidden_size: int) -> None:
        super().__init__()
        self.detach = config.detach
        with seeded_init(config.init_seed):
            self.layers = mlp((hidden_size, *config.hidden_sizes, 1), output_gain=0.01)

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
        with torch.autocast(states.device.type, enabled=False):
            weights = next(self.layers.parameters())
            values = at_least_float32(self.layers(states.to(weights.dtype)).squeeze(-1))
        return values * mask

    def save(self, folder: Path) -> None:
        """Write the weights to the folder of a model, as :data:`VALUE_HEAD_FILE` in :data:`VALUE_HEAD_FOLDER`."""
        from safetensors.torch import save_file

        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        (folder / VALUE_HEAD_FOLDER).mkdir()
        save_file(state, folder / VALUE_HEAD_FOLDER / VALUE_HEAD_FILE, metadata={"format": "pt"})

"""Small networks: multilayer perceptrons, running statistics, action heads, and value heads."""

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
from lrl.ranges import PositiveFloat, Seed, check_fields
from lrl.types import Inputs, RandomKeys, SamplingConfig

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}
"""Activations by the name that configurations use."""


class Layers(nn.Sequential):
    """A sequence of layers that skips the search for hooks, which takes a tenth of the time of a small network.

    Layers that have forward hooks are called in the usual way.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name in torch)
        """Apply the layers to a tensor ``(..., size)``."""
        for layer in self:
            hooks = layer._forward_pre_hooks or layer._forward_hooks
            input = layer(input) if hooks else layer.forward(input)  # noqa: A001
        return input


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
        output_gain: gain of the weights of the last layer; other layers have the gain of the activation.
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
        weight = torch.empty(
            size_out, size_in, dtype=torch.float32
        )  # float32, because the factorisation does not support 16 bits
        with torch.no_grad():
            layer.weight.copy_(nn.init.orthogonal_(weight, output_gain if last else gain))
        nn.init.zeros_(layer.bias)
        layers.append(layer)
        if not last:
            layers += [nn.BatchNorm1d(size_out)] if batch_norm else []
            layers += [ACTIVATIONS[activation]()]
            layers += [nn.Dropout(dropout)] if dropout else []
    return Layers(*layers)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert a tensor of any shape to float32 if it has 16 bits."""
    return tensor.float() if tensor.dtype in HALVED else tensor


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off; if it is off already, nothing is entered, which saves time."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def seeded_init(seed: int | None) -> Iterator[None]:
    """Seed the initial weights that are created in a ``with`` block; None uses the random state of the run."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class RunningStatistics(nn.Module, ABC):
    """Abstract base class of modules that normalise vectors by running statistics, which checkpoints contain.

    The statistics are those of all vectors of earlier collections. Vectors that are added by :meth:`learn` are used
    after the next :meth:`settle`, so that the statistics do not change during a collection and its updates.

    Args:
        size: length of the vectors.
        clip: largest absolute value of a component of the result.
    """

    reads: ClassVar[str]
    """Name of the entry of ``TurnBatch.inputs`` that contains the vectors."""
    counting: Tensor
    """The statistics that :meth:`forward` uses: rows are the number of vectors, their mean, and their spread."""
    learned: Tensor
    """The statistics including the last collection, in the same format."""
    learned_in: Tensor
    """Index of the last collection that was added; -1 if there is none."""

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        spread = self.spread(torch.zeros(1, size, dtype=torch.float64))
        for name in ("counting", "learned"):  # rows: number of vectors, mean, and from the third on their spread
            self.register_buffer(name, spread.new_zeros(2 + len(spread), size))
        self.register_buffer("learned_in", torch.tensor(-1))

    @property
    def is_empty(self) -> bool:
        """Return whether the statistics that are used contain no vectors."""
        return bool(self.counting[0, 0] == 0)

    @abstractmethod
    def spread(self, deviations: Tensor) -> Tensor:
        """Return the sum over rows of squares or products of deviations from the mean.

        Args:
            deviations: vectors minus their mean, ``(row, size)``.

        Returns:
            ``(1, size)`` for squares, ``(size, size)`` for products.
        """

    @abstractmethod
    def forward(self, vectors: Tensor) -> Tensor:
        """Normalise vectors ``(row, size)``; return them unchanged before the first :meth:`settle`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the statistics to another device without casting: in 16 bits, large counts would stop increasing."""
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @torch.no_grad()
    def learn(self, vectors: Tensor, collection: int, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """Add the vectors of a collection to the statistics (Chan et al., 1979).

        A second call for the same collection changes nothing.

        Args:
            vectors: vectors of this rank, ``(row, size)``.
            collection: index of the collection.
            reduce: sums a tensor over ranks; None if there is one rank.
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
        """Use the statistics of all collections before ``collection`` from now on.

        After a resume within ``collection``, the statistics that include it are not used.
        """
        if self.learned_in < collection:
            self.counting.copy_(self.learned)


class RunningNorm(RunningStatistics):
    """Normalises observations: ``(x - mean) / std``, clipped to ``[-clip, clip]``."""

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
        """Use the statistics of all collections before ``collection`` from now on."""
        super().settle(collection)
        self._moments = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._moments = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._moments = None
        super()._load_from_state_dict(*args, **kwargs)


class RunningWhitening(RunningStatistics):
    """Whitens hidden states: ``(x - mean) C^-1/2`` with the covariance C, clipped to ``[-clip, clip]``.

    The hidden states of language models have most of their variance in a few directions, and a network that reads them
    hardly uses the others. arXiv:2103.15316 whitens sentence embeddings for this reason. Among all roots of C, the
    symmetric one changes least when C changes.

    Args:
        size: length of the vectors.
        clip: largest absolute value of a component of the result.
        floor: smallest standard deviation of a principal component, as a share of the largest one; smaller ones are
            replaced by it.
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
        """Use the statistics of all collections before ``collection`` from now on, and compute ``C^-1/2``."""
        super().settle(collection)
        count = self.counting[0, 0]
        if count < 2:
            return
        variances, directions = torch.linalg.eigh(self.counting[2:] / count)
        deviations = variances.clamp(min=0).sqrt()
        stretch = 1 / deviations.clamp(min=self.floor * float(deviations[-1]) + 1e-8)
        self.matrix.copy_((directions * stretch) @ directions.T)


_TINY = 2.0**-54
"""Half the spacing of the uniform numbers. It is added to them, because the normal quantile of 0 is infinite."""


@dataclass(frozen=True, kw_only=True)
class ObservationCriticConfig:
    """Configures a value network on the numbers of an observation, which shares no weights with the actor."""

    hidden_sizes: Sequence[int] = (64, 64)
    """Sizes of the hidden layers; their activation is that of the head."""
    normalise_observations: bool = True
    """Whether observations are normalised by running mean and standard deviation."""
    observation_clip: PositiveFloat = 5.0
    """Largest absolute value of a normalised observation."""

    def __post_init__(self) -> None:
        check_fields(self, "policy.critic")
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"policy.critic.hidden_sizes is {list(self.hidden_sizes)}; all must be positive.")


class ActionHead(nn.Module):
    """Action distribution: a softmax for a Discrete space, a Gaussian for a Box.

    The standard deviation of the Gaussian is a parameter that does not depend on the state.

    Args:
        space: a Discrete space or a Box. Native actions are clipped to the bounds of a Box.
        initial_log_std: initial logarithm of the Gaussian's standard deviation.
    """

    def __init__(self, space: gym.Space, initial_log_std: float) -> None:
        super().__init__()
        assert isinstance(space, (spaces.Discrete, spaces.Box))
        self.space: Any = space
        self.is_box = isinstance(space, spaces.Box)
        self.size = int(np.prod(space.shape or ())) if isinstance(space, spaces.Box) else int(space.n)
        """Number of outputs that the network must have."""
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
        """Return demonstrated native actions as inputs of turns, which :meth:`logprobs_of` uses.

        Args:
            actions: native actions as the environment received them, which for a Box are clipped.

        Returns:
            ``action``, int64 ``(turn,)``; for a Box ``clipped_action``, ``(turn, dimension)`` in at least float32.
        """
        if self.log_std is None:
            return {"action": torch.as_tensor(np.asarray(actions, dtype=np.int64) - int(self.space.start))}
        rows = np.asarray(actions).reshape(len(actions), -1)
        return {"clipped_action": torch.as_tensor(rows, dtype=at_least_float32(self.log_std).dtype)}

    def logprobs_of(self, distribution: Distribution, inputs: Inputs) -> Tensor:
        """Return the log-probabilities ``(turn, 1)`` of sampled or demonstrated actions.

        For a sampled action in a Box, this is the log-density of the action before clipping. Of a demonstrated action,
        only the clipped value is known (see :meth:`~lrl.functional.distributions.Gaussian.clipped_logprobs`).

        Args:
            distribution: one distribution per turn.
            inputs: inputs of the turns.
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
            keys: counters that determine the random numbers.
            sampling: sampling settings.

        Returns:
            The native actions ``(row, ...)``; the sampled actions before clipping and rounding, ``(row,)`` or
            ``(row, dimension)``; and their log-probabilities ``(row, 1)``.
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
            log_std = self.log_std.to(
                outputs
            )  # cast before exp(), so that the standard deviation is not rounded to 16 bits
            actions = outputs + noise * log_std.exp() * sampling.temperature
            spread = Gaussian(outputs[:, None], log_std + float(np.log(sampling.temperature)))
            logprobs = self.logprobs(spread, actions)
        native = actions.cpu().numpy().reshape(-1, *self.space.shape)
        native = np.clip(native, self.space.low, self.space.high)
        whole = np.issubdtype(self.space.dtype, np.integer)
        return (np.rint(native) if whole else native).astype(self.space.dtype, copy=False), actions, logprobs


def is_numbers(space: gym.Space) -> bool:
    """Return whether observations of a space can be flattened to a vector of numbers."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return all(is_numbers(part) for part in (space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def vector_size(space: gym.Space) -> int:
    """Return the length of a flattened observation; Discrete values are one-hot vectors."""
    return int(np.prod(spaces.flatten_space(space).shape or ()))


def vectors(space: gym.Space, observations: Sequence[Any], like: Tensor) -> Tensor:
    """Return flattened observations, ``(row, size)``.

    Args:
        space: observation space of one environment.
        observations: native observations, one per row.
        like: a tensor whose data type and device the result has.
    """
    if isinstance(space, spaces.Box):
        rows = np.asarray(observations)
    else:
        rows = np.stack([np.asarray(spaces.flatten(space, observation)) for observation in observations])
    return torch.as_tensor(rows, dtype=like.dtype, device=like.device).reshape(len(observations), -1)


VALUE_HEAD_FILE = "value_head.safetensors"
"""Name of the file with the weights of a value head, which ``lrl merge`` writes and ``init_from`` reads."""
VALUE_HEAD_FOLDER = "value_head"
"""Subfolder of that file, because vLLM treats every ``*.safetensors`` in the folder of a model as part of the model."""


@dataclass(frozen=True, kw_only=True)
class ValueHeadConfig:
    """Configures a critic on the hidden states of the language model.

    The value of a token is computed from the hidden state that predicts the token, and thus from all tokens before it.
    """

    hidden_sizes: Sequence[int] = ()
    """Sizes of the hidden layers, whose activation is ReLU; an empty list creates a linear head."""
    adapter: bool = False
    """Whether the critic has its own adapter in the language model with the settings of ``language_model.lora``. Values
    then need an additional forward pass."""
    detach: bool = False
    """Whether the value loss trains only the head and not the language model. ``trainer.gradient_clip_val`` limits the
    norm of the gradients of both together."""
    init_seed: Seed | None = None
    """Seed of the initial weights; null uses the random state of the run."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"value_head.hidden_sizes is {list(self.hidden_sizes)}; all must be positive.")
        if self.adapter and self.detach:
            raise ValueError("value_head.adapter and detach are both true: the adapter would learn nothing; unset one.")


class ValueHead(nn.Module):
    """Computes values from hidden states, in at least float32.

    Args:
        config: settings of the head.
        hidden_size: size of the hidden states.
    """

    def __init__(self, config: ValueHeadConfig, hidden_size: int) -> None:
        super().__init__()
        self.detach = config.detach
        with seeded_init(config.init_seed):
            self.layers = mlp((hidden_size, *config.hidden_sizes, 1), output_gain=0.01)

    def view(self, states: Tensor, mask: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes values ``(turn, token)`` for indices of turns ``(turn,)``.

        Args:
            states: hidden states, ``(turn, token, hidden)``, which do not change while the head is trained.
            mask: true for sampled tokens, bool ``(turn, token)``.
        """
        return lambda index: self(states[index], mask[index])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Compute values ``(turn, token)``, 0 where masked.

        Args:
            states: hidden states, ``(turn, token, hidden)``.
            mask: true for sampled tokens, bool ``(turn, token)``.
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

"""Small networks: multilayer perceptrons, and normalisation by running statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

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
        ValueError: the activation is unknown.
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
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def value_view(critic: nn.Module, seen: Tensor) -> Callable[[Tensor], Tensor]:
    """Return values ``(turn, 1)`` as a function of indices of rows ``(turn,)``, never in half precision.

    Autocast would round them, and would keep using its copy of the weights while these are fitted.

    Args:
        critic: from ``(turn, size)`` to ``(turn, 1)``.
        seen: inputs of the critic, ``(row, size)``.
    """

    def values(index: Tensor) -> Tensor:
        with torch.autocast(seen.device.type, enabled=False):
            return at_least_float32(critic(seen[index]))

    return values


@contextmanager
def seeded_init(seed: int | None) -> Iterator[None]:
    """Initialise the weights created in a ``with`` block from a seed of their own; None takes the run's."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class RunningStatistics(nn.Module, ABC):
    """Normalises vectors by the mean and spread of all vectors so far; saved with the policy.

    New vectors take effect at the next :meth:`settle`: while a collection is made and trained on, nothing changes.

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
        """Move to another device, and never convert to 16 bits: a count of 1,000 would stop growing."""
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
        """Let what was learned before ``collection`` take effect, not what was learned in it (after a resume)."""
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
        """Let what was learned before ``collection`` take effect."""
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

    The states of language models have most of their variance in a few directions (arXiv:2103.15316 whitens those of
    sentences), so that a network on top of them hardly uses the rest. Of all roots the symmetric one changes least when
    C changes.

    Args:
        size: length of the vectors.
        clip: largest absolute value of the result.
        floor: a standard deviation below this share of the largest is scaled as if it were this.
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
        """Let what was learned before ``collection`` take effect, and compute the root."""
        super().settle(collection)
        count = self.counting[0, 0]
        if count < 2:
            return
        variances, directions = torch.linalg.eigh(self.counting[2:] / count)
        deviations = variances.clamp(min=0).sqrt()
        stretch = 1 / deviations.clamp(min=self.floor * float(deviations[-1]) + 1e-8)
        self.matrix.copy_((directions * stretch) @ directions.T)

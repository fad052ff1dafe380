"""Small networks: what a multilayer perceptron, a value head and running statistics are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


def mlp(sizes: Sequence[int], activation: str = "relu", output_gain: float = 1.0) -> nn.Sequential:
    """Linear layers with an activation between them, orthogonal weights and zero biases.

    Args:
        sizes: of the input, the hidden layers and the output.
        activation: ``relu``, ``tanh``, ``gelu`` or ``silu``.
        output_gain: of the last layer's weights; the others have the gain of the activation.

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"policy.activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")
    gain = nn.init.calculate_gain("tanh" if activation == "tanh" else "relu")
    layers: list[nn.Module] = []
    for index, (size_in, size_out) in enumerate(pairwise(sizes)):
        last = index == len(sizes) - 2
        layer = nn.Linear(size_in, size_out)
        nn.init.orthogonal_(layer.weight, output_gain if last else gain)
        nn.init.zeros_(layer.bias)
        layers += [layer] if last else [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


@contextmanager
def drawn_from(seed: int | None) -> Iterator[None]:
    """Draw the weights that are made inside from a seed of their own; None takes the run's."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class RunningNorm(nn.Module):
    """``(x - mean) / std`` by the statistics of all that was learned so far, clipped; saved with the policy.

    Args:
        size: of the vectors.
        clip: largest absolute value that is handed on.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    def forward(self, vectors: Tensor) -> Tensor:
        """Normalise ``(row, size)``; as it is while nothing was learned."""
        if self.count < 2:
            return vectors
        std = (self.squares / self.count).sqrt() + 1e-8
        return ((vectors - self.mean) / std).clamp(-self.clip, self.clip).to(vectors.dtype)

    @torch.no_grad()
    def learn(self, sums: Tensor, squares: Tensor, count: Tensor) -> None:
        """Add vectors by their sum, their sum of squares and their number (Chan et al., 1979)."""
        if count == 0:
            return
        mean = sums / count
        total = self.count + count
        shift = mean - self.mean
        self.squares += squares - count * mean.square() + shift.square() * self.count * count / total
        self.mean += shift * count / total
        self.count.copy_(total)

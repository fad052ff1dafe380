"""The distributions that tokens are drawn from, as trust regions see them: exact divergences, and their curvature.

A distribution has *coordinates*, the numbers that a network puts out. Fisher's matrix of the network's weights is
``J^T M J``, with ``J`` the derivative of the coordinates by the weights and ``M`` the second derivative of the
divergence by the coordinates, which is written down here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrl.types import Distribution


class Categorical(Distribution):
    """Probabilities of finitely many choices.

    Args:
        logits: ``(turn, token, choice)``, not normalised; in half precision they are widened.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        self._all: Tensor | None = None

    @property
    def coordinates(self) -> Tensor:
        """The logits."""
        return self._logits

    @property
    def all_logprobs(self) -> Tensor:
        """Of every choice, ``(turn, token, choice)``."""
        if self._all is None:
            self._all = torch.log_softmax(self._logits, dim=-1)
        return self._all

    def logprobs(self, drawn: Tensor) -> Tensor:
        """Of ids ``(turn, token)``."""
        return self.all_logprobs.gather(-1, drawn[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """``-sum p log p``."""
        return -(self.all_logprobs.exp() * self.all_logprobs).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        """``sum p (log p - log q)``."""
        assert isinstance(other, Categorical)
        return (self.all_logprobs.exp() * (self.all_logprobs - other.all_logprobs)).sum(-1)

    def metric(self, tangent: Tensor) -> Tensor:
        """``(diag p - p p^T)`` times the tangent."""
        probabilities = self.all_logprobs.detach().exp()
        return probabilities * (tangent - (probabilities * tangent).sum(-1, keepdim=True))

    def detach(self) -> Categorical:
        """Return a constant copy; log-softmax makes a new tensor, which holds the logits and the log-probabilities."""
        constant = Categorical(self.all_logprobs.detach())
        constant._all = constant.coordinates
        return constant


class Gaussian(Distribution):
    """Independent normal numbers.

    Args:
        means: ``(turn, token, dimension)``.
        log_std: as ``means``, or to be broadcast to them.
    """

    def __init__(self, means: Tensor, log_std: Tensor) -> None:
        self.means, self.log_std = means, log_std.expand_as(means)

    @property
    def coordinates(self) -> Tensor:
        """Means, then logarithms of the standard deviations."""
        return torch.cat([self.means, self.log_std], dim=-1)

    def logprobs(self, drawn: Tensor) -> Tensor:
        """Log-density of vectors ``(turn, token, dimension)``."""
        each = -0.5 * ((drawn - self.means) / self.log_std.exp()).square() - self.log_std - 0.5 * math.log(2 * math.pi)
        return each.sum(-1)

    def entropy(self) -> Tensor:
        """Differential: it may be negative."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        """``log(s' / s) + (s^2 + (m - m')^2) / (2 s'^2) - 1/2``, summed over dimensions."""
        assert isinstance(other, Gaussian)
        squares = (2 * self.log_std).exp() + (self.means - other.means).square()
        each = other.log_std - self.log_std + squares * (-2 * other.log_std).exp() / 2 - 0.5
        return each.sum(-1)

    def metric(self, tangent: Tensor) -> Tensor:
        """``1 / s^2`` for means, 2 for the logarithms of the standard deviations."""
        means, log_std = tangent.chunk(2, dim=-1)
        return torch.cat([means * (-2 * self.log_std.detach()).exp(), 2 * log_std], dim=-1)

    def detach(self) -> Gaussian:
        """Return a constant copy: ``log_std`` may be a parameter, which a line search moves in place."""
        return Gaussian(self.means.detach().clone(), self.log_std.detach().clone())

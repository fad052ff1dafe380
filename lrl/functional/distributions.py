"""Distributions from which tokens and actions are sampled, with exact KL divergences and Fisher matrices.

The *coordinates* of a distribution are the numbers that a network outputs, such as logits. The Fisher matrix of the
network's parameters is ``J^T M J``: ``J`` is the Jacobian of the coordinates with respect to the parameters, and ``M``,
the *metric*, is the Hessian of the KL divergence with respect to the coordinates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrl.types import Distribution


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits divided by a temperature.

    Sampling and training both call this function; ``_Pick.backward`` in :mod:`lrl.lm.logprobs` contains its derivative.
    16-bit logits are converted to float32 before the division. If they were divided first, they would be rounded a
    second time, and the log-probabilities recorded in sampling would differ from those computed in training.

    Args:
        logits: unnormalised log-probabilities, any shape.
        temperature: positive number.

    Returns:
        Tensor with the shape of ``logits``; float64 if they are float64, else float32.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1 else logits / temperature


class Categorical(Distribution):
    """Represents a categorical distribution for each token.

    Args:
        logits: unnormalised log-probabilities, ``(turn, token, choice)``; with ``index``, ``(row, choice)``.
        temperature: divisor of the logits.
        index: row of each token's logits, int64 ``(turn, token)``. Tokens with equal distributions may have one row,
            which is normalised once. None: each token has logits of its own.
    """

    def __init__(self, logits: Tensor, temperature: float = 1.0, index: Tensor | None = None) -> None:
        self._logits, self._index = tempered(logits, temperature), index
        self._normalised: Tensor | None = None

    @property
    def coordinates(self) -> Tensor:
        """The logits divided by the temperature, ``(turn, token, choice)``."""
        return self._of_tokens(self._logits)

    @property
    def all_logprobs(self) -> Tensor:
        """Log-probability of every choice, ``(turn, token, choice)``."""
        return self._of_tokens(self._logprobs)

    @property
    def _logprobs(self) -> Tensor:
        """Log-probability of every choice, in the shape of the logits."""
        if self._normalised is None:
            self._normalised = torch.log_softmax(self._logits, dim=-1)
        return self._normalised

    def _of_tokens(self, rows: Tensor) -> Tensor:
        return rows if self._index is None else rows[self._index]

    def logprobs(self, samples: Tensor) -> Tensor:
        """Return the log-probabilities ``(turn, token)`` of sampled ids, int64 ``(turn, token)``."""
        if self._index is not None:
            return self._logprobs[self._index, samples]
        return self._logprobs.gather(-1, samples[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropy ``-sum p log p`` in nats, ``(turn, token)``."""
        return self._of_tokens(-(self._logprobs.exp() * self._logprobs).sum(-1))

    def kl(self, other: Distribution) -> Tensor:
        """Return KL(self || other) ``= sum p (log p - log q)`` in nats, ``(turn, token)``."""
        assert isinstance(other, Categorical)
        return (self.all_logprobs.exp() * (self.all_logprobs - other.all_logprobs)).sum(-1)

    def metric(self, tangent: Tensor) -> Tensor:
        """Return ``(diag p - p p^T)`` times ``tangent``, both ``(turn, token, choice)``."""
        probabilities = self.all_logprobs.detach().exp()
        return probabilities * (tangent - (probabilities * tangent).sum(-1, keepdim=True))

    def detach(self) -> Categorical:
        """Return a copy without gradient. Its log-probabilities also serve as its logits, which saves memory."""
        constant = Categorical(self.all_logprobs.detach())
        constant._normalised = constant.coordinates
        return constant


class Gaussian(Distribution):
    """Represents a normal distribution with diagonal covariance for each token.

    Args:
        means: ``(turn, token, dimension)``.
        log_std: logarithm of the standard deviations, broadcastable to ``(turn, token, dimension)``.
    """

    def __init__(self, means: Tensor, log_std: Tensor) -> None:
        self.means, self.log_std = means, log_std.expand_as(means)

    @property
    def coordinates(self) -> Tensor:
        """The means, then the logarithms of the standard deviations, ``(turn, token, 2 * dimension)``."""
        return torch.cat([self.means, self.log_std], dim=-1)

    def logprobs(self, samples: Tensor) -> Tensor:
        """Return the log-densities ``(turn, token)`` of sampled vectors ``(turn, token, dimension)``."""
        each = (
            -0.5 * ((samples - self.means) / self.log_std.exp()).square() - self.log_std - 0.5 * math.log(2 * math.pi)
        )
        return each.sum(-1)

    def clipped_logprobs(self, samples: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return the log-likelihoods ``(turn, token)`` of samples that were clipped to a box (Tobin, 1958).

        Inside the box this is the log-density. At a bound it is the log-probability of all values at or beyond the
        bound, because clipping maps all of them to the bound. A mean beyond the bound is therefore not penalised.

        Args:
            samples: vectors ``(turn, token, dimension)``; values outside the box count as values at its bounds.
            low: lower bounds, ``(dimension,)``, may be infinite.
            high: upper bounds, ``(dimension,)``, may be infinite.
        """
        inside = samples.clamp(low, high)
        beyond = (samples >= high).to(inside.dtype) - (samples <= low).to(inside.dtype)  # 1, 0 or -1
        deviations = (inside - self.means) / self.log_std.exp()
        density = -0.5 * deviations.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        mass = torch.special.log_ndtr((-beyond * deviations).double())  # float32 gradients are wrong beyond 1,000 std
        return torch.where(beyond == 0, density, mass.to(density.dtype)).sum(-1)

    def entropy(self) -> Tensor:
        """Return the differential entropy in nats, ``(turn, token)``; it may be negative."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        """Return KL(self || other) in nats, ``(turn, token)``.

        Sums ``log(s' / s) + (s^2 + (m - m')^2) / (2 s'^2) - 1/2`` over the dimensions.
        """
        assert isinstance(other, Gaussian)
        squares = (2 * self.log_std).exp() + (self.means - other.means).square()
        each = other.log_std - self.log_std + squares * (-2 * other.log_std).exp() / 2 - 0.5
        return each.sum(-1)

    def metric(self, tangent: Tensor) -> Tensor:
        """Return the Fisher metric times ``tangent``, both ``(turn, token, 2 * dimension)``.

        The metric is diagonal: ``1 / s^2`` for the means, 2 for the logarithms of the standard deviations.
        """
        means, log_std = tangent.chunk(2, dim=-1)
        return torch.cat([means * (-2 * self.log_std.detach()).exp(), 2 * log_std], dim=-1)

    def detach(self) -> Gaussian:
        """Return a copy without gradient. It has new tensors, because a line search changes ``log_std`` in place."""
        return Gaussian(self.means.detach().clone(), self.log_std.detach().clone())

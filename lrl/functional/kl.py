"""Estimators of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate the KL divergence at each sampled token.

    With ``d = log pi_ref - log pi``: k1 is ``-d`` (unbiased, can be negative), k2 is ``d^2 / 2`` (biased, low
    variance; its gradient is that of the KL), k3 is ``exp(d) - 1 - d`` (unbiased, never negative).

    Args:
        logprobs: any shape, of the policy that sampled.
        ref_logprobs: the same shape.
        estimator: ``k1``, ``k2`` or ``k3``.

    Raises:
        ValueError: an unknown estimator.
    """
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return difference.exp() - 1 - difference
    raise ValueError(f"kl.estimator is {estimator!r}; it must be k1, k2 or k3.")

"""Building blocks of TRPO (arXiv:1502.05477, appendix C): conjugate gradient, Fisher-vector products, line search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MatrixVectorProduct = Callable[[Tensor], Tensor]
"""Multiplies a symmetric positive definite matrix by a vector ``(parameter,)``; the result is ``(parameter,)``."""


def conjugate_gradient(
    product: MatrixVectorProduct, target: Tensor, iterations: int = 10, tolerance: float = 1e-10
) -> Tensor:
    """Solve ``A x = target`` for a symmetric positive definite matrix ``A`` by the conjugate gradient method.

    In exact arithmetic, the number of iterations needed is the number of distinct eigenvalues of ``A``.

    Args:
        product: multiplies ``A`` by a vector.
        target: ``(parameter,)``.
        iterations: maximum number of iterations, each with one matrix-vector product.
        tolerance: the iteration stops when the squared norm of the residual is at most this fraction of the squared
            norm of ``target``.

    Returns:
        The approximate solution ``x``, ``(parameter,)``.
    """
    x = torch.zeros_like(target)
    residual, direction = target.clone(), target.clone()
    squared_norm = residual @ residual
    threshold = tolerance * squared_norm
    for _ in range(iterations):
        if squared_norm <= threshold:
            break
        image = product(direction)
        step = squared_norm / (direction @ image)
        x, residual = x + step * direction, residual - step * image
        previous, squared_norm = squared_norm, residual @ residual
        direction = residual + squared_norm / previous * direction
    return x


def fisher_vector_product(mean_kl: Tensor, parameters: Sequence[Tensor]) -> MatrixVectorProduct:
    """Return a function that multiplies the Hessian of a mean KL divergence by a vector, by differentiating twice.

    If the two distributions are equal, this Hessian is the Fisher matrix.

    Args:
        mean_kl: scalar ``()`` with a graph whose leaves include ``parameters``.
        parameters: the trainable parameters, tensors of any shape.
    """
    gradient = flatten(torch.autograd.grad(mean_kl, parameters, create_graph=True, allow_unused=True), parameters)

    def product(vector: Tensor) -> Tensor:
        second = torch.autograd.grad(gradient @ vector, parameters, retain_graph=True, allow_unused=True)
        return flatten(second, parameters)

    return product


def gauss_newton_vector_product(
    outputs: Tensor, output_metric: MatrixVectorProduct, parameters: Sequence[Tensor]
) -> MatrixVectorProduct:
    """Return a function that multiplies the Gauss-Newton matrix ``J^T M J`` by a vector.

    ``J`` is the Jacobian of ``outputs`` with respect to ``parameters``, and ``M`` the matrix of ``output_metric``. If
    ``M`` is the Fisher matrix of the output distribution, the product is the Fisher matrix of the parameters, and it is
    positive semi-definite in spite of rounding errors. ``J v`` is computed by reverse-mode differentiation only: ``v^T
    J^T u`` is linear in ``u``, and its gradient with respect to ``u`` is ``J v``.

    Args:
        outputs: network outputs of any shape, for example ``(turn, token, coordinate)``, with a graph whose leaves
            include ``parameters``.
        output_metric: multiplies ``M`` by a tensor with the shape of ``outputs``. Masks and the weights of an average
            are part of ``M``.
        parameters: the trainable parameters, tensors of any shape.
    """
    probe = torch.zeros_like(outputs, requires_grad=True)
    transposed = torch.autograd.grad(outputs, parameters, probe, create_graph=True, allow_unused=True)
    used = [index for index, gradient in enumerate(transposed) if gradient is not None and gradient.requires_grad]

    def product(vector: Tensor) -> Tensor:
        pieces = vector.split([parameter.numel() for parameter in parameters])
        directions = [pieces[index].view_as(parameters[index]) for index in used]
        (tangent,) = torch.autograd.grad([transposed[index] for index in used], probe, directions, retain_graph=True)
        result = torch.autograd.grad(outputs, parameters, output_metric(tangent), retain_graph=True, allow_unused=True)
        return flatten(result, parameters)

    return product


class LineSearchResult(NamedTuple):
    """Result of :func:`line_search`; all numbers are 0 if no step was accepted."""

    accepted: bool
    """Whether a step was accepted."""
    step: float
    """Accepted step as a fraction of the full step."""
    improvement: float
    """Increase of the surrogate objective."""
    kl: float
    """Mean KL(old || new) in nats."""


def line_search(
    evaluate: Callable[[], tuple[float, float]],
    parameters: Sequence[Tensor],
    full_step: Tensor,
    start: float,
    expected: float,
    max_kl: float,
    max_backtracks: int = 10,
    backtrack_coeff: float = 0.5,
    accept_ratio: float = 0.1,
) -> LineSearchResult:
    """Take the largest step ``backtrack_coeff^k * full_step`` that improves enough and stays in the trust region.

    If no step is accepted, the parameters are restored exactly.

    Args:
        evaluate: returns the surrogate objective and the mean KL(old || new) at the current parameters.
        parameters: the trainable parameters, tensors of any shape; changed in place.
        full_step: change of all parameters as one vector, ``(parameter,)``.
        start: surrogate objective before the step.
        expected: first-order estimate of the improvement of a full step.
        max_kl: largest mean KL divergence in nats that is accepted.
        max_backtracks: number of step sizes that are tried, including the full step.
        backtrack_coeff: ratio of each step size to the one before.
        accept_ratio: smallest accepted ratio of the improvement to the expected improvement of the same step; the
            latter is the fraction of the full step times ``expected``.
    """
    before = [parameter.detach().clone() for parameter in parameters]
    for attempt in range(max_backtracks):
        fraction = backtrack_coeff**attempt
        _set_to_sum(parameters, before, fraction * full_step)
        surrogate, kl = evaluate()
        improvement = surrogate - start
        if improvement > 0 and improvement >= accept_ratio * fraction * expected and kl <= max_kl:
            return LineSearchResult(accepted=True, step=fraction, improvement=improvement, kl=kl)
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    return LineSearchResult(accepted=False, step=0.0, improvement=0.0, kl=0.0)


@torch.no_grad()
def _set_to_sum(parameters: Sequence[Tensor], before: Sequence[Tensor], step: Tensor) -> None:
    """Set ``parameters`` in place to ``before`` plus the matching slices of ``step`` ``(parameter,)``."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, value, change in zip(parameters, before, step.split(sizes), strict=True):
        parameter.copy_(value + change.view_as(value))


def flatten(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of any shape to one vector ``(parameter,)``; None becomes zeros with the shape in ``like``.

    Args:
        tensors: gradients, as ``torch.autograd.grad`` returns them with ``allow_unused=True``.
        like: the parameters, with the shapes of ``tensors``.
    """
    filled = (torch.zeros_like(p) if tensor is None else tensor for tensor, p in zip(tensors, like, strict=True))
    return torch.cat([tensor.reshape(-1) for tensor in filled])

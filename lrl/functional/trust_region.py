"""The trust region's parts: conjugate gradient, Fisher products, and the line search (arXiv:1502.05477, appendix C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""A symmetric positive matrix times a vector ``(parameter,)``."""


def conjugate_gradient(product: Product, target: Tensor, iterations: int = 10, tolerance: float = 1e-10) -> Tensor:
    """Solve ``A x = target`` for a symmetric positive ``A`` that is known by its products only.

    Args:
        product: ``A`` times a vector.
        target: ``(parameter,)``.
        iterations: at most; one product each.
        tolerance: share of the squared norm of ``target`` that is left when it stops.

    Returns:
        ``x``, ``(parameter,)``: after as many iterations as ``A`` has distinct eigenvalues, the solution.
    """
    x = torch.zeros_like(target)
    rest, direction = target.clone(), target.clone()
    norm = rest @ rest
    enough = tolerance * norm
    for _ in range(iterations):
        if norm <= enough:
            break
        image = product(direction)
        step = norm / (direction @ image)
        x, rest = x + step * direction, rest - step * image
        before, norm = norm, rest @ rest
        direction = rest + norm / before * direction
    return x


def fisher_product(mean_kl: Tensor, parameters: Sequence[Tensor], damping: float) -> Product:
    """Products of the second derivative of a mean KL divergence with vectors, by differentiating twice.

    At the weights where the divergence is zero that is Fisher's matrix.

    Args:
        mean_kl: a scalar with a graph, of which ``parameters`` are leaves.
        parameters: those that are trained.
        damping: is added to the diagonal.
    """
    gradient = flatten(torch.autograd.grad(mean_kl, parameters, create_graph=True, allow_unused=True), parameters)

    def product(vector: Tensor) -> Tensor:
        twice = torch.autograd.grad(gradient @ vector, parameters, retain_graph=True, allow_unused=True)
        return flatten(twice, parameters) + damping * vector

    return product


def gauss_newton_product(coordinates: Tensor, metric: Product, parameters: Sequence[Tensor], damping: float) -> Product:
    """Products of ``J^T M J`` with vectors, where ``J`` is the derivative of ``coordinates`` by ``parameters``.

    At the weights that ``M`` was taken at that is Fisher's matrix, positive whatever the rounding. ``J v`` is had from
    reverse mode alone: ``J^T u`` is linear in ``u``, and its derivative by ``u`` along ``v`` is ``J v``.

    Args:
        coordinates: any shape, with a graph, of which ``parameters`` are leaves.
        metric: ``M`` times a tensor of that shape, what they are averaged with included.
        parameters: those that are trained.
        damping: is added to the diagonal.
    """
    probe = torch.zeros_like(coordinates, requires_grad=True)
    transposed = torch.autograd.grad(coordinates, parameters, probe, create_graph=True, allow_unused=True)
    used = [index for index, part in enumerate(transposed) if part is not None and part.requires_grad]

    def product(vector: Tensor) -> Tensor:
        pieces = vector.split([parameter.numel() for parameter in parameters])
        along = [pieces[index].view_as(parameters[index]) for index in used]
        (tangent,) = torch.autograd.grad([transposed[index] for index in used], probe, along, retain_graph=True)
        back = torch.autograd.grad(coordinates, parameters, metric(tangent), retain_graph=True, allow_unused=True)
        return flatten(back, parameters) + damping * vector

    return product


class LineSearch(NamedTuple):
    """How a line search ended."""

    accepted: bool
    step: float
    """The share of the full step that was taken; 0 where none was."""
    improvement: float
    """Of the surrogate."""
    kl: float
    """Mean KL(old || new)."""


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
) -> LineSearch:
    """Take the largest of the steps ``backtrack_coeff^k`` that improves enough and stays in the region.

    If none does, the weights are what they were, bit by bit.

    Args:
        evaluate: surrogate (to be raised) and mean KL(old || new) at the weights as they are.
        parameters: changed in place.
        full_step: ``(parameter,)``.
        start: surrogate at the weights as they are.
        expected: by how much a full step should raise the surrogate, to first order.
        max_kl: the region.
        max_backtracks: how many steps are tried.
        backtrack_coeff: from each to the next.
        accept_ratio: of improvement to what was expected of that step.
    """
    before = [parameter.detach().clone() for parameter in parameters]
    for attempt in range(max_backtracks):
        share = backtrack_coeff**attempt
        add(parameters, before, share * full_step)
        surrogate, kl = evaluate()
        improvement = surrogate - start
        if improvement > 0 and improvement >= accept_ratio * share * expected and kl <= max_kl:
            return LineSearch(accepted=True, step=share, improvement=improvement, kl=kl)
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    return LineSearch(accepted=False, step=0.0, improvement=0.0, kl=0.0)


@torch.no_grad()
def add(parameters: Sequence[Tensor], before: Sequence[Tensor], step: Tensor) -> None:
    """Set ``parameters`` to ``before`` plus their parts of ``step``."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, value, part in zip(parameters, before, step.split(sizes), strict=True):
        parameter.copy_(value + part.view_as(value))


def flatten(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """One vector ``(parameter,)``; zeros where there is no gradient."""
    return torch.cat(
        [
            (torch.zeros_like(parameter) if tensor is None else tensor).reshape(-1)
            for tensor, parameter in zip(tensors, like, strict=True)
        ]
    )

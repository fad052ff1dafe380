"""Conjugate gradient, Fisher products and line search against cases that can be done by hand."""

import math

import pytest
import torch

from lrl.functional.trust_region import (
    conjugate_gradient,
    fisher_vector_product,
    flatten,
    gauss_newton_vector_product,
    line_search,
)


def positive(size, seed):
    root = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.T + 0.1 * torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_as_many_iterations_as_dimensions_solve_the_system(size):
    matrix, target = positive(size, size), torch.arange(1.0, size + 1, dtype=torch.float64)
    x = conjugate_gradient(lambda vector: matrix @ vector, target, iterations=size, tolerance=0)
    torch.testing.assert_close(x, torch.linalg.solve(matrix, target), rtol=1e-6, atol=1e-8)


def test_two_iterations_by_hand():
    """Textbook example: A = [[4, 1], [1, 3]], b = [1, 2] has the solution [1/11, 7/11]; the first iterate is b / 4."""
    matrix, target = torch.tensor([[4.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 2.0])
    once = conjugate_gradient(lambda vector: matrix @ vector, target, iterations=1)
    torch.testing.assert_close(once, target * 5 / 20)
    twice = conjugate_gradient(lambda vector: matrix @ vector, target, iterations=2)
    torch.testing.assert_close(twice, torch.tensor([1 / 11, 7 / 11]))


def test_a_small_target_is_solved_as_well_as_a_large_one():
    matrix, target = positive(5, 0), torch.arange(1.0, 6, dtype=torch.float64)
    solve = lambda scale: conjugate_gradient(lambda vector: matrix @ vector, scale * target) / scale  # noqa: E731
    torch.testing.assert_close(solve(1e-9), solve(1.0))
    torch.testing.assert_close(solve(1.0), torch.linalg.solve(matrix, target), rtol=1e-4, atol=1e-6)


def test_a_zero_target_needs_no_matrix_vector_product():
    def product(vector):
        raise AssertionError

    assert not conjugate_gradient(product, torch.zeros(3)).any()


def test_the_fisher_product_is_that_of_the_explicit_matrix():
    """Softmax of weights: F = diag(p) - p p^T; of a Gaussian's log std: 2."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    log_std = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    old = logits.detach().softmax(0)
    ratio = (log_std.detach() - log_std).exp()
    kl = (old * (old.log() - logits.log_softmax(0))).sum() + (0.5 * ratio.square() - ratio.log() - 0.5).sum()
    product = fisher_vector_product(kl, [logits, unused, log_std])
    explicit = torch.zeros(6, 6, dtype=torch.float64)
    explicit[:3, :3] = torch.diag(old) - torch.outer(old, old)
    explicit[5, 5] = 2
    for index in range(6):
        unit = torch.zeros(6, dtype=torch.float64)
        unit[index] = 1
        torch.testing.assert_close(product(unit), explicit[index])


def test_the_gauss_newton_product_is_that_of_the_explicit_matrix():
    """Fisher matrix of logits ``tanh(A w)`` with metric ``diag(p) - p p^T``: J^T M J with J = diag(1 - tanh^2) A."""
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    weight = torch.randn(3, generator=draw, dtype=torch.float64, requires_grad=True)
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    logits = torch.tanh(matrix @ weight)
    p = logits.detach().softmax(0)
    metric = torch.diag(p) - torch.outer(p, p)
    jacobian = (1 - logits.detach().square())[:, None] * matrix
    explicit = torch.zeros(5, 5, dtype=torch.float64)
    explicit[2:, 2:] = jacobian.T @ metric @ jacobian
    product = gauss_newton_vector_product(logits, lambda tangent: metric @ tangent, [unused, weight])
    for row, unit in zip(explicit, torch.eye(5, dtype=torch.float64), strict=True):
        torch.testing.assert_close(product(unit), row)


def bowl(weight, steepness=1.0):
    """Surrogate with its maximum at 1, KL half the squared distance from 0."""
    return lambda: (float(-((weight - 1) ** 2).sum()) * steepness, float(0.5 * (weight**2).sum()))


@pytest.mark.parametrize(
    ("full", "max_kl", "share"),
    [
        (1.0, 1.0, 1.0),  # to the top
        (1.0, 0.125, 0.5),  # KL of 1 is .5, of 1/2 exactly .125
        (1.0, 0.1, 0.25),
        (4.0, 100.0, 0.25),  # 4 and 2 do not improve, 1 does
    ],
)
def test_the_largest_step_that_improves_inside_the_region_is_taken(full, max_kl, share):
    weight = torch.zeros(1, dtype=torch.float64)
    step = torch.tensor([full], dtype=torch.float64)
    found = line_search(bowl(weight), [weight], step, start=-1.0, expected=1e-6, max_kl=max_kl)
    assert found.accepted and found.step == share and weight.item() == pytest.approx(share * full)
    assert found.kl == pytest.approx(0.5 * (share * full) ** 2) and found.kl <= max_kl
    assert found.improvement == pytest.approx(1 - (share * full - 1) ** 2)


def test_an_improvement_far_below_the_expected_one_is_rejected():
    weight = torch.zeros(1, dtype=torch.float64)
    step = torch.tensor([1.0], dtype=torch.float64)
    assert not line_search(bowl(weight), [weight], step, -1.0, 100.0, max_kl=10.0, max_backtracks=4).accepted


def test_a_search_that_fails_restores_every_bit():
    first, second = torch.tensor([0.1, math.pi]), torch.tensor([[1e-30], [3e7]])
    kept = [first.clone(), second.clone()]
    tried = []

    def evaluate():
        tried.append(flatten([first, second], [first, second]))
        return -float(len(tried)), 0.0

    found = line_search(evaluate, [first, second], torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.0, 1.0, 1.0, max_backtracks=3)
    assert found == (False, 0.0, 0.0, 0.0)
    assert torch.equal(first, kept[0]) and torch.equal(second, kept[1])
    assert len(tried) == 3 and not torch.equal(tried[0], tried[1])

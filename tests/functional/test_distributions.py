"""Exact divergences against torch's, and their curvature against automatic differentiation."""

import pytest
import torch

from lrl.functional.distributions import Categorical, Gaussian
from lrl.functional.trust_region import fisher_vector_product, flatten, gauss_newton_vector_product


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair(kind):
    """Two distributions of ours and the same two of torch, over ``(5, 2)`` tokens."""
    if kind == "categorical":
        logits = [normal(5, 2, 4, seed=seed) for seed in (0, 1)]
        return [Categorical(part) for part in logits], [torch.distributions.Categorical(logits=part) for part in logits]
    parts = [(normal(5, 2, 3, seed=seed), 0.5 * normal(3, seed=seed + 5)) for seed in (0, 1)]
    theirs = [torch.distributions.Normal(means, log_std.exp()) for means, log_std in parts]
    return [Gaussian(*part) for part in parts], [torch.distributions.Independent(part, 1) for part in theirs]


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_divergence_entropy_and_logprobs_are_those_of_torch(kind):
    (ours, other), (theirs, their_other) = pair(kind)
    torch.testing.assert_close(ours.kl(other), torch.distributions.kl_divergence(theirs, their_other))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    sample = theirs.sample()
    torch.testing.assert_close(ours.logprobs(sample), theirs.log_prob(sample))
    torch.testing.assert_close(ours.kl(ours.detach()), torch.zeros(5, 2, dtype=torch.float64))


def test_a_sample_at_a_bound_has_the_probability_of_all_values_clipped_to_it():
    """By hand, for a standard normal: log density at .5, log Phi(-1) and log Phi(-2)."""
    low, high = torch.tensor([-1.0]), torch.tensor([2.0])
    gaussian = Gaussian(torch.zeros(5, 1, 1), torch.zeros(1))
    samples = torch.tensor([0.5, -1.0, 2.0, -7.0, 7.0])[:, None, None]
    expected = torch.tensor([-1.0439385, -1.8410216, -3.7831843, -1.8410216, -3.7831843])
    torch.testing.assert_close(gaussian.clipped_logprobs(samples, low, high), expected[:, None])


def test_clipped_probabilities_sum_to_one_and_are_the_plain_ones_in_an_infinite_box():
    low, high = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)
    gaussian = Gaussian(torch.full((1, 1, 1), 0.3, dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64))
    grid = torch.linspace(-1, 0.7, 20001, dtype=torch.float64)[1:-1, None, None]
    everywhere = Gaussian(gaussian.means.expand_as(grid), gaussian.log_std[0, 0])
    inside = torch.trapezoid(everywhere.clipped_logprobs(grid, low, high).exp()[:, 0], grid[:, 0, 0])
    bounds = [float(gaussian.clipped_logprobs(bound[None, None], low, high).exp()) for bound in (low, high)]
    assert float(inside) + sum(bounds) == pytest.approx(1, abs=1e-3)
    (ours, _), _ = pair("gaussian")
    infinite, samples = torch.full((3,), torch.inf, dtype=torch.float64), normal(5, 2, 3, seed=4)
    torch.testing.assert_close(ours.clipped_logprobs(samples, -infinite, infinite), ours.logprobs(samples))


@pytest.mark.parametrize("mean", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_the_gradient_at_a_bound_is_finite_and_leads_towards_it(mean):
    means, log_std = torch.full((1, 1, 1), mean, requires_grad=True), torch.full((1,), -3.0, requires_grad=True)
    bounds = torch.tensor([-torch.inf]), torch.tensor([1.0])
    Gaussian(means, log_std).clipped_logprobs(torch.ones(1, 1, 1), *bounds).sum().backward()
    assert torch.isfinite(means.grad).all() and torch.isfinite(log_std.grad).all()
    assert (means.grad > 0).all() if mean < 1 else (means.grad.abs() < 1e-6).all()


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_a_detached_distribution_stays_when_the_parameters_move_in_place(kind):
    """A line search writes parameters in place; the old distribution must not move along."""
    parameters = [normal(5, 2, 3).requires_grad_(), normal(3, seed=1).requires_grad_()]
    live = Categorical(parameters[0]) if kind == "categorical" else Gaussian(*parameters)
    old, before = live.detach(), live.coordinates.detach().clone()
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)
    expected = torch.log_softmax(before, -1) if kind == "categorical" else before
    torch.testing.assert_close(old.coordinates, expected)


def at(kind, coordinates):
    """Return a distribution with these parameters."""
    return Categorical(coordinates) if kind == "categorical" else Gaussian(*coordinates.chunk(2, -1))


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_the_metric_is_the_second_derivative_of_the_divergence(kind):
    old = pair(kind)[0][0]
    hessian = torch.autograd.functional.hessian(lambda moved: old.kl(at(kind, moved)).sum(), old.coordinates)
    tangent = normal(*old.coordinates.shape, seed=9)
    torch.testing.assert_close(old.metric(tangent), torch.tensordot(hessian, tangent, tangent.ndim))


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_both_forms_of_the_fisher_product_are_that_of_the_explicit_matrix(kind):
    """A network of 2 x 3 + 3 (+ 3) weights; the Fisher matrix from its definition, E[score score^T]."""
    inputs, weight, bias = normal(6, 2), normal(2, 3, seed=1).requires_grad_(), normal(3, seed=2).requires_grad_()
    log_std, unused = (0.3 * normal(3, seed=3)).requires_grad_(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    outputs = torch.tanh(inputs @ weight + bias)[:, None]
    distribution = Categorical(outputs) if kind == "categorical" else Gaussian(outputs, log_std)
    parameters = [weight, unused, bias] + ([] if kind == "categorical" else [log_std])
    explicit = definition(kind, distribution, parameters)
    mean_kl = distribution.detach().kl(distribution).mean()
    products = [
        fisher_vector_product(mean_kl, parameters),
        gauss_newton_vector_product(
            distribution.coordinates, lambda tangent: distribution.metric(tangent) / 6, parameters
        ),
    ]
    for index in range(len(explicit)):
        unit = torch.zeros(len(explicit), dtype=torch.float64)
        unit[index] = 1
        for product in products:
            torch.testing.assert_close(product(unit), explicit[index], rtol=1e-9, atol=1e-12)


def definition(kind, distribution, parameters):
    """Categorical: over all choices, weighted; Gaussian: by the normal numbers' moments, from Gauss-Hermite nodes."""
    if kind == "categorical":
        total = 0
        for choice in range(3):
            logprobs = distribution.logprobs(torch.full((6, 1), choice))
            for row in range(6):
                score = flatten(grads(logprobs[row, 0], parameters), parameters)
                total = total + logprobs[row, 0].detach().exp() * torch.outer(score, score) / 6
        return total
    nodes, weights = torch.tensor([-(3**0.5), 0.0, 3**0.5], dtype=torch.float64), [1 / 6, 2 / 3, 1 / 6]
    total = 0
    for one, w1 in zip(nodes, weights):
        for two, w2 in zip(nodes, weights):
            for three, w3 in zip(nodes, weights):
                noise = torch.stack([one, two, three]) * distribution.log_std.detach().exp()
                logprobs = distribution.logprobs(distribution.means.detach() + noise)
                for row in range(6):
                    score = flatten(grads(logprobs[row, 0], parameters), parameters)
                    total = total + w1 * w2 * w3 * torch.outer(score, score) / 6
    return total


def grads(scalar, parameters):
    return torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)


def test_tokens_with_one_row_of_logits_equal_tokens_with_a_copy_each():
    logits, index = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 2], [2, 1]])
    rows, copies = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    shared, each = Categorical(rows, 0.7, index), Categorical(copies[index], 0.7)
    samples = torch.tensor([[1, 4], [0, 0]])
    for name in ("coordinates", "all_logprobs"):
        assert torch.equal(getattr(shared, name), getattr(each, name))
    assert torch.equal(shared.logprobs(samples), each.logprobs(samples))
    assert torch.equal(shared.entropy(), each.entropy())
    assert torch.equal(shared.detach().kl(each), each.detach().kl(shared))
    for distribution in (shared, each):
        (distribution.logprobs(samples) + distribution.entropy()).square().sum().backward()
    torch.testing.assert_close(rows.grad, copies.grad)

import math

import numpy as np
import pytest
from scipy import stats

from lrl.evaluation.statistics import (
    bootstrap_bounds,
    bootstrap_interval,
    interquartile_mean,
    ratio_interval,
    t_interval,
    wilson_interval,
)


def test_the_t_interval_is_that_of_student() -> None:
    # mean 3, standard deviation sqrt(2.5), t(4) = 2.7764451
    lower, upper = t_interval([1, 2, 3, 4, 5])
    assert (lower, upper) == pytest.approx((1.0367568, 4.9632432), abs=1e-5)


@pytest.mark.parametrize("interval", [t_interval, bootstrap_interval])
def test_one_value_has_no_interval_and_equal_values_have_one_of_width_0(interval) -> None:
    assert all(math.isnan(bound) for bound in interval([1.0]))
    assert interval([0.74] * 10) == (0.74, 0.74)


@pytest.mark.parametrize("values", [[1.0] * 9 + [0.0], [0.975, 0.985, 0.945, 1.0, 1.0], [500.0] * 9 + [104.0]])
def test_a_bootstrap_interval_stays_within_the_values(values) -> None:
    lower, upper = bootstrap_interval(values)
    assert min(values) <= lower < np.mean(values) < upper <= max(values)
    assert (lower, upper) == bootstrap_interval(values)  # whatever was drawn before


def test_a_bootstrap_interval_of_many_values_agrees_with_students() -> None:
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    assert bootstrap_interval(values) == pytest.approx(t_interval(values), abs=0.02)


def test_a_bootstrap_of_curves_resamples_whole_runs() -> None:
    # The two points of a run add up to 1; resampled apart they would not.
    first = np.array([0.0, 0.25, 0.5, 1.0])
    samples = np.stack([first, 1 - first], axis=1)
    (low, other_low), (high, other_high) = bootstrap_bounds((samples,), np.mean, resamples=500)
    assert (other_low, other_high) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [
        (0, 10, (0.0, 0.2775328)),
        (10, 10, (0.7224672, 1.0)),
        (7, 10, (0.3967781, 0.8922087)),
        (148, 200, (0.6750925, 0.7958617)),
    ],
)
def test_wilson_intervals_are_those_of_the_printed_formula(successes, trials, expected) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-6)


def test_more_successes_than_trials_raise() -> None:
    with pytest.raises(ValueError, match="successes is 3 of 2 trials"):
        wilson_interval(3, 2)


def test_interquartile_mean_cuts_whole_values_as_rliable_does() -> None:
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -100]) == pytest.approx(3.5)
    assert interquartile_mean([0, 1, 2, 3, 100]) == pytest.approx(2.0)  # int(.25 * 5) = 1 is cut on each side
    assert interquartile_mean([[0, 10], [1, 11], [2, 12], [90, 99]], axis=0) == pytest.approx([1.5, 11.5])
    assert interquartile_mean([[0, 4], [1, 5], [2, 6], [3, 7]]) == pytest.approx(3.5)


def test_a_ratio_interval_resamples_episodes_and_not_turns() -> None:
    # One long episode with every invalid turn: turn by turn the rate would look known to within 2%.
    assert ratio_interval([1000, 0], [1000, 1000]) == (0.0, 1.0)
    assert ratio_interval([1], [4]) == (0.25, 0.25)


def test_a_ratio_interval_agrees_with_scipys_of_independent_turns() -> None:
    invalid = np.random.default_rng(0).integers(0, 2, size=400)
    wilson = stats.binomtest(int(invalid.sum()), 400).proportion_ci(method="wilson")
    assert ratio_interval(invalid, np.ones(400)) == pytest.approx((wilson.low, wilson.high), abs=0.01)

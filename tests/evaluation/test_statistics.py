import math

import numpy as np
import pytest

from lrl.evaluation.statistics import (
    interquartile_mean,
    iqm_interval,
    mean_interval,
    ratio_interval,
    stratified_bootstrap_interval,
    student_t_quantile,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062047), (2, 4.3026527), (9, 2.2621572), (30, 2.0422725), (199, 1.9719565)]
)
def test_t_quantiles_agree_with_the_printed_table(degrees: int, expected: float) -> None:
    assert student_t_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)


def test_mean_interval_is_students() -> None:
    # mean 3, standard deviation sqrt(2.5), t(4) = 2.7764451
    lower, upper = mean_interval([1, 2, 3, 4, 5])
    assert (lower, upper) == pytest.approx((1.0367568, 4.9632432), abs=1e-5)


def test_one_value_has_no_interval() -> None:
    assert all(math.isnan(bound) for bound in mean_interval([1.0]))


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [
        (0, 10, (0.0, 0.2775328)),
        (10, 10, (0.7224672, 1.0)),
        (7, 10, (0.3967781, 0.8922087)),
        (148, 200, (0.6750925, 0.7958617)),
    ],
)
def test_wilson_intervals_agree_with_scipy(successes: int, trials: int, expected: tuple[float, float]) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-6)


def test_more_successes_than_trials_are_refused() -> None:
    with pytest.raises(ValueError, match="successes is 3 of 2 trials"):
        wilson_interval(3, 2)


def test_interquartile_mean_cuts_whole_values_as_rliable_does() -> None:
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -100]) == pytest.approx(3.5)
    assert interquartile_mean([0, 1, 2, 3, 100]) == pytest.approx(2.0)  # int(.25 * 5) = 1 is cut on each side
    assert interquartile_mean([[0, 10], [1, 11], [2, 12], [90, 99]], axis=0) == pytest.approx([1.5, 11.5])
    assert interquartile_mean([[0, 4], [1, 5], [2, 6], [3, 7]]) == pytest.approx(3.5)


def test_bootstrap_interval_of_a_constant_is_a_point() -> None:
    assert iqm_interval(np.full((5, 3), 0.25)) == (0.25, 0.25)


def test_bootstrap_draws_runs_of_each_task_apart() -> None:
    # Tasks differ by 1000 and runs by nothing: an unstratified bootstrap would mix the tasks and spread.
    scores = np.array([[0.0, 1000.0]] * 4)
    assert stratified_bootstrap_interval(scores, lambda drawn: drawn.mean(-1)) == (500.0, 500.0)


def test_bootstrap_interval_of_a_mean_agrees_with_its_standard_error() -> None:
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    lower, upper = stratified_bootstrap_interval(values, lambda drawn: drawn.mean(-1), resamples=4000)
    expected = mean_interval(values)
    assert (lower, upper) == pytest.approx(expected, abs=0.02)


def test_ratio_interval_draws_episodes_and_not_turns() -> None:
    # One long episode with every invalid turn: turn by turn the rate would look known to within 2%.
    lower, upper = ratio_interval([1000, 0], [1000, 1000])
    assert (lower, upper) == (0.0, 1.0)


def test_statistics_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).normal(size=37)
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))
    expected = stats.t.interval(0.95, 36, values.mean(), stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected, abs=1e-5)
    wilson = stats.binomtest(148, 200).proportion_ci(method="wilson")
    assert wilson_interval(148, 200) == pytest.approx((wilson.low, wilson.high), abs=1e-9)

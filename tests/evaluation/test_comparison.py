"""Runs compared with baseline runs, paired by seed."""

import math

import numpy as np
import pytest
from scipy.stats import bootstrap, nct, t, ttest_rel

from lrl.cli.compare import report
from lrl.evaluation.comparison import compare, pairs_needed, power_of_pairs, smallest_effect

OURS, THEIRS = dict(enumerate([3.0, 5, 4, 6, 7])), dict(enumerate([1.0, 2, 3, 4, 5]))


def test_five_pairs_by_hand():
    # Differences 2 3 1 2 2: mean 2, standard deviation sqrt(2 / 4), Student's 97.5% quantile with 4 degrees 2.776.
    result = compare(OURS, THEIRS, bounded=False)
    assert result.mean == 2 and result.standard_deviation == pytest.approx(math.sqrt(0.5))
    half = 2.7764 * math.sqrt(0.5 / 5)
    assert result.interval(False) == pytest.approx((2 - half, 2 + half), abs=1e-4)
    assert result.pairs_needed() == 4 and result.smallest_effect() < 2


def test_the_paired_interval_is_that_of_scipys_paired_t_test():
    ours, theirs = np.random.default_rng(0).normal(size=(2, 12))
    expected = ttest_rel(ours, theirs).confidence_interval(0.95)
    result = compare(dict(enumerate(ours)), dict(enumerate(theirs)), bounded=False)
    assert result.interval(False) == pytest.approx((expected.low, expected.high))


def test_the_interval_of_a_bounded_figure_is_scipys_paired_bootstrap_and_stays_in_range():
    ours, theirs = np.array([1.0, 1, 1, 1, 1, 1, 1, 0.6]), np.array([0.0, 0, 0, 0, 0, 0, 0.1, 0])
    result = compare(dict(enumerate(ours)), dict(enumerate(theirs)), bounded=True)
    expected = bootstrap(
        (ours, theirs),
        lambda a, b, axis: (a - b).mean(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    low, high = result.interval(True)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.02)
    assert high <= 1 < compare(dict(enumerate(ours)), dict(enumerate(theirs)), bounded=False).interval(False)[1]


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_the_number_of_pairs_is_that_of_cohens_tables(effect, pairs):
    assert pairs_needed(effect) == pairs
    assert power_of_pairs(effect, pairs) >= 0.8 > power_of_pairs(effect, pairs - 1)


@pytest.mark.parametrize(("effect", "pairs"), [(0.0, 5), (0.5, 5), (1.0, 5), (0.3, 40), (0.03, 10_000)])
def test_the_power_is_that_of_scipys_noncentral_t_distribution(effect, pairs):
    critical, shift = t.isf(0.025, pairs - 1), effect * math.sqrt(pairs)
    expected = nct.sf(critical, pairs - 1, shift) + nct.cdf(-critical, pairs - 1, shift)
    assert power_of_pairs(effect, pairs) == pytest.approx(expected, abs=1e-5)


def test_the_smallest_effect_of_ten_pairs_is_about_one_standard_deviation():
    assert smallest_effect(10) == pytest.approx(0.9962, abs=1e-3)
    for pairs in (2, 3, 5, 100, 20_000):
        assert power_of_pairs(smallest_effect(pairs), pairs) == pytest.approx(0.8)
    assert pairs_needed(1e9) == 2


def test_a_tiny_effect_takes_many_pairs():
    assert pairs_needed(0.001) == pytest.approx(2.8016**2 * 1e6, rel=1e-3)  # ((1.960 + 0.8416) / effect)^2


def test_seeds_without_a_partner_are_left_out():
    result = compare({1: 1.0, 2: 2.0, 3: 3.0}, {9: 0.0, 2: 0.5, 3: 1.0}, bounded=False)
    assert result.seeds.tolist() == [2, 3] and result.differences.tolist() == [1.5, 2.0]
    assert (result.unpaired, result.unpaired_baseline) == ((1,), (9,))
    with pytest.raises(ValueError, match="the runs have seeds 1, 2 and the baseline 3; at least one seed"):
        compare({1: 1.0, 2: 2.0}, {3: 1.0}, bounded=False)


def test_few_or_equal_pairs_have_no_interval_and_no_division_by_zero():
    four = compare({seed: OURS[seed] for seed in range(4)}, THEIRS, bounded=True)
    assert four.interval(False) is None and four.smallest_effect() > 0
    one = report(compare({0: 1.0}, {0: 0.5}, bounded=True), "val/success_rate")
    assert "at least 5 pairs, and there are 1" in one and "cannot be estimated from one pair" in one
    equal = compare(OURS, OURS, bounded=True)
    assert equal.interval(False) == (0, 0) and equal.pairs_needed() == math.inf
    sums = [0.7, 0.1, 0.34, 0.5, 0.62], [0.4, 0.4, 0.5, 0.62, 0.34]  # the mean difference is -2.2e-17
    rounded = compare(*(dict(enumerate(side)) for side in sums), bounded=True)
    assert rounded.mean != 0 and rounded.pairs_needed() == math.inf and "inf" not in report(rounded, "val/success_rate")
    assert pairs_needed(1e-6) == math.inf
    shifted = compare(OURS, {seed: value - 1 for seed, value in OURS.items()}, bounded=False)
    assert shifted.interval(False) == (1, 1) and shifted.pairs_needed() == 2 and shifted.smallest_effect() == 0

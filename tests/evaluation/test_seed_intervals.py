"""Intervals over seeds stay within what is possible; few seeds have none."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from results.summaries import final_values, kept_results, learning_table

from lrl.evaluation.statistics import bounds_of, check_bounds, spread

RESULTS = Path(__file__).parents[2] / "assets" / "results"


def row_of(values, metric, **more):
    runs = [{"minutes": 1.0, "curve": {metric: [0.0, value]}} for value in values]
    return learning_table([{"title": "t", "metric": metric, "command": "c", "runs": runs, **more}]).splitlines()[-1]


def test_a_rate_and_a_bounded_return_have_intervals_inside_their_bounds():
    rates = [1.0] * 4 + [0.6]
    assert "success rate 0.920 (0.760 to 1.000) | 5 |" in row_of(rates, "val/success_rate")
    returns = row_of([500.0] * 9 + [104.0], "val/return", bounds=[0, 500], bar=475)
    assert "return 460.400 (381.200 to 500.000) | 9 of 10 reach 475 |" in returns


def test_an_unbounded_return_has_students_interval():
    assert "return 3.000 (1.037 to 4.963)" in row_of([1, 2, 3, 4, 5], "val/return")


@pytest.mark.parametrize("metric", ["val/success_rate", "val/return"])
def test_fewer_than_five_seeds_show_their_values_instead_of_an_interval(metric):
    assert " 0.500 (1.000, 0.250, 0.250, 0.500) | 4 |" in row_of([1, 0.25, 0.25, 0.5], metric)
    assert " 0.250 | 1 |" in row_of([0.25], metric)


def test_forty_seeds_have_their_number_an_interval_and_how_many_reach_the_bar():
    row = row_of([0.74] * 39 + [0.0], "val/exact_success", bar=0.72)
    assert re.search(r"exact success 0\.722 \(0\.\d+ to 0\.740\) \| 39 of 40 reach 0\.72 \|", row)


def test_equal_seeds_have_an_interval_of_width_0():
    assert spread(np.full(40, 0.74), (0, 1)) == spread(np.full(5, 0.74), None) == "0.740 to 0.740"


def test_a_value_outside_the_bounds_raises_one_sentence():
    result = {"metric": "val/return", "bounds": [0, 500]}
    check_bounds(result, np.array([0.0, 500.0]))
    with pytest.raises(ValueError, match="bounds is 0 500, but val/return ends between -1 and 500"):
        check_bounds(result, np.array([-1.0, 500.0]))
    with pytest.raises(ValueError, match="bounds is 0 1"):
        check_bounds({"metric": "val/success_rate"}, np.array([1.2]))


def test_every_saved_result_of_a_bounded_metric_has_bounds():
    for name, result in kept_results(RESULTS).items():
        if "metric" in result:
            check_bounds(result, final_values(result))
            assert (bounds_of(result) is None) == name.startswith("half_cheetah"), json.dumps(name)

"""Numbers as text, and numbers from text."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.numbers import Decimals, Integers, NumberFormat, split

ENDS = st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))


def test_integers_are_written_and_read_as_by_hand():
    numbers = Integers([-1.0, 0.0], [1.0, 999.0])
    assert numbers.write([-1.0, 500.4]) == ["0", "500"] and numbers.write([5.0, -5.0]) == ["999", "0"]
    np.testing.assert_allclose(numbers.read(["999", "7"]), [1.0, 7.0])


@given(ENDS, st.floats(0, 1))
def test_a_round_trip_of_integers_is_exact_to_half_a_bin(ends, share):
    low, width = ends
    value = low + share * width
    numbers = Integers([low], [low + width])
    (back,) = numbers.read(numbers.write([value]))
    assert abs(back - value) <= (numbers.high[0] - numbers.low[0]) / 999 / 2 * (1 + 1e-6) + 1e-9


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), st.integers(0, 6))
def test_a_round_trip_of_decimals_is_exact_to_half_of_the_last_digit(values, precision):
    numbers = Decimals(len(values), precision)
    np.testing.assert_allclose(numbers.read(numbers.write(values)), values, atol=0.5 * 10**-precision + 1e-9)


@given(st.integers(0, 999))
def test_every_integer_is_read_back_as_itself(number):
    numbers = Integers([-3.0], [2.0])
    assert numbers.write(numbers.read([str(number)])) == [str(number)]


def test_what_is_not_finite_is_written_without_an_exception():
    values = [math.inf, -math.inf, math.nan]
    assert Integers([0.0] * 3, [1.0] * 3).write(values) == ["999", "0", "nan"]
    assert Decimals(3).write(values) == ["inf", "-inf", "nan"]


@pytest.mark.parametrize("text", ["", " 1", "1 ", "+1", "1e3", "nan", "inf", "²", "١", "１", "1_0", "--1", ".5", "5."])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(InvalidActionError):
        Decimals(1).read([text])
    with pytest.raises(InvalidActionError):
        Integers([0.0], [1.0]).read([text])


@pytest.mark.parametrize("text", ["1000", "-1", "01", "0.5", "9" * 400])
def test_integers_beyond_the_bins_are_refused(text):
    with pytest.raises(InvalidActionError, match="0 to 999"):
        Integers([0.0], [1.0]).read([text])


def test_a_wrong_number_of_parts_is_refused():
    with pytest.raises(InvalidActionError, match="must be 3 numbers"):
        split("1,2", 3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "words"}, "kind"),
        ({"precision": -1}, "precision"),
        ({"ranges": [(1.0, 0.0)]}, r"ranges\[0\]"),
        ({"ranges": {"velocity": [(0.0, 1.0), (1.0, 0.0)]}}, r"ranges.velocity\[1\]"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=f"numbers.{named}"):
        NumberFormat(**settings)


def test_ends_further_apart_than_the_largest_number_have_no_integers():
    most = np.finfo(np.float64).max
    with pytest.raises(ValueError, match="observation: dimension 0 goes from -1.79.*numbers.ranges"):
        NumberFormat(kind="integers").writer([-most], [most], "observation")
    with pytest.raises(ValueError, match=r"numbers.ranges\[1\] is .* a finite width apart"):
        NumberFormat(kind="integers", ranges=[(0.0, 1.0), (-most, most)])


def test_the_first_and_the_last_integer_are_the_ends_themselves():
    numbers = Integers([-0.1, 1e6], [0.3, 1e6 + 1e-3])
    assert numbers.read(["0", "0"]).tolist() == [-0.1, 1e6]
    assert numbers.read(["999", "999"]).tolist() == [0.3, 1e6 + 1e-3]


def test_an_unbounded_action_is_not_told_to_give_ranges_which_are_for_observations():
    with pytest.raises(ValueError, match="action: dimension 0 goes from .*; numbers.kind must be decimals"):
        NumberFormat(kind="integers").writer([0.0], [math.inf], "action")


def test_an_unbounded_dimension_has_no_integers():
    with pytest.raises(ValueError, match="dimension 1 goes from -inf to inf.*numbers.ranges"):
        NumberFormat(kind="integers").writer([0.0, -math.inf], [1.0, math.inf], "observation")

"""Tests of the text formats of numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.numbers import BinCodec, DecimalCodec, NormalisedCodec, NumberFormat, split_numbers

BOUNDS = st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))


def test_bins_match_hand_computed_values():
    codec = BinCodec([-1.0, 0.0], [1.0, 999.0])
    assert codec.encode([-1.0, 500.4]) == ["0", "500"] and codec.encode([5.0, -5.0]) == ["999", "0"]
    np.testing.assert_allclose(codec.decode(["999", "7"]), [1.0, 7.0])


@given(BOUNDS, st.floats(0, 1))
def test_a_round_trip_of_bins_is_exact_to_half_a_bin(bounds, share):
    low, width = bounds
    value = low + share * width
    codec = BinCodec([low], [low + width])
    (back,) = codec.decode(codec.encode([value]))
    assert abs(back - value) <= (codec.high[0] - codec.low[0]) / 999 / 2 * (1 + 1e-6) + 1e-9


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), st.integers(0, 6))
def test_a_round_trip_of_decimals_is_exact_to_half_of_the_last_digit(values, precision):
    codec = DecimalCodec(len(values), precision)
    np.testing.assert_allclose(codec.decode(codec.encode(values)), values, atol=0.5 * 10**-precision + 1e-9)


@given(st.integers(0, 999))
def test_every_bin_is_encoded_as_itself(number):
    codec = BinCodec([-3.0], [2.0])
    assert codec.encode(codec.decode([str(number)])) == [str(number)]


def test_non_finite_numbers_are_encoded():
    values = [math.inf, -math.inf, math.nan]
    assert BinCodec([0.0] * 3, [1.0] * 3).encode(values) == ["999", "0", "nan"]
    assert DecimalCodec(3).encode(values) == ["inf", "-inf", "nan"]


@pytest.mark.parametrize("text", ["", " 1", "1 ", "+1", "1e3", "nan", "inf", "²", "١", "１", "1_0", "--1", ".5", "5."])
def test_texts_that_are_not_numbers_raise(text):
    with pytest.raises(InvalidActionError):
        DecimalCodec(1).decode([text])
    with pytest.raises(InvalidActionError):
        BinCodec([0.0], [1.0]).decode([text])


@pytest.mark.parametrize("text", ["1000", "-1", "01", "0.5", "9" * 400])
def test_integers_out_of_range_raise(text):
    with pytest.raises(InvalidActionError, match="0 to 999"):
        BinCodec([0.0], [1.0]).decode([text])


def test_a_wrong_number_of_items_raises():
    with pytest.raises(InvalidActionError, match="must be 3 numbers"):
        split_numbers("1,2", 3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "words"}, "kind"),
        ({"precision": -1}, "precision"),
        ({"tags": "no"}, "tags is 'no'; it must be true or false"),
        ({"names": 1}, "names is 1"),
        ({"action_names": 1}, "action_names is 1"),
        ({"ranges": [(1.0, 0.0)]}, r"ranges\[0\]"),
        ({"ranges": {"velocity": [(0.0, 1.0), (1.0, 0.0)]}}, r"ranges.velocity\[1\]"),
    ],
)
def test_invalid_settings_raise_with_their_key(settings, named):
    with pytest.raises(ValueError, match=f"numbers.{named}"):
        NumberFormat(**settings)


def test_ranges_of_infinite_width_raise():
    most = np.finfo(np.float64).max
    with pytest.raises(ValueError, match="observation: dimension 0 goes from -1.79.*numbers.ranges"):
        NumberFormat(kind="integers").codec([-most], [most], "observation")
    with pytest.raises(ValueError, match=r"numbers.ranges\[1\] is .* a finite width"):
        NumberFormat(kind="integers", ranges=[(0.0, 1.0), (-most, most)])


def test_the_first_and_the_last_bin_are_the_exact_bounds():
    codec = BinCodec([-0.1, 1e6], [0.3, 1e6 + 1e-3])
    assert codec.decode(["0", "0"]).tolist() == [-0.1, 1e6]
    assert codec.decode(["999", "999"]).tolist() == [0.3, 1e6 + 1e-3]


def test_the_error_for_unbounded_actions_does_not_suggest_ranges():
    with pytest.raises(ValueError, match="action: dimension 0 goes from .*; numbers.kind must be decimals"):
        NumberFormat(kind="integers").codec([0.0], [math.inf], "action")


def test_the_error_for_unbounded_observations_suggests_ranges():
    with pytest.raises(ValueError, match="dimension 1 goes from -inf to inf.*numbers.ranges"):
        NumberFormat(kind="integers").codec([0.0, -math.inf], [1.0, math.inf], "observation")


def test_normalised_numbers_match_hand_computed_values():
    codec = NormalisedCodec([1.0, -2.0], [2.0, 0.5], precision=2)
    assert codec.encode([4.0, -2.25]) == ["1.50", "-0.50"] and codec.encode([1.0, -2.0]) == ["0.00", "0.00"]
    assert codec.encode([1e9, -math.inf]) == ["10.00", "-10.00"] and codec.encode([math.nan, -2.0])[0] == "nan"
    np.testing.assert_allclose(codec.decode(["1.50", "-0.50"]), [4.0, -2.25])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "normalised", "statistics": [(0.0, 0.0)]}, r"numbers.statistics\[0\] is \(0.0, 0.0\)"),
        ({"kind": "normalised", "statistics": {"x": [(0.0, 1.0), (math.nan, 1.0)]}}, r"numbers.statistics.x\[1\]"),
        ({"kind": "decimals", "statistics": [(0.0, 1.0)]}, "numbers.statistics is set, but numbers.kind is 'decimals'"),
        ({"kind": "normalised", "ranges": [(0.0, 1.0)]}, "numbers.ranges is set, but numbers.kind is 'normalised'"),
    ],
)
def test_statistics_that_do_not_fit_raise_with_their_key(settings, named):
    with pytest.raises(ValueError, match=named):
        NumberFormat(**settings)


def test_parse_accepts_a_kind_or_a_mapping_of_keys():
    assert NumberFormat.parse("integers") == NumberFormat(kind="integers")
    assert NumberFormat.parse("{kind: decimals, precision: 5}") == NumberFormat(precision=5)
    for wrong in ("3", "{digits: 5}", "[1]", "{"):
        with pytest.raises(ValueError, match="numbers is .* it must be decimals, integers, or a mapping of keys"):
            NumberFormat.parse(wrong)
    for wrong, named in (
        ("{precision: 5.5}", "numbers.precision is 5.5"),
        ("{precision: true}", "numbers.precision is True"),
        ("{kind: integers, ranges: [[1]]}", r"numbers.ranges\[0\] is \[1\]; it must be two numbers"),
        ("{kind: integers, ranges: [[a, b]]}", r"numbers.ranges\[0\] is \['a', 'b'\]; it must be two"),
    ):
        with pytest.raises(ValueError, match=named):
            NumberFormat.parse(wrong)
    with pytest.raises(ValueError, match="numbers.kind is 'roman'; it must be"):
        NumberFormat.parse("roman")

"""Tests of the codec for arbitrary spaces."""

import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import EnvironmentMetadata, Quantity, SpaceCodec

BOX = spaces.Box(-2.0, 2.0, (2, 3), np.float32)
JOINT = spaces.Dict({"move": spaces.Discrete(3, start=1), "by": spaces.Box(0.0, 1.0, (2,))})
SPACES = [
    spaces.Discrete(4),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([2, 5]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    spaces.MultiBinary(3),
    BOX,
    spaces.Text(5, charset="abc"),
    JOINT,
    spaces.Tuple((spaces.Discrete(2), spaces.Tuple((spaces.MultiBinary(2), spaces.Discrete(3))))),
]
INTEGERS = NumberFormat(kind="integers")
INTEGER_DTYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


@st.composite
def integer_boxes(draw, widest=None):
    """Generate a one-dimensional Box of integers that float64 represents, and an element of it."""
    dtype = draw(st.sampled_from(INTEGER_DTYPES))
    least, most = max(int(np.iinfo(dtype).min), -(2**53)), min(int(np.iinfo(dtype).max), 2**53)
    low = draw(st.integers(least, most - 1))
    high = draw(st.integers(low + 1, most if widest is None else min(most, low + widest)))
    space = spaces.Box(np.array([low], dtype), np.array([high], dtype), dtype=dtype)
    return space, np.array([draw(st.integers(low, high))], dtype)


def round_trip(space, value, numbers=None):
    codec = SpaceCodec(spaces.Discrete(2), space, numbers)
    back = codec.text_to_action(codec.action_to_text(value))
    assert back.dtype == space.dtype and space.contains(back)
    return int(back[0])


def same(a, b, atol):
    if isinstance(a, dict):
        return all(same(a[key], b[key], atol) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y, atol) for x, y in zip(a, b))
    return a == b if isinstance(a, str) else np.shape(a) == np.shape(b) and np.allclose(a, b, atol=atol)


@pytest.mark.parametrize("numbers", [None, INTEGERS], ids=["decimals", "integers"])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_round_trip_does_not_change_actions(space, numbers):
    codec = SpaceCodec(spaces.Discrete(2), space, numbers)
    space.seed(0)
    for _ in range(50):
        action = space.sample()
        back = codec.text_to_action(codec.action_to_text(action))
        assert same(action, back, 4 / 999 / 2 + 1e-6)


@settings(deadline=None)
@given(integer_boxes())
def test_decimals_of_integer_boxes_are_exact(pair):
    space, value = pair
    for end in (space.low, value, space.high):
        assert round_trip(space, end) == round_trip(space, end, NumberFormat(precision=0)) == int(end[0])


@settings(deadline=None)
@given(integer_boxes(widest=999))
def test_bins_of_integer_boxes_with_up_to_a_thousand_values_are_exact(pair):
    assert round_trip(*pair, INTEGERS) == int(pair[1][0])


def test_bins_of_integers_near_the_limit_of_float64_are_exact():
    low = 6158385104122268
    space = spaces.Box(np.array([low]), np.array([low + 549]), dtype=np.int64)
    assert all(round_trip(space, np.array([low + step]), INTEGERS) == low + step for step in range(550))


@settings(deadline=None)
@given(integer_boxes())
def test_bins_of_wider_integer_boxes_are_exact_to_half_a_bin_and_at_the_bounds(pair):
    space, value = pair
    low, high = int(space.low[0]), int(space.high[0])
    assert abs(round_trip(space, value, INTEGERS) - int(value[0])) <= (high - low) / 999 / 2 * (1 + 1e-9) + 0.5
    assert (round_trip(space, space.low, INTEGERS), round_trip(space, space.high, INTEGERS)) == (low, high)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_different_observations_have_different_texts(space):
    codec = SpaceCodec(space, spaces.Discrete(2))
    assert len({codec.observation_to_text(space.sample()) for _ in range(50)}) > 1


def test_texts_match_hand_written_ones():
    metadata = EnvironmentMetadata(
        description="A cart.", observation=(Quantity("position"), Quantity("speed")), action_names=("left", "right")
    )
    space = spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))
    codec = SpaceCodec(space, spaces.Discrete(2), NumberFormat(precision=2), metadata)
    assert codec.observation_to_text([0.125, 3]) == "<observation>0.12,3.00</observation>"
    assert codec.description == "A cart. Actions: left, right."
    named = SpaceCodec(space, spaces.Discrete(2), NumberFormat(precision=2, names=True), metadata)
    assert named.observation_to_text([0.125, 3]) == "position 0.12\nspeed 3.00"
    bare = SpaceCodec(space, spaces.Discrete(2), NumberFormat(precision=2, tags=False), metadata)
    assert bare.observation_to_text([0.125, 3]) == "0.12,3.00" and not bare.tags_observations
    assert bare.text_to_observation("0.12,3.00").tolist() == pytest.approx([0.12, 3])
    ranged = NumberFormat(kind="integers", ranges=[(-1.0, 1.0), (0.0, 10.0)])
    assert (
        SpaceCodec(space, spaces.Discrete(2), ranged).observation_to_text([0, 20]).startswith("<observation>500,999<")
    )
    assert SpaceCodec(spaces.Discrete(3), JOINT).action_to_text({"move": 2, "by": [0.5, 0]}) == (
        "<action>by: 0.500,0.000\nmove: 2</action>"
    )


@pytest.mark.parametrize(
    ("space", "text", "reason"),
    [
        (spaces.Discrete(2), "2", "one of 0, 1"),
        (spaces.Discrete(2), " 1", "one of"),
        (BOX, "1,2,3,4,5,6", "inside <action>"),
        (BOX, "<action>1,2,3</action>", "6 numbers"),
        (spaces.MultiDiscrete([2, 5]), "<action>2,0</action>", "0 to 1"),
        (spaces.MultiBinary(2), "<action>0,²</action>", "not an integer"),
        (JOINT, "<action>move: 2\nby: 1,1</action>", "'by'"),
        (spaces.Text(3), "<action>abcd</action>", "too long"),
    ],
)
def test_illegal_actions_raise_with_a_reason(space, text, reason):
    with pytest.raises(InvalidActionError, match=reason):
        SpaceCodec(spaces.Discrete(2), space).text_to_action(text)


def test_a_hundred_thousand_random_strings_raise_only_invalid_action_errors():
    rng = random.Random(0)
    alphabet = "0123456789.,-+ \n<>/actionmoveby:²١１_eEnaif\x00é漢🙂\ud800"
    codecs = [SpaceCodec(spaces.Discrete(2), space, numbers) for space in SPACES for numbers in (None, INTEGERS)]
    legal = 0
    for number in range(100_000):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 12)))
        text = f"<action>{text}</action>" if number % 2 else text
        try:
            codecs[number % len(codecs)].text_to_action(text)
            legal += 1
        except InvalidActionError:
            pass
    assert 0 < legal < 10_000


def test_an_unsupported_space_raises():
    with pytest.raises(ValueError, match=r"the action space is Sequence.*which is not supported"):
        SpaceCodec(spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)))


def test_a_wrong_number_of_ranges_raises():
    with pytest.raises(ValueError, match="numbers.ranges has 3 entries, but the observation has 6"):
        SpaceCodec(BOX, spaces.Discrete(2), NumberFormat(kind="integers", ranges=[(0.0, 1.0)] * 3))


def test_ranges_of_a_dict_or_tuple_are_given_by_path():
    box = spaces.Box(-np.inf, np.inf, (2,))
    body = spaces.Dict({"position": box, "speed": spaces.Tuple((box, box)), "count": spaces.Discrete(3)})
    ranges = {"position": [(-1.0, 1.0), (0.0, 10.0)], "speed.0": [(0.0, 999.0)], "speed.1": [(0.0, 99.9)]}
    codec = SpaceCodec(body, spaces.Discrete(2), NumberFormat(kind="integers", ranges=ranges))
    seen = {"position": [0.0, 5.0], "speed": ([1.0, 2.0], [1.0, 2.0]), "count": 2}
    assert codec.observation_to_text(seen) == "count: 2\nposition: 500,500\nspeed.0: 1,2\nspeed.1: 10,20"


def test_a_single_range_applies_to_all_leaves_and_missing_keys_use_the_bounds():
    space = spaces.Dict({"a": spaces.Box(0.0, 999.0, (1,)), "b": spaces.Box(0.0, 99.9, (1,))})
    seen = {"a": [7.0], "b": [7.0]}

    def text(ranges):
        return SpaceCodec(space, spaces.Discrete(2), NumberFormat(kind="integers", ranges=ranges)).observation_to_text(
            seen
        )

    assert text([(0.0, 9990.0)]) == "a: 1\nb: 1"
    assert text({"a": [(0.0, 9990.0)]}) == "a: 1\nb: 70" and text(None) == "a: 7\nb: 70"


DICT = spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (2,)), "b": spaces.Discrete(2)})


@pytest.mark.parametrize(
    ("space", "ranges", "sentence"),
    [
        (DICT, {"c": [(0.0, 1.0)]}, "numbers.ranges has the keys c, but the observation has numbers under a"),
        (DICT, {"b": [(0.0, 1.0)]}, "numbers.ranges has the keys b"),
        (DICT, [(0.0, 1.0)] * 2, r"has 2 entries without keys, .* mapping such as \{a: \[\[low, high\]\]\}"),
        (DICT, {"a": [(0.0, 1.0)] * 3}, "numbers.ranges has 3 entries, but the observation a has 2 dimensions"),
        (DICT, None, r"observation a: dimension 0 goes from -inf to inf.*set numbers.ranges to \{a: one \[low, high\]"),
        (BOX, {"a": [(0.0, 1.0)]}, "numbers.ranges has the keys a, but the observation has 6 dimensions"),
        (spaces.Discrete(3), [(0.0, 1.0)], "numbers.ranges is set, but the observation space is Discrete"),
    ],
)
def test_ranges_that_do_not_match_the_space_raise(space, ranges, sentence):
    with pytest.raises(ValueError, match=sentence):
        SpaceCodec(space, spaces.Discrete(2), NumberFormat(kind="integers", ranges=ranges))


@pytest.mark.parametrize("space", [BOX, DICT, spaces.Discrete(3)], ids=["Box", "Dict", "Discrete"])
def test_unknown_names_raise(space):
    with pytest.raises(ValueError, match="numbers.names is true, but .* has no known names; it must be false"):
        SpaceCodec(space, spaces.Discrete(2), NumberFormat(names=True))
    with pytest.raises(ValueError, match="numbers.action_names is true, but .* has no known names; it must be false"):
        SpaceCodec(spaces.Discrete(2), space, NumberFormat(action_names=True))


@pytest.mark.parametrize(("space", "names"), [(DICT, False), (spaces.Discrete(3), False), (BOX, True)])
def test_tags_false_raises_for_observations_without_tags(space, names):
    metadata = EnvironmentMetadata(observation=(Quantity("a"),) * 2)
    with pytest.raises(ValueError, match="numbers.tags is false, but observations of .* have no tags.*must be true"):
        SpaceCodec(space, spaces.Discrete(2), NumberFormat(tags=False, names=names), metadata)


def test_a_wrong_number_of_action_names_raises():
    with pytest.raises(ValueError, match="there must be 2 different names"):
        SpaceCodec(spaces.Discrete(2), spaces.Discrete(2), None, EnvironmentMetadata(action_names=("left",)))


def test_bounds_and_non_finite_observations_are_encoded():
    space = gym.make("CartPole-v1").observation_space
    for numbers in (NumberFormat(), NumberFormat(kind="integers", ranges=[(-1.0, 1.0)])):
        codec = SpaceCodec(space, spaces.Discrete(2), numbers)
        for value in (space.low, space.high, np.full(4, np.nan), np.full(4, np.inf)):
            assert codec.observation_to_text(value)


def test_observations_are_normalised_and_actions_remain_decimals():
    observed, acted = spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Box(-2.0, 2.0, (1,), np.float32)
    numbers = NumberFormat(kind="normalised", statistics=[(1.0, 2.0), (-2.0, 0.5)], precision=2, describe=True)
    codec = SpaceCodec(observed, acted, numbers)
    assert codec.observation_to_text(np.array([4.0, -2.25])) == "<observation>1.50,-0.50</observation>"
    assert codec.action_to_text(np.array([1.25])) == "<action>1.25</action>"
    assert codec.text_to_action("<action>1.25</action>") == np.float32(1.25)
    assert codec.description == (
        "Observations: 2 numbers separated by commas: 1, 2, each minus its mean and divided by its standard deviation. "
        "Actions: 1 numbers separated by commas: 1 (from -2 to 2), each a decimal number, inside <action></action>."
    )


def test_normalised_numbers_of_a_dict_have_statistics_by_key():
    box = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    space = spaces.Dict({"at": box, "on": spaces.Discrete(2), "to": box})
    numbers = NumberFormat(kind="normalised", statistics={"at": [(0.0, 2.0)], "to": [(1.0, 1.0), (0.0, 1.0)]})
    text = SpaceCodec(space, spaces.Discrete(2), numbers).observation_to_text({"at": [1, 2], "on": 1, "to": [1, 2]})
    assert text == "at: 0.500,1.000\non: 1\nto: 0.000,2.000"


@pytest.mark.parametrize(
    ("space", "statistics", "complaint"),
    [
        (BOX, None, "numbers.statistics lacks the observation; .* lrl collect --statistics prints"),
        (BOX, [(0.0, 1.0)] * 2, "numbers.statistics has 2 entries, but the observation has 6 dimensions"),
        (spaces.Dict({"a": BOX, "b": BOX}), {"a": [(0.0, 1.0)]}, "numbers.statistics lacks the observation b"),
        (spaces.Dict({"a": BOX}), {"c": [(0.0, 1.0)]}, "numbers.statistics has the keys c"),
        (spaces.Discrete(3), [(0.0, 1.0)], "numbers.statistics is set, but the observation space is Discrete"),
    ],
)
def test_statistics_that_do_not_fit_the_space_raise(space, statistics, complaint):
    with pytest.raises(ValueError, match=complaint):
        SpaceCodec(space, spaces.Discrete(2), NumberFormat(kind="normalised", statistics=statistics))

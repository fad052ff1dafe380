"""Tests of clipping actions to their space."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.codecs.codec import clip_to_box, clip_to_space
from lrl.codecs.spaces import SpaceCodec

WHOLE = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
BYTES = spaces.Box(0, 255, (2,), np.uint8)
UNIT = spaces.Box(-1.0, 1.0, (2,), np.float32)


def parse_and_clip(space, text):
    """Parse and clip an action; return it with the number of clipped values."""
    return clip_to_space(space, SpaceCodec(spaces.Discrete(2), space).text_to_action(f"<action>{text}</action>"))


def test_values_out_of_an_integer_box_are_clipped_without_overflow():
    action, clipped = parse_and_clip(BYTES, "300,-1")
    assert action.tolist() == [255, 0] and action.dtype == np.uint8 and clipped == 2


def test_fractions_in_an_integer_box_are_rounded_not_truncated():
    action, clipped = parse_and_clip(BYTES, "2.7,254.9")
    assert action.tolist() == [3, 255] and clipped == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WHOLE)
@settings(deadline=None)
@given(number=st.integers(-(2**53), 2**53))
def test_values_are_clipped_to_any_integer_dtype(dtype, number):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    action, clipped = parse_and_clip(spaces.Box(least, most, (1,), dtype), str(number))
    assert int(action[0]) == min(max(number, least), most) and clipped == (not least <= number <= most)
    assert action.dtype == dtype


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e30, -1e30])
def test_a_custom_codec_may_return_floats_for_an_integer_box(value):
    space = spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64)
    action, clipped = clip_to_box(space, [value])
    assert action[0] == (space.high if value > 0 else space.low)[0] and clipped == 1


def test_overflow_of_half_precision_is_clipped_without_a_warning():
    action, clipped = parse_and_clip(spaces.Box(-1.0, 1.0, (2,), np.float16), "1000000,0.5")
    assert action.tolist() == [1.0, 0.5] and clipped == 1


def test_a_bound_that_is_rounded_by_its_dtype_does_not_count_as_clipped():
    assert parse_and_clip(spaces.Box(-0.4, 0.7, (2,), np.float32), "-0.4,0.7")[1] == 0


def test_a_box_inside_a_dict_or_a_tuple_is_clipped_and_counted():
    space = spaces.Dict({"by": UNIT, "move": spaces.Discrete(3), "then": spaces.Tuple((BYTES, spaces.Discrete(2)))})
    action, clipped = parse_and_clip(space, "by: 5,-0.5\nmove: 2\nthen.0: 256,7\nthen.1: 1")
    assert action["by"].tolist() == [1.0, -0.5] and action["then"][0].tolist() == [255, 7]
    assert (action["move"], action["then"][1], clipped) == (2, 1, 2) and space.contains(action)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Dict({"a": spaces.Discrete(3)})], ids=str)
def test_the_count_is_none_for_spaces_without_a_box(space):
    assert clip_to_space(space, space.sample())[1] is None

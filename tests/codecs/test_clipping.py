"""Actions outside their space: rounded, clipped, cast and counted."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.codecs.clipping import clip_to_box, clip_to_space
from lrl.codecs.spaces import SpaceCodec

WHOLE = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
BYTES = spaces.Box(0, 255, (2,), np.uint8)
UNIT = spaces.Box(-1.0, 1.0, (2,), np.float32)


def act(space, text):
    """What an environment is stepped with, and how many numbers were clipped."""
    return clip_to_space(space, SpaceCodec(spaces.Discrete(2), space).text_to_action(f"<action>{text}</action>"))


def test_numbers_beyond_an_integer_box_are_clipped_and_do_not_wrap_around():
    action, clipped = act(BYTES, "300,-1")
    assert action.tolist() == [255, 0] and action.dtype == np.uint8 and clipped == 2


def test_numbers_between_integers_are_rounded_and_not_cut_off():
    action, clipped = act(BYTES, "2.7,254.9")
    assert action.tolist() == [3, 255] and clipped == 0


@pytest.mark.parametrize("dtype", WHOLE)
@settings(deadline=None)
@given(number=st.integers(-(10**20) + 1, 10**20 - 1))
def test_any_number_becomes_the_nearest_of_any_integer_dtype(dtype, number):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    action, clipped = act(spaces.Box(least, most, (1,), dtype), str(number))
    assert int(action[0]) == min(max(number, least), most) and clipped == (not least <= number <= most)
    assert action.dtype == dtype


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e30, -1e30])
def test_a_codec_of_ones_own_may_answer_floats(value):
    space = spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64)
    action, clipped = clip_to_box(space, [value])
    assert action[0] == (space.high if value > 0 else space.low)[0] and clipped == 1


def test_numbers_too_large_for_half_precision_are_clipped_without_a_warning():
    action, clipped = act(spaces.Box(-1.0, 1.0, (2,), np.float16), "1000000,0.5")
    assert action.tolist() == [1.0, 0.5] and clipped == 1


def test_a_bound_that_its_dtype_rounds_is_not_clipped():
    assert act(spaces.Box(-0.4, 0.7, (2,), np.float32), "-0.4,0.7")[1] == 0


def test_a_box_inside_a_dict_or_a_tuple_is_clipped_and_counted():
    space = spaces.Dict({"by": UNIT, "move": spaces.Discrete(3), "then": spaces.Tuple((BYTES, spaces.Discrete(2)))})
    action, clipped = act(space, "by: 5,-0.5\nmove: 2\nthen.0: 256,7\nthen.1: 1")
    assert action["by"].tolist() == [1.0, -0.5] and action["then"][0].tolist() == [255, 7]
    assert (action["move"], action["then"][1], clipped) == (2, 1, 2) and space.contains(action)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Dict({"a": spaces.Discrete(3)})], ids=str)
def test_nothing_is_counted_where_there_is_no_box(space):
    assert clip_to_space(space, space.sample())[1] is None

"""Tests of numbers that follow the names of their dimensions."""

import numpy as np
import pytest
from gymnasium import spaces

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import EnvironmentMetadata, Quantity, SpaceCodec


@pytest.mark.parametrize(
    ("kind", "text"), [("integers", "back thigh 999,shin 500"), ("decimals", "back thigh 1.000,shin 0.000")]
)
def test_numbers_of_an_action_follow_their_names(kind, text):
    space = spaces.Box(-1.0, 1.0, (2,))
    metadata = EnvironmentMetadata(action=(Quantity("back thigh", "torque"), Quantity("shin", "torque")))
    codec = SpaceCodec(space, space, NumberFormat(kind=kind, action_names=True, precision=3), metadata)
    assert codec.action_to_text([1.0, 0.0]) == f"<action>{text}</action>"
    assert codec.action_to_text([1.0, 0.0]) == f"<action>{text}</action>"
    assert codec.text_to_action(f"<action>{text}</action>").tolist() == pytest.approx([1.0, 0.0], abs=2e-3)
    assert "," in codec.observation_to_text([1.0, 0.0]) and "shin" not in codec.observation_to_text([1.0, 0.0])
    assert codec.description.endswith(
        "2 numbers separated by commas, each after its name, in the order back thigh, shin, inside <action></action>."
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("999,500", "'999' must begin with 'back thigh' and a blank"),
        ("back thigh 999,back thigh 500", "'back thigh 500' must begin with 'shin' and a blank"),
        ("back thigh 999", "there must be 2 numbers separated by commas, not 1"),
        ("back thigh 999,shin x", "'x' is not an integer from 0 to 999"),
        ("back thigh 999,shin", "'shin' must begin with 'shin' and a blank"),
    ],
)
def test_an_action_whose_numbers_lack_their_names_is_invalid(text, complaint):
    space = spaces.Box(-1.0, 1.0, (2,))
    metadata = EnvironmentMetadata(action=(Quantity("back thigh"), Quantity("shin")))
    codec = SpaceCodec(space, space, NumberFormat(kind="integers", action_names=True), metadata)
    with pytest.raises(InvalidActionError, match=complaint):
        codec.text_to_action(f"<action>{text}</action>")


def test_observations_with_names_are_parsed():
    metadata = EnvironmentMetadata(observation=(Quantity("position"), Quantity("speed")))
    space = spaces.Box(-np.inf, np.inf, (2,))
    codec = SpaceCodec(space, spaces.Discrete(2), NumberFormat(names=True), metadata)
    assert codec.text_to_observation("position 0.125\nspeed 3.000").tolist() == [0.125, 3.0]
    with pytest.raises(InvalidActionError, match="there must be 2 lines, not 1"):
        codec.text_to_observation("position 0.125")

"""Tests of the codec registry."""

import gymnasium as gym
import pytest

from lrl.codecs.registry import codec_for
from lrl.codecs.toy_text import FrozenLakeCodec


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "FrozenLake8x8-v1"])
def test_the_codec_of_frozen_lake_is_found_by_class(env_id: str) -> None:
    assert isinstance(codec_for(gym.make(env_id)), FrozenLakeCodec)


def test_an_unregistered_environment_gets_a_space_codec() -> None:
    codec = codec_for(gym.make("Blackjack-v1"))
    assert codec.observation_to_text((14, 10, 0)) == "0: 14\n1: 10\n2: 0"
    assert codec.action_texts == ("0", "1")


def test_an_unsupported_space_raises_with_environment_and_space() -> None:
    class Odd(gym.Env):
        observation_space = gym.spaces.Graph(gym.spaces.Discrete(2), None)
        action_space = gym.spaces.Discrete(2)

    with pytest.raises(ValueError, match="env is 'Odd': the observation space is Graph"):
        codec_for(Odd())

"""Which codec is found."""

import gymnasium as gym
import pytest

from lrl.codecs.grid import FrozenLakeCodec
from lrl.codecs.registry import codec_for


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "FrozenLake8x8-v1"])
def test_frozen_lake_is_found_through_its_class(env_id: str) -> None:
    assert isinstance(codec_for(gym.make(env_id)), FrozenLakeCodec)


def test_an_unknown_environment_is_one_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="'Blackjack-v1'.*codec="):
        codec_for(gym.make("Blackjack-v1"))

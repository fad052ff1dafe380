"""Which codec speaks for which environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import gymnasium as gym

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.codec import TextCodec
from lrl.codecs.grid import FrozenLakeCodec, is_slippery
from lrl.codecs.known_environments import WORDINGS
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import CliffWalkingCodec, TaxiCodec

T = TypeVar("T")

_CODECS: dict[str, Callable[[gym.Env], TextCodec]] = {
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": lambda env: FrozenLakeCodec(is_slippery(env)),
    "gymnasium.envs.toy_text.taxi:TaxiEnv": lambda env: TaxiCodec(),
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": lambda env: CliffWalkingCodec(),
    "minigrid.minigrid_env:MiniGridEnv": lambda env: BabyAICodec(has_expert=hasattr(env, "expert_action")),
}
"""``module:class`` of a native environment to what builds its codec. Names, so that no environment is imported here."""


def codec_for(env: gym.Env, numbers: NumberFormat | None = None) -> TextCodec:
    """The codec of an environment's class, or of the nearest class it inherits from; else one by its spaces.

    Args:
        env: a native environment.
        numbers: how numbers are written; None takes decimals.

    Raises:
        ValueError: nothing speaks for its spaces, or ``numbers`` is given where nothing is written in numbers.
    """
    native = env.unwrapped
    build, wording = _nearest(native, _CODECS), _nearest(native, WORDINGS)
    name = native.spec.id if native.spec is not None else type(native).__name__
    if build is not None:
        if numbers is not None:
            raise ValueError(f"env.numbers is set, but {name} is told in words; it must be null.")
        return build(native)
    try:
        own = None if wording is None else wording.of(native)
        return SpaceCodec(native.observation_space, native.action_space, numbers, own)
    except ValueError as error:
        raise ValueError(f"env is {name!r}: {error}") from error


def _nearest(native: gym.Env, table: Mapping[str, T]) -> T | None:
    for parent in type(native).__mro__:
        found = table.get(f"{parent.__module__}:{parent.__qualname__}")
        if found is not None:
            return found
    return None

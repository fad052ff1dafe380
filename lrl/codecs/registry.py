"""Registry of the codecs for native environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import gymnasium as gym

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.codec import TextCodec
from lrl.codecs.known_environments import ENVIRONMENT_METADATA
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import CliffWalkingCodec, FrozenLakeCodec, TaxiCodec, is_slippery

T = TypeVar("T")

_CODECS: dict[str, Callable[[gym.Env], TextCodec]] = {
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": lambda env: FrozenLakeCodec(is_slippery(env)),
    "gymnasium.envs.toy_text.taxi:TaxiEnv": lambda env: TaxiCodec(),
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": lambda env: CliffWalkingCodec(),
    "minigrid.minigrid_env:MiniGridEnv": lambda env: BabyAICodec(has_expert=hasattr(env, "expert_action")),
}
"""Codec constructors by the ``module:class`` of the native environment. Names avoid importing the environments."""


def codec_for(env: gym.Env, numbers: NumberFormat | None = None) -> TextCodec:
    """Create the codec of an environment.

    The codec is registered for the environment's class or its nearest registered base class. All other environments
    get a :class:`~lrl.codecs.spaces.SpaceCodec`.

    Args:
        env: A native environment.
        numbers: The format of numbers; None selects decimals.

    Raises:
        ValueError: If the spaces are not supported, or ``numbers`` is given for an environment described in words.
    """
    native = env.unwrapped
    make_codec, metadata = _lookup(native, _CODECS), _lookup(native, ENVIRONMENT_METADATA)
    name = native.spec.id if native.spec is not None else type(native).__name__
    if make_codec is not None:
        if numbers is not None:
            raise ValueError(f"env.numbers is set, but {name} is described in words; it must be null.")
        return make_codec(native)
    try:
        resolved = None if metadata is None else metadata.resolve(native)
        return SpaceCodec(native.observation_space, native.action_space, numbers, resolved)
    except ValueError as error:
        raise ValueError(f"env is {name!r}: {error}") from error


def _lookup(native: gym.Env, table: Mapping[str, T]) -> T | None:
    for base in type(native).__mro__:
        entry = table.get(f"{base.__module__}:{base.__qualname__}")
        if entry is not None:
            return entry
    return None

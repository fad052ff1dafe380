"""Which codec speaks for which environment."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium as gym

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.codec import TextCodec
from lrl.codecs.grid import FrozenLakeCodec, is_slippery

_CODECS: dict[str, Callable[[gym.Env], TextCodec]] = {
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": lambda env: FrozenLakeCodec(is_slippery(env)),
    "minigrid.minigrid_env:MiniGridEnv": lambda env: BabyAICodec(has_expert=hasattr(env, "expert_action")),
}
"""``module:class`` of a native environment to what builds its codec. Names, so that no environment is imported here."""


def codec_for(env: gym.Env) -> TextCodec:
    """The codec of an environment's class, or of the nearest class it inherits from.

    Raises:
        ValueError: nothing speaks for this environment.
    """
    native = env.unwrapped
    for parent in type(native).__mro__:
        build = _CODECS.get(f"{parent.__module__}:{parent.__qualname__}")
        if build is not None:
            return build(native)
    name = native.spec.id if native.spec is not None else type(native).__name__
    raise ValueError(f"env is {name!r}, which no text codec describes; pass codec=, a TextCodec of your own.")

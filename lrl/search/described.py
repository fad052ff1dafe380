"""Descriptions in words of an environment and of what the parameters of small policies mean, for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from lrl.codecs.codec import TextCodec
from lrl.codecs.registry import codec_for
from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.boundary import close_env
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.search.facts import environment_facts
from lrl.search.policies import LinearPolicy, SearchedPolicy, TabularPolicy

_WRITTEN_IN_FULL = 24
"""Number of weights up to which each output of a linear policy is written as a sum."""


def task_in_words(policy: SearchedPolicy, env: EnvFactory, max_steps: int | None = None) -> tuple[str, str]:
    """Describe an environment with all that ProPS+ is told of it, and what each parameter of a policy does.

    Environments without facts of their own, and those with a codec that describes them in other words than the
    registered one, are described by their codec.

    Args:
        policy: connected to the spaces of the environment.
        env: the environment.
        max_steps: episodes are cut after this many steps, if the environment's own limit is not shorter.
    """
    codec, context = env.codec, None
    world = environment_in_words(codec)
    if not isinstance(env, GymnasiumEnvs):
        return world, policy_in_words(policy, codec)
    wrapped = env.make_native()
    native = wrapped.unwrapped
    facts = environment_facts(native)
    if facts is not None and world == environment_in_words(codec_for(native)):
        limits = (max_steps, None if wrapped.spec is None else wrapped.spec.max_episode_steps)
        cap = min((limit for limit in limits if limit is not None), default=None)
        world = facts.render(cap, known_start=not env.reset_options)
    if isinstance(codec.unwrapped, FrozenLakeCodec):
        context = codec.context(native)  # rows and columns are those of the map of any episode
    close_env(wrapped)
    return world, policy_in_words(policy, codec, context)


def environment_in_words(codec: TextCodec) -> str:
    """Describe an environment by its codec to a model that does not act in it, without the form of written actions.

    Args:
        codec: of the environment.
    """
    return codec.native_description if isinstance(codec, SpaceCodec) else codec.description


def policy_in_words(policy: SearchedPolicy, codec: TextCodec, context: Any = None) -> str:
    """Describe what each parameter of a policy does.

    Args:
        policy: connected to the spaces of an environment.
        codec: of the same environment; names actions and states.
        context: of the codec; states that need one are not named without it.
    """
    if isinstance(policy, LinearPolicy):
        return _linear(policy, codec.action_texts)
    if isinstance(policy, TabularPolicy):
        return _table(policy, codec, context)
    return f"{policy.parameter_space().size} parameters determine it."


def _linear(policy: LinearPolicy, actions: Sequence[str] | None) -> str:
    (inputs, outputs), acted = policy.shape, policy.spaces[1]
    symbol = "score" if isinstance(acted, spaces.Discrete) else "a"
    formulas = [f"{symbol}[{j}] = {_sum(inputs, outputs, j, policy.bias)}" for j in range(outputs)]
    if inputs * outputs > _WRITTEN_IN_FULL:
        general = f"{symbol}[j] = sum over i of s[i] * params[i * {outputs} + j]"
        formulas = [general + f" + params[{inputs * outputs} + j]" * policy.bias + f", j from 0 to {outputs - 1}"]
    text = f"it is linear in the observation s, whose {inputs} numbers are s[0] to s[{inputs - 1}]: "
    text += "; ".join(formulas) + ". "
    if isinstance(acted, spaces.Discrete):
        names = actions or [f"action {int(acted.start) + index}" for index in range(outputs)]
        listed = ", ".join(f"score[{index}] is that of {name}" for index, name in enumerate(names))
        return text + f"The action with the highest score is taken; {listed}."
    assert isinstance(acted, spaces.Box)
    limits = [f"a[{j}] from {low:g} to {high:g}" for j, (low, high) in enumerate(zip(*_bounds(acted), strict=True))]
    return text + f"The numbers a are the action, clipped to its range: {', '.join(limits)}."


def _bounds(box: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    return box.low.ravel(), box.high.ravel()


def _sum(inputs: int, outputs: int, output: int, bias: bool) -> str:
    """Write one output of a linear policy as a sum of products."""
    terms = [f"s[{index}] * params[{index * outputs + output}]" for index in range(inputs)]
    return " + ".join(terms + [f"params[{inputs * outputs + output}]"] * bias)


def _table(policy: TabularPolicy, codec: TextCodec, context: Any) -> str:
    observed, acted = policy.spaces
    assert isinstance(observed, spaces.Discrete)
    assert isinstance(acted, spaces.Discrete)
    first = int(observed.start)
    meaning = _meanings(int(acted.start), codec.action_texts or ())
    text = f"it is a table: params[i] is the action in state i{f' + {first}' if first else ''}. Actions: {meaning}."
    if codec.needs_context and context is None:
        return text
    texts = [codec.observation_to_text(state, context) for state in range(first, first + int(observed.n))]
    states = [codec.summary(state) for state in texts] if codec.needs_context else texts
    if all(state.isdigit() for state in states):
        return text
    return f"{text} States: {_meanings(first, states)}."


def _meanings(first: int, names: Sequence[str]) -> str:
    """List numbers with their names, or numbers alone where these are the names."""
    numbered = [(str(number), name) for number, name in enumerate(names, first)]
    if all(number == name for number, name in numbered):
        return ", ".join(names)
    return "; ".join(f"{number} is {name}" for number, name in numbered)

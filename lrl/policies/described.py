"""Descriptions in words of an environment and of what the parameters of small policies mean, for prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces

from lrl.codecs.codec import TextCodec
from lrl.codecs.spaces import SpaceCodec
from lrl.policies.linear import LinearPolicy
from lrl.policies.searched import SearchedPolicy
from lrl.policies.tabular import TabularPolicy

_WRITTEN_IN_FULL = 24
"""Number of weights up to which each output of a linear policy is written as a sum."""


def environment_in_words(codec: TextCodec) -> str:
    """Describe an environment to a model that does not act in it, without the form in which others write actions.

    Args:
        codec: of the environment.
    """
    return codec.native_description if isinstance(codec, SpaceCodec) else codec.description


def policy_in_words(policy: SearchedPolicy, codec: TextCodec) -> str:
    """Describe what each parameter of a policy does.

    Args:
        policy: connected to the spaces of an environment.
        codec: of the same environment; names actions, and states where these need no context.
    """
    if isinstance(policy, LinearPolicy):
        return _linear(policy, codec.action_texts)
    if isinstance(policy, TabularPolicy):
        return _table(policy, codec)
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


def _table(policy: TabularPolicy, codec: TextCodec) -> str:
    observed, acted = policy.spaces
    assert isinstance(observed, spaces.Discrete)
    assert isinstance(acted, spaces.Discrete)
    first = int(observed.start)
    names = codec.action_texts or ()
    meaning = "; ".join(f"{int(acted.start) + index} is {name}" for index, name in enumerate(names))
    text = f"it is a table: params[i] is the action in state i{f' + {first}' if first else ''}. Actions: {meaning}."
    if codec.needs_context:
        return text
    states = [codec.observation_to_text(state) for state in range(first, first + int(observed.n))]
    if all(text.isdigit() for text in states):
        return text
    return text + " States: " + "; ".join(f"{first + i} is {state}" for i, state in enumerate(states)) + "."

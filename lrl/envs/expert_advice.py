"""Expert actions of native environments: by the environment itself, by value iteration or by a controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium as gym
import numpy as np

from lrl.envs.tabular import TransitionTable, optimal_q

_GREEDY_POLICIES: WeakKeyDictionary[gym.Env, np.ndarray] = WeakKeyDictionary()
"""Cache of the best action of each state, int64 ``(state,)``, by environment."""


def expert_action(native: gym.Env) -> Any:
    """Return the expert's action in the current state of ``native``.

    Raises:
        ValueError: If no expert is known for the environment.
    """
    own_expert = getattr(native, "expert_action", None)
    if own_expert is not None:
        return own_expert()
    for base in type(native).__mro__:
        expert = _EXPERTS.get(f"{base.__module__}:{base.__qualname__}")
        if expert is not None:
            return expert(native)
    raise ValueError(f"policy is 'expert', but no expert is known for {type(native).__name__}.")


def _value_iteration_action(native: Any) -> int:
    """Return the first best action by the environment's own transition table, with discount factor .99."""
    if native not in _GREEDY_POLICIES:
        _GREEDY_POLICIES[native] = optimal_q([TransitionTable.from_gymnasium(native.P)])[0].argmax(-1)
    return int(_GREEDY_POLICIES[native][native.s])


def _cartpole_action(native: Any) -> int:
    """Return the action of a linear controller that balances the pole and keeps the cart near the centre."""
    position, velocity, angle, angular_velocity = native.state
    return int(angle + 0.3 * angular_velocity + 0.05 * position + 0.1 * velocity > 0)


_EXPERTS: dict[str, Callable[[Any], int]] = {
    "gymnasium.envs.toy_text.taxi:TaxiEnv": _value_iteration_action,
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": _value_iteration_action,
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": _cartpole_action,
}
"""Experts by the ``module:class`` of the native environment."""

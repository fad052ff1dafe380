"""Experts of environments, and a wrapper that gives a native environment text observations and text actions."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium as gym
import numpy as np

from lrl.codecs.codec import InvalidActionError, TextCodec, clip_to_space
from lrl.envs.native import NativeEnv, SuccessAt
from lrl.envs.tabular import TransitionTable, optimal_q
from lrl.prompts import get_response_format

_GREEDY_POLICIES: WeakKeyDictionary[gym.Env, np.ndarray] = WeakKeyDictionary()
"""Cache of the best action in each state, int64 ``(state,)``, by environment."""


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
    """Return the first optimal action according to the environment's transition table, with discount factor 0.99."""
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


class AnyText(gym.spaces.Text):
    """Text space that contains every string; samples are printable ASCII.

    Gymnasium's ``Text`` checks each character of each text and stores its alphabet three times.
    """

    def __init__(self, max_length: int = 4096) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string."""
        return isinstance(x, str)


class AdvisedObservation(str):
    """Text of an observation with the action of the environment's expert as an attribute.

    Args:
        text: text of the observation.
        expert_action: native action of the expert.
    """

    expert_action: Any

    def __new__(cls, text: str, expert_action: Any) -> AdvisedObservation:
        """Create the text with the action as an attribute."""
        advised = super().__new__(cls, text)
        advised.expert_action = expert_action
        return advised

    def __getnewargs__(self) -> tuple[str, Any]:  # type: ignore[override]
        """Return the arguments of :meth:`__new__`, for copying and pickling."""
        return str(self), self.expert_action


def text_of(observation: Any) -> str:
    """Return the plain text of an observation; empty for a native observation."""
    return str(observation) if isinstance(observation, str) else ""


class TextEnv(gym.Wrapper):
    """Wrapper whose observations are texts and whose actions are responses.

    If a response has the wrong format or no legal action, the native environment is not stepped. The reward is then
    ``invalid_penalty``, the observation is the reason followed by the unchanged text, and the episode terminates after
    ``max_invalid`` consecutive invalid responses. Values out of the bounds of a Box, including one nested in a Dict or
    Tuple, are clipped.

    ``info`` always contains ``action_valid``, ``success`` and ``invalid_reason`` (see
    :class:`~lrl.envs.native.NativeEnv`). If the action space contains a Box, ``clipped_numbers`` is the number of
    clipped values. If the format has reasoning and the action space is finite, ``reasoning_agrees`` is whether the last
    action mentioned in the reasoning is the action taken.

    Args:
        env: a native environment.
        codec: the codec of the environment.
        response_format: name of the format of responses.
        invalid_penalty: reward of an invalid response.
        max_invalid: number of consecutive invalid responses that ends an episode; at least 1.
        success_return: see :class:`~lrl.envs.native.NativeEnv`.
        reset_options: see :class:`~lrl.envs.native.NativeEnv`.
        success_at: see :class:`~lrl.envs.native.NativeEnv`.

    Raises:
        ValueError: If ``max_invalid`` is less than 1.

    Attributes:
        advises: whether observations are of class :class:`AdvisedObservation`. Set it before a reset.
    """

    def __init__(
        self,
        env: gym.Env,
        codec: TextCodec,
        response_format: str = "think_answer",
        invalid_penalty: float = -0.1,
        max_invalid: int = 5,
        success_return: float | None = None,
        reset_options: Mapping[str, Any] | None = None,
        success_at: SuccessAt = "last_step",
    ) -> None:
        if max_invalid < 1:
            raise ValueError(f"max_invalid is {max_invalid}; it must be at least 1.")
        self._native = NativeEnv(env, success_return, reset_options, codec, success_at, checks_finite=True)
        super().__init__(self._native)
        self.codec = codec
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._format = get_response_format(response_format)
        self._penalty = float(invalid_penalty)
        self._max_invalid = max_invalid
        self._num_invalid = 0
        self._context: Any = None
        self._text = ""
        self.advises = False

    @property
    def noise_seed(self) -> int | None:
        """Seed of the native environment's noise after each reset; None keeps the seed of the reset."""
        return self._native.noise_seed

    @noise_seed.setter
    def noise_seed(self, seed: int | None) -> None:
        """Set the seed for all later resets."""
        self._native.noise_seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see :meth:`~lrl.envs.native.NativeEnv.reset`."""
        observation, info = self._native.reset(seed=seed, options=options)
        self._num_invalid = 0
        self._context = self.codec.context(self._native.env)
        return self._show(observation), info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Parse a response and take its action, or reject it with feedback. No text raises an error."""
        try:
            native_action = self.codec.text_to_action(self._format.extract(action))
        except InvalidActionError as error:
            observation, reward, terminated, truncated, info = self._reject(str(error))
            return observation, reward, terminated, truncated, info | self._agreement(action, None)
        self._num_invalid = 0
        native_action, clipped = clip_to_space(self._native.action_space, native_action)
        observation, reward, terminated, truncated, info = self._native.step(native_action)
        if clipped is not None:
            info["clipped_numbers"] = clipped
        info |= self._agreement(action, native_action)
        return self._show(observation), reward, terminated, truncated, info

    def _agreement(self, response: str, native_action: Any) -> dict[str, bool]:
        """Return whether the last action mentioned in the reasoning was taken; empty without reasoning or names."""
        reasoning = self._format.reasoning(response)
        if reasoning is None or self.codec.action_texts is None:
            return {}
        taken = None if native_action is None else self.codec.action_to_text(native_action)
        return {"reasoning_agrees": taken is not None and self.codec.last_mentioned_action(reasoning) == taken}

    def _show(self, observation: Any) -> Any:
        self._text = self.codec.observation_to_text(observation, self._context)
        return self._advised(self._text)

    def _advised(self, text: str) -> Any:
        """Add the expert's action to a text if ``advises`` is true."""
        return AdvisedObservation(text, expert_action(self.env.unwrapped)) if self.advises else text

    def _reject(self, reason: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_invalid += 1
        info = {"action_valid": False, "success": self._native.success_so_far, "invalid_reason": reason}
        text = f"Invalid action: {reason}.\n{self._text}"
        return self._advised(text), self._penalty, self._num_invalid >= self._max_invalid, False, info

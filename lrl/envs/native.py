"""Wrapper that adds success, recording and reseeded noise to native environments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
from gymnasium.utils import seeding

from lrl.codecs.codec import TextCodec
from lrl.envs.boundary import CheckedEnv

SuccessAt = Literal["last_step", "any_step"]
"""Whether an episode is a success if its last step is one, or if any of its steps is one."""


@dataclass(frozen=True)
class NativeReset:
    """Holds what a reset of a native environment returned."""

    observation: Any
    context: Any
    """The codec's context, see :meth:`~lrl.codecs.codec.TextCodec.context`; None without a codec."""


@dataclass(frozen=True)
class NativeStep:
    """Holds an action of a native environment, and what its step returned."""

    start: NativeReset
    """The start of the episode."""
    action: Any
    observation: Any
    reward: float


class NativeEnv(gym.Wrapper):
    """Wrapper of a native environment with the same ``info`` entries for all environments.

    ``info`` contains ``action_valid`` (True), ``invalid_reason`` (empty) and ``success``. Of the environment's own
    entries it keeps only ``reward_<term>``, as ``reward/<term>``, because vectorizing all of them takes longer than a
    step.

    ``success`` is whether the episode is a success if it ends with this step. A step is a success by the first of these
    criteria that applies:

    1. ``info["success"]``, or else ``info["is_success"]``, of the environment is true.
    2. The return up to this step is at least ``success_return``.
    3. The return up to this step is at least the ``reward_threshold`` that the environment is registered with.
    4. The episode terminates with its first positive reward.

    With ``success_at="last_step"`` the episode is a success if its last step is one, with ``"any_step"`` if any step
    is one. The return is undiscounted and contains native rewards only.

    Args:
        env: A native environment. What it returns is checked, see :class:`~lrl.envs.boundary.CheckedEnv`.
        success_return: Return from which an episode is a success; None selects the registered threshold.
        reset_options: Options of every reset; options passed to :meth:`reset` take precedence.
        codec: Codec whose context is recorded, so that recorded observations can be converted to text later.
        success_at: Whether the last step or any step decides on success.
        checks_finite: Whether to check that observations are finite, where they are not batched.

    Attributes:
        records: Whether ``info["native"]`` contains a :class:`NativeStep` after each step. Set it before a reset.
        noise_seed: If set, seeds the environment's random number generator after each reset. Environments of one group
            can thereby share their initial state but not their transition noise.
    """

    def __init__(
        self,
        env: gym.Env,
        success_return: float | None = None,
        reset_options: Mapping[str, Any] | None = None,
        codec: TextCodec | None = None,
        success_at: SuccessAt = "last_step",
        checks_finite: bool = False,
    ) -> None:
        self._checked = CheckedEnv(env, reset_options, checks_finite)
        super().__init__(self._checked)
        self._codec, self._any_step = codec, success_at == "any_step"
        self.records = False
        self._start: NativeReset | None = None
        self.noise_seed: int | None = None
        spec = env.unwrapped.spec
        registered = None if spec is None else spec.reward_threshold
        self._success_return = registered if success_return is None else success_return
        self._return = 0.0
        self._rewarded = self._succeeded = False

    @property
    def success_so_far(self) -> bool:
        """Return whether the episode is a success if it ends without another native step."""
        return self._any_step and self._succeeded

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and reseed its noise.

        Args:
            seed: Seed of the environment.
            options: Options of this reset, passed to the environment, except those of lrl (``episode``).
        """
        observation, _ = self.env.reset(seed=seed, options=options)
        if self.noise_seed is not None:
            self.env.unwrapped.np_random = seeding.np_random(int(self.noise_seed))[0]
        self._return, self._rewarded, self._succeeded = 0.0, False, False
        info: dict[str, Any] = {"action_valid": True, "success": False, "invalid_reason": ""}
        if self.records:
            context = None if self._codec is None else self._codec.context(self.env)
            self._start = NativeReset(copy.deepcopy(observation), context)  # it may be overwritten by the next step
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment with a native action."""
        observation, reward, terminated, truncated, native_info = self._checked.step(action)
        self._return += reward
        reported, terms = self._checked.reported(native_info) if native_info else (None, {})
        success = self._is_success(reward, terminated, reported)
        self._succeeded |= success
        self._rewarded |= reward > 0
        info: dict[str, Any] = {"action_valid": True, "success": success or self.success_so_far, "invalid_reason": ""}
        info |= terms
        if self.records and self._start is not None:
            info["native"] = NativeStep(self._start, action, observation, reward)
        return observation, reward, terminated, truncated, info

    def _is_success(self, reward: float, terminated: bool, reported: bool | None) -> bool:
        """Return whether the step is a success."""
        if reported is not None:
            return reported
        if self._success_return is not None:
            return self._return >= self._success_return
        return terminated and reward > 0 and not self._rewarded

"""What every environment of ours adds to a native one: a verdict on the episode, and noise that can be reseeded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from gymnasium.utils import seeding

from lrl.codecs.codec import TextCodec


@dataclass(frozen=True)
class NativeStart:
    """Holds what a reset of a native environment returned."""

    observation: Any
    context: Any
    """The codec's context, see :meth:`~lrl.codecs.codec.TextCodec.context`; None without a codec."""


@dataclass(frozen=True)
class NativeStep:
    """Holds an action of a native environment, and what its step returned."""

    start: NativeStart
    """The start of the episode."""
    action: Any
    observation: Any
    reward: float


class NativeEnv(gym.Wrapper):
    """A native environment whose infos are the same for all environments.

    ``info`` holds ``action_valid`` (true), ``invalid_reason`` (empty), ``success``, and of what an environment adds of
    its own only ``reward_<term>`` as ``reward/<term>``: the rest costs more to vectorise than its step. ``success`` is
    meaningful at an episode's end; it is the first of these that exists: the environment's own verdict
    (``info["success"]`` or ``info["is_success"]``); return >= ``success_return``; return >= the reward threshold that
    the environment is registered with; a first positive reward at a terminal state. The return is undiscounted and
    holds native rewards only.

    Args:
        env: a native environment.
        success_return: see above.
        reset_options: of every reset; those of a call count more.
        codec: whose context is recorded with each episode, so that the recording can be put into words later.

    Attributes:
        records: whether ``info["native"]`` holds a :class:`NativeStep` after a step. Set it before a reset.
        noise_seed: if set, the environment's random numbers are seeded with it after each reset, so that
            environments of one group can share their start but not what happens to them afterwards.
    """

    def __init__(
        self,
        env: gym.Env,
        success_return: float | None = None,
        reset_options: Mapping[str, Any] | None = None,
        codec: TextCodec | None = None,
    ) -> None:
        super().__init__(env)
        self._reset_options, self._codec = dict(reset_options or {}), codec
        self.records = False
        self._start: NativeStart | None = None
        self.noise_seed: int | None = None
        spec = env.unwrapped.spec
        registered = None if spec is None else spec.reward_threshold
        self._success_return = registered if success_return is None else success_return
        self._return = 0.0
        self._rewarded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the native environment, then its noise. Options that it does not know are passed on untouched."""
        observation, _ = self.env.reset(seed=seed, options=self._reset_options | (options or {}))
        if self.noise_seed is not None:
            self.env.unwrapped.np_random = seeding.np_random(int(self.noise_seed))[0]
        self._return, self._rewarded = 0.0, False
        info: dict[str, Any] = {"action_valid": True, "success": False, "invalid_reason": ""}
        if self.records:
            context = None if self._codec is None else self._codec.context(self.env)
            self._start = NativeStart(copy.deepcopy(observation), context)  # it may be overwritten by the next step
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the native environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward = float(reward)
        self._return += reward
        success = (terminated or truncated) and self._succeeded(reward, terminated, info)
        self._rewarded |= reward > 0
        told = {"action_valid": True, "success": success, "invalid_reason": "", **reward_terms(info)}
        if self.records and self._start is not None:
            told["native"] = NativeStep(self._start, action, observation, reward)
        return observation, reward, terminated, truncated, told

    def _succeeded(self, reward: float, terminated: bool, info: dict[str, Any]) -> bool:
        verdict = info.get("success", info.get("is_success"))
        if verdict is not None:
            return bool(verdict)
        if self._success_return is not None:
            return self._return >= self._success_return
        return terminated and reward > 0 and not self._rewarded


def reward_terms(info: Mapping[str, Any]) -> dict[str, float]:
    """What an environment tells of its reward: ``reward_ctrl`` of ``info`` as ``reward/ctrl``."""
    if not info:
        return {}
    return {f"reward/{name[7:]}": float(value) for name, value in info.items() if name.startswith("reward_")}

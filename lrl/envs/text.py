"""Text in, text out: a codec around a native environment, with the invalid-action rule."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from lrl.codecs.clipping import clip_to_space
from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.expert_advice import expert_action
from lrl.envs.native import NativeEnv
from lrl.prompts.response_format import response_format as format_named


class AnyText(gym.spaces.Text):
    """Every string is a member; samples are printable ASCII.

    Gymnasium's own space looks at each character of each text and keeps three copies of its alphabet.
    """

    def __init__(self, max_length: int = 4096) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string, of whatever length and characters."""
        return isinstance(x, str)


@dataclass(frozen=True)
class AdvisedObservation:
    """An observation's text with the action that the environment's own expert would take."""

    text: str
    expert_action: Any
    """A native action."""


def text_of(observation: Any) -> str:
    """Return the text of an observation, with or without an expert's action; empty where it is native."""
    if isinstance(observation, AdvisedObservation):
        return observation.text
    return observation if isinstance(observation, str) else ""


class TextEnv(gym.Wrapper):
    """A native environment that shows text and takes answers.

    An answer whose format or action is not legal is an event of the environment: the native environment is not
    stepped, the reward is ``invalid_penalty``, the observation says what was wrong above the unchanged text, and
    the episode terminates after ``max_invalid`` such answers in a row. Numbers beyond a Box, also one inside a Dict or
    Tuple, are clipped to it and counted as ``clipped_numbers``. ``info`` always holds ``action_valid``,
    ``success`` and ``invalid_reason`` (see :class:`~lrl.envs.native.NativeEnv`). Where the format has reasoning and
    actions are finitely many, ``reasoning_agrees`` says whether the action it names last is the one that was taken.

    Args:
        env: a native environment.
        codec: its text.
        response_format: how answers are written, by name.
        invalid_penalty: reward of an invalid answer.
        max_invalid: invalid answers in a row that end the episode.
        success_return: see :class:`~lrl.envs.native.NativeEnv`.
        reset_options: as well.

    Attributes:
        advises: whether observations are :class:`AdvisedObservation`, by :mod:`lrl.envs.expert_advice`. Set it before
            a reset.
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
    ) -> None:
        if max_invalid < 1:
            raise ValueError(f"max_invalid is {max_invalid}; it must be at least 1.")
        self._native = NativeEnv(env, success_return, reset_options, codec)
        super().__init__(self._native)
        self.codec = codec
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._format = format_named(response_format)
        self._penalty = float(invalid_penalty)
        self._max_invalid = max_invalid
        self._invalid = 0
        self._context: Any = None
        self._text = ""
        self.advises = False

    @property
    def noise_seed(self) -> int | None:
        """Seeds the native environment's noise after each reset; None leaves it to the reset's own seed."""
        return self._native.noise_seed

    @noise_seed.setter
    def noise_seed(self, seed: int | None) -> None:
        self._native.noise_seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. Options that the native environment does not know do no harm."""
        observation, info = self._native.reset(seed=seed, options=options)
        self._invalid = 0
        self._context = self.codec.context(self._native.env)
        return self._show(observation), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one answer, whatever its text."""
        try:
            native_action = self.codec.text_to_action(self._format.extract(action))
        except InvalidActionError as error:
            observation, reward, terminated, truncated, info = self._refuse(str(error))
            return observation, reward, terminated, truncated, info | self._agreement(action, None)
        self._invalid = 0
        native_action, clipped = clip_to_space(self._native.action_space, native_action)
        observation, reward, terminated, truncated, info = self._native.step(native_action)
        if clipped is not None:
            info["clipped_numbers"] = clipped
        info |= self._agreement(action, native_action)
        return self._show(observation), reward, terminated, truncated, info

    def _agreement(self, answer: str, native_action: Any) -> dict[str, bool]:
        """Whether the reasoning names the action that was taken; nothing where there is none to name."""
        thought = self._format.reasoning(answer)
        if thought is None or self.codec.action_texts is None:
            return {}
        taken = None if native_action is None else self.codec.action_to_text(native_action)
        return {"reasoning_agrees": taken is not None and self.codec.mentioned_action(thought) == taken}

    def _show(self, observation: Any) -> Any:
        self._text = self.codec.observation_to_text(observation, self._context)
        return self._advised(self._text)

    def _advised(self, text: str) -> Any:
        """Add the expert's action to a text, where that was asked for."""
        return AdvisedObservation(text, expert_action(self.env.unwrapped)) if self.advises else text

    def _refuse(self, reason: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._invalid += 1
        info = {"action_valid": False, "success": False, "invalid_reason": reason}
        text = f"Invalid action: {reason}.\n{self._text}"
        return self._advised(text), self._penalty, self._invalid >= self._max_invalid, False, info

"""Abstract interface that converts observations to text and text to actions."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import Any, SupportsInt

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike


class InvalidActionError(ValueError):
    """Raised for text that is not a legal action. The message is shown to the policy as feedback."""


class TextCodec(ABC):
    """Abstract base class of codecs for one family of environments.

    A codec converts native observations to text and text to native actions. It knows no tokens and keeps no state.
    """

    has_expert: bool = False
    """Whether an expert action is available for the environment (:mod:`lrl.envs.text`)."""

    needs_context: bool = False
    """Whether converting an observation to text requires its :meth:`context`."""

    tags_observations: bool = False
    """Whether observations are enclosed in ``<observation></observation>``."""

    @property
    def unwrapped(self) -> TextCodec:
        """The codec itself, or the codec that it wraps (:class:`~lrl.evaluation.rephrased.RephrasedCodec`)."""
        return self

    @property
    @abstractmethod
    def description(self) -> str:
        """Description of the environment, its observations and its actions, for the system message."""

    @property
    @abstractmethod
    def action_texts(self) -> tuple[str, ...] | None:
        """Texts of all legal actions in the order of the action space; None if the action space is not finite."""

    @property
    def action_space(self) -> gym.Space | None:
        """Native action space; None if the actions are not finitely many and the codec only knows their texts."""
        return None if self.action_texts is None else spaces.Discrete(len(self.action_texts))

    def random_action_text(self, uniform: float) -> str:
        """Return the text of a random legal action, each of finitely many being equally likely.

        Args:
            uniform: a random number from [0, 1) that determines the action.

        Raises:
            ValueError: If there are not finitely many actions, and a subclass does not override this method.
        """
        if self.action_texts is None:
            raise ValueError(self._lacks("random_action_text"))
        return self.action_texts[int(uniform * len(self.action_texts))]

    def random_action(self, uniform: float) -> Any:
        """Return a random legal native action, see :meth:`random_action_text`."""
        return self.text_to_action(self.random_action_text(uniform))

    @property
    def default_action_text(self) -> str:
        """Text of the action that a constant policy repeats: the first action, or zero.

        Raises:
            ValueError: If there are not finitely many actions, and a subclass does not override this property.
        """
        if self.action_texts is None:
            raise ValueError(self._lacks("default_action_text"))
        return self.action_texts[0]

    def _lacks(self, name: str) -> str:
        """Return the error for a codec that has no finite action space and does not override a method."""
        return f"codec is {type(self).__name__}, whose action_texts are None; it must override {name}."

    def context(self, env: gym.Env) -> Any:
        """Return what the observation alone does not contain, such as the map; None by default.

        It is read from ``env`` after each reset and saved with each recorded episode, so it must consist of JSON
        values, with tuples instead of lists.
        """
        return None

    @abstractmethod
    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Convert a native observation to text.

        Args:
            observation: an element of the native observation space.
            context: the result of :meth:`context` for the current episode.
        """

    def text_to_observation(self, text: str) -> Any:
        """Parse the text of an observation, with or without tags, to the precision of the text.

        Returns:
            The native observation; None if the codec cannot parse its texts.

        Raises:
            ValueError: If the codec can parse its texts, but not ``text``.
        """
        return None

    def last_mentioned_action(self, text: str) -> str | None:
        """Return the text of the last action mentioned in ``text``, ignoring case.

        Returns None if no action is mentioned or the action space is not finite.
        """
        best: tuple[int, int, str | None] = (0, 0, None)
        for action in self.action_texts or ():
            for match in re.finditer(rf"(?<![\w.]){re.escape(action)}(?![\w])", text, re.IGNORECASE):
                # If two actions end at the same position, the longer one is returned.
                best = max(best, (match.end(), len(action), action), key=lambda candidate: candidate[:2])
        return best[2]

    def summary(self, text: str) -> str:
        """Summarize the text of an observation in a few words, for the reasoning of demonstrations."""
        return text.partition("\n")[0]

    def ahead(self, text: str) -> str:
        """Name the object directly ahead of the agent, for the reasoning of demonstrations.

        Raises:
            ValueError: If the agent of the environment faces no direction.
        """
        raise ValueError(
            f"demonstrations.reasoning contains {{ahead}}, which {type(self).__name__} cannot fill in; it may contain "
            "{seen} and {action} only."
        )

    @abstractmethod
    def text_to_action(self, text: str) -> Any:
        """Parse the text of an action strictly.

        Raises:
            InvalidActionError: If ``text`` is not a legal action.
        """

    @abstractmethod
    def action_to_text(self, action: Any) -> str:
        """Convert a native action to text. This is the inverse of :meth:`text_to_action`."""


class NamedActionsCodec(TextCodec):
    """Abstract base class of codecs whose actions 0, 1, ... have names."""

    _actions: tuple[str, ...]
    _ignores_case = False
    """Whether names are matched without regard to case and surrounding whitespace, instead of exactly."""

    @property
    def action_texts(self) -> tuple[str, ...]:
        """Names of the actions in the order of the action space."""
        return self._actions

    def text_to_action(self, text: str) -> int:
        """Return the index of the action named ``text``.

        Raises:
            InvalidActionError: If ``text`` is not the name of an action.
        """
        if self._ignores_case:
            lower = text.strip().lower()
            text = next((name for name in self._actions if name.lower() == lower), text)
        if text not in self._actions:
            raise InvalidActionError(f"the action must be one of {', '.join(self._actions)}")
        return self._actions.index(text)

    def action_to_text(self, action: SupportsInt) -> str:
        """Return the name of an action.

        Raises:
            ValueError: If ``action`` is not the index of an action.
        """
        if int(action) not in range(len(self._actions)):
            raise ValueError(f"the action is {action}; it must be from 0 to {len(self._actions) - 1}.")
        return self._actions[int(action)]


# Clipping of actions to the action space.


def clip_to_space(space: gym.Space, action: Any) -> tuple[Any, int | None]:
    """Clip all Box values of an action, including those nested in a Dict or Tuple.

    Args:
        space: the action space.
        action: an element of ``space``, except that Box values may be out of bounds.

    Returns:
        The nearest element of ``space``, and the number of clipped values; None if ``space`` contains no Box.
    """
    if isinstance(space, spaces.Box):
        return clip_to_box(space, action)
    if isinstance(space, spaces.Dict):
        clipped = {key: clip_to_space(subspace, action[key]) for key, subspace in space.spaces.items()}
        return {key: value for key, (value, _) in clipped.items()}, _total([count for _, count in clipped.values()])
    if isinstance(space, spaces.Tuple):
        pairs = [clip_to_space(subspace, value) for subspace, value in zip(space.spaces, action, strict=True)]
        return tuple(value for value, _ in pairs), _total([count for _, count in pairs])
    return action, None


def clip_to_box(space: spaces.Box, values: ArrayLike) -> tuple[np.ndarray, int]:
    """Clip an array to the bounds of a Box.

    Args:
        space: the Box. For an integer dtype, values are first rounded half to even.
        values: an array of shape ``space.shape``. Integers that do not fit into 64 bits require dtype object.

    Returns:
        The clipped array of shape ``space.shape`` and dtype ``space.dtype``, and the number of clipped values.
    """
    values = np.asarray(values).reshape(space.shape)
    if np.issubdtype(space.dtype, np.integer):
        return _clip_integers(space, values)
    with np.errstate(over="ignore"):  # Infinity is clipped like any other value.
        cast = values.astype(space.dtype)
    clipped = np.clip(cast, space.low, space.high)
    return clipped, int((clipped != cast).sum())


def _clip_integers(space: spaces.Box, values: np.ndarray) -> tuple[np.ndarray, int]:
    """Clip with Python integers: float64 cannot represent the 64-bit bounds, and casting out of bounds overflows."""
    rounded = [round(value) if math.isfinite(value) else value for value in values.ravel().tolist()]
    bounds = zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True)
    clipped = [min(max(value, low), high) for value, (low, high) in zip(rounded, bounds, strict=True)]
    count = sum(value != nearest for value, nearest in zip(rounded, clipped, strict=True))
    return np.array(clipped, dtype=space.dtype).reshape(space.shape), count


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None

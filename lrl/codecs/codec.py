"""The two directions of text: what an environment shows, and what a policy's words mean in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym


class InvalidActionError(ValueError):
    """A text that is not a legal action; the message says why, in words a policy can be shown."""


class TextCodec(ABC):
    """Observation to text and text to action, for one family of environments. Pure: no tokens, no state."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What the environment is, what an observation shows and which actions exist: the system text."""

    @property
    @abstractmethod
    def action_texts(self) -> tuple[str, ...] | None:
        """Every legal action's text in the order of the action space; None where they are not finite."""

    def context(self, env: gym.Env) -> Any:
        """What the observation alone does not say (a map, a mission); read from ``env`` after each reset."""
        return None

    @abstractmethod
    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Describe one native observation."""

    @abstractmethod
    def text_to_action(self, text: str) -> Any:
        """Parse the text of an action, strictly.

        Raises:
            InvalidActionError: ``text`` is not a legal action.
        """

    @abstractmethod
    def action_to_text(self, action: Any) -> str:
        """The text of one native action; the inverse of :meth:`text_to_action`."""

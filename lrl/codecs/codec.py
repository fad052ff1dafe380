"""The two directions of text: what an environment shows, and what a policy's words mean in it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym


class InvalidActionError(ValueError):
    """A text that is not a legal action; the message says why, in words a policy can be shown."""


class TextCodec(ABC):
    """Observation to text and text to action, for one family of environments. Pure: no tokens, no state."""

    has_expert: bool = False
    """Whether the environment can be asked what its expert would do (:mod:`lrl.envs.expert_advice`)."""

    needs_context: bool = False
    """Whether an observation is text together with its :meth:`context` only."""

    tags_observations: bool = False
    """Whether observations stand inside ``<observation></observation>``."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What the environment is, what an observation shows and which actions exist: the system text."""

    @property
    @abstractmethod
    def action_texts(self) -> tuple[str, ...] | None:
        """Every legal action's text in the order of the action space; None where they are not finite."""

    def random_action_text(self, uniform: float) -> str:
        """A legal action's text, drawn by a number from [0, 1); each of finitely many is equally likely."""
        assert self.action_texts is not None, "a codec without finite actions draws them itself"
        return self.action_texts[int(uniform * len(self.action_texts))]

    @property
    def idle_action_text(self) -> str:
        """The action of a policy that does the same all the time: the first, or zero."""
        assert self.action_texts is not None, "a codec without finite actions says which is idle"
        return self.action_texts[0]

    def context(self, env: gym.Env) -> Any:
        """What the observation alone does not say (a map, a mission); read from ``env`` after each reset.

        Data sets keep it with each episode: it must be made of what JSON holds, with tuples for lists.
        """
        return None

    @abstractmethod
    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Describe one native observation."""

    def mentioned_action(self, text: str) -> str | None:
        """The one of finitely many actions that ``text`` names last, in whatever case; None where it names none."""
        named: tuple[int, int, str | None] = (0, 0, None)
        for action in self.action_texts or ():
            for found in re.finditer(rf"(?<![\w.]){re.escape(action)}(?![\w])", text, re.IGNORECASE):
                # of two that end in one place, the longer
                named = max(named, (found.end(), len(action), action), key=lambda one: one[:2])
        return named[2]

    def gist(self, text: str) -> str:
        """What matters most in an observation's ``text``, in a few words: a demonstrator's reasoning says it."""
        return text.partition("\n")[0]

    @abstractmethod
    def text_to_action(self, text: str) -> Any:
        """Parse the text of an action, strictly.

        Raises:
            InvalidActionError: ``text`` is not a legal action.
        """

    @abstractmethod
    def action_to_text(self, action: Any) -> str:
        """The text of one native action; the inverse of :meth:`text_to_action`."""

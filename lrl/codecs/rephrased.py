"""Rewords the texts of a codec, to evaluate how a trained policy generalises to prompts that it has not seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from lrl.codecs.codec import InvalidActionError, TextCodec


@dataclass(frozen=True, kw_only=True)
class Phrasing:
    """Specifies other wording for the texts of a codec; fields that are not given leave their texts unchanged."""

    description: str | None = None
    """Description of the environment, in which the system message lists the actions."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """New names of actions, by the old ones. The description gets them as well, unless it is given."""
    observations: Mapping[str, str] = field(default_factory=dict)
    """Replacements in observations, one after the other: regular expression to text."""
    order: Sequence[str] = ()
    """Old names of all actions in the order in which the description lists them."""


class RephrasedCodec(TextCodec):
    """Wraps a codec so that its prompts and action names are worded differently.

    Args:
        codec: The codec whose texts are rephrased; its actions have names.
        phrasing: The other words.

    Raises:
        ValueError: If a name is no action of ``codec``, if two actions get the same name, or if a regular expression
            is invalid.
    """

    def __init__(self, codec: TextCodec, phrasing: Phrasing) -> None:
        if codec.action_texts is None:
            raise ValueError(f"the actions of {type(codec).__name__} have no names; its texts cannot be rephrased.")
        known = ", ".join(codec.action_texts)
        for key, names in (("actions", phrasing.actions), ("order", phrasing.order)):
            for name in names:
                if name not in codec.action_texts:
                    raise ValueError(f"{key} names {name!r}, which is no action; there are {known}.")
        if phrasing.order and sorted(phrasing.order) != sorted(codec.action_texts):
            raise ValueError(f"order is {list(phrasing.order)}; it must name each of {known} once.")
        self._codec, self.phrasing = codec, phrasing
        self._new = {name: phrasing.actions.get(name, name) for name in codec.action_texts}
        self._old = {new: old for old, new in self._new.items()}
        if len(self._old) < len(self._new):
            raise ValueError(f"actions is {dict(phrasing.actions)}, which gives two actions the same name.")
        try:
            self._rules = [(re.compile(pattern), text) for pattern, text in phrasing.observations.items()]
        except re.error as error:
            raise ValueError(f"observations has {error.pattern!r}, which is no regular expression: {error}.") from error
        self._names = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, codec.action_texts)) + r")(?!\w)")
        self.has_expert, self.needs_context = codec.has_expert, codec.needs_context
        self.tags_observations = codec.tags_observations

    @property
    def unwrapped(self) -> TextCodec:
        """The codec whose texts are rephrased."""
        return self._codec.unwrapped

    @property
    def description(self) -> str:
        """The given description, or the codec's own with the new names in the given order."""
        if self.phrasing.description is not None:
            return self.phrasing.description
        order = iter(self.phrasing.order or self._codec.action_texts or ())
        return self._names.sub(lambda match: self._new[next(order, match[0])], self._codec.description)

    @property
    def action_space(self) -> gym.Space | None:
        """Native action space of the codec whose texts are rephrased."""
        return self.unwrapped.action_space

    @property
    def action_texts(self) -> tuple[str, ...]:
        """The new names, in the order of the action space."""
        return tuple(self._new.values())

    def context(self, env: gym.Env) -> Any:
        """Return the codec's own context."""
        return self._codec.context(env)

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Convert a native observation to the codec's text, and rephrase that."""
        return self.rephrase_observation(self._codec.observation_to_text(observation, context))

    def rephrase_observation(self, text: str) -> str:
        """Return the text of an observation in the other words."""
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text

    def rephrase_response(self, text: str) -> str:
        """Return a response with the new names of the actions."""
        return self._names.sub(lambda match: self._new[match[0]], text)

    def summary(self, text: str) -> str:
        """Summarize the text of an observation by its first line."""
        return text.partition("\n")[0]

    def text_to_action(self, text: str) -> Any:
        """Return the action with a new name, ignoring case and surrounding whitespace.

        Raises:
            InvalidActionError: If ``text`` is none of the new names.
        """
        by_lower_case = {new.lower(): old for new, old in self._old.items()}
        old = self._old.get(text, by_lower_case.get(text.strip().lower()))
        if old is None:
            raise InvalidActionError(f"the action must be one of {', '.join(self._old)}")
        return self._codec.text_to_action(old)

    def action_to_text(self, action: Any) -> str:
        """Return the new name of an action."""
        return self._new[self._codec.action_to_text(action)]

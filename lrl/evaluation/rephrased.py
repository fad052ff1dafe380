"""Evaluation of a trained policy on reworded prompts, renamed actions, or actions listed in another order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.load import Loaded
from lrl.files import resolve
from lrl.registry import register
from lrl.types import PastTurn


@dataclass(frozen=True, kw_only=True)
class Phrasing:
    """Specifies another wording of a codec's texts; fields with their default leave the texts unchanged."""

    description: str | None = None
    """Description of the environment in the system message."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """New name of each renamed action, by its old name. They are also replaced in the description, unless
    ``description`` is given."""
    observations: Mapping[str, str] = field(default_factory=dict)
    """Replacements in observations, by regular expression; they are applied in this order."""
    order: Sequence[str] = ()
    """Old names of all actions in the order in which the description lists them."""


@register
class RephrasedCodec(TextCodec):
    """Wraps a codec so that its prompts and action names are worded differently.

    Args:
        codec: the codec to rephrase, whose actions must have names.
        phrasing: the new wording.

    Raises:
        ValueError: If a name is not an action of ``codec``, two actions get the same name, or a regular expression is
            invalid.
    """

    def __init__(self, codec: TextCodec, phrasing: Phrasing) -> None:
        if codec.action_texts is None:
            raise ValueError(f"the actions of {type(codec).__name__} have no names; its texts cannot be rephrased.")
        known = ", ".join(codec.action_texts)
        for key, names in (("actions", phrasing.actions), ("order", phrasing.order)):
            for name in names:
                if name not in codec.action_texts:
                    raise ValueError(f"{key} names {name!r}, which is not an action; the actions are {known}.")
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
            raise ValueError(
                f"observations has {error.pattern!r}, which is not a regular expression: {error}."
            ) from error
        listed = ", ".join(codec.action_texts)
        if phrasing.order and phrasing.description is None and listed not in codec.description:
            raise ValueError(
                f"order is {list(phrasing.order)}, but the description does not list the actions ({listed}); give a "
                "description."
            )
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
        before, listed, after = self._codec.description, "", ""
        if self.phrasing.order:  # the list of the actions is at the end; other names in the text keep their places
            before, listed, after = before.rpartition(", ".join(self._codec.action_texts or ()))
            listed = ", ".join(self._new[name] for name in self.phrasing.order)
        return self.rephrase_response(before) + listed + self.rephrase_response(after)

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
        """Return the rephrased text of an observation."""
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text

    def rephrase_response(self, text: str) -> str:
        """Return a response with the new names of the actions."""
        return self._names.sub(lambda match: self._new[match[0]], text)

    def text_to_action(self, text: str) -> Any:
        """Return the action with a new name, ignoring case and surrounding whitespace.

        Raises:
            InvalidActionError: If ``text`` is not one of the new names.
        """
        by_lower_case = {new.lower(): old for new, old in self._old.items()}
        old = self._old.get(text, by_lower_case.get(text.strip().lower()))
        if old is None:
            raise InvalidActionError(f"the action must be one of {', '.join(self._old)}")
        return self._codec.text_to_action(old)

    def action_to_text(self, action: Any) -> str:
        """Return the new name of an action."""
        return self._new[self._codec.action_to_text(action)]


def read_phrasings(path: str) -> dict[str, Phrasing]:
    """Read a YAML file of phrasings: a mapping from names to the fields of :class:`Phrasing`.

    Raises:
        ValueError: If there is no such file, or its content is not such a mapping.
    """
    file = Path(resolve(path))
    if not file.is_file():
        raise ValueError(f"rephrase is {path!r}; there is no such file.")
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"rephrase is {path!r}, which is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"rephrase is {path!r}; it must map names to phrasings.")
    kinds = {"description": str, "actions": dict, "observations": dict, "order": list}
    phrasings: dict[str, Phrasing] = {}
    for name, fields in content.items():
        for key, value in fields.items() if isinstance(fields, Mapping) else [(str(fields), None)]:
            if not isinstance(value, kinds.get(key, ())):
                raise ValueError(
                    f"rephrase is {path!r}, where {name} has {key!r}: {value!r}; it must be one of description "
                    "(a text), actions and observations (mappings) and order (a list)."
                )
        phrasings[str(name)] = Phrasing(**fields)
    return phrasings


@contextmanager
def rephrased(loaded: Loaded, phrasing: Phrasing) -> Iterator[Loaded]:
    """Rephrase the texts of a policy and its environment, few-shot examples included, inside a ``with`` block.

    Args:
        loaded: a policy that reads text, and its environment.
        phrasing: the new wording.

    Raises:
        ValueError: If the policy does not read text, its system message is fixed, or the phrasing does not fit.
    """
    policy, envs = loaded.policy, loaded.env_factory
    if not isinstance(envs, GymnasiumEnvs) or policy.prompt is None:
        raise ValueError("rephrase needs a policy that reads prompts, in a Gymnasium environment.")
    if policy.prompt.system is not None and (phrasing.description or phrasing.actions or phrasing.order):
        raise ValueError(
            f"rephrase changes the system message, but the policy's prompt.system is "
            f"{policy.prompt.system!r}; give a file that rephrases observations only."
        )
    codec, prompt = RephrasedCodec(envs.codec, phrasing), policy.prompt
    examples = [
        PastTurn(codec.rephrase_observation(turn.observation), codec.rephrase_response(turn.response))
        for turn in prompt.examples
    ]
    try:
        policy.prompt = prompt.with_examples(examples) if examples else prompt
        _connect(policy, codec)
        yield loaded._replace(env_factory=envs.with_settings(codec=codec))
    finally:
        policy.prompt = prompt
        _connect(policy, envs.codec)


def _connect(policy: Any, codec: TextCodec) -> None:
    """Connect a policy to a codec, whose action names it tokenises again."""
    policy.connect(codec)
    policy.configure()

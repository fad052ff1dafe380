"""Codec for any environment whose observation and action spaces have a text format."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.codecs.numbers import NumberFormat, Range, Ranges
from lrl.codecs.space_formats import (
    BoxFormat,
    CompositeFormat,
    DiscreteFormat,
    MultiDiscreteFormat,
    SpaceFormat,
    TextFormat,
    flatten,
)


@dataclass(frozen=True, kw_only=True)
class EnvironmentMetadata:
    """Information about an environment that its spaces do not contain."""

    description: str = ""
    """Description of the task in one or two sentences."""
    observation_names: tuple[str, ...] | Callable[[Any], tuple[str, ...] | None] | None = None
    """Names of the observed dimensions, or a function that returns them for a native environment."""
    action_names: tuple[str, ...] | None = None
    """Names of the actions of a Discrete action space."""
    observation_ranges: tuple[Range, ...] | Callable[[Any], tuple[Range, ...] | None] | None = None
    """Typical ranges of the observed dimensions, or a function that returns them for a native environment."""
    has_expert: bool = False
    """Whether an expert action is available for the environment."""

    def resolve(self, env: gym.Env) -> EnvironmentMetadata:
        """Return a copy in which functions are replaced by their results for ``env``."""
        names, ranges = self.observation_names, self.observation_ranges
        return replace(
            self,
            observation_names=names(env) if callable(names) else names,
            observation_ranges=ranges(env) if callable(ranges) else ranges,
        )


def format_for_space(
    space: gym.Space, numbers: NumberFormat, metadata: EnvironmentMetadata, role: str, ranges: Ranges | None = None
) -> SpaceFormat:
    """Create the text format of a space.

    Args:
        space: A Discrete, MultiDiscrete, MultiBinary, Box or Text space, or a Dict or Tuple of these.
        numbers: The format of numbers.
        metadata: Names of the observed dimensions and of the actions.
        role: ``observation`` or ``action``, with the path of a leaf; used for names and error messages.
        ranges: The ranges that integers represent; None selects the bounds of the space.

    Raises:
        ValueError: If the space is not supported or the ranges do not match it.
    """
    if isinstance(space, spaces.Discrete):
        return DiscreteFormat(space, metadata.action_names if role == "action" else None)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return MultiDiscreteFormat(space)
    if isinstance(space, spaces.Text):
        return TextFormat(space)
    if isinstance(space, spaces.Box):
        low, high = _bounds(space, ranges, role)
        names = metadata.observation_names if numbers.names and role == "observation" else None
        assert not callable(names), "resolve() has been called"
        return BoxFormat(space, numbers.codec(low, high, role, np.issubdtype(space.dtype, np.integer)), names)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        leaves = dict(flatten(space, space))
        by_path, no_metadata = _ranges_by_path(ranges, leaves, role), EnvironmentMetadata()
        formats = {
            path: format_for_space(leaf, numbers, no_metadata, f"{role} {path}", by_path.get(path))
            for path, leaf in leaves.items()
        }
        return CompositeFormat(space, formats)
    raise ValueError(
        f"the {role} space is {space}, which is not supported; it must be a Discrete, MultiDiscrete, MultiBinary, Box "
        "or Text, or a Dict or Tuple of these."
    )


def _ranges_by_path(ranges: Ranges | None, leaves: Mapping[str, gym.Space], role: str) -> Mapping[str, Sequence[Range]]:
    """Return the ranges of each Box in a Dict or Tuple by path; a single range applies to all."""
    boxes = [path for path, leaf in leaves.items() if isinstance(leaf, spaces.Box)]
    if ranges is None:
        return {}
    if isinstance(ranges, Mapping):
        unknown = [path for path in ranges if path not in boxes]
        if unknown:
            raise ValueError(
                f"numbers.ranges has the key {unknown[0]!r}; the {role} has numbers under {', '.join(boxes)}."
            )
        return ranges
    if len(ranges) > 1:
        raise ValueError(
            f"numbers.ranges is a list of {len(ranges)}, but the {role} has numbers under {', '.join(boxes)}; it must "
            f"be a mapping such as {{{boxes[0]}: [[low, high]]}}."
        )
    return dict.fromkeys(boxes, ranges)


def _bounds(space: spaces.Box, ranges: Ranges | None, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper bounds of all dimensions, each ``(dimension,)``."""
    if isinstance(ranges, Mapping):
        keys = ", ".join(ranges)
        raise ValueError(f"numbers.ranges has the keys {keys}; the {role} is a Box, so it must be a list without keys.")
    if ranges is None:
        return space.low.ravel(), space.high.ravel()
    size = int(np.prod(space.shape))
    if len(ranges) not in (1, size):
        raise ValueError(f"numbers.ranges has {len(ranges)} entries; the {role} has {size} dimensions.")
    low, high = np.broadcast_to(np.asarray(ranges, dtype=np.float64), (size, 2)).T
    return low, high


class SpaceCodec(TextCodec):
    """Codec for any environment, based on its spaces.

    Box observations are enclosed in ``<observation></observation>`` unless their dimensions are named. Actions that are
    not Discrete are enclosed in ``<action></action>``.

    Args:
        observation_space: The native observation space.
        action_space: The native action space.
        numbers: The format of numbers; None selects decimals.
        metadata: What is known about the environment beyond its spaces.

    Raises:
        ValueError: If a space is not supported, or a setting of ``numbers`` does not apply to it.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        numbers: NumberFormat | None = None,
        metadata: EnvironmentMetadata | None = None,
    ) -> None:
        self.numbers, metadata = numbers or NumberFormat(), metadata or EnvironmentMetadata()
        names, ranges = metadata.observation_names, metadata.observation_ranges
        if callable(names) or callable(ranges):
            raise TypeError("The metadata depends on the environment; call its resolve() method first.")
        self._check_numbers(observation_space, names)
        self.has_expert = metadata.has_expert
        self._observation = format_for_space(
            observation_space, self.numbers, metadata, "observation", self.numbers.ranges or ranges
        )
        self._action = format_for_space(action_space, self.numbers, metadata, "action")
        self._description, self._action_space = metadata.description, copy.deepcopy(action_space)
        self.tags_observations = isinstance(observation_space, spaces.Box) and not (self.numbers.names and names)

    def _check_numbers(self, space: gym.Space, names: tuple[str, ...] | None) -> None:
        """Raise if a setting would have no effect."""
        if self.numbers.ranges and not any(isinstance(leaf, spaces.Box) for _, leaf in flatten(space, space)):
            raise ValueError(f"numbers.ranges is set, but the observation space is {space}; it must be null.")
        if self.numbers.names and not (isinstance(space, spaces.Box) and names):
            raise ValueError(
                f"numbers.names is true, but the dimensions of {space} have no known names; it must be false."
            )

    @property
    def description(self) -> str:
        """Description of the task and the format of actions."""
        form = self._action.description
        if self._action.texts is None:
            form += ", inside <action></action>"
        return f"{self._description} Actions: {form}.".lstrip()

    @property
    def action_texts(self) -> tuple[str, ...] | None:
        """Texts of all actions of a Discrete action space; None for any other space."""
        return self._action.texts

    def random_action_text(self, uniform: float) -> str:
        """Return the text of a sample of the action space, with a seed derived from ``uniform``."""
        self._action_space.seed(int(uniform * 2**32))
        return self.action_to_text(self._action_space.sample())

    @property
    def default_action_text(self) -> str:
        """Text of the first action, of zero clipped to a Box, or of a fixed sample of any other space."""
        if self._action.texts is not None:
            return self._action.texts[0]
        if not isinstance(self._action_space, spaces.Box):
            return self.random_action_text(0.0)
        zero = np.zeros(self._action_space.shape, dtype=self._action_space.dtype)
        return self.action_to_text(np.clip(zero, self._action_space.low, self._action_space.high))

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Convert an element of the observation space to text."""
        text = self._observation.encode(observation)
        return f"<observation>{text}</observation>" if self.tags_observations else text

    def text_to_observation(self, text: str) -> Any:
        """Parse an observation without names; see :meth:`~lrl.codecs.codec.TextCodec.text_to_observation`."""
        if self.numbers.names:
            return None
        return self._observation.decode(text.removeprefix("<observation>").removesuffix("</observation>"))

    def text_to_action(self, text: str) -> Any:
        """Parse the name of a Discrete action, or the text inside the action tags.

        Raises:
            InvalidActionError: If ``text`` is not a legal action.
        """
        if self._action.texts is None:
            if not (text.startswith("<action>") and text.endswith("</action>") and len(text) >= 17):
                raise InvalidActionError("the action must stand inside <action></action>")
            text = text[8:-9]
        return self._action.decode(text)

    def action_to_text(self, action: Any) -> str:
        """Convert an action to its name, or to text inside the action tags."""
        text = self._action.encode(action)
        return text if self._action.texts is not None else f"<action>{text}</action>"

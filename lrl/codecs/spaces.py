"""Codec for any environment whose spaces have a text format, and descriptions of what the numbers mean."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.codecs.numbers import NUM_BINS, NormalisedCodec, NumberFormat, Range, Ranges
from lrl.codecs.space_formats import (
    BoxFormat,
    CompositeFormat,
    DiscreteFormat,
    MultiDiscreteFormat,
    SpaceFormat,
    TextFormat,
    flatten,
)
from lrl.registry import register

_NUMBERED = re.compile(r"(.*?)(\d+)")


class Quantity(NamedTuple):
    """Describes one number of an observation or an action."""

    name: str
    unit: str = ""
    """Unit, or what is measured; empty for numbers without unit."""
    range: Range | None = None
    """Values that the number usually takes, which 0 and 999 represent; None selects the bounds of the space."""


_Quantities = tuple[Quantity, ...]


@dataclass(frozen=True, kw_only=True)
class EnvironmentMetadata:
    """Information about an environment that its spaces do not contain."""

    description: str = ""
    """Description of the task in one or two sentences."""
    task: str | None = None
    """Replaces ``description`` if ``numbers.describe`` is true; None keeps it."""
    observation: _Quantities | None = None
    """Names, units and ranges of the observed dimensions, of which either all or none have a range."""
    action: _Quantities | None = None
    """Names and units of the numbers of an action."""
    action_names: tuple[str, ...] | None = None
    """Names of the actions of a Discrete action space."""
    has_expert: bool = False
    """Whether an expert action is available for the environment."""

    def quantities(self, role: str) -> _Quantities | None:
        """Return the numbers of the ``observation`` or ``action``; None if unknown, or for other roles."""
        return {"observation": self.observation, "action": self.action}.get(role)

    @property
    def observation_ranges(self) -> tuple[Range, ...] | None:
        """Ranges of the observed dimensions; None if they are unknown."""
        ranges = [one.range for one in self.observation or ()]
        known = tuple(one for one in ranges if one is not None)
        return known if known and len(known) == len(ranges) else None


def format_for_space(
    space: gym.Space, numbers: NumberFormat, metadata: EnvironmentMetadata, role: str, pairs: Ranges | None = None
) -> SpaceFormat:
    """Create the text format of a space.

    Args:
        space: a Discrete, MultiDiscrete, MultiBinary, Box or Text space, or a Dict or Tuple of these.
        numbers: the format of numbers.
        metadata: names of the observed dimensions and of the actions.
        role: ``observation`` or ``action``, with the path of a leaf; used for names and error messages.
        pairs: the ranges that integers represent, where None selects the bounds of the space; or the statistics of
            normalised numbers.

    Raises:
        ValueError: If the space is not supported or the ranges or statistics do not match it.
    """
    if isinstance(space, spaces.Discrete):
        return DiscreteFormat(space, metadata.action_names if role == "action" else None)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return MultiDiscreteFormat(space)
    if isinstance(space, spaces.Text):
        return TextFormat(space, strict=role.startswith("action"))
    if isinstance(space, spaces.Box):
        return _box_format(space, numbers, metadata.quantities(role), role, pairs)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        leaves = dict(flatten(space, space))
        by_path, no_metadata = _pairs_by_path(pairs, leaves, numbers, role), EnvironmentMetadata()
        formats = {
            path: format_for_space(leaf, numbers, no_metadata, f"{role} {path}", by_path.get(path))
            for path, leaf in leaves.items()
        }
        return CompositeFormat(space, formats)
    raise ValueError(
        f"the {role} space is {space}, which is not supported; it must be a Discrete, MultiDiscrete, MultiBinary, Box "
        "or Text, or a Dict or Tuple of these."
    )


def _box_format(
    space: spaces.Box, numbers: NumberFormat, known: _Quantities | None, role: str, pairs: Ranges | None
) -> BoxFormat:
    """Create the format of a Box; the arguments are those of :func:`format_for_space`."""
    is_action = role.startswith("action")
    given, bounds = _pairs(space, pairs, numbers, role), (space.low.ravel(), space.high.ravel())
    if numbers.kind != "normalised" or is_action:
        bounds = bounds if given is None else given
        codec = numbers.codec(*bounds, role, np.issubdtype(space.dtype, np.integer))
    elif given is None:
        raise ValueError(
            f"numbers.statistics lacks the {role}; for normalised numbers there must be one [mean, deviation] per "
            "dimension, which lrl collect --statistics prints."
        )
    else:
        codec = NormalisedCodec(*given, numbers.precision)
    named = numbers.action_names if role == "action" else numbers.names and role == "observation"
    names = [one.name for one in known or ()] if named else None
    details = describe_box(space, numbers, bounds, known, is_action) if numbers.describe else ""
    return BoxFormat(space, codec, names, details, separator="\n" if named and not is_action else ",")


def _pairs_by_path(
    pairs: Ranges | None, leaves: Mapping[str, gym.Space], numbers: NumberFormat, role: str
) -> Mapping[str, Sequence[Range]]:
    """Return the ranges or statistics of each Box in a Dict or Tuple by path; a single pair applies to all."""
    boxes = [path for path, leaf in leaves.items() if isinstance(leaf, spaces.Box)]
    if pairs is None:
        return {}
    if not isinstance(pairs, Mapping) and len(pairs) == 1:
        return dict.fromkeys(boxes, pairs)
    if not isinstance(pairs, Mapping) or not set(pairs) <= set(boxes):
        has = f"the keys {', '.join(pairs)}" if isinstance(pairs, Mapping) else f"{len(pairs)} entries without keys"
        raise ValueError(
            f"{numbers.pairs_key} has {has}, but the {role} has numbers under {', '.join(boxes)}; it must be a mapping "
            f"such as {{{boxes[0]}: [[low, high]]}}."
        )
    return pairs


def _pairs(
    space: spaces.Box, pairs: Ranges | None, numbers: NumberFormat, role: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return lower and upper ends, or means and standard deviations, each ``(dimension,)``; None if not set."""
    if pairs is None:
        return None
    size = int(np.prod(space.shape))
    if isinstance(pairs, Mapping) or len(pairs) not in (1, size):
        has = f"the keys {', '.join(pairs)}" if isinstance(pairs, Mapping) else f"{len(pairs)} entries"
        raise ValueError(
            f"{numbers.pairs_key} has {has}, but the {role} has {size} dimensions; it must be a list of one pair, or "
            "of one per dimension."
        )
    first, second = np.broadcast_to(np.asarray(pairs, dtype=np.float64), (size, 2)).T
    return first, second


@register
class SpaceCodec(TextCodec):
    """Codec for any environment, based on its spaces.

    Box observations are enclosed in ``<observation></observation>`` unless their dimensions are named or
    ``numbers.tags`` is false. Actions that are not Discrete are enclosed in ``<action></action>``.

    Args:
        observation_space: the native observation space.
        action_space: the native action space.
        numbers: the format of numbers; None selects decimals.
        metadata: information that the spaces do not contain.

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
        named = self.numbers.names and bool(metadata.observation)
        self._check_numbers(observation_space, named)
        for key, space, role in (("names", observation_space, "observation"), ("action_names", action_space, "action")):
            if getattr(self.numbers, key) and not (isinstance(space, spaces.Box) and metadata.quantities(role)):
                raise ValueError(f"numbers.{key} is true, but {space} has no known names; it must be false.")
        self.has_expert = metadata.has_expert
        pairs = self.numbers.ranges or metadata.observation_ranges
        if self.numbers.kind == "normalised":
            pairs = self.numbers.statistics
        self.observation_format = format_for_space(observation_space, self.numbers, metadata, "observation", pairs)
        self.action_format = format_for_space(action_space, self.numbers, metadata, "action")
        self._description = (self.numbers.describe and metadata.task) or metadata.description
        self.metadata, self._action_space = metadata, copy.deepcopy(action_space)
        self.tags_observations = self.numbers.tags and isinstance(observation_space, spaces.Box) and not named

    def _check_numbers(self, space: gym.Space, named: bool) -> None:
        """Raise if a setting would have no effect."""
        given = self.numbers.ranges or self.numbers.statistics
        if given and not any(isinstance(leaf, spaces.Box) for _, leaf in flatten(space, space)):
            raise ValueError(f"{self.numbers.pairs_key} is set, but the observation space is {space}; it must be null.")
        if not self.numbers.tags and (named or not isinstance(space, spaces.Box)):
            raise ValueError(
                f"numbers.tags is false, but observations of {space} have no tags{' with names' * named}; "
                "it must be true."
            )

    @property
    def description(self) -> str:
        """Description of the task and the format of actions, with ``numbers.describe`` also of observations."""
        form = self.action_format.description + ", inside <action></action>" * (self.action_format.texts is None)
        observations = f" Observations: {self.observation_format.description}." if self.numbers.describe else ""
        return f"{self._description}{observations} Actions: {form}.".lstrip()

    @property
    def native_description(self) -> str:
        """Description of the task and of the native numbers of observations and actions, independent of their text."""
        parts = [self.metadata.task or self.metadata.description]
        for role in ("observation", "action"):
            known = self.metadata.quantities(role)
            if known:
                parts.append(f"The numbers of an {role} are, in order: {describe_quantities(known, 'usually')}.")
        return " ".join(filter(None, parts))

    @property
    def action_texts(self) -> tuple[str, ...] | None:
        """Texts of all actions of a Discrete action space; None for any other space."""
        return self.action_format.texts

    @property
    def action_space(self) -> gym.Space:
        """Native action space."""
        return self._action_space

    def random_action_text(self, uniform: float) -> str:
        """Return the text of a sample of the action space, with a seed derived from ``uniform``."""
        return self.action_to_text(self.random_action(uniform))

    def random_action(self, uniform: float) -> Any:
        """Return a sample of the action space, without the rounding of texts, with a seed derived from ``uniform``."""
        self._action_space.seed(int(uniform * 2**32))
        return self._action_space.sample()

    @property
    def default_action_text(self) -> str:
        """Text of the first action, of zero clipped to a Box, or of a fixed sample of any other space."""
        if self.action_format.texts is not None:
            return self.action_format.texts[0]
        if not isinstance(self._action_space, spaces.Box):
            return self.random_action_text(0.0)
        zero = np.zeros(self._action_space.shape, dtype=self._action_space.dtype)
        return self.action_to_text(np.clip(zero, self._action_space.low, self._action_space.high))

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Convert an element of the observation space to text."""
        text = self.observation_format.encode(observation)
        return f"<observation>{text}</observation>" if self.tags_observations else text

    def text_to_observation(self, text: str) -> Any:
        """Parse an observation, with or without tags."""
        if self.tags_observations:
            text = text.removeprefix("<observation>").removesuffix("</observation>")
        return self.observation_format.decode(text)

    def text_to_action(self, text: str) -> Any:
        """Parse the name of a Discrete action, or the text inside the action tags.

        Raises:
            InvalidActionError: If ``text`` is not a legal action.
        """
        if self.action_format.texts is None:
            if not (text.startswith("<action>") and text.endswith("</action>") and len(text) >= 17):
                raise InvalidActionError("the action must stand inside <action></action>")
            text = text[8:-9]
        return self.action_format.decode(text)

    def action_to_text(self, action: Any) -> str:
        """Convert an action to its name, or to text inside the action tags."""
        text = self.action_format.encode(action)
        return text if self.action_format.texts is not None else f"<action>{text}</action>"


def describe_quantities(quantities: Sequence[Quantity], qualifier: str = "") -> str:
    """List names, units and ranges; successive numbers with the same unit and range are grouped.

    Args:
        quantities: one per number. Successive numbered names are abbreviated, such as ``force 0 to 77``.
        qualifier: text before ranges, such as ``usually``.

    Returns:
        For example ``height (m, from -4 to 4), pitch, thigh (rad, from -4 to 4)``.
    """
    parts: list[tuple[str, str]] = []
    for (unit, limits), group in groupby(quantities, key=lambda one: one[1:]):
        names = ", ".join(_abbreviated([one.name for one in group]))
        span = "" if limits is None else f"{qualifier} from {limits[0]:g} to {limits[1]:g}".strip()
        parts.append((names, ", ".join(filter(None, (unit, span)))))
    if len(parts) == 1 and not parts[0][1]:
        return parts[0][0]
    return ", ".join(f"{names} ({about or 'no unit'})" for names, about in parts)


def _abbreviated(names: list[str]) -> Iterator[str]:
    """Yield names; three or more successive numbered names are abbreviated, such as ``force 0 to 2``."""
    start = 0
    while start < len(names):
        match, count = _NUMBERED.fullmatch(names[start]), 1
        while match and names[start + count : start + count + 1] == [f"{match[1]}{int(match[2]) + count}"]:
            count += 1
        if match is None or count < 3:
            count = 1
            yield names[start]
        else:
            yield f"{names[start]} to {int(match[2]) + count - 1}"
        start += count


def describe_box(
    space: spaces.Box,
    numbers: NumberFormat,
    bounds: tuple[np.ndarray, np.ndarray],
    known: Sequence[Quantity] | None,
    is_action: bool,
) -> str:
    """Describe the numbers of a Box: names, units, ranges, and how each is written.

    Args:
        space: the Box.
        numbers: the format of the numbers.
        bounds: lower and upper ends of the ranges, each ``(dimension,)``; 0 and 999 represent them.
        known: names and units; None names dimensions by their position.
        is_action: whether the numbers are those of an action, which are never normalised.
    """
    low, high = bounds
    known = known or [Quantity(str(number)) for number in range(1, len(low) + 1)]
    limits = [pair if np.isfinite(pair).all() else None for pair in zip(low.tolist(), high.tolist(), strict=True)]
    listed = [one._replace(range=pair) for one, pair in zip(known, limits, strict=True)]
    if numbers.kind == "integers":
        last = NUM_BINS - 1
        form = f"an integer from 0 to {last}, where 0 is the smallest and {last} the largest value of its range"
        return f"{describe_quantities(listed)}, each {form}"
    if numbers.kind == "normalised" and not is_action:
        form = "minus its mean and divided by its standard deviation"
        return f"{describe_quantities([one._replace(range=None) for one in known])}, each {form}"
    are_bounds = np.array_equal(low, space.low.ravel()) and np.array_equal(high, space.high.ravel())
    return f"{describe_quantities(listed, '' if are_bounds else 'usually')}, each a decimal number"

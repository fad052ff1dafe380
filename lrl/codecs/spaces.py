"""Any Gymnasium space as text, and a codec for any environment whose spaces have one."""

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
from lrl.codecs.parts import CountsPart, JointPart, Part, PlainPart, VectorPart, WordsPart, flatten


@dataclass(frozen=True, kw_only=True)
class Wording:
    """What is known of an environment beyond its spaces."""

    description: str = ""
    """What it is about, in a sentence or two."""
    names: tuple[str, ...] | Callable[[Any], tuple[str, ...] | None] | None = None
    """Of the observed dimensions; or what tells them of the environment."""
    actions: tuple[str, ...] | None = None
    """Words for its actions."""
    ranges: tuple[Range, ...] | Callable[[Any], tuple[Range, ...] | None] | None = None
    """Where its observations stay, or all that matters of them, per dimension; or what tells it of the environment."""
    has_expert: bool = False
    """Whether it can be asked what its expert would do."""

    def of(self, native: gym.Env) -> Wording:
        """The wording of one environment: names and ranges that depend on it are asked for."""
        names = self.names(native) if callable(self.names) else self.names
        return replace(self, names=names, ranges=self.ranges(native) if callable(self.ranges) else self.ranges)


def part_for(
    space: gym.Space, numbers: NumberFormat, wording: Wording, where: str, ranges: Ranges | None = None
) -> Part:
    """The text of a space.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box, Text, or a Dict or Tuple of these.
        numbers: how numbers are written.
        wording: its words and names, where it has some.
        where: ``observation`` or ``action``, for errors.
        ranges: what integers stand for; None takes the bounds.

    Raises:
        ValueError: it is another space, or the ranges do not fit it.
    """
    if isinstance(space, spaces.Discrete):
        return WordsPart(space, wording.actions if where == "action" else None)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return CountsPart(space)
    if isinstance(space, spaces.Text):
        return PlainPart(space)
    if isinstance(space, spaces.Box):
        ends = _ends(space, ranges, where)
        named = wording.names if numbers.names and where == "observation" else None
        assert not callable(named), "the wording of one environment is that of Wording.of()"
        whole = np.issubdtype(space.dtype, np.integer)
        return VectorPart(space, numbers.writer(*ends, where, whole), named)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        leaves = dict(flatten(space, space))
        own = _ranges_by_key(ranges, leaves, where)
        parts = {
            path: part_for(leaf, numbers, Wording(), f"{where} {path}", own.get(path)) for path, leaf in leaves.items()
        }
        return JointPart(space, parts)
    raise ValueError(
        f"the {where} space is {space}, which has no text; it must be a Discrete, MultiDiscrete, MultiBinary, Box or "
        "Text, or a Dict or Tuple of these."
    )


def _ranges_by_key(ranges: Ranges | None, leaves: Mapping[str, gym.Space], where: str) -> Mapping[str, Sequence[Range]]:
    """The ranges of each Box of a Dict or Tuple, by its path; a single one is for all."""
    boxes = [path for path, leaf in leaves.items() if isinstance(leaf, spaces.Box)]
    if ranges is None:
        return {}
    if isinstance(ranges, Mapping):
        unknown = [path for path in ranges if path not in boxes]
        if unknown:
            raise ValueError(
                f"numbers.ranges has the key {unknown[0]!r}; the {where} has numbers under {', '.join(boxes)}."
            )
        return ranges
    if len(ranges) > 1:
        raise ValueError(
            f"numbers.ranges is a list of {len(ranges)}, but the {where} has numbers under {', '.join(boxes)}; it must "
            f"be by key, like {{{boxes[0]}: [[low, high]]}}."
        )
    return dict.fromkeys(boxes, ranges)


def _ends(space: spaces.Box, ranges: Ranges | None, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of every dimension, ``(dimension,)``."""
    if isinstance(ranges, Mapping):
        keys = ", ".join(ranges)
        raise ValueError(
            f"numbers.ranges has the keys {keys}; the {where} is a Box, so it must be a list without keys."
        )
    if ranges is None:
        return space.low.ravel(), space.high.ravel()
    size = int(np.prod(space.shape))
    if len(ranges) not in (1, size):
        raise ValueError(f"numbers.ranges has {len(ranges)} entries; the {where} has {size} dimensions.")
    ends = np.asarray(ranges, dtype=np.float64)
    return tuple(np.broadcast_to(ends, (size, 2)).T)  # pyright: ignore[reportReturnType]


class SpaceCodec(TextCodec):
    """Any environment by its spaces.

    Observations are written inside ``<observation></observation>`` and numbers that are answered inside
    ``<action></action>``; words and names stand alone.

    Args:
        observation_space: native.
        action_space: native.
        numbers: how numbers are written.
        wording: what is known beyond the spaces.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        numbers: NumberFormat | None = None,
        wording: Wording | None = None,
    ) -> None:
        self.numbers, wording = numbers or NumberFormat(), wording or Wording()
        if callable(wording.names) or callable(wording.ranges):
            raise TypeError("The wording's names or ranges depend on the environment; codec_for asks it for them.")
        self._check_numbers(observation_space, wording)
        self.has_expert = wording.has_expert
        ranges = self.numbers.ranges or wording.ranges
        self._observation = part_for(observation_space, self.numbers, wording, "observation", ranges)
        self._action = part_for(action_space, self.numbers, wording, "action")
        self._description, self._action_space = wording.description, copy.deepcopy(action_space)
        self.tags_observations = isinstance(observation_space, spaces.Box) and not (
            self.numbers.names and wording.names
        )

    def _check_numbers(self, space: gym.Space, wording: Wording) -> None:
        """Refuse settings that would do nothing."""
        if self.numbers.ranges and not any(isinstance(leaf, spaces.Box) for _, leaf in flatten(space, space)):
            raise ValueError(f"numbers.ranges is set, but the observation space is {space}; it must be null.")
        if self.numbers.names and not (isinstance(space, spaces.Box) and wording.names):
            raise ValueError(
                f"numbers.names is true, but no names are known of the observed numbers, {space}; it must be false."
            )

    @property
    def description(self) -> str:
        """What is known of the environment, and what an action looks like."""
        texts = self._action.texts
        form = self._action.about if texts is not None else f"{self._action.about}, inside <action></action>"
        return f"{self._description} Actions: {form}.".lstrip()

    @property
    def action_texts(self) -> tuple[str, ...] | None:
        """Of a Discrete action space."""
        return self._action.texts

    def random_action_text(self, uniform: float) -> str:
        """As Gymnasium samples the space: uniform where it is bounded."""
        self._action_space.seed(int(uniform * 2**32))
        return self.action_to_text(self._action_space.sample())

    @property
    def idle_action_text(self) -> str:
        """The first action, or zero, or what is nearest to it in the space."""
        if self._action.texts is not None:
            return self._action.texts[0]
        if not isinstance(self._action_space, spaces.Box):
            return self.random_action_text(0.0)
        zero = np.zeros(self._action_space.shape, dtype=self._action_space.dtype)
        return self.action_to_text(np.clip(zero, self._action_space.low, self._action_space.high))

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Write all of it."""
        text = self._observation.write(observation)
        return f"<observation>{text}</observation>" if self.tags_observations else text

    def text_to_action(self, text: str) -> Any:
        """Read a word, or what stands in the tags."""
        if self._action.texts is None:
            if not (text.startswith("<action>") and text.endswith("</action>") and len(text) >= 17):
                raise InvalidActionError("the action must stand inside <action></action>")
            text = text[8:-9]
        return self._action.read(text)

    def action_to_text(self, action: Any) -> str:
        """A word, or numbers in their tags."""
        text = self._action.write(action)
        return text if self._action.texts is not None else f"<action>{text}</action>"

"""Single spaces as text: what a codec of any environment is put together from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from lrl.codecs.clipping import clip_to_box
from lrl.codecs.codec import InvalidActionError
from lrl.codecs.numbers import Numbers, split


class Part(ABC):
    """The text of one space, in both directions."""

    texts: tuple[str, ...] | None = None
    """The text of every element, in the space's order, where they are few."""
    about: str
    """What is written, for a reader."""

    @abstractmethod
    def write(self, value: Any) -> str:
        """The text of an element."""

    @abstractmethod
    def read(self, text: str) -> Any:
        """The element of a text.

        Raises:
            InvalidActionError: it is the text of none.
        """


class WordsPart(Part):
    """A Discrete space: a word for each element.

    Args:
        space: the space.
        words: in its order; None takes the numbers themselves.
    """

    def __init__(self, space: spaces.Discrete, words: Sequence[str] | None = None) -> None:
        numbers = range(int(space.start), int(space.start) + int(space.n))
        self.texts = tuple(words) if words is not None else tuple(map(str, numbers))
        if len(self.texts) != len(numbers) or len(set(self.texts)) != len(numbers):
            raise ValueError(f"actions are {self.texts}; there must be {len(numbers)} different ones.")
        self._start, self._index = numbers.start, dict(zip(self.texts, numbers))
        many = len(numbers) > 20
        self.about = f"{self.texts[0]} to {self.texts[-1]}" if many else ", ".join(self.texts)

    def write(self, value: Any) -> str:
        """The element's word."""
        assert self.texts is not None
        return self.texts[int(value) - self._start]

    def read(self, text: str) -> int:
        """By the very word."""
        if text not in self._index:
            raise InvalidActionError(f"the action must be one of {self.about}")
        return self._index[text]


class CountsPart(Part):
    """MultiDiscrete and MultiBinary: one integer per dimension, separated by commas."""

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        self._shape, self._dtype = space.shape, space.dtype
        binary = isinstance(space, spaces.MultiBinary)
        self._low = np.zeros(self._shape, dtype=np.int64).ravel() if binary else np.asarray(space.start).ravel()
        sizes = np.full(self._shape, 2).ravel() if binary else np.asarray(space.nvec).ravel()
        self._high = self._low + sizes - 1
        self.about = f"{len(sizes)} integers, at least {self._low.tolist()} and at most {self._high.tolist()}"

    def write(self, value: Any) -> str:
        """Comma-separated."""
        return ",".join(map(str, np.asarray(value).ravel().tolist()))

    def read(self, text: str) -> np.ndarray:
        """Exactly as many integers as there are dimensions, each in its range."""
        parts = split(text, len(self._low))
        for part, low, high in zip(parts, self._low, self._high, strict=True):
            if not re.fullmatch(r"-?[0-9]{1,18}", part) or not low <= int(part) <= high:
                raise InvalidActionError(f"{part[:20]!r} is not an integer from {low} to {high}")
        return np.array([int(part) for part in parts], dtype=self._dtype).reshape(self._shape)


class VectorPart(Part):
    """A Box: its numbers, flattened, separated by commas, or each behind its name."""

    def __init__(self, space: spaces.Box, numbers: Numbers, names: Sequence[str] | None = None) -> None:
        self._space, self._numbers, self._names = space, numbers, names
        if names is not None and len(names) != numbers.size:
            raise ValueError(f"names are {list(names)}; there must be {numbers.size}, one per dimension.")
        self.about = f"{numbers.size} numbers separated by commas"

    def write(self, value: Any) -> str:
        """All dimensions in C order."""
        texts = self._numbers.write(np.asarray(value).ravel().tolist())
        if self._names is None:
            return ",".join(texts)
        return "\n".join([f"{name} {text}" for name, text in zip(self._names, texts)])

    def read(self, text: str) -> np.ndarray:
        """As many numbers as there are dimensions.

        Numbers outside the space are returned as they were said, not cast to its dtype: whoever acts clips them.
        """
        values = self._numbers.read(split(text, self._numbers.size)).reshape(self._space.shape)
        inside, clipped = clip_to_box(self._space, values)
        return values if clipped else inside


class PlainPart(Part):
    """A Text space: the text itself."""

    def __init__(self, space: spaces.Text) -> None:
        self._space, self.about = space, "a text"

    def write(self, value: Any) -> str:
        """As it is."""
        return str(value)

    def read(self, text: str) -> str:
        """If the space holds it."""
        if text not in self._space:
            raise InvalidActionError("the text is too long or has characters that are not allowed")
        return text


class JointPart(Part):
    """A Dict or Tuple, nested or not: one line per leaf, ``key.key: text``.

    Args:
        space: the space.
        leaves: its other spaces' texts by their path, in the order of the space.
    """

    def __init__(self, space: spaces.Dict | spaces.Tuple, leaves: Mapping[str, Part]) -> None:
        self._space, self._leaves = space, leaves
        self.about = "; ".join(f"{path}: {part.about}" for path, part in leaves.items()) + "; one line each"

    def write(self, value: Any) -> str:
        """In the order of the space."""
        values = dict(flatten(self._space, value))
        return "\n".join(f"{path}: {part.write(values[path])}" for path, part in self._leaves.items())

    def read(self, text: str) -> Any:
        """Every path once, in the order of the space."""
        lines = text.split("\n")
        if len(lines) != len(self._leaves):
            raise InvalidActionError(f"there must be {len(self._leaves)} lines: {', '.join(self._leaves)}")
        values: dict[str, Any] = {}
        for line, (path, part) in zip(lines, self._leaves.items(), strict=True):
            if not line.startswith(f"{path}: "):
                raise InvalidActionError(f"the line of {path!r} must begin with '{path}: '")
            values[path] = part.read(line[len(path) + 2 :])
        return _build(self._space, values)


def children(space: gym.Space) -> dict[str, gym.Space] | None:
    """The parts of a Dict or Tuple by name; None for any other space."""
    if isinstance(space, spaces.Dict):
        return {str(key): part for key, part in space.spaces.items()}
    return {str(key): part for key, part in enumerate(space.spaces)} if isinstance(space, spaces.Tuple) else None


def flatten(space: gym.Space, value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of an element of ``space`` by their path; a space itself may stand for its elements."""
    parts = children(space)
    if parts is None:
        yield path, value
        return
    values = [value[key] for key in space] if isinstance(space, spaces.Dict) else value
    for (key, part), one in zip(parts.items(), values, strict=True):
        yield from flatten(part, one, f"{path}.{key}" if path else key)


def _build(space: gym.Space, values: Mapping[str, Any], path: str = "") -> Any:
    parts = children(space)
    if parts is None:
        return values[path]
    built = [_build(part, values, f"{path}.{key}" if path else key) for key, part in parts.items()]
    return tuple(built) if isinstance(space, spaces.Tuple) else dict(zip(space.spaces, built, strict=True))  # pyright: ignore[reportAttributeAccessIssue]

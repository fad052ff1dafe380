"""Text formats of single Gymnasium spaces, of which codecs for whole environments are composed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsInt

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from lrl.codecs.codec import InvalidActionError, clip_to_box
from lrl.codecs.numbers import NumberCodec, plain_numbers, split_numbers


class SpaceFormat(ABC):
    """Abstract base class that converts the elements of one space to text and back."""

    texts: tuple[str, ...] | None = None
    """Texts of all elements in the order of the space; None unless the space is Discrete."""
    description: str
    """Description of the texts, shown to the policy."""

    @abstractmethod
    def encode(self, value: Any) -> str:
        """Convert an element of the space to text."""

    @abstractmethod
    def decode(self, text: str) -> Any:
        """Convert text to an element of the space.

        Raises:
            InvalidActionError: If ``text`` does not represent an element.
        """

    def plain(self, text: str) -> str:
        """Convert another program's text for :meth:`decode`: plain decimals, without surrounding whitespace."""
        return plain_numbers(text.strip())


_MAX_NAMES = 1_000_000
"""Maximum number of elements of a Discrete space."""


class DiscreteFormat(SpaceFormat):
    """Format of a Discrete space: one name per element.

    Args:
        space: the space.
        names: names in the order of the space; None selects the numbers themselves.

    Raises:
        ValueError: If there is not exactly one name per element, a name occurs twice, or there are too many elements.
    """

    def __init__(self, space: spaces.Discrete, names: Sequence[str] | None = None) -> None:
        if space.n > _MAX_NAMES:
            raise ValueError(f"a space has {space.n} elements; a Discrete must have at most {_MAX_NAMES}.")
        numbers = range(int(space.start), int(space.start) + int(space.n))
        self.texts = tuple(names) if names is not None else tuple(map(str, numbers))
        if len(self.texts) != len(numbers) or len(set(self.texts)) != len(numbers):
            raise ValueError(f"actions are {self.texts}; there must be {len(numbers)} different names.")
        self._start, self._index = numbers.start, dict(zip(self.texts, numbers))
        many = len(numbers) > 20
        self.description = f"{self.texts[0]} to {self.texts[-1]}" if many else ", ".join(self.texts)

    def encode(self, value: SupportsInt) -> str:
        """Return the name of an element.

        Raises:
            ValueError: If ``value`` is not an element.
        """
        assert self.texts is not None
        position = int(value) - self._start
        if position not in range(len(self.texts)):
            raise ValueError(f"{value} is not an integer from {self._start} to {self._start + len(self.texts) - 1}.")
        return self.texts[position]

    def decode(self, text: str) -> int:
        """Return the element that is named exactly ``text``.

        Raises:
            InvalidActionError: If no element has this name.
        """
        if text not in self._index:
            raise InvalidActionError(f"the action must be one of {self.description}")
        return self._index[text]


class MultiDiscreteFormat(SpaceFormat):
    """Format of a MultiDiscrete or MultiBinary space: one integer per dimension, separated by commas.

    Args:
        space: the space.
    """

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        self._shape, self._dtype = space.shape, space.dtype
        binary = isinstance(space, spaces.MultiBinary)
        self._low = np.zeros(self._shape, dtype=np.int64).ravel() if binary else np.asarray(space.start).ravel()
        sizes = np.full(self._shape, 2).ravel() if binary else np.asarray(space.nvec).ravel()
        self._high = self._low + sizes - 1
        self.description = f"{len(sizes)} integers, at least {self._low.tolist()} and at most {self._high.tolist()}"

    def encode(self, value: ArrayLike) -> str:
        """Join the integers of an array of the space's shape, in C order.

        Raises:
            ValueError: If ``value`` is not an element of the space.
        """
        integers = np.asarray(value).ravel()
        if integers.shape != self._low.shape or not ((integers >= self._low) & (integers <= self._high)).all():
            raise ValueError(f"{integers.tolist()} is not {self.description}.")
        return ",".join(map(str, integers.tolist()))

    def decode(self, text: str) -> np.ndarray:
        """Parse one integer per dimension; the array has the space's shape and dtype.

        Raises:
            InvalidActionError: If there are too few or too many integers, or one of them is out of range.
        """
        integers = split_numbers(text, len(self._low))
        for integer, low, high in zip(integers, self._low, self._high, strict=True):
            if not re.fullmatch(r"-?[0-9]{1,20}", integer) or not low <= int(integer) <= high:
                raise InvalidActionError(f"{integer[:20]!r} is not an integer from {low} to {high}")
        return np.array([int(integer) for integer in integers], dtype=self._dtype).reshape(self._shape)


class BoxFormat(SpaceFormat):
    """Format of a Box: its flattened numbers, each after the name of its dimension if names are given.

    Args:
        space: the space.
        numbers: the codec of the numbers.
        names: one name per dimension in C order, without the separator; None writes numbers only.
        details: description of the numbers; if it is empty, the description contains only their count.
        separator: text between numbers: a comma, or a line break if names are given.

    Raises:
        ValueError: If there is not exactly one name per dimension.
    """

    def __init__(
        self,
        space: spaces.Box,
        numbers: NumberCodec,
        names: Sequence[str] | None = None,
        details: str = "",
        separator: str = ",",
    ) -> None:
        self._space, self._numbers, self._names, self.details = space, numbers, names, details
        self._separator = separator
        if names is not None and len(names) != numbers.size:
            raise ValueError(f"names are {list(names)}; there must be {numbers.size}, one per dimension.")
        form = "numbers separated by commas"
        if names is not None and separator == ",":
            form += ", each after its name, in " + ("this order" if details else f"the order {', '.join(names)}")
        elif names is not None and details:
            form = "lines, each a name and its number"
        self.description = f"{numbers.size} {form}{details and ': '}{details}"

    def encode(self, value: ArrayLike) -> str:
        """Write all numbers of an array of the space's shape, in C order."""
        texts = self._numbers.encode(np.asarray(value).ravel().tolist())
        if self._names is None:
            return self._separator.join(texts)
        return self._separator.join([f"{name} {text}" for name, text in zip(self._names, texts)])

    def decode(self, text: str) -> np.ndarray:
        """Parse one number per dimension, after its name if names are given; the array has the space's shape.

        Values outside the bounds are returned unchanged, without casting to the space's dtype. The environment wrapper
        clips them (:func:`~lrl.codecs.codec.clip_to_space`).
        """
        texts = split_numbers(text, self._numbers.size, self._separator)
        if self._names is not None:
            texts = [_after_name(name, text) for name, text in zip(self._names, texts)]
        values = self._numbers.decode(texts).reshape(self._space.shape)
        clipped, count = clip_to_box(self._space, values)
        return values if count else clipped


def _after_name(name: str, text: str) -> str:
    """Return the text after ``name`` and a blank.

    Raises:
        InvalidActionError: If ``text`` does not begin with ``name`` and a blank.
    """
    if not text.startswith(f"{name} "):
        raise InvalidActionError(f"{text[:20]!r} must begin with {name!r} and a blank")
    return text[len(name) + 1 :]


class TextFormat(SpaceFormat):
    """Format of a Text space: the text itself.

    Args:
        space: the space.
        strict: whether :meth:`decode` rejects texts outside of the space. Observations can be
            outside of it, because Gymnasium's default alphabet has no blank.
    """

    def __init__(self, space: spaces.Text, strict: bool = True) -> None:
        self._space, self._strict, self.description = space, strict, "a text"

    def encode(self, value: str) -> str:
        """Return the text unchanged."""
        return str(value)

    def decode(self, text: str) -> str:
        """Return the text unchanged if it is an element of the space.

        Raises:
            InvalidActionError: If ``strict`` is true and the text is not an element of the space.
        """
        if self._strict and text not in self._space:
            raise InvalidActionError("the text is too long or has characters that are not allowed")
        return text

    def plain(self, text: str) -> str:
        """Return the text unchanged, even if it contains numbers."""
        return text


class CompositeFormat(SpaceFormat):
    """Format of a possibly nested Dict or Tuple: one line ``key.key: text`` per leaf.

    Args:
        space: the space.
        leaves: formats of the leaves by path, in the order of the space.
    """

    def __init__(self, space: spaces.Dict | spaces.Tuple, leaves: Mapping[str, SpaceFormat]) -> None:
        self._space, self._leaves = space, leaves
        self.description = "; ".join(f"{path}: {leaf.description}" for path, leaf in leaves.items()) + "; one line each"

    def encode(self, value: Mapping[str, Any] | Sequence[Any]) -> str:
        """Write all leaves in the order of the space."""
        values = dict(flatten(self._space, value))
        return "\n".join(f"{path}: {leaf.encode(values[path])}" for path, leaf in self._leaves.items())

    def decode(self, text: str) -> dict[str, Any] | tuple[Any, ...]:
        """Parse one line per leaf, in the order of the space; a text may have several lines."""
        texts = self._split(text)
        values = {path: leaf.decode(texts[path]) for path, leaf in self._leaves.items()}
        return unflatten(self._space, values)

    def plain(self, text: str) -> str:
        """Convert the text of each leaf with the format of the leaf."""
        *_, last = self._leaves.values()
        texts = self._split(text.lstrip() if isinstance(last, TextFormat) else text.strip())
        return "\n".join(f"{path}: {leaf.plain(texts[path])}" for path, leaf in self._leaves.items())

    def _split(self, text: str) -> dict[str, str]:
        """Return the text of each leaf by its path.

        Raises:
            InvalidActionError: If a leaf is missing, or there are more lines than leaves and no leaf is a Text space.
        """
        has_texts = any(isinstance(leaf, TextFormat) for leaf in self._leaves.values())
        if text.count("\n") + 1 != len(self._leaves) and not has_texts:
            raise InvalidActionError(f"there must be {len(self._leaves)} lines: {', '.join(self._leaves)}")
        texts: dict[str, str] = {}
        rest = f"\n{text}"
        for path, following in zip(self._leaves, [*self._leaves, ""][1:], strict=True):
            if not rest.startswith(f"\n{path}: "):
                raise InvalidActionError(f"the line of {path!r} must begin with '{path}: '")
            rest = rest[len(path) + 3 :]
            end = rest.find(f"\n{following}: ") if following and has_texts else rest.find("\n")
            end = len(rest) if end < 0 or not following else end
            texts[path], rest = rest[:end], rest[end:]
        return texts


def subspaces(space: gym.Space) -> dict[str, gym.Space] | None:
    """Return the subspaces of a Dict or Tuple by name; None for any other space."""
    if isinstance(space, spaces.Dict):
        return {str(key): subspace for key, subspace in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {str(index): subspace for index, subspace in enumerate(space.spaces)}
    return None


def flatten(space: gym.Space, value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf of an element of ``space``.

    Args:
        space: the space.
        value: an element of ``space``, or ``space`` itself to get the spaces of the leaves.
        path: the path of ``space`` in an enclosing space.
    """
    children = subspaces(space)
    if children is None:
        yield path, value
        return
    values = [value[key] for key in space] if isinstance(space, spaces.Dict) else value
    for (key, subspace), child in zip(children.items(), values, strict=True):
        yield from flatten(subspace, child, f"{path}.{key}" if path else key)


def unflatten(space: gym.Space, values: Mapping[str, Any], path: str = "") -> Any:
    """Return the element of ``space`` with given values of its leaves; the inverse of :func:`flatten`.

    Args:
        space: the space.
        values: value of each leaf, by its path.
        path: the path of ``space`` in an enclosing space.
    """
    children = subspaces(space)
    if children is None:
        return values[path]
    built = [unflatten(subspace, values, f"{path}.{key}" if path else key) for key, subspace in children.items()]
    return tuple(built) if isinstance(space, spaces.Tuple) else dict(zip(space.spaces, built, strict=True))  # pyright: ignore[reportAttributeAccessIssue]

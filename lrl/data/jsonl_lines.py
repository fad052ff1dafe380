"""Lines of JSON Lines files: where they are in a file, and how observations and actions are parsed from them."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from lrl.codecs.clipping import clip_to_space
from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.codecs.number_codecs import NUMBER
from lrl.functional.random import permutation

_ACTION_TAGS = re.compile(r"^\s*<action>|</action>\s*$")
_KEYS = {"observation", "action"}
_MAX_KNOWN = 10_000
"""Number of different actions that are remembered while a file is checked."""
_BIN = re.compile(r"0|[1-9][0-9]{0,2}")
_INTEGER = re.compile(r"\s*-?[0-9]{1,18}\s*", re.ASCII)
_OBSERVATION_TAGS = re.compile(r"^\s*<observation>|</observation>\s*$")


class JsonlFile:
    """File with one JSON object per line, whose lines are read when they are needed.

    Args:
        path: Path of the file.
        key: Configuration key of what reads it, for error messages.
        num_lines: Number of lines to use, of those that are not empty; None uses all. A larger number adds to the same
            lines.
        seed: Seed of the selection.

    Raises:
        ValueError: If the file is missing, empty or has too few lines.
    """

    def __init__(self, path: str, key: str, num_lines: int | None = None, seed: int = 0) -> None:
        self.path = path
        lines = self._find_lines(key)
        if not len(lines):
            raise ValueError(f"{key}.path is {path!r}, which is empty; it must hold JSON objects.")
        if (num_lines or 1) > len(lines):
            raise ValueError(
                f"{key}.num_rows is {num_lines}, but {path!r} holds {len(lines)}; it must be at most that."
            )
        self._lines = lines[np.sort(permutation(len(lines), "lines", seed)[:num_lines])]

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def fingerprint(self) -> str:
        """Hash of the file's content and of the selection of lines."""
        digest = hashlib.sha256(self._lines.tobytes())
        with Path(self.path).open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
        return digest.hexdigest()

    def _find_lines(self, key: str) -> np.ndarray:
        """Return number, first byte and length of each line that is not empty, int64 ``(line, 3)``."""
        lines, start = array("q"), 0
        try:
            with Path(self.path).open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        lines.extend((number, start, len(line)))
                    start += len(line)
        except OSError as error:
            raise ValueError(f"{key}.path is {self.path!r}, which cannot be read: {error}.") from error
        return np.array(lines, dtype=np.int64).reshape(-1, 3)

    @contextmanager
    def record(self, index: int) -> Iterator[dict[str, Any]]:
        """Give the object of a selected line; what is raised about it becomes ``ValueError`` with the line's number."""
        number, start, length = self._lines[range(len(self))[index]].tolist()
        with Path(self.path).open("rb") as file, self._readable_errors(number):
            file.seek(start)
            yield json.loads(file.read(length))

    def check(self, codec: TextCodec, space: gym.Space, parse: Callable[[dict[str, Any]], object], *keys: str) -> None:
        """Parse every selected line once, and log how many actions are clipped.

        Lines of plain numbers and names are recognised by their form, which is faster.

        Args:
            codec: Codec of the environment.
            space: Native action space.
            parse: Parses the object of a line, and raises ``LookupError`` for what the environment does not write.
            keys: Keys that a line may have in place of ``action``.

        Raises:
            ValueError: If a line cannot be parsed.
        """
        clipped, first, known = 0, 0, set[str]()
        with Path(self.path).open("rb") as file:
            for number, start, length in self._lines.tolist():
                file.seek(start)
                line = file.read(length)
                with self._readable_errors(number):
                    record = json.loads(line)
                    if _is_readable(codec, record, known):
                        continue
                    parse(record)
                    if "action" not in record:
                        continue
                    if parse_action(codec, record, space, *keys)[1]:
                        clipped, first = clipped + 1, first or number
                    elif len(known) < _MAX_KNOWN:
                        known.add(record["action"])
        if clipped:
            message = "%s: %d of %d actions are out of the bounds of %s and are clipped; the first is in line %d."
            logging.getLogger("lrl").warning(message, self.path, clipped, len(self), space, first)

    @contextmanager
    def _readable_errors(self, number: int) -> Iterator[None]:
        """Raise what is wrong with a line as ``ValueError`` with its number."""
        try:
            yield
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}, line {number}: it must be a JSON object, {error}.") from error
        except LookupError as error:
            raise ValueError(f"{self.path}, line {number}: {error.args[0]}.") from error


def _is_readable(codec: TextCodec, record: Any, known: Set[str]) -> bool:
    """Return whether the codec surely reads a line; False if that takes long to know.

    Args:
        codec: Codec of the environment.
        record: Object of the line.
        known: Actions that were parsed before and are in bounds.
    """
    if not (isinstance(record, dict) and record.keys() == _KEYS):
        return False
    observation, action = record["observation"], record["action"]
    if not (isinstance(observation, str) and isinstance(action, str)):
        return False
    if not codec.reads_observation(observation.removeprefix("<observation>").removesuffix("</observation>")):
        return False
    return action in known or codec.reads_action(action.removeprefix("<action>").removesuffix("</action>"))


def parse_observation(codec: TextCodec, record: dict[str, Any], space: gym.Space) -> tuple[str, Any]:
    """Return the observation of a line as the environment writes it, and its native value.

    Args:
        codec: Codec of the environment.
        record: Object of the line; the observation may have ``<observation>`` tags or not.
        space: Native observation space.

    Returns:
        The text, with tags where the environment writes them, and the native observation. Of codecs that cannot parse
        observations the text is that of the file, and the observation None.

    Raises:
        LookupError: If there is no such text, or it is none that the environment writes.
    """
    given = text_of(record, "observation")
    bare = _OBSERVATION_TAGS.sub("", given)
    text = f"<observation>{bare}</observation>" if codec.tags_observations else bare
    try:
        observation = _parse(codec.text_to_observation, codec.plain_observation, bare)
    except ValueError as error:
        raise LookupError(f"observation is {given!r}, which the environment does not write: {error}") from error
    if observation is None:
        return text, None
    written = codec.observation_to_text(observation)
    if written != text:
        _check_scale("observation", given, space, observation)
    return written, observation


def parse_action(codec: TextCodec, record: dict[str, Any], space: gym.Space, *keys: str) -> tuple[Any, int]:
    """Return the native action of a line, clipped to its space, and how many of its numbers were clipped.

    Args:
        codec: Codec of the environment.
        record: Object of the line; the action may have ``<action>`` tags or not, and an action that is a word may be
            given by its number in the action space.
        space: Native action space.
        keys: Keys that the line may have in place of ``action``, for the error message.

    Raises:
        LookupError: If there is no such text, or it is no legal action.
    """
    text = text_of(record, "action", *keys)
    try:
        action = _parse_action(codec, text)
    except InvalidActionError as error:
        raise LookupError(f"action is {text!r}; {error}") from error
    if codec.action_to_text(action) not in (text, f"<action>{_ACTION_TAGS.sub('', text)}</action>"):
        _check_scale("action", text, space, action)
    clipped, count = clip_to_space(space, action)
    return clipped, count or 0


def _parse_action(codec: TextCodec, text: str) -> Any:
    bare = _ACTION_TAGS.sub("", text)
    words = codec.action_texts
    if words is None:  # codecs of numbers write tags
        return _parse(lambda plain: codec.text_to_action(f"<action>{plain}</action>"), codec.plain_action, bare)
    if _INTEGER.fullmatch(bare) and bare not in words and int(bare) in map(codec.text_to_action, words):
        return int(bare)
    with suppress(InvalidActionError):
        return codec.text_to_action(text)
    return codec.text_to_action(bare)


def _parse(read: Callable[[str], Any], plain: Callable[[str], str], text: str) -> Any:
    """Read a text as the environment writes it, or else as another program does, so that ``1e-05`` is read as well."""
    with suppress(ValueError):
        return read(text)
    return read(plain(text))


def _check_scale(key: str, text: str, space: gym.Space, value: Any) -> None:
    """Raise if integers from 0 to 999, which stand for values between two bounds, were read as these values.

    Args:
        key: ``observation`` or ``action``.
        text: Text of the file.
        space: Native space.
        value: Value that was read, before it is clipped.

    Raises:
        LookupError: If the text holds such integers only, and some are out of bounds.
    """
    _, clipped = clip_to_space(space, value)
    if clipped and all(_BIN.fullmatch(number) for number in NUMBER.findall(text)):
        raise LookupError(
            f"{key} is {text!r}, integers out of the bounds of the {key} space; if they stand for values from 0, the "
            "lowest, to 999, the highest, env.numbers.kind must be integers"
        )


def text_of(record: dict[str, Any], *keys: str) -> str:
    """Return the text under the first of ``keys`` that a line has; raise ``LookupError`` if it has none."""
    for key in keys:
        if key in record:
            if not isinstance(record[key], str):
                raise LookupError(f"{key} is {record[key]!r}; it must be a text")
            return record[key]
    raise LookupError(f"it has no {' or '.join(keys)}; it has {', '.join(record) or 'nothing'}")

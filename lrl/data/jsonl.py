"""Demonstrations in JSON Lines files: one object per line with an observation and an action or a response."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import gymnasium as gym
import numpy as np

from lrl.codecs.codec import InvalidActionError, TextCodec, clip_to_space
from lrl.codecs.numbers import NUMBER
from lrl.codecs.spaces import SpaceCodec
from lrl.data.minari import MinariDemonstrations
from lrl.data.sources import Demonstrations, LazyDemonstrations
from lrl.envs.factory import EnvFactory
from lrl.files import write_whole
from lrl.functional.random import permutation
from lrl.policies.policy import Policy
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import Demonstration, Item, LazySequence, NativeTurn

_ACTION_TAGS = re.compile(r"^\s*<action>|</action>\s*$")
_BIN = re.compile(r"0|[1-9][0-9]{0,2}")
_INTEGER = re.compile(r"\s*-?[0-9]{1,18}\s*", re.ASCII)
_OBSERVATION_TAGS = re.compile(r"^\s*<observation>|</observation>\s*$")


class JsonlLines(LazySequence[Item]):
    """Sequence of the lines of a file with one JSON object per line, which are read on demand.

    Args:
        path: path of the file.
        key: configuration key of the object that reads the file, for error messages.
        parse: function from a line's object to its item; it raises ``LookupError`` for texts that are not in the
            environment's format.
        num_lines: number of non-empty lines to sample; None uses all. A smaller sample is a subset of a larger one with
            the same seed.
        seed: seed of the selection.

    Raises:
        ValueError: If the file is missing, empty or has too few lines.
    """

    def __init__(
        self, path: str, key: str, parse: Callable[[dict[str, Any]], Item], num_lines: int | None = None, seed: int = 0
    ) -> None:
        self.path, self._parse = path, parse
        lines = self._find_lines(key)
        if not len(lines):
            raise ValueError(f"{key}.path is {path!r}, which is empty; it must contain JSON objects.")
        if (num_lines or 1) > len(lines):
            raise ValueError(
                f"{key}.num_rows is {num_lines}, but {path!r} has {len(lines)} lines; it must be at most that."
            )
        self._lines = lines[np.sort(permutation(len(lines), "lines", seed)[:num_lines])]

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def fingerprint(self) -> str:
        """Hash of the file's content and of the selection of lines."""
        with Path(self.path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(self._lines.tobytes())
        return digest.hexdigest()

    def _find_lines(self, key: str) -> np.ndarray:
        """Return the line number, first byte and length in bytes of each non-empty line, int64 ``(line, 3)``."""
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

    def item(self, index: int) -> Item:
        """Return the item of a selected line.

        Raises:
            ValueError: If the line cannot be parsed; the message contains its number.
        """
        number, start, length = self._lines[index].tolist()
        with Path(self.path).open("rb") as file, self._readable_errors(number):
            file.seek(start)
            return self._parse(json.loads(file.read(length)))

    def check(self, codec: TextCodec, space: gym.Space, *keys: str) -> None:
        """Parse every selected line once, and log how many actions are clipped.

        Args:
            codec: codec of the environment.
            space: native action space.
            keys: keys that a line may have instead of ``action``.

        Raises:
            ValueError: If a line cannot be parsed.
        """
        clipped, first = 0, 0
        with Path(self.path).open("rb") as file:
            for number, start, length in self._lines.tolist():
                file.seek(start)
                with self._readable_errors(number):
                    record = json.loads(file.read(length))
                    self._parse(record)
                    if "action" in record and parse_action(codec, record, space, *keys)[1]:
                        clipped, first = clipped + 1, first or number
        if clipped:
            message = (
                "%s: actions of %d of %d lines are out of the bounds of %s and are clipped; the first is in line %d."
            )
            logging.getLogger("lrl").warning(message, self.path, clipped, len(self), space, first)

    @contextmanager
    def _readable_errors(self, number: int) -> Iterator[None]:
        """Convert errors about a line to a ``ValueError`` whose message contains the line number."""
        try:
            yield
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}, line {number}: it is not a valid JSON object ({error}).") from error
        except LookupError as error:
            raise ValueError(f"{self.path}, line {number}: {error.args[0]}.") from error


def parse_observation(codec: TextCodec, record: dict[str, Any], space: gym.Space) -> tuple[str, Any]:
    """Return the observation of a line in the environment's format, and its native value.

    Args:
        codec: codec of the environment.
        record: JSON object of the line. Its ``observation`` may have ``<observation>`` tags.
        space: native observation space.

    Returns:
        The text, with tags if the environment's format has them, and the native observation. If the codec cannot parse
        observations, the text is returned as it is in the file, and the observation is None.

    Raises:
        LookupError: If the line has no ``observation``, or its value is not a string or not in the environment's
            format.
    """
    given = text_of(record, "observation")
    bare = _OBSERVATION_TAGS.sub("", given)
    text = f"<observation>{bare}</observation>" if codec.tags_observations else bare
    try:
        plain = codec.observation_format.plain if isinstance(codec, SpaceCodec) else str
        observation = _parse(codec.text_to_observation, plain, bare)
    except ValueError as error:
        raise LookupError(f"observation is {given!r}, which is not in the environment's format: {error}") from error
    if observation is None:
        return text, None
    written = codec.observation_to_text(observation)
    if written != text:
        _check_scale("observation", given, space, observation)
    return written, observation


def parse_action(codec: TextCodec, record: dict[str, Any], space: gym.Space, *keys: str) -> tuple[Any, int]:
    """Return the native action of a line, clipped to its space, and how many of its numbers were clipped.

    Args:
        codec: codec of the environment.
        record: JSON object of the line. Its ``action`` may have ``<action>`` tags, and an action that the codec writes
            as a word may also be given by its index in the action space.
        space: native action space.
        keys: keys that the line may have instead of ``action``, for the error message.

    Raises:
        LookupError: If the line has none of these keys, or the value is not a string or not a legal action.
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
    if words is None:  # codecs of numeric actions accept them only in tags
        plain = codec.action_format.plain if isinstance(codec, SpaceCodec) else str
        return _parse(lambda number: codec.text_to_action(f"<action>{number}</action>"), plain, bare)
    if _INTEGER.fullmatch(bare) and bare not in words and int(bare) in map(codec.text_to_action, words):
        return int(bare)  # the index of an action that the codec writes as a word
    with suppress(InvalidActionError):
        return codec.text_to_action(text)
    return codec.text_to_action(bare)


def _parse(read: Callable[[str], Any], plain: Callable[[str], str], text: str) -> Any:
    """Parse a text in the environment's format; if that fails, rewrite numbers such as ``1e-05`` as decimals first."""
    with suppress(ValueError):
        return read(text)
    return read(plain(text))


def _check_scale(key: str, text: str, space: gym.Space, value: Any) -> None:
    """Raise an error if a text probably encodes its values as integers from 0 (lower bound) to 999 (upper bound).

    The codec does not decode such integers unless ``env.numbers.kind`` is ``integers``. This mistake is detected only
    if at least one of them is outside the space.

    Args:
        key: ``observation`` or ``action``.
        text: text of the file.
        space: native space.
        value: the value that the codec read, not clipped.

    Raises:
        LookupError: If the text contains only integers from 0 to 999, and some are outside the space.
    """
    _, clipped = clip_to_space(space, value)
    if clipped and all(_BIN.fullmatch(number) for number in NUMBER.findall(text)):
        raise LookupError(
            f"{key} is {text!r}, whose integers are outside the {key} space; if 0 encodes the lower bound and 999 the "
            "upper bound, set env.numbers.kind to integers"
        )


def text_of(record: dict[str, Any], *keys: str) -> str:
    """Return the text under the first of ``keys`` that a line has.

    Raises:
        LookupError: If the line has none of these keys, or the value is not a string.
    """
    for key in keys:
        if key in record:
            if not isinstance(record[key], str):
                raise LookupError(f"{key} is {record[key]!r}; it must be a string")
            return record[key]
    raise LookupError(f"it has no {' or '.join(keys)}; it has {', '.join(record) or 'nothing'}")


_CACHED = 2**15
"""Maximum number of cached demonstrations."""


@register
class JsonlDemonstrations(Demonstrations):
    """Demonstrates the actions or responses of a file with one JSON object per line.

    A line has an ``observation`` or a ``prompt``, and an ``action`` or a ``response``. The observation is parsed and
    written again in the environment's format, so it is at most as precise as the text in the file. The action is
    written in the policy's format, with the ``reasoning`` of the line, if any. Prompts and responses are not changed.
    ``<observation>`` and ``<action>`` tags are optional, and an action that is a word may be given by its index in the
    action space. Files of the original experiment (see the README) can therefore be read. Their lines are
    ``{"observation": ..., "action": ...}``. A policy that acts natively, that is, with values of the
    environment's spaces instead of texts, can learn from lines whose observations are numbers. Prompts have no history,
    because a line does not state to which episode it belongs. All lines are checked at the start and read on demand.

    Args:
        path: path of the file.
        num_rows: number of lines to sample; null uses all. A smaller sample is a subset of a larger one with the same
            seed.
        seed: seed of the selection.
    """

    has_native_turns = True

    def __init__(self, path: str, num_rows: PositiveInt | None = None, seed: int = 0) -> None:
        check_arguments(JsonlDemonstrations.__init__, locals(), "demonstrations")
        self.path, self.num_rows, self.seed = path, num_rows, seed
        self._spaces: tuple[gym.Space, gym.Space] | None = None

    def validate(self, env: EnvFactory) -> None:
        """Store the native spaces of the environment, with which the lines are parsed."""
        self._spaces = env.spaces

    def check_held_out(self, training: Demonstrations) -> None:
        """Check that the training demonstrations are not read from the same file.

        Raises:
            ValueError: If the training demonstrations are read from the same file.
        """
        for source in training.sources:
            if isinstance(source, JsonlDemonstrations) and Path(source.path).resolve() == Path(self.path).resolve():
                raise ValueError(
                    f"data.validation_demonstrations.path is {self.path!r}, which data.demonstrations also reads; it "
                    "must be another file."
                )

    def load(self, codec: TextCodec, policy: Policy) -> JsonlTurns:
        """Return one demonstration per selected line as a lazy sequence.

        Demonstrations contain native observations and actions if the policy acts natively, otherwise texts.

        Raises:
            ValueError: If the file is missing, empty or has fewer than ``num_rows`` lines, if a line is not a JSON
                object with the required keys, or if an observation or action does not fit the environment.
        """
        assert self._spaces is not None, "validate() must be called before"
        turns = JsonlTurns(self.path, codec, policy, self._spaces, self.num_rows, self.seed)
        turns.check(codec, self._spaces[1], "response")
        return turns


@final
class JsonlTurns(JsonlLines[Demonstration], LazyDemonstrations):
    """Lazy sequence of the demonstrations in a file, with a cache of recently read ones.

    Args:
        path: path of the file.
        codec: codec of the environment.
        policy: policy that learns from the demonstrations. It formats their responses, unless it acts natively.
        native_spaces: native observation space and native action space; actions are clipped to the latter.
        num_lines: see :class:`JsonlLines`.
        seed: see :class:`JsonlLines`.
    """

    def __init__(
        self,
        path: str,
        codec: TextCodec,
        policy: Policy,
        native_spaces: tuple[gym.Space, gym.Space],
        num_lines: int | None,
        seed: int,
    ) -> None:
        parse = self._native if policy.response_format is None else self._text
        super().__init__(path, "demonstrations", parse, num_lines, seed)
        self._codec, self._policy, self._spaces = codec, policy, native_spaces
        self.item = lru_cache(_CACHED)(self.item)

    def _text(self, record: dict[str, Any]) -> Demonstration:
        """Return the demonstration of a line as text in the formats of the policy."""
        if "observation" in record:
            observation, _ = parse_observation(self._codec, record, self._spaces[0])
        else:
            observation = text_of(record, "observation", "prompt")
        if "response" in record:
            return Demonstration(observation, text_of(record, "response"))
        action, _ = parse_action(self._codec, record, self._spaces[1], "response")
        reasoning = text_of(record, "reasoning") if record.get("reasoning") is not None else ""
        return Demonstration(observation, self._policy.write(self._codec.action_to_text(action), reasoning))

    def _native(self, record: dict[str, Any]) -> Demonstration:
        """Return the demonstration of a line as native observation and action."""
        observations, actions = self._spaces
        text, observation = parse_observation(self._codec, record, observations)
        if observation is None:
            name = type(self._policy).__name__
            raise LookupError(f"observation is {text!r}, which a {name} cannot read; use a TextPolicy")
        return Demonstration(native=NativeTurn(observation, parse_action(self._codec, record, actions)[0]))


def write_jsonl(dataset_id: str, env: EnvFactory, path: str | Path, digits: bool = False) -> int:
    """Convert a Minari data set to a file in the format of the original experiment (see the README).

    A line is ``{"observation": "<observation>..</observation>", "action": "<action>..</action>"}``. Steps at which a
    random action was inserted during collection are omitted. :class:`JsonlDemonstrations` reads the file.

    Args:
        dataset_id: Minari's name of the data set.
        env: the environment of the data set, whose codec writes the texts.
        path: path of the file; missing folders are created, and an existing file is replaced atomically.
        digits: whether to write an action that is a word as its index in the action space, as in the original
            experiment.

    Returns:
        The number of lines.

    Raises:
        ValueError: If the data set is missing, empty, damaged or of another environment; if it was collected with an
            advisor (``lrl collect --advisor``); or if ``digits`` is true and actions are not words.
        OSError: If the file cannot be written.
    """
    if digits and env.codec.action_texts is None:
        raise ValueError("digits is true, but the actions of the environment are numbers; digits must be false.")
    source = MinariDemonstrations(dataset_id, split="all")
    source.prepare_data()
    source.validate(env)
    reader, codec, lines = source.reader, env.codec, 0
    reader.check_own_actions("dataset_id")
    with write_whole(path) as file:
        for index in range(len(reader.lengths)):
            episode = reader.episode(index)
            for step in reader.demonstrated_steps(index).tolist():
                observation = codec.observation_to_text(episode.observations[step], episode.context)
                action = episode.actions[step]
                texts = {"observation": observation if codec.tags_observations else _tagged("observation", observation)}
                action = str(int(action)) if digits else codec.action_to_text(action)
                texts["action"] = action if codec.action_texts is None else _tagged("action", action)
                file.write(json.dumps(texts) + "\n")
                lines += 1
    return lines


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>{text}</{tag}>"

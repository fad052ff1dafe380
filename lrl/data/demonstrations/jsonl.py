"""Demonstrations in JSON Lines files: one object per line with an observation and an action or a response."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym

from lrl.codecs.clipping import clip_to_space
from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.data.demonstrations.minari import MinariDemonstrations
from lrl.data.demonstrations.sources import Demonstrations
from lrl.envs.factory import EnvFactory
from lrl.policies.policy import Policy
from lrl.types import Demonstration

_ACTION_TAGS = re.compile(r"^\s*<action>|</action>\s*$")
_BIN = re.compile(r"0|[1-9][0-9]{0,2}")
_INTEGER = re.compile(r"\s*-?[0-9]{1,18}\s*")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_OBSERVATION_TAGS = re.compile(r"^\s*<observation>|</observation>\s*$")


class JsonlDemonstrations(Demonstrations):
    """Reads demonstrations from a file with one JSON object per line.

    The observation is the value of ``observation``, with or without ``<observation>`` tags, or the unchanged value of
    ``prompt``. The response is the unchanged value of ``response``, or is written in the policy's format from
    ``action``, with or without ``<action>`` tags, and an optional ``reasoning``. Tags are added or removed so that
    they are where the environment writes them. If actions are words, an action may also be given by its number in the
    action space. The files of the original experiment, ``{"observation": ..., "action": ...}``, can be read.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._action_space: gym.Space | None = None

    def validate(self, env: EnvFactory) -> None:
        """Take the action space, which numbers must fit."""
        if env.codec.action_texts is None:
            self._action_space = env.spaces[1]

    def load(self, codec: TextCodec, policy: Policy) -> list[Demonstration]:
        """Return one demonstration per line that is not empty.

        Raises:
            ValueError: the file is missing or empty, a line is not such an object, or an action is invalid.
        """
        try:
            lines = Path(self.path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"demonstrations.path is {self.path!r}, which cannot be read as text: {error}.") from error
        demonstrations = [
            self._parse(number, line, codec, policy) for number, line in enumerate(lines, 1) if line.strip()
        ]
        if not demonstrations:
            raise ValueError(f"demonstrations.path is {self.path!r}, which is empty; it must hold JSON objects.")
        return demonstrations

    def _parse(self, number: int, line: str, codec: TextCodec, policy: Policy) -> Demonstration:
        """Parse one line; errors name the file and the line ``number``."""
        with readable_errors(self.path, number):
            record = json.loads(line)
            observation = observation_text(record, codec, "observation", "prompt")
            if "response" in record:
                return Demonstration(observation, _text(record, "response"))
            action = parse_action(codec, record, "action", "response")
            if self._action_space is not None:
                check_scale("action", record["action"], self._action_space, action)
            return Demonstration(observation, policy.write(codec.action_to_text(action), record.get("reasoning", "")))


@contextmanager
def readable_errors(path: str | Path, number: int) -> Iterator[None]:
    """Raise errors about one line of a file as ``ValueError`` with the path and the ``number`` of the line."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: it must be a JSON object, {error}.") from error
    except LookupError as error:
        raise ValueError(f"{path}, line {number}: {error.args[0]}.") from error


def observation_text(record: dict[str, Any], codec: TextCodec, *keys: str) -> str:
    """Return the text of the observation, with tags or without as the environment writes it.

    Args:
        record: the object of a line.
        codec: codec of the environment.
        keys: of which ``record`` must have one; the text of any but ``observation`` is not changed.

    Raises:
        LookupError: there is no such key, or it holds no text.
    """
    text = _text(record, *keys)
    if "observation" not in record:
        return text
    bare = _OBSERVATION_TAGS.sub("", text)
    return f"<observation>{bare}</observation>" if codec.tags_observations else bare


def parse_action(codec: TextCodec, record: dict[str, Any], *keys: str) -> Any:
    """Parse a native action with or without tags; if actions are words, also from its number in the action space.

    Raises:
        LookupError: there is no such key, it holds no text, or the text is no legal action.
    """
    text = _text(record, *keys)
    try:
        return _parse_action(codec, text)
    except InvalidActionError as error:
        raise LookupError(f"action is {text!r}; {error}") from error


def _parse_action(codec: TextCodec, text: str) -> Any:
    bare = _ACTION_TAGS.sub("", text)
    words = codec.action_texts or ()
    if _INTEGER.fullmatch(bare) and bare not in words and int(bare) in map(codec.text_to_action, words):
        return int(bare)
    for candidate in (text, bare):
        with suppress(InvalidActionError):
            return codec.text_to_action(candidate)
    return codec.text_to_action(f"<action>{bare}</action>")  # codecs of numbers write tags


def check_scale(key: str, text: str, space: gym.Space, value: Any) -> None:
    """Raise if integers from 0 to 999, which stand for values between two bounds, were read as these values.

    Args:
        key: ``observation`` or ``action``.
        text: what stands in the file.
        space: native space.
        value: what was read, before it is clipped.

    Raises:
        LookupError: the text holds such integers only, and some are out of bounds.
    """
    _, clipped = clip_to_space(space, value)
    if clipped and all(_BIN.fullmatch(number) for number in _NUMBER.findall(text)):
        raise LookupError(
            f"{key} is {text!r}, integers out of the bounds of the {key} space; if they stand for values from 0, the "
            "lowest, to 999, the highest, env.numbers.kind must be integers"
        )


def _text(record: dict[str, Any], *keys: str) -> str:
    """Return the text under the first of ``keys`` that ``record`` has."""
    for key in keys:
        if key in record:
            if not isinstance(record[key], str):
                raise LookupError(f"{key} is {record[key]!r}; it must be a text")
            return record[key]
    raise LookupError(f"it has no {' or '.join(keys)}; it has {', '.join(record) or 'nothing'}")


def write_jsonl(dataset_id: str, env: EnvFactory, path: str | Path) -> int:
    """Convert a Minari data set to a file that :class:`JsonlDemonstrations` reads, in the original's format.

    A line is ``{"observation": "<observation>..</observation>", "action": "<action>..</action>"}``. Steps at which a
    random action was inserted while collecting are left out, as a line cannot be marked as no demonstration.

    Args:
        dataset_id: Minari's name of the data set.
        env: the environment of the data set, whose codec writes the texts.
        path: the file; missing folders are created.

    Returns:
        The number of lines.

    Raises:
        ValueError: the data set is missing, empty, damaged or of another environment, or was collected with an advisor.
    """
    source = MinariDemonstrations(dataset_id, split="all")
    source.prepare_data()
    source.validate(env)
    reader, codec, lines = source.reader, env.codec, 0
    reader.check_own_actions("--dataset_id")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for index in range(len(reader.lengths)):
            episode = reader.episode(index)
            for step in reader.demonstrated_steps(index).tolist():
                texts = {"observation": codec.observation_to_text(episode.observation(step), episode.context)}
                texts["action"] = codec.action_to_text(episode.action(step))
                file.write(json.dumps({tag: _tagged(tag, text) for tag, text in texts.items()}) + "\n")
                lines += 1
    return lines


def _tagged(tag: str, text: str) -> str:
    """Return ``<tag>text</tag>``; some codecs write these tags already."""
    return text if text.startswith(f"<{tag}>") else f"<{tag}>{text}</{tag}>"

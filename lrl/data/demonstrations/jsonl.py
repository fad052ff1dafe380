"""Demonstrations in JSON Lines files: one object per line with an observation and an action or a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

import gymnasium as gym
import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.minari import MinariDemonstrations
from lrl.data.demonstrations.sources import Demonstrations, LazyDemonstrations
from lrl.data.jsonl_lines import JsonlFile, parse_action, parse_observation, text_of
from lrl.envs.factory import EnvFactory
from lrl.functional.random import permutation
from lrl.policies.policy import Policy
from lrl.ranges import PositiveInt, check_arguments
from lrl.types import Demonstration, NativeTurn
from lrl.whole_file import write_whole

_CACHED = 2**15
"""Number of demonstrations that are kept in memory."""


class JsonlDemonstrations(Demonstrations):
    """Demonstrates the actions or responses of a file with one JSON object per line.

    A line has an ``observation``, with or without ``<observation>`` tags, which is shown as the environment writes it,
    to the precision of the file; or a ``prompt``, whose text is not changed. It has an ``action``, with or without
    ``<action>`` tags, which is written in the policy's format with an optional ``reasoning``; or a ``response``, whose
    text is not changed. If actions are words, an action may also be given by its number in the action space. So the
    files of the original experiment, ``{"observation": ..., "action": ...}``, can be read. A policy that acts natively
    learns from lines whose observations are numbers. Prompts have no history, since lines do not say to which episode
    they belong. All lines are checked at the start and read when they are needed.

    Args:
        path: the file.
        num_rows: number of lines to use; null uses all. A larger number adds to the same lines.
        seed: seed of the selection.
    """

    has_native_turns = True

    def __init__(self, path: str, num_rows: PositiveInt | None = None, seed: int = 0) -> None:
        check_arguments(JsonlDemonstrations.__init__, locals(), "demonstrations")
        self.path, self.num_rows, self.seed = path, num_rows, seed
        self._spaces: tuple[gym.Space, gym.Space] | None = None

    def validate(self, env: EnvFactory) -> None:
        """Take the native spaces of the environment, which observations and actions must fit."""
        self._spaces = env.spaces

    def check_held_out(self, training: Demonstrations) -> None:
        """Raise if the training demonstrations are of the same file.

        Raises:
            ValueError: they are.
        """
        for source in training.sources:
            if isinstance(source, JsonlDemonstrations) and Path(source.path).resolve() == Path(self.path).resolve():
                raise ValueError(
                    f"data.validation_demonstrations.path is {self.path!r}, which data.demonstrations read as well; it "
                    "must be another file."
                )

    def load(self, codec: TextCodec, policy: Policy) -> JsonlTurns:
        """Return one demonstration per selected line as a lazy sequence, native if the policy acts natively.

        Raises:
            ValueError: the file is missing, empty or too small, a line is not such an object, or it has an observation
                or action that is not of the environment.
        """
        assert self._spaces is not None, "validate() comes first"
        file = JsonlFile(self.path, "demonstrations", self.num_rows, self.seed)
        turns = JsonlTurns(file, codec, policy, self._spaces)
        file.check(codec, self._spaces[1], turns.parse, "response")
        return turns


@final
class JsonlTurns(LazyDemonstrations):
    """Lazy sequence of the demonstrations in a file; those that were read last are kept in memory.

    Args:
        file: the selected lines.
        codec: codec of the environment.
        policy: formats responses, or acts natively.
        native_spaces: native observation space, and action space, to whose bounds actions are clipped.
    """

    def __init__(
        self, file: JsonlFile, codec: TextCodec, policy: Policy, native_spaces: tuple[gym.Space, gym.Space]
    ) -> None:
        self._file, self._codec, self._policy, self._spaces = file, codec, policy, native_spaces
        self.parse = self._native if policy.response_format is None else self._text
        """Function from a line's object to its demonstration; it raises ``LookupError`` for a wrong line."""
        self._cache: dict[int, Demonstration] = {}

    def __len__(self) -> int:
        return len(self._file)

    def demonstration(self, index: int) -> Demonstration:
        """Return the demonstration of a line."""
        found = self._cache.get(index)
        if found is None:
            with self._file.record(index) as record:
                found = self.parse(record)
            if len(self._cache) >= _CACHED:
                self._cache.pop(next(iter(self._cache)))
            self._cache[index] = found
        return found

    @property
    def fingerprint(self) -> str:
        """Hash of the file's content, and which of its lines are demonstrated."""
        return self._file.fingerprint

    def shuffled_indices(self, seed: int, epoch: int) -> np.ndarray:
        """Return every index once, int64 ``(turn,)``."""
        return permutation(len(self), "demonstrations", seed, epoch)

    def _text(self, record: dict[str, Any]) -> Demonstration:
        """Return the demonstration of a line as the policy's prompts and responses are written."""
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
    """Convert a Minari data set to a file that :class:`JsonlDemonstrations` reads, in the original's format.

    A line is ``{"observation": "<observation>..</observation>", "action": "<action>..</action>"}``. Steps at which a
    random action was inserted while collecting are left out, as a line cannot be marked as no demonstration.

    Args:
        dataset_id: Minari's name of the data set.
        env: the environment of the data set, whose codec writes the texts.
        path: the file; missing folders are created, and a former file is replaced when all lines are written.
        digits: whether an action that is a word is written as its number in the action space, as the original does.

    Returns:
        The number of lines.

    Raises:
        ValueError: the data set is missing, empty, damaged or of another environment, or was collected with an advisor;
            or ``digits`` is true and actions are no words.
        OSError: the file cannot be written.
    """
    if digits and env.codec.action_texts is None:
        raise ValueError("--digits is given, but the actions of the environment are numbers; leave it out.")
    source = MinariDemonstrations(dataset_id, split="all")
    source.prepare_data()
    source.validate(env)
    reader, codec, lines = source.reader, env.codec, 0
    reader.check_own_actions("--dataset_id")
    with write_whole(path) as file:
        for index in range(len(reader.lengths)):
            episode = reader.episode(index)
            for step in reader.demonstrated_steps(index).tolist():
                observation = codec.observation_to_text(episode.observation(step), episode.context)
                action = episode.action(step)
                texts = {"observation": observation if codec.tags_observations else _tagged("observation", observation)}
                action = str(int(action)) if digits else codec.action_to_text(action)
                texts["action"] = action if codec.action_texts is None else _tagged("action", action)
                file.write(json.dumps(texts) + "\n")
                lines += 1
    return lines


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>{text}</{tag}>"

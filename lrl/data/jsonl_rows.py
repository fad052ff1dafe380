"""Rows of prompts from JSON Lines files: one object per line with an observation and an action."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import gymnasium as gym
import numpy as np

from lrl.codecs.clipping import clip_to_space
from lrl.codecs.codec import TextCodec
from lrl.data.demonstrations.jsonl import check_scale, observation_text, parse_action, readable_errors
from lrl.envs.factory import EnvFactory
from lrl.envs.rows import EnvRows
from lrl.functional.random import permutation
from lrl.ranges import PositiveInt, check_arguments
from lrl.rewards.row import Row


class JsonlRows(EnvRows):
    """Data set of the lines of a file, such as ``{"observation": "<observation>..", "action": "<action>.."}``.

    Texts may have tags or not, and an action that is a word may be given by its number, so the files of the original
    experiment can be read. Lines are read when they are shown. If the codec can parse observations, they are written
    again as the environment writes them, and networks can read them, to the precision of the file. Lines do not say to
    which episode they belong, so prompts have no history.

    Args:
        path: Path of the file.
        env: The environment of the observations, whose codec parses and writes the texts.
        num_rows: Number of lines to use; null uses all. A larger number adds to the same lines.
        seed: Seed of the selection.
    """

    def __init__(self, path: str, env: EnvFactory, num_rows: PositiveInt | None = None, seed: int = 0) -> None:
        check_arguments(JsonlRows.__init__, locals(), "env.rows")
        self.path, self.env, self.num_rows, self.seed = path, env, num_rows, seed

    def rows(self) -> JsonlRowSequence:
        """Return the selected lines as a lazy sequence, in the order of the file.

        Raises:
            ValueError: If the file is missing, empty or too small, or its first line is not such an object.
        """
        lines = self._lines()
        if not len(lines):
            raise ValueError(f"env.rows.path is {self.path!r}, which is empty; it must hold JSON objects.")
        if (self.num_rows or 1) > len(lines):
            raise ValueError(
                f"env.rows.num_rows is {self.num_rows}, but {self.path!r} holds {len(lines)}; it must be at most that."
            )
        selected = np.sort(permutation(len(lines), "lines", self.seed)[: self.num_rows])
        rows = JsonlRowSequence(self.path, self.codec, self.spaces, lines[selected])
        rows[0]  # Reports errors that all rows have.
        return rows

    def _lines(self) -> np.ndarray:
        """Return number, first byte and length of each line that is not empty, int64 ``(line, 3)``."""
        lines, start = array("q"), 0
        try:
            with Path(self.path).open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        lines.extend((number, start, len(line)))
                    start += len(line)
        except OSError as error:
            raise ValueError(f"env.rows.path is {self.path!r}, which cannot be read: {error}.") from error
        return np.array(lines, dtype=np.int64).reshape(-1, 3)


class JsonlRowSequence(Sequence[Row]):
    """Lazy sequence of lines of a file.

    Args:
        path: Path of the file.
        codec: Codec of the environment.
        native_spaces: Native observation space, and action space, to whose bounds actions are clipped.
        lines: Number, first byte and length of each line, int64 ``(line, 3)``.
    """

    def __init__(
        self, path: str, codec: TextCodec, native_spaces: tuple[gym.Space, gym.Space], lines: np.ndarray
    ) -> None:
        self._path, self._codec, self._spaces, self._lines = path, codec, native_spaces, lines

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        number, start, length = self._lines[range(len(self))[index]].tolist()
        with Path(self._path).open("rb") as file:
            file.seek(start)
            line = file.read(length)
        with readable_errors(self._path, number):
            return self._parse(line)

    def _parse(self, line: bytes) -> Row:
        record, codec = json.loads(line), self._codec
        text = observation_text(record, codec, "observation")
        try:
            observation = codec.text_to_observation(text)
        except ValueError as error:
            raise LookupError(
                f"observation is {record['observation']!r}, which the environment does not write: {error}"
            ) from error
        if observation is not None:
            check_scale("observation", record["observation"], self._spaces[0], observation)
        parsed = parse_action(codec, record, "action")
        check_scale("action", record["action"], self._spaces[1], parsed)
        action, _ = clip_to_space(self._spaces[1], parsed)
        written = text if observation is None else codec.observation_to_text(observation)
        return Row(observation=written, action=action, native_observation=observation)

"""Rows of prompts from JSON Lines files: one object per line with an observation and an action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import gymnasium as gym

from lrl.codecs.codec import TextCodec
from lrl.data.jsonl_lines import JsonlFile, parse_action, parse_observation
from lrl.envs.factory import EnvFactory
from lrl.envs.rows import EnvRows
from lrl.ranges import PositiveInt, check_arguments
from lrl.rewards.row import Row


class JsonlRows(EnvRows):
    """Data set of the lines of a file, such as ``{"observation": "<observation>..", "action": "<action>.."}``.

    Texts may have tags or not, and an action that is a word may be given by its number, so the files of the original
    experiment can be read. All lines are checked at the start and read when they are shown. If the codec can parse
    observations, they are written again as the environment writes them, and networks can read them, to the precision of
    the file. Lines do not say to which episode they belong, so prompts have no history.

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
            ValueError: If the file is missing, empty or too small, or a selected line is not such an object or has an
                observation or action that is not of the environment.
        """
        file = JsonlFile(self.path, "env.rows", self.num_rows, self.seed)
        rows = JsonlRowSequence(file, self.codec, self.spaces)
        file.check(self.codec, self.spaces[1], rows.parse)
        return rows


class JsonlRowSequence(Sequence[Row]):
    """Lazy sequence of lines of a file.

    Args:
        file: The selected lines.
        codec: Codec of the environment.
        native_spaces: Native observation space, and action space, to whose bounds actions are clipped.
    """

    def __init__(self, file: JsonlFile, codec: TextCodec, native_spaces: tuple[gym.Space, gym.Space]) -> None:
        self._file, self._codec, self._spaces = file, codec, native_spaces

    def __len__(self) -> int:
        return len(self._file)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        with self._file.record(index) as record:
            return self.parse(record)

    def parse(self, record: dict[str, Any]) -> Row:
        """Return the row of a line's object.

        Raises:
            LookupError: If it has no observation or action, or one that is not of the environment.
        """
        observations, actions = self._spaces
        text, observation = parse_observation(self._codec, record, observations)
        action, _ = parse_action(self._codec, record, actions)
        return Row(observation=text, action=action, native_observation=observation)

"""Demonstrations of a FrozenLake expert as a CSV file, in the columns of the original experiment."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from lrl.codecs.grid import Desc, FrozenLakeCodec
from lrl.envs.frozen_lake.expert_rows import row_of
from lrl.envs.rows import RowSource
from lrl.rewards.row import Row

ACTIONS = FrozenLakeCodec().action_texts
Q_COLUMNS = tuple(f"q_value_{action.lower()}" for action in ACTIONS)
NEEDED = ("state_str", "action_text", *Q_COLUMNS)
"""Columns that a file must have."""
COLUMNS = ("state", "state_str", "action", "action_text", *Q_COLUMNS, "reward", "next_state", "done", "batch_idx")
"""``state_str`` is the environment's ``ansi`` picture with ``|`` for newlines: an empty line or the last action, then
the map, in which an escape code colours the agent's cell."""

_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")
_HEADER = re.compile(r"\s*(\((Left|Down|Right|Up)\))?\s*")


class CsvRows(RowSource):
    """The states of a file of demonstrations, each as often as it is in there or once.

    The columns :data:`NEEDED` are enough: the state is then the cell that ``state_str`` colours. Of the other
    :data:`COLUMNS` those that are there are read as well, and must agree.

    Args:
        path: the file; columns that are not among :data:`COLUMNS` are ignored.
        distinct: keep one row of each state of a map and its values. The original's file repeats 11 of them.
        is_slippery: what the description of the environment says.
    """

    def __init__(self, path: str, distinct: bool = True, is_slippery: bool = True) -> None:
        self.path, self.distinct, self.is_slippery = Path(path), distinct, is_slippery

    @property
    def codec(self) -> FrozenLakeCodec:
        """FrozenLake as text."""
        return FrozenLakeCodec(self.is_slippery)

    def rows(self) -> list[Row]:
        """The rows in the order of the file.

        Raises:
            ValueError: the file cannot be read; the message names row (the first after the header is 1) and column.
        """
        rows = [_read_row(record, f"{self.path}, row {number}") for number, record in enumerate(self._records(), 1)]
        return list(dict.fromkeys(rows)) if self.distinct else rows

    def _records(self) -> Iterator[Mapping[str, Any]]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                missing = [column for column in NEEDED if column not in (reader.fieldnames or ())]
                if missing:
                    raise ValueError(f"{self.path}, row 0 (the header), column {missing[0]}: it is missing.")
                yield from reader
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"rows.path is {str(self.path)!r}, which cannot be read as CSV: {error}.") from error


def _read_row(record: Mapping[str, Any], where: str) -> Row:
    cell = _Cells(record, where)
    desc, agent = cell.read("state_str", decode_picture, "an ansi picture of the map with | for newlines")
    size = len(desc) * len(desc[0])
    state = cell.read_optional("state", _index_below(size), f"a cell's index below {size}", agent)
    if state is None:
        raise ValueError(f"{where}, column state_str: no cell is coloured, and there is no column state to say where.")
    if agent not in (None, state):
        raise ValueError(f"{where}, column state_str: the agent is drawn on cell {agent}; column state says {state}.")
    named = cell.read("action_text", _action_named, f"one of {', '.join(ACTIONS)}")
    action = cell.read_optional("action", _index_below(len(ACTIONS)), "0, 1, 2 or 3", named)
    if named != action:
        text = record["action_text"]
        raise ValueError(f"{where}, column action_text: it is {text!r}; action {action} is {ACTIONS[action]}.")
    values = np.array([cell.read(column, _finite, "a finite number") for column in Q_COLUMNS])
    cell.read_optional("next_state", _index_below(size), f"a cell's index below {size}")
    cell.read_optional("reward", _finite, "a finite number")
    return row_of(state, desc, values, action)


class _Cells:
    """One record, read cell by cell; what cannot be read is an error that says where."""

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record, self.where = record, where

    def read(self, column: str, convert: Callable[[str], Any], expected: str) -> Any:
        """The converted cell of ``column``."""
        text = self.record[column]
        try:
            if text is None:
                raise ValueError("the row ends before it")
            return convert(text)
        except ValueError as error:
            raise ValueError(f"{self.where}, column {column}: it is {text!r}; it must be {expected}.") from error

    def read_optional(self, column: str, convert: Callable[[str], Any], expected: str, without: Any = None) -> Any:
        """The converted cell of ``column``; ``without`` where the file has no such column."""
        return self.read(column, convert, expected) if column in self.record else without


def _action_named(text: str) -> int:
    return ACTIONS.index(text.strip().upper())


def _finite(text: str) -> float:
    value = float(text)
    if not np.isfinite(value):
        raise ValueError(text)
    return value


def _index_below(size: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = float(text)  # a table program may have written 3 as 3.0
        if value not in range(size):
            raise ValueError(text)
        return int(value)

    return convert


def decode_picture(state_str: str) -> tuple[Desc, int | None]:
    """Read an ``ansi`` picture with ``|`` for newlines.

    Returns:
        the map, and the coloured cell's index; None where no cell is coloured.

    Raises:
        ValueError: there is no rectangular map of S, F, H and G in it, or more than one coloured cell.
    """
    lines = state_str.replace("\r", "").replace("\n", "|").split("|")
    drawn = [line.strip() for line in lines if not _HEADER.fullmatch(line)]
    desc = tuple(_COLOURED.sub(r"\1", line) for line in drawn)
    if not desc or len({len(line) for line in desc}) > 1 or set("".join(desc)) - set("SFHG"):
        raise ValueError(state_str)
    coloured = [(row, match.start()) for row, line in enumerate(drawn) for match in _COLOURED.finditer(line)]
    if len(coloured) > 1:
        raise ValueError(state_str)
    return desc, coloured[0][0] * len(desc[0]) + coloured[0][1] if coloured else None


def demonstrate(
    q_values: np.ndarray, num_episodes: int, seed: int = 0, batch_size: int = 100, **kwargs: Any
) -> list[dict[str, Any]]:
    """Records of the successful ones among greedy episodes, as the original made them.

    Args:
        q_values: the expert, ``(state, action)``.
        num_episodes: episodes to play, failures included.
        seed: of the first episode; the others follow it.
        batch_size: successful episodes that share a ``batch_idx``.
        kwargs: of ``FrozenLake-v1``: ``map_name``, ``desc``, ``is_slippery``.

    Returns:
        one dict with the keys :data:`COLUMNS` per step.
    """
    env = gym.make("FrozenLake-v1", render_mode="ansi", disable_env_checker=True, **kwargs)
    records: list[dict[str, Any]] = []
    successes = 0
    for episode in range(num_episodes):
        steps = _greedy_episode(env, q_values, seed + episode)
        if steps[-1]["reward"] > 0:
            records += [step | {"batch_idx": successes // batch_size} for step in steps]
            successes += 1
    env.close()
    return records


def _greedy_episode(env: gym.Env, q_values: np.ndarray, seed: int) -> list[dict[str, Any]]:
    state, _ = env.reset(seed=seed)
    steps: list[dict[str, Any]] = []
    while not steps or not steps[-1]["done"]:
        picture = str(env.render()).replace("\n", "|")
        action = int(q_values[state].argmax())
        after, reward, terminated, truncated, _ = env.step(action)
        steps.append(
            {
                "state": state,
                "state_str": picture,
                "action": action,
                "action_text": ACTIONS[action],
                **dict(zip(Q_COLUMNS, q_values[state].tolist(), strict=True)),
                "reward": float(reward),
                "next_state": after,
                "done": terminated or truncated,
            }
        )
        state = after
    return steps


def write_csv(path: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records with the columns :data:`COLUMNS`; folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(records)

"""FrozenLake: maps, an environment with a new random map per episode, and data sets of an expert's actions.

Random maps are divided into a training and a test split. Data sets contain the reachable states of maps with optimal
Q-values, or the states of a CSV file with the columns of the original experiment.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map
from gymnasium.spaces import Discrete

from lrl.codecs.toy_text import Desc, FrozenLakeCodec, render_map
from lrl.envs.prompt_env import RowSource
from lrl.envs.tabular import TransitionTable, optimal_q, reachable_states
from lrl.files import resolve, write_whole
from lrl.ranges import ClosedUnitInterval, PositiveInt, check_arguments
from lrl.registry import register
from lrl.rewards.reward import Row

Split = Literal["train", "test", "all"]
"""Split of random maps: a hash of the map assigns a fifth of all maps to ``test``, and the others to ``train``."""


_TEST_INTERVAL = 5
"""One in this many maps belongs to the test split, on average."""


def named_map(name: str) -> Desc:
    """Return one of Gymnasium's maps.

    Raises:
        ValueError: If there is no map with that name.
    """
    if name not in MAPS:
        raise ValueError(f"map_name is {name!r}; it must be one of {', '.join(MAPS)}.")
    return tuple(MAPS[name])


def transition_table(desc: Desc, is_slippery: bool = True, success_rate: float = 1 / 3) -> TransitionTable:
    """Return the transition table of FrozenLake on a map.

    Args:
        desc: the map.
        is_slippery: whether moves can slip to the sides.
        success_rate: probability that a move on slippery ice has the chosen direction.
    """
    lake = FrozenLakeEnv(desc=list(desc), is_slippery=is_slippery, success_rate=success_rate)
    return TransitionTable.from_gymnasium(lake.P)


def map_split(desc: Desc) -> Literal["train", "test"]:
    """Return the split that a map belongs to, which is the same on every machine."""
    return "test" if zlib.crc32("/".join(desc).encode()) % _TEST_INTERVAL == 0 else "train"


def sample_map(rng: np.random.Generator, split: Split = "train", size: int = 4, p: float = 0.8) -> Desc:
    """Sample a map on which the goal can be reached.

    Args:
        rng: random number generator.
        split: the split of the map.
        size: side length in cells.
        p: probability that a cell is ice.
    """
    while True:
        desc = tuple(generate_random_map(size, p, seed=int(rng.integers(2**31))))
        if split in ("all", map_split(desc)):
            return desc


def random_maps(num_maps: int, seed: int, split: Split = "train", size: int = 4, p: float = 0.8) -> list[Desc]:
    """Sample different maps.

    Args:
        num_maps: number of maps.
        seed: seed of the maps.
        split: the split of the maps.
        size: side length in cells.
        p: probability that a cell is ice.

    Raises:
        ValueError: If a setting is out of range, or more than 1,000 samples in a row give no new map.
    """
    _validate(split, size, p)
    rng, maps, num_repeated = np.random.default_rng(seed), dict[Desc, None](), 0
    while len(maps) < num_maps:
        desc = sample_map(rng, split, size, p)
        num_repeated = num_repeated + 1 if desc in maps else 0
        if num_repeated > 1000:
            raise ValueError(f"num_maps is {num_maps}; {len(maps)} different {split} maps of size {size} were found.")
        maps[desc] = None
    return list(maps)


class RandomMapsEnv(FrozenLakeEnv):
    """FrozenLake with a new random map in each episode.

    The seed of a reset determines the map and the transition noise. Registered as ``lrl/FrozenLakeRandomMaps-v0`` with
    a time limit of 100 steps.

    Args:
        render_mode: render mode of FrozenLake.
        size: side length in cells.
        p: probability that a cell is ice.
        is_slippery: whether moves can slip to the sides.
        split: the split of the maps.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        render_mode: str | None = None,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        split: Split = "train",
    ) -> None:
        _validate(split, size, p)
        self._map_settings: tuple[Split, int, float] = (split, size, p)
        self._is_slippery = is_slippery
        first = sample_map(np.random.default_rng(0), *self._map_settings)
        super().__init__(render_mode=render_mode, desc=list(first), is_slippery=is_slippery)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Sample a map and start an episode on it."""
        if seed is not None:
            super().reset(seed=seed)
        desc = sample_map(self.np_random, *self._map_settings)
        lake = FrozenLakeEnv(desc=list(desc), is_slippery=self._is_slippery)
        self.desc, self.P, self.initial_state_distrib = lake.desc, lake.P, lake.initial_state_distrib
        return super().reset(options=options)


def _validate(split: str, size: int, p: float) -> None:
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(get_args(Split))}.")
    if size < 2:
        raise ValueError(f"size is {size}; it must be at least 2.")
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; it must be in (0, 1].")


# Data sets of states with the Q-values of an expert, one row per state.


class _LakeRows(RowSource):
    """Base class of data sets of states of FrozenLake."""

    is_slippery: bool

    @property
    def codec(self) -> FrozenLakeCodec:
        """Codec of FrozenLake."""
        return FrozenLakeCodec(self.is_slippery)


@register
class ExpertQRows(_LakeRows):
    """Data set of all reachable states of one map (11 states on the 4x4 map) with optimal Q-values.

    Args:
        map_name: ``4x4`` or ``8x8``.
        desc: a custom map, instead of ``map_name``.
        is_slippery: whether moves can slip to the sides.
        gamma: discount factor.
    """

    def __init__(
        self,
        map_name: str = "4x4",
        desc: Sequence[str] | None = None,
        is_slippery: bool = True,
        gamma: ClosedUnitInterval = 0.99,
    ) -> None:
        check_arguments(ExpertQRows.__init__, locals(), "env.rows")
        self.desc: Desc = named_map(map_name) if desc is None else tuple(desc)
        self.is_slippery, self.gamma = is_slippery, gamma

    @property
    def spaces(self) -> tuple[Discrete, Discrete]:
        """The spaces of FrozenLake on the map: cells and directions."""
        return Discrete(len("".join(self.desc))), Discrete(4)

    def rows(self) -> list[Row]:
        """Return one row per state, in ascending order."""
        return make_rows([self.desc], self.is_slippery, self.gamma)


@register
class RandomMapRows(_LakeRows):
    """Data set of all reachable states of many random maps with optimal Q-values.

    Args:
        num_maps: number of different maps.
        seed: seed of the maps.
        split: the split of the maps: ``train``, ``test`` or ``all``.
        size: side length in cells.
        p: probability that a cell is ice.
        is_slippery: whether moves can slip to the sides.
        gamma: discount factor.
    """

    def __init__(
        self,
        num_maps: PositiveInt = 1000,
        seed: int = 0,
        split: Split = "train",
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        gamma: ClosedUnitInterval = 0.99,
    ) -> None:
        check_arguments(RandomMapRows.__init__, locals(), "env.rows")
        self.num_maps, self.seed = num_maps, seed
        self.split: Split = split
        self.size, self.p = size, p
        self.is_slippery, self.gamma = is_slippery, gamma

    def rows(self) -> list[Row]:
        """Return the rows of all maps, one map after the other."""
        maps = random_maps(self.num_maps, self.seed, self.split, self.size, self.p)
        return make_rows(maps, self.is_slippery, self.gamma)


def make_rows(maps: Sequence[Desc], is_slippery: bool = True, gamma: float = 0.99) -> list[Row]:
    """Return the rows of all reachable states of some maps, with optimal Q-values.

    Args:
        maps: the maps, which must have the same size.
        is_slippery: whether moves can slip to the sides.
        gamma: discount factor.
    """
    if not maps:
        return []
    tables = [transition_table(desc, is_slippery) for desc in maps]
    values = optimal_q(tables, gamma)
    rows: list[Row] = []
    for desc, table, q in zip(maps, tables, values, strict=True):
        start = "".join(desc).index("S")
        rows += [make_row(state, desc, q[state]) for state in reachable_states(table, start)]
    return rows


def make_row(state: int, desc: Desc, q_values: np.ndarray, action: int | None = None) -> Row:
    """Create the row of one state.

    Args:
        state: index of the cell.
        desc: the map.
        q_values: the expert's value of each action, ``(action,)``.
        action: the expert's action; None selects the first of the best actions.
    """
    chosen = int(q_values.argmax()) if action is None else action
    return Row(
        observation=render_map(state, desc),
        q_values=tuple(q_values.tolist()),
        action=chosen,
        native_observation=state,
        state=state,
        desc=desc,
    )


ACTIONS = FrozenLakeCodec().action_texts
"""Names of the actions, in the order of the action space."""
Q_COLUMNS = tuple(f"q_value_{action.lower()}" for action in ACTIONS)
"""Columns of the Q-values, in the order of the action space."""
REQUIRED_COLUMNS = ("state_str", "action_text", *Q_COLUMNS)
"""Columns that a file must contain."""
COLUMNS = ("state", "state_str", "action", "action_text", *Q_COLUMNS, "reward", "next_state", "done", "batch_idx")
"""All columns. ``state_str`` is the environment's ``ansi`` rendering with ``|`` instead of newlines: an empty line or
the last action, followed by the map, with an escape sequence that colours the agent's cell."""

_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")
_HEADER = re.compile(r"\s*(\((Left|Down|Right|Up)\))?\s*")


@register
class CsvRows(_LakeRows):
    """Data set of the states in a CSV file of demonstrations.

    The state is the coloured cell of ``state_str``. Repeated rows are dropped: the file of the original experiment
    contains 11 different ones.

    Args:
        path: path of the file, or ``assets/expert_q/frozen_lake.csv``, which ships with lrl. Columns that are not in
            :data:`REQUIRED_COLUMNS` are ignored.
        is_slippery: whether the description of the environment states that the ice is slippery.
    """

    def __init__(self, path: str, is_slippery: bool = True) -> None:
        self.path, self.is_slippery = Path(resolve(path)), is_slippery

    def rows(self) -> list[Row]:
        """Return the rows in the order of the file.

        Raises:
            ValueError: If the file cannot be read, a column is missing, or a cell is invalid; in the last two cases the
                message contains the row (1 is the first after the header) and the column.
        """
        rows = [_read_row(record, f"{self.path}, row {number}") for number, record in enumerate(self._records(), 1)]
        return list(dict.fromkeys(rows))

    def _records(self) -> Iterator[Mapping[str, Any]]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                missing = [column for column in REQUIRED_COLUMNS if column not in (reader.fieldnames or ())]
                if missing:
                    raise ValueError(f"{self.path}, row 0 (the header), column {missing[0]}: it is missing.")
                yield from reader
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"rows.path is {str(self.path)!r}, which cannot be read as CSV: {error}.") from error


def _read_row(record: Mapping[str, Any], where: str) -> Row:
    """Return the row of a record; errors contain the row and the column."""

    def cell(column: str, convert: Callable[[str], Any], expected: str) -> Any:
        """Return the converted cell of a column, or raise an error that states what was expected."""
        try:
            return convert(record[column] or "")  # a short row has no such cell
        except ValueError as error:
            raise ValueError(f"{where}, column {column}: it is {record[column]!r}; it must be {expected}.") from error

    rendering = "an ansi rendering of the map with | for newlines and one coloured cell, the agent's"
    desc, state = cell("state_str", parse_rendering, rendering)
    action = cell("action_text", _action_named, f"one of {', '.join(ACTIONS)}")
    values = np.array([cell(column, _finite, "a finite number") for column in Q_COLUMNS])
    return make_row(state, desc, values, action)


def _action_named(text: str) -> int:
    return ACTIONS.index(text.strip().upper())


def _finite(text: str) -> float:
    value = float(text)
    if not np.isfinite(value):
        raise ValueError(text)
    return value


def parse_rendering(state_str: str) -> tuple[Desc, int]:
    """Parse an ``ansi`` rendering with ``|`` instead of newlines.

    Returns:
        The map, and the index of the coloured cell.

    Raises:
        ValueError: If the text is not a rectangular map of S, F, H and G with one coloured cell.
    """
    lines = state_str.replace("\r", "").replace("\n", "|").split("|")
    rows = [line.strip() for line in lines if not _HEADER.fullmatch(line)]
    desc = tuple(_COLOURED.sub(r"\1", line) for line in rows)
    if not desc or len({len(line) for line in desc}) > 1 or set("".join(desc)) - set("SFHG"):
        raise ValueError(state_str)
    coloured = [(row, match.start()) for row, line in enumerate(rows) for match in _COLOURED.finditer(line)]
    if len(coloured) != 1:
        raise ValueError(state_str)
    return desc, coloured[0][0] * len(desc[0]) + coloured[0][1]


def generate_records(
    q_values: np.ndarray, num_episodes: int, seed: int = 0, batch_size: int = 100, **kwargs: Any
) -> list[dict[str, Any]]:
    """Play greedy episodes and return the records of the successful ones, as in the original experiment.

    Args:
        q_values: Q-values of the expert, ``(state, action)``.
        num_episodes: number of episodes to play, including unsuccessful ones.
        seed: seed of the first episode; each later episode has the next integer.
        batch_size: number of successful episodes with the same ``batch_idx``.
        kwargs: arguments of ``FrozenLake-v1``: ``map_name``, ``desc``, ``is_slippery``.

    Returns:
        One dict with the keys :data:`COLUMNS` per step.
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
        rendering = str(env.render()).replace("\n", "|")
        action = int(q_values[state].argmax())
        next_state, reward, terminated, truncated, _ = env.step(action)
        steps.append(
            {
                "state": state,
                "state_str": rendering,
                "action": action,
                "action_text": ACTIONS[action],
                **dict(zip(Q_COLUMNS, q_values[state].tolist(), strict=True)),
                "reward": float(reward),
                "next_state": next_state,
                "done": terminated or truncated,
            }
        )
        state = next_state
    return steps


def write_csv(path: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records to a CSV file with the columns :data:`COLUMNS`; missing folders are created.

    Raises:
        OSError: If the file cannot be written.
    """
    with write_whole(path, newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(records)

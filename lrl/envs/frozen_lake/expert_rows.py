"""States of FrozenLake with optimal Q-values, computed from the transition table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium.spaces import Discrete

from lrl.codecs.grid import Desc, FrozenLakeCodec, render_map
from lrl.envs.frozen_lake.maps import Split, named_map, random_maps, transition_table
from lrl.envs.rows import RowSource
from lrl.envs.tabular import optimal_q, reachable_states
from lrl.rewards.row import Row


class ExpertQRows(RowSource):
    """Data set of all reachable states of one map (11 on the 4x4 map) with optimal Q-values.

    Args:
        map_name: ``4x4`` or ``8x8``.
        desc: A custom map, instead of ``map_name``.
        is_slippery: Whether moves can slip to the sides.
        gamma: Discount factor.
    """

    def __init__(
        self, map_name: str = "4x4", desc: Sequence[str] | None = None, is_slippery: bool = True, gamma: float = 0.99
    ) -> None:
        self.desc: Desc = named_map(map_name) if desc is None else tuple(desc)
        self.is_slippery, self.gamma = is_slippery, gamma

    @property
    def codec(self) -> FrozenLakeCodec:
        """Codec of FrozenLake."""
        return FrozenLakeCodec(self.is_slippery)

    @property
    def spaces(self) -> tuple[Discrete, Discrete]:
        """The spaces of FrozenLake on the map: cells and directions."""
        return Discrete(len("".join(self.desc))), Discrete(4)

    def rows(self) -> list[Row]:
        """Return one row per state, in ascending order."""
        return make_rows([self.desc], self.is_slippery, self.gamma)


class RandomMapRows(RowSource):
    """Data set of all reachable states of many random maps with optimal Q-values.

    Args:
        num_maps: Number of different maps.
        seed: Seed of the maps.
        split: The split of the maps: ``train``, ``test`` or ``all``.
        size: Side length in cells.
        p: Probability that a cell is ice.
        is_slippery: Whether moves can slip to the sides.
        gamma: Discount factor.
    """

    def __init__(
        self,
        num_maps: int = 1000,
        seed: int = 0,
        split: Split = "train",
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        gamma: float = 0.99,
    ) -> None:
        self.num_maps, self.seed = num_maps, seed
        self.split: Split = split
        self.size, self.p = size, p
        self.is_slippery, self.gamma = is_slippery, gamma

    @property
    def codec(self) -> FrozenLakeCodec:
        """Codec of FrozenLake."""
        return FrozenLakeCodec(self.is_slippery)

    def rows(self) -> list[Row]:
        """Return the rows of all maps, one map after the other."""
        maps = random_maps(self.num_maps, self.seed, self.split, self.size, self.p)
        return make_rows(maps, self.is_slippery, self.gamma)


def make_rows(maps: Sequence[Desc], is_slippery: bool = True, gamma: float = 0.99) -> list[Row]:
    """Return the rows of all reachable states of maps of the same size, with optimal Q-values."""
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
        state: Index of the cell.
        desc: The map.
        q_values: The expert's value of each action, ``(action,)``.
        action: The expert's action; None selects the first best one.
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

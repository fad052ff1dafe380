"""FrozenLake's states with expert values, from the transition table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lrl.codecs.grid import Desc, FrozenLakeCodec, render_map
from lrl.envs.frozen_lake.maps import Split, named_map, random_maps, transition_table
from lrl.envs.rows import RowSource
from lrl.envs.tabular import optimal_q, reachable_states
from lrl.rewards.row import Row


class ExpertQRows(RowSource):
    """Every state of one map in which an agent can be (11 on the 4x4 map), with the best policy's values.

    Args:
        map_name: ``4x4`` or ``8x8``.
        desc: another map, instead of ``map_name``.
        is_slippery: whether moves can slip to the sides.
        gamma: discount per step.
    """

    def __init__(
        self, map_name: str = "4x4", desc: Sequence[str] | None = None, is_slippery: bool = True, gamma: float = 0.99
    ) -> None:
        self.desc: Desc = named_map(map_name) if desc is None else tuple(desc)
        self.is_slippery, self.gamma = is_slippery, gamma

    @property
    def codec(self) -> FrozenLakeCodec:
        """FrozenLake as text."""
        return FrozenLakeCodec(self.is_slippery)

    def rows(self) -> list[Row]:
        """One row per state, ascending."""
        return expert_rows([self.desc], self.is_slippery, self.gamma)


class RandomMapRows(RowSource):
    """Every state of many random maps in which an agent can be, with the best policy's values.

    Args:
        num_maps: different maps.
        seed: decides which.
        split: the family they are from: ``train``, ``test`` or ``all``.
        size: cells per side.
        p: probability that a cell is ice.
        is_slippery: whether moves can slip to the sides.
        gamma: discount per step.
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
        """FrozenLake as text."""
        return FrozenLakeCodec(self.is_slippery)

    def rows(self) -> list[Row]:
        """The rows of one map after the other."""
        maps = random_maps(self.num_maps, self.seed, self.split, self.size, self.p)
        return expert_rows(maps, self.is_slippery, self.gamma)


def expert_rows(maps: Sequence[Desc], is_slippery: bool = True, gamma: float = 0.99) -> list[Row]:
    """Rows of all reachable states of maps of one size, with the best policy's values."""
    if not maps:
        return []
    tables = [transition_table(desc, is_slippery) for desc in maps]
    values = optimal_q(tables, gamma)
    rows: list[Row] = []
    for desc, table, q in zip(maps, tables, values, strict=True):
        start = "".join(desc).index("S")
        rows += [row_of(state, desc, q[state]) for state in reachable_states(table, start)]
    return rows


def row_of(state: int, desc: Desc, q_values: np.ndarray, action: int | None = None) -> Row:
    """The row of one state; without ``action`` the expert takes the first best one."""
    chosen = int(q_values.argmax()) if action is None else action
    return Row(
        observation=render_map(state, desc), q_values=tuple(q_values.tolist()), action=chosen, state=state, desc=desc
    )

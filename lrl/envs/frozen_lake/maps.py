"""FrozenLake's maps: the known ones, random ones in two families, and an environment that draws one per episode."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map

from lrl.codecs.grid import Desc
from lrl.envs.tabular import TransitionTable

Split = Literal["train", "test", "all"]
"""Which maps: a fifth of all maps, picked by a hash of the map, is for testing and never drawn for training."""

_SPLITS = ("train", "test", "all")
_TEST_SHARE = 5


def named_map(name: str) -> Desc:
    """A map that Gymnasium knows.

    Raises:
        ValueError: it knows none of that name.
    """
    if name not in MAPS:
        raise ValueError(f"map_name is {name!r}; it must be one of {', '.join(MAPS)}.")
    return tuple(MAPS[name])


def transition_table(desc: Desc, is_slippery: bool = True) -> TransitionTable:
    """The environment's own transition table on a map."""
    return TransitionTable.of(FrozenLakeEnv(desc=list(desc), is_slippery=is_slippery).P)


def split_of(desc: Desc) -> Literal["train", "test"]:
    """The family that a map belongs to, on every machine and for ever."""
    return "test" if zlib.crc32("/".join(desc).encode()) % _TEST_SHARE == 0 else "train"


def draw_map(rng: np.random.Generator, split: Split = "train", size: int = 4, p: float = 0.8) -> Desc:
    """Draw a map on which the goal can be reached.

    Args:
        rng: moves on.
        split: the family to draw from.
        size: cells per side.
        p: probability that a cell is ice.
    """
    while True:
        desc = tuple(generate_random_map(size, p, seed=int(rng.integers(2**31))))
        if split in ("all", split_of(desc)):
            return desc


def random_maps(num_maps: int, seed: int, split: Split = "train", size: int = 4, p: float = 0.8) -> list[Desc]:
    """Draw maps, all different.

    Raises:
        ValueError: a setting is out of range, or there are not that many different maps.
    """
    _check_drawing(split, size, p)
    rng, maps, misses = np.random.default_rng(seed), dict[Desc, None](), 0
    while len(maps) < num_maps:
        desc = draw_map(rng, split, size, p)
        misses = misses + 1 if desc in maps else 0
        if misses > 1000:
            raise ValueError(f"num_maps is {num_maps}; {len(maps)} different {split} maps of size {size} were found.")
        maps[desc] = None
    return list(maps)


class RandomMapsEnv(FrozenLakeEnv):
    """FrozenLake on a new map in each episode; the reset's seed decides the map as well as the slips.

    Registered as ``lrl/FrozenLakeRandomMaps-v0``, 100 steps.

    Args:
        render_mode: as in FrozenLake.
        size: cells per side.
        p: probability that a cell is ice.
        is_slippery: whether moves can slip to the sides.
        split: the family of maps.
    """

    def __init__(
        self,
        render_mode: str | None = None,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        split: Split = "train",
    ) -> None:
        _check_drawing(split, size, p)
        self._drawing: tuple[Split, int, float] = (split, size, p)
        self._is_slippery = is_slippery
        first = draw_map(np.random.default_rng(0), *self._drawing)
        super().__init__(render_mode=render_mode, desc=list(first), is_slippery=is_slippery)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Draw a map and start on it."""
        if seed is not None:
            super().reset(seed=seed)
        desc = draw_map(self.np_random, *self._drawing)
        lake = FrozenLakeEnv(desc=list(desc), is_slippery=self._is_slippery)
        self.desc, self.P, self.initial_state_distrib = lake.desc, lake.P, lake.initial_state_distrib
        return super().reset(options=options)


def _check_drawing(split: str, size: int, p: float) -> None:
    if split not in _SPLITS:
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(_SPLITS)}.")
    if size < 2:
        raise ValueError(f"size is {size}; it must be at least 2.")
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; it must be in (0, 1].")

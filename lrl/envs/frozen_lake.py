"""Maps of FrozenLake: named maps, random maps with a train/test split, and an environment with random maps."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map

from lrl.codecs.toy_text import Desc
from lrl.envs.tabular import TransitionTable

Split = Literal["train", "test", "all"]
"""Split of random maps. A hash of the map selects a fifth of all maps for testing."""

_SPLITS = ("train", "test", "all")
_TEST_INTERVAL = 5
"""One of this many maps belongs to the test split."""


def named_map(name: str) -> Desc:
    """Return one of Gymnasium's maps.

    Raises:
        ValueError: If there is no map with that name.
    """
    if name not in MAPS:
        raise ValueError(f"map_name is {name!r}; it must be one of {', '.join(MAPS)}.")
    return tuple(MAPS[name])


def transition_table(desc: Desc, is_slippery: bool = True) -> TransitionTable:
    """Return the transition table of FrozenLake on a map."""
    return TransitionTable.from_gymnasium(FrozenLakeEnv(desc=list(desc), is_slippery=is_slippery).P)


def map_split(desc: Desc) -> Literal["train", "test"]:
    """Return the split that a map belongs to, which is the same on every machine."""
    return "test" if zlib.crc32("/".join(desc).encode()) % _TEST_INTERVAL == 0 else "train"


def sample_map(rng: np.random.Generator, split: Split = "train", size: int = 4, p: float = 0.8) -> Desc:
    """Sample a map on which the goal can be reached.

    Args:
        rng: Random number generator.
        split: The split of the map.
        size: Side length in cells.
        p: Probability that a cell is ice.
    """
    while True:
        desc = tuple(generate_random_map(size, p, seed=int(rng.integers(2**31))))
        if split in ("all", map_split(desc)):
            return desc


def random_maps(num_maps: int, seed: int, split: Split = "train", size: int = 4, p: float = 0.8) -> list[Desc]:
    """Sample different maps.

    Raises:
        ValueError: If a setting is out of range or there are fewer than ``num_maps`` different maps.
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
        render_mode: Render mode of FrozenLake.
        size: Side length in cells.
        p: Probability that a cell is ice.
        is_slippery: Whether moves can slip to the sides.
        split: The split of the maps.

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
    if split not in _SPLITS:
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(_SPLITS)}.")
    if size < 2:
        raise ValueError(f"size is {size}; it must be at least 2.")
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; it must be in (0, 1].")

"""What can be changed in a demonstration without making it wrong: the names of things, or left and right."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lrl.codecs.babyai import COLORS, OBJECTS
from lrl.envs.babyai.levels import HELD_OUT

_KINDS = ("key", "ball", "box")
_FIRST = OBJECTS.index(_KINDS[0])
_MIRRORED = {0: 1, 1: 0}
"""Turning left is turning right in the mirror."""


class Symmetry(ABC):
    """Maps whole episodes to episodes that would have been demonstrated as well."""

    @abstractmethod
    def change(
        self, observations: Sequence[Any], actions: Sequence[Any], rng: np.random.Generator
    ) -> tuple[list[Any], list[Any]]:
        """Native observations and actions of one episode, changed in one way that is drawn from ``rng``.

        There may be more actions than observations: those that were advised and not taken.
        """


class BabyAISymmetry(Symmetry):
    """Other colours and kinds for all objects of a room, alike in view and mission, and its mirror image.

    Doors stay doors, in other colours. No mission names what training levels never name
    (:data:`lrl.envs.babyai.levels.HELD_OUT`).

    Args:
        mirror: whether half of the episodes are mirrored.
    """

    def __init__(self, mirror: bool = True) -> None:
        self.mirror = mirror

    def change(
        self, observations: Sequence[Any], actions: Sequence[Any], rng: np.random.Generator
    ) -> tuple[list[Any], list[Any]]:
        """See :meth:`Symmetry.change`; an observation is MiniGrid's dict, an action 0 to 5."""
        while True:
            colors, kinds = rng.permutation(len(COLORS)), rng.permutation(len(_KINDS))
            words = {COLORS[old]: COLORS[new] for old, new in enumerate(colors)}
            words |= {_KINDS[old]: _KINDS[new] for old, new in enumerate(kinds)}
            missions = [_renamed(seen["mission"], words) for seen in observations]
            if not any(pair in HELD_OUT for pair in pairwise(re.findall(r"\w+", missions[0]))):
                break
        mirrored = self.mirror and bool(rng.integers(2))
        changed = [
            dict(seen, image=_image(seen["image"], colors, kinds, mirrored), mission=mission)
            for seen, mission in zip(observations, missions, strict=True)
        ]
        return changed, [_MIRRORED.get(int(action), action) if mirrored else action for action in actions]


def _renamed(mission: str, words: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: words.get(word[0], word[0]), mission)


def _image(image: np.ndarray, colors: np.ndarray, kinds: np.ndarray, mirrored: bool) -> np.ndarray:
    """MiniGrid's view ``(column, row, 3)`` with other objects, and columns from right to left."""
    image = image.copy()
    kind, color = image[..., 0], image[..., 1]
    things = (kind >= _FIRST) & (kind < _FIRST + len(_KINDS))
    colored = things | (kind == OBJECTS.index("door"))
    color[colored] = colors[color[colored]]
    kind[things] = _FIRST + kinds[kind[things] - _FIRST]
    return np.ascontiguousarray(image[::-1]) if mirrored else image

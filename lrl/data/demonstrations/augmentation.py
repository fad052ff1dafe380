"""Data augmentation: symmetries that turn a correct demonstration into another correct one."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Generic

import numpy as np
from gymnasium.core import ActType, ObsType

from lrl.codecs.babyai import COLORS, OBJECTS
from lrl.envs.babyai.levels import HELD_OUT

_KINDS = ("key", "ball", "box")
_FIRST_KIND = OBJECTS.index(_KINDS[0])
_MIRRORED_ACTIONS = {0: 1, 1: 0}
"""Turning left and turning right."""


class Symmetry(ABC, Generic[ObsType, ActType]):
    """Abstract transformation of whole episodes under which the demonstrated actions stay correct."""

    @abstractmethod
    def augment(
        self, observations: Sequence[ObsType], actions: Sequence[ActType], rng: np.random.Generator
    ) -> tuple[list[ObsType], list[ActType]]:
        """Return the native observations and actions of one episode after a transformation sampled from ``rng``.

        There may be more actions than observations: the last ones were advised and not taken.
        """


class BabyAISymmetry(Symmetry[dict[str, Any], int]):
    """Permutes the colours and kinds of all objects of a room, in view and mission, and mirrors some episodes.

    Doors keep their kind. Missions with the colours and kinds that training levels never name
    (:data:`lrl.envs.babyai.levels.HELD_OUT`) are not produced.

    Args:
        mirror: whether half of the episodes are mirrored, left to right.
    """

    def __init__(self, mirror: bool = True) -> None:
        self.mirror = mirror

    def augment(
        self, observations: Sequence[dict[str, Any]], actions: Sequence[int], rng: np.random.Generator
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Apply a random symmetry to observations, MiniGrid's dictionaries, and actions, 0 to 5."""
        while True:  # until the mission names nothing that is held out
            colors, kinds = rng.permutation(len(COLORS)), rng.permutation(len(_KINDS))
            words = {COLORS[old]: COLORS[new] for old, new in enumerate(colors)}
            words |= {_KINDS[old]: _KINDS[new] for old, new in enumerate(kinds)}
            missions = [_replace_words(observation["mission"], words) for observation in observations]
            if not any(pair in HELD_OUT for pair in pairwise(re.findall(r"\w+", missions[0]))):
                break
        mirrored = self.mirror and bool(rng.integers(2))
        changed = [
            dict(observation, image=_transform_image(observation["image"], colors, kinds, mirrored), mission=mission)
            for observation, mission in zip(observations, missions, strict=True)
        ]
        return changed, [_MIRRORED_ACTIONS.get(int(action), action) if mirrored else action for action in actions]


def _replace_words(mission: str, words: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: words.get(word[0], word[0]), mission)


def _transform_image(image: np.ndarray, colors: np.ndarray, kinds: np.ndarray, mirrored: bool) -> np.ndarray:
    """Return MiniGrid's view ``(column, row, 3)`` with other objects, with its columns reversed if ``mirrored``."""
    image = image.copy()
    kind, color = image[..., 0], image[..., 1]
    is_object = (kind >= _FIRST_KIND) & (kind < _FIRST_KIND + len(_KINDS))
    is_colored = is_object | (kind == OBJECTS.index("door"))
    color[is_colored] = colors[color[is_colored]]
    kind[is_object] = _FIRST_KIND + kinds[kind[is_object] - _FIRST_KIND]
    return np.ascontiguousarray(image[::-1]) if mirrored else image

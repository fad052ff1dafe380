"""Data augmentation: demonstrations that are made of other demonstrations, by symmetries or noise."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Generic

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.core import ActType, ObsType

from lrl.codecs.babyai import COLORS, OBJECTS
from lrl.envs.babyai import HELD_OUT
from lrl.ranges import PositiveFloat, check_arguments

_KINDS = ("key", "ball", "box")
_FIRST_KIND = OBJECTS.index(_KINDS[0])
_MIRRORED_ACTIONS = {0: 1, 1: 0}
"""Turning left and turning right."""


class Augmentation(ABC, Generic[ObsType, ActType]):
    """Abstract transformation of whole episodes under which the demonstrated actions stay correct, or nearly so."""

    def connect(self, action_space: gym.Space) -> None:  # noqa: B027 (a symmetry knows its environment)
        """Take the action space of the data set. Called before :meth:`augment`.

        Raises:
            ValueError: the actions cannot be transformed.
        """

    @abstractmethod
    def augment(
        self, observations: Sequence[ObsType], actions: Sequence[ActType], rng: np.random.Generator
    ) -> tuple[list[ObsType], list[ActType]]:
        """Return the native observations and actions of one episode after a transformation sampled from ``rng``.

        There may be more actions than observations: the last ones were advised.
        """


class BabyAISymmetry(Augmentation[dict[str, Any], int]):
    """Permutes the colours and kinds of all objects of a room, in view and mission, and mirrors some episodes.

    Doors keep their kind. Missions with the colours and kinds that training levels never name
    (:data:`lrl.envs.babyai.HELD_OUT`) are not produced.

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


class GaussianNoise(Augmentation[np.ndarray, np.ndarray]):
    """Adds Gaussian noise to the numbers of actions, for policies to which neighbouring numbers are different tokens.

    The likelihood of actions with noise is on average the cross-entropy with a Gaussian around the demonstrated number,
    so a number's probability spreads to its neighbours (HL-Gauss, arXiv:2403.03950). Numbers that leave the action
    space are clipped to it, so one at its bound keeps half of its probability. Noise differs between copies and is the
    same in every pass. A policy that acts natively has a standard deviation of its own and gains nothing.

    Args:
        actions: standard deviation of the noise, in the unit of the actions.
    """

    def __init__(self, actions: PositiveFloat) -> None:
        check_arguments(GaussianNoise.__init__, locals(), "demonstrations.augmentation")
        if not math.isfinite(actions):
            raise ValueError(f"demonstrations.augmentation.actions is {actions}; it must be finite.")
        self.actions = actions
        self._space: spaces.Box | None = None

    def connect(self, action_space: gym.Space) -> None:
        """Take the action space, to whose bounds numbers are clipped.

        Raises:
            ValueError: the actions are not vectors of real numbers.
        """
        if not (isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating)):
            raise ValueError(
                f"demonstrations.augmentation is GaussianNoise, but actions are of {action_space}; it must be null "
                "unless actions are vectors of real numbers (a Box)."
            )
        self._space = action_space

    def augment(
        self, observations: Sequence[np.ndarray], actions: Sequence[np.ndarray], rng: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return unchanged observations, and actions with noise."""
        assert self._space is not None, "connect() comes first"
        low, high = self._space.low, self._space.high
        changed = (action + self.actions * rng.standard_normal(low.shape) for action in actions)
        return list(observations), [np.clip(action, low, high).astype(self._space.dtype) for action in changed]


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

"""A robot in an L-shaped corridor, with the transitions of the first track of ProPS (arXiv:2511.21928)."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from lrl.envs.batched.dynamics import Dynamics, DynamicsEnv, DynamicsVectorEnv

OUTER = ((0, 0), (0, 20), (20, 20), (20, 8.5), (11.5, 8.5), (11.5, 0))
"""Corners of the outer wall, in metres."""
INNER = ((3, 3), (3, 17), (17, 17), (17, 11.5), (8.5, 11.5), (8.5, 3))
"""Corners of the inner wall."""
CENTRE_LINES = (
    ((1.5, 1.5), (1.5, 18.5)),
    ((1.5, 18.5), (18.5, 18.5)),
    ((18.5, 10), (18.5, 18.5)),
    ((10, 10), (18.5, 10)),
    ((10, 1.5), (10, 10)),
    ((1.5, 1.5), (10, 1.5)),
)
"""Segments on which episodes begin, each with the same probability."""
ANGLES = np.array([-90.0, -45.0, 0.0, 45.0, 90.0]) / 180 * np.pi
"""Directions of the five distances, from left to right."""
_RAY, _NOISE, _COLLISION = 30.0, 0.02, 0.4
_DISTANCE, _TURN = np.array([0.2, 0.04, 0.04]), np.array([0.0, 0.2, -0.2])
_REWARD = np.array([5.0, -0.5, -0.5])


def _walls(axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return position, and lower and upper end, of all walls that cross an axis, each ``(wall,)``."""
    sides = [side for corners in (OUTER, INNER) for side in zip(corners, corners[1:] + corners[:1], strict=True)]
    crossing = [side for side in sides if side[0][axis] == side[1][axis]]
    ends = np.array([sorted((a[1 - axis], b[1 - axis])) for a, b in crossing])
    return np.array([a[axis] for a, _ in crossing], dtype=np.float64), ends[:, 0], ends[:, 1]


_WALLS = (_walls(0), _walls(1))


def distances(places: np.ndarray, headings: np.ndarray) -> np.ndarray:
    """Return the distances to the nearest wall in five directions, ``(copy, 5)``.

    Args:
        places: ``(copy, 2)``.
        headings: Angles from the +y axis, clockwise, ``(copy,)``.
    """
    angles = headings[:, None] + ANGLES
    rays = (np.sin(angles)[..., None], np.cos(angles)[..., None])
    nearest = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for axis, (position, low, high) in enumerate(_WALLS):
            length = (position - places[:, axis, None, None]) / rays[axis]  # (copy, direction, wall)
            across = places[:, 1 - axis, None, None] + length * rays[1 - axis]
            hit = (length >= 0) & (across >= low) & (across <= high)
            nearest.append(np.where(hit, length, _RAY).min(-1))
    return np.minimum(*nearest)


class Navigation(Dynamics):
    """Implements a point robot that sees five distances, with noise in its motion and its observations.

    States are float64 ``(copy, 8)``: place, heading and the last observation. Actions: 0 moves forward, 1 turns right
    and 2 turns left. Reward 5 for a move forward and -0.5 for a turn; an observed distance below 0.4 m is a collision,
    with reward -200 instead, and ends the episode.
    """

    noise_size = 7

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(ANGLES),), np.float64)
        self.action_space = spaces.Discrete(3)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a place on a centre line and a heading."""
        begin, end = np.array(CENTRE_LINES[rng.integers(len(CENTRE_LINES))])
        place = begin + rng.random() * (end - begin)
        heading = rng.uniform(-np.pi, np.pi)
        seen = distances(place[None], np.array([heading]))[0] + _NOISE * rng.standard_normal(len(ANGLES))
        return np.concatenate([place, [heading], seen])

    def noise(self, rng: np.random.Generator, steps: int) -> np.ndarray:
        """Sample normal numbers: of the distance, of the turn and of the five observations."""
        return _NOISE * rng.standard_normal((steps, self.noise_size))

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the five distances with noise."""
        return states[:, 3:]

    def step(
        self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Move, then turn; a negative distance moves forward as well, as in the original."""
        heading = states[:, 2]
        moved = np.abs(_DISTANCE[actions] + noise[:, 0])
        after = np.empty_like(states)
        after[:, 0] = states[:, 0] + moved * np.sin(heading)
        after[:, 1] = states[:, 1] + moved * np.cos(heading)
        after[:, 2] = heading + _TURN[actions] + noise[:, 1]
        after[:, 3:] = distances(after[:, :2], after[:, 2]) + noise[:, 2:]
        collides = np.any(after[:, 3:] < _COLLISION, axis=1)
        return after, np.where(collides, -200.0, _REWARD[actions]), collides


class NavigationEnv(DynamicsEnv):
    """The corridor, registered as ``lrl/Navigation-v0``."""

    def __init__(self) -> None:
        super().__init__(Navigation())


class NavigationVectorEnv(DynamicsVectorEnv):
    """Many copies of the corridor.

    Args:
        num_envs: Number of copies.
        max_episode_steps: Number of steps after which an episode is truncated.
    """

    def __init__(self, num_envs: int = 1, max_episode_steps: int | None = None) -> None:
        super().__init__(Navigation(), num_envs, max_episode_steps)

"""The environments of ProPS (arXiv:2511.21928) that Gymnasium does not have: Maze, Nim, Pong and Navigation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
from gymnasium import spaces

from lrl.envs.tabular import TransitionTable
from lrl.search.batched import Dynamics, DynamicsEnv, DynamicsVectorEnv, TableDynamics, Transition

OPEN = ((0, 1), (1, 2), (2, 5), (4, 5), (0, 3), (3, 6), (6, 7), (7, 8))
"""Pairs of neighbouring cells without a wall between them; the number of a cell is ``3 * row + column``."""
GOAL = 8
"""Number of the goal's cell in the maze."""
_MOVES = (-3, 3, 1, -1)
"""Change of the cell's number by the actions up, down, right and left."""
_STEP_REWARD = -0.1 / 9


@cache
def maze() -> TableDynamics:
    """Return a maze of 3 x 3 cells, from cell 0 to cell 8, with the actions 0 up, 1 down, 2 right and 3 left.

    The reward is 1 for the step that reaches cell 8, which terminates the episode, and -0.1/9 in all other steps. A
    move into a wall leaves the state unchanged. The only shortest path is down, down, right, right.
    """
    cells, moves = np.arange(9)[:, None], np.array(_MOVES)
    passages = {frozenset(pair) for pair in OPEN}
    is_open = np.array([[frozenset((cell, cell + move)) in passages for move in _MOVES] for cell in range(9)])
    following = np.where(is_open, cells + moves, cells)[..., None]
    arrives = is_open[..., None] & (following == GOAL)
    table = TransitionTable(
        next_state=following.astype(np.int64),
        probability=np.ones(following.shape),
        reward=np.where(arrives, 1.0, _STEP_REWARD),
        terminated=arrives,
    )
    return TableDynamics(table, np.eye(9)[0])


class MazeEnv(DynamicsEnv):
    """Maze of 3 x 3 cells, registered as ``lrl/Maze3x3-v0``."""

    def __init__(self) -> None:
        super().__init__(maze())


STICKS = 10
"""Initial number of sticks in Nim."""


@cache
def nim() -> TableDynamics:
    """Return misère Nim against a perfect opponent: the player who takes the last of ten sticks loses.

    The agent begins. It observes the number of sticks that are left, and takes 1, 2 or 3; the illegal action 0 of the
    original does not exist. The reward is 1 if the opponent takes the last stick, and -1 if the agent takes it or more
    sticks than are left. With ``n`` sticks left, the opponent takes ``(n + 3) mod 4``, or a random legal number if that
    is 0.
    """
    outcomes = {
        sticks: {taken - 1: list(_outcomes(sticks, taken)) for taken in (1, 2, 3)} for sticks in range(STICKS + 1)
    }
    return TableDynamics(TransitionTable.from_gymnasium(outcomes), np.eye(STICKS + 1)[STICKS], first_action=1)


def _outcomes(sticks: int, taken: int) -> Iterator[tuple[float, int, float, bool]]:
    """Yield probability, next state, reward and termination for each move of the opponent."""
    left = sticks - taken
    if left <= 0:
        yield 1.0, 0, -1.0, True
        return
    best = (left + 3) % 4
    replies = [best] if best else range(1, min(3, left) + 1)
    for reply in replies:
        rest = left - reply
        yield 1 / len(replies), rest, float(rest == 0), rest == 0


class NimEnv(DynamicsEnv):
    """Misère Nim against a perfect opponent, registered as ``lrl/Nim-v0``."""

    def __init__(self) -> None:
        super().__init__(nim())


_SPEED, _PADDLE, _LOWEST = 5.0, 80.0, 520.0
_PADDLE_MOVES = np.array([-_SPEED, _SPEED, 0.0])


class Pong(Dynamics):
    """Pong on a field of 800 x 600 pixels, against an opponent that never misses; y increases downwards.

    States are float64 ``(copy, 6)``: the upper ends of the agent's left paddle and of the right paddle, and position
    and velocity of the ball. Observations are float32 ``(copy, 5)``: the centre of the agent's paddle, and position and
    velocity of the ball. Actions are 0 up, 1 down and 2 nothing. The reward is 1 for each time that the agent hits the
    ball, at most three times in 1000 steps; the episode terminates when the ball leaves the field.
    """

    def __init__(self) -> None:
        low, high = np.array([40, -5, -5, -5, -5]), np.array([560, 795, 595, 5, 5])
        self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        self.action_space = spaces.Discrete(3)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Serve from the middle to a random side at a random angle."""
        return np.array([260.0, 260.0, 400.0, 300.0, rng.choice([-_SPEED, _SPEED]), rng.uniform(-_SPEED, _SPEED)])

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the observations, which do not contain the opponent."""
        seen = states[:, 1:].astype(np.float32)
        seen[:, 0] = states[:, 0] + _PADDLE / 2
        return seen

    def step(self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> Transition:
        """Move both paddles, then the ball, which bounces off walls and paddles; the reward of a hit is 1."""
        tops, ball, velocity = states[:, :2], states[:, 2:4], states[:, 4:]
        chased = np.where(tops[:, 1] + _PADDLE / 2 < ball[:, 1], _SPEED, -_SPEED)
        tops = np.minimum(np.maximum(tops + np.stack([_PADDLE_MOVES[actions], chased], axis=1), 0), _LOWEST)
        ball = ball + velocity
        (x, y), (vx, vy) = ball.T, velocity.T
        vy = np.where((y <= 0) | (y >= 590), -vy, vy)
        above = y[:, None] - tops  # distance of the ball below the upper end of each paddle
        covered = (above >= 0) & (above <= _PADDLE)
        hit = covered[:, 0] & (vx < 0) & (x <= 10)
        returned = covered[:, 1] & (vx >= 0) & (x >= 780)
        bounced = hit | returned
        offset = np.where(hit, above[:, 0], above[:, 1])
        vy = np.where(bounced, _SPEED * (2 * offset / _PADDLE - 1), vy)
        vx = np.where(bounced, -vx, vx)
        after = np.column_stack([tops, ball, vx, vy])
        return after, hit.astype(np.float64), (x < 0) | (x > 790)


class PongEnv(DynamicsEnv):
    """Pong against a perfect opponent, registered as ``lrl/Pong-v0``."""

    def __init__(self) -> None:
        super().__init__(Pong())


OUTER = ((0, 0), (0, 20), (20, 20), (20, 8.5), (11.5, 8.5), (11.5, 0))
"""Corners of the outer wall of the L-shaped corridor of Navigation, in metres."""
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
"""Segments on which episodes start, each with the same probability."""
ANGLES = np.array([-90.0, -45.0, 0.0, 45.0, 90.0]) / 180 * np.pi
"""Directions of the five distances in radians, from left to right."""
_RAY, _NOISE, _COLLISION = 30.0, 0.02, 0.4
_DISTANCE, _TURN = np.array([0.2, 0.04, 0.04]), np.array([0.0, 0.2, -0.2])
_REWARD = np.array([5.0, -0.5, -0.5])


def _walls(axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the position on an axis and both ends of all walls at right angles to it, each ``(wall,)``."""
    sides = [side for corners in (OUTER, INNER) for side in zip(corners, corners[1:] + corners[:1], strict=True)]
    crossing = [side for side in sides if side[0][axis] == side[1][axis]]
    ends = np.array([sorted((a[1 - axis], b[1 - axis])) for a, b in crossing])
    return np.array([a[axis] for a, _ in crossing], dtype=np.float64), ends[:, 0], ends[:, 1]


_WALLS = (_walls(0), _walls(1))


def distances(places: np.ndarray, headings: np.ndarray) -> np.ndarray:
    """Return the distances to the nearest wall in five directions, ``(copy, 5)``.

    Args:
        places: positions ``(copy, 2)``.
        headings: angles from the +y axis, clockwise, ``(copy,)``.
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
    """Point robot in a corridor that observes five distances, with noise in its motion and its observations.

    The transitions are those of the first track of ProPS. States are float64 ``(copy, 8)``: position, heading and the
    last observation. Action 0 moves forward, 1 turns right and 2 turns left. The reward is 5 for a move forward and
    -0.5 for a turn. An observed distance below 0.4 m is a collision: the reward is -200, and the episode terminates.
    """

    noise_size = 7

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(ANGLES),), np.float64)
        self.action_space = spaces.Discrete(3)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a position on a centre line and a heading."""
        begin, end = np.array(CENTRE_LINES[rng.integers(len(CENTRE_LINES))])
        place = begin + rng.random() * (end - begin)
        heading = rng.uniform(-np.pi, np.pi)
        seen = distances(place[None], np.array([heading]))[0] + _NOISE * rng.standard_normal(len(ANGLES))
        return np.concatenate([place, [heading], seen])

    def noise(self, rng: np.random.Generator, steps: int) -> np.ndarray:
        """Sample normal noise of the distance, the turn and the five observations."""
        return _NOISE * rng.standard_normal((steps, self.noise_size))

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the five distances, which include noise."""
        return states[:, 3:]

    def step(self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> Transition:
        """Move, then turn; as in the original, a negative distance also moves forward."""
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
    """Robot in an L-shaped corridor, registered as ``lrl/Navigation-v0``."""

    def __init__(self) -> None:
        super().__init__(Navigation())


# Entry points of `gymnasium.make_vec`.
MazeVectorEnv = partial(DynamicsVectorEnv, maze())
NimVectorEnv = partial(DynamicsVectorEnv, nim())
PongVectorEnv = partial(DynamicsVectorEnv, Pong())
NavigationVectorEnv = partial(DynamicsVectorEnv, Navigation())

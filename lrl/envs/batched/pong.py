"""Pong on a field of 800 x 600 pixels, with the transitions of ProPS (arXiv:2511.21928)."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from lrl.envs.batched.dynamics import Dynamics, DynamicsEnv, DynamicsVectorEnv

_SPEED, _PADDLE, _LOWEST = 5.0, 80.0, 520.0
_MOVES = np.array([-_SPEED, _SPEED, 0.0])


class Pong(Dynamics):
    """Implements Pong against an opponent that never misses; y grows downwards.

    States are float64 ``(copy, 6)``: the tops of the left paddle, which is the agent's, and of the right one, the
    position of the ball and its velocity. Observations are float32 ``(copy, 5)``: the centre of the agent's paddle,
    and position and velocity of the ball. Actions: 0 up, 1 down, 2 nothing. Reward 1 for each hit of the agent's, of
    which 1000 steps allow three; the episode ends when the ball leaves the field.
    """

    def __init__(self) -> None:
        low, high = np.array([40, -5, -5, -5, -5]), np.array([560, 795, 595, 5, 5])
        self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        self.action_space = spaces.Discrete(3)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Serve from the middle, to either side at any angle."""
        return np.array([260.0, 260.0, 400.0, 300.0, rng.choice([-_SPEED, _SPEED]), rng.uniform(-_SPEED, _SPEED)])

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return what the agent sees; it does not see the opponent."""
        seen = states[:, 1:].astype(np.float32)
        seen[:, 0] = states[:, 0] + _PADDLE / 2
        return seen

    def step(
        self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Move both paddles, then the ball, which bounces off walls and paddles."""
        tops, ball, velocity = states[:, :2], states[:, 2:4], states[:, 4:]
        chased = np.where(tops[:, 1] + _PADDLE / 2 < ball[:, 1], _SPEED, -_SPEED)
        tops = np.minimum(np.maximum(tops + np.stack([_MOVES[actions], chased], axis=1), 0), _LOWEST)
        ball = ball + velocity
        (x, y), (vx, vy) = ball.T, velocity.T
        vy = np.where((y <= 0) | (y >= 590), -vy, vy)
        above = y[:, None] - tops  # how far below the top of each paddle the ball is
        covered = (above >= 0) & (above <= _PADDLE)
        hit = covered[:, 0] & (vx < 0) & (x <= 10)
        returned = covered[:, 1] & (vx >= 0) & (x >= 780)
        bounced = hit | returned
        at = np.where(hit, above[:, 0], above[:, 1])
        vy = np.where(bounced, _SPEED * (2 * at / _PADDLE - 1), vy)
        vx = np.where(bounced, -vx, vx)
        after = np.column_stack([tops, ball, vx, vy])
        return after, hit.astype(np.float64), (x < 0) | (x > 790)


class PongEnv(DynamicsEnv):
    """Pong, registered as ``lrl/Pong-v0``."""

    def __init__(self) -> None:
        super().__init__(Pong())


class PongVectorEnv(DynamicsVectorEnv):
    """Many copies of Pong.

    Args:
        num_envs: Number of copies.
        max_episode_steps: Number of steps after which an episode is truncated.
    """

    def __init__(self, num_envs: int = 1, max_episode_steps: int | None = None) -> None:
        super().__init__(Pong(), num_envs, max_episode_steps)

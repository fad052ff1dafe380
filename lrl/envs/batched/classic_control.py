"""Gymnasium's CartPole and mountain cars for many copies at once, which play the episodes of Gymnasium's own.

Gymnasium's vectorised CartPole samples all copies from one generator, so that an episode depends on what is beside it;
the mountain cars have no vectorised implementation.
"""

from __future__ import annotations

import math

import numpy as np
from gymnasium import spaces

from lrl.envs.batched.dynamics import Dynamics

_TAU, _GRAVITY, _FORCE = 0.02, 9.8, 10.0
_POLE_MASS, _MASS, _LENGTH = 0.1, 1.1, 0.5
_POLE_MOMENT = _POLE_MASS * _LENGTH
_LIMITS = np.array([2.4, 12 * 2 * math.pi / 360])


class CartPole(Dynamics):
    """Implements ``CartPole-v1``; states are float64 ``(copy, 4)`` and observations their float32."""

    def __init__(self) -> None:
        high = np.array([_LIMITS[0] * 2, np.inf, _LIMITS[1] * 2, np.inf], dtype=np.float32)
        self.observation_space, self.action_space = spaces.Box(-high, high, dtype=np.float32), spaces.Discrete(2)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample all four numbers in [-.05, .05)."""
        return rng.uniform(-0.05, 0.05, 4)

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states as float32."""
        return states.astype(np.float32)

    def step(
        self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Integrate by Euler's method; reward 1 per step."""
        theta, speed = states[:, 2], states[:, 3]
        cos, sin = np.cos(theta), np.sin(theta)
        pushed = (np.where(actions == 1, _FORCE, -_FORCE) + _POLE_MOMENT * np.square(speed) * sin) / _MASS
        turn = (_GRAVITY * sin - cos * pushed) / (_LENGTH * (4.0 / 3.0 - _POLE_MASS * np.square(cos) / _MASS))
        derivative = np.empty_like(states)
        derivative[:, ::2] = states[:, 1::2]
        derivative[:, 1] = pushed - _POLE_MOMENT * turn * cos / _MASS
        derivative[:, 3] = turn
        states = states + _TAU * derivative
        return states, np.ones(len(states)), np.any(np.abs(states[:, ::2]) > _LIMITS, axis=1)


class MountainCar(Dynamics):
    """Implements ``MountainCar-v0``; states are float64 ``(copy, 2)`` and observations their float32."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = _car_space(), spaces.Discrete(3)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a position in [-.6, -.4) at rest."""
        return np.array([rng.uniform(-0.6, -0.4), 0.0])

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states as float32."""
        return states.astype(np.float32)

    def step(
        self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Push the car; reward -1 per step, until position .5."""
        position, velocity = states.T
        velocity = velocity + ((actions - 1) * 0.001 + np.cos(3 * position) * -0.0025)
        states = _moved(position, np.minimum(np.maximum(velocity, -0.07), 0.07))
        return states, np.full(len(states), -1.0), (states[:, 0] >= 0.5) & (states[:, 1] >= 0)


class MountainCarContinuous(Dynamics):
    """Implements ``MountainCarContinuous-v0``; states and observations are float32 ``(copy, 2)``.

    Gymnasium computes the first step of an episode in float64; here the start is rounded to float32 as well.
    """

    def __init__(self) -> None:
        self.observation_space = _car_space()
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a position in [-.6, -.4) at rest."""
        return np.array([rng.uniform(-0.6, -0.4), 0.0], dtype=np.float32)

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states."""
        return states

    def step(
        self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Push the car; reward 100 at position .45, minus a tenth of the squared action."""
        position, velocity = states.T
        action = actions[:, 0]
        force = np.minimum(np.maximum(action, np.float32(-1)), np.float32(1))
        slope = (0.0025 * np.cos((3 * position).astype(np.float64))).astype(np.float32)
        velocity = velocity + (force * np.float32(0.0015) - slope)
        states = _moved(position, np.minimum(np.maximum(velocity, np.float32(-0.07)), np.float32(0.07)))
        arrived = (states[:, 0] >= np.float32(0.45)) & (states[:, 1] >= 0)
        return states, 100.0 * arrived - 0.1 * np.square(action.astype(np.float64)), arrived


def _car_space() -> spaces.Box:
    return spaces.Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32), dtype=np.float32)


def _moved(position: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    """Return the states of cars after a step with some velocity; the left wall stops them."""
    low, high = position.dtype.type(-1.2), position.dtype.type(0.6)
    position = np.minimum(np.maximum(position + velocity, low), high)
    return np.stack([position, np.where((position == low) & (velocity < 0), 0, velocity)], axis=1)

"""Environments with transitions in NumPy for many copies at once: tables, CartPole and the mountain cars.

Each :class:`Dynamics` serves as a :class:`gymnasium.Env` and as a :class:`gymnasium.vector.VectorEnv`. Each copy has
its own random number generator, so that its episodes depend on its seed only, not on the other copies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from lrl.envs.processes import reset_arguments
from lrl.envs.tabular import TransitionTable

_BLOCK = 64
"""Number of steps whose random numbers are sampled at once for a copy."""


Transition = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Next states ``(copy, ...)``, rewards, float64 ``(copy,)``, and whether the episodes terminate, bool ``(copy,)``."""


class Dynamics(ABC):
    """Abstract base class of the transitions of independent copies; each copy is a row of the arrays."""

    observation_space: gym.Space
    """Observation space of one copy."""
    action_space: gym.Space
    """Action space of one copy."""
    noise_size: int = 0
    """Number of random numbers that a copy uses in each step."""

    @abstractmethod
    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample the initial state of one copy.

        Returns:
            The state, ``(...)``; all states have the same shape and type.
        """

    def noise(self, rng: np.random.Generator, steps: int) -> np.ndarray:
        """Sample random numbers for the next steps of one copy, ``(steps, noise_size)``, uniform by default."""
        return rng.random((steps, self.noise_size))

    @abstractmethod
    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the observations ``(copy, ...)`` in states ``(copy, ...)``."""

    @abstractmethod
    def step(self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> Transition:
        """Take one step in each copy.

        Args:
            states: states ``(copy, ...)``, which are not modified.
            actions: actions ``(copy, ...)``.
            noise: random numbers ``(copy, noise_size)``.
        """


class DynamicsEnv(gym.Env):
    """Single environment with given transitions.

    Args:
        dynamics: transitions of the environment.
    """

    metadata = {"render_modes": []}

    def __init__(self, dynamics: Dynamics) -> None:
        self.dynamics = dynamics
        self.observation_space, self.action_space = dynamics.observation_space, dynamics.action_space
        self._states = np.zeros((1, 0))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; options are ignored."""
        super().reset(seed=seed)
        self._states = self.dynamics.start(self.np_random)[None]
        return self.dynamics.observe(self._states)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step.

        Raises:
            ValueError: If the action is illegal.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"action is {action!r}; it must be in {self.action_space}.")
        noise = self.dynamics.noise(self.np_random, 1)
        self._states, rewards, terminated = self.dynamics.step(self._states, np.asarray(action)[None], noise)
        return self.dynamics.observe(self._states)[0], float(rewards[0]), bool(terminated[0]), False, {}


class DynamicsVectorEnv(VectorEnv):
    """Vectorized environment with given transitions, without autoreset.

    Copies whose episode has ended may be stepped together with the others; their results must be ignored.

    Args:
        dynamics: transitions of the environment.
        num_envs: number of copies.
        max_episode_steps: number of steps after which an episode is truncated; None for no limit.

    Attributes:
        name: name of the environment in error messages.
        steps_ended_copies: True, because copies may be stepped after the end of their episode.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}
    steps_ended_copies = True

    def __init__(self, dynamics: Dynamics, num_envs: int = 1, max_episode_steps: int | None = None) -> None:
        self.dynamics, self.num_envs, self.name = dynamics, num_envs, type(dynamics).__name__
        self.single_observation_space, self.single_action_space = dynamics.observation_space, dynamics.action_space
        self.observation_space = batch_space(dynamics.observation_space, num_envs)
        self.action_space = batch_space(dynamics.action_space, num_envs)
        self._limit = np.inf if max_episode_steps is None else max_episode_steps
        self._rngs = [seeding.np_random()[0] for _ in range(num_envs)]
        self._states = np.stack([dynamics.start(rng) for rng in self._rngs])
        self._noise = np.zeros((num_envs, _BLOCK, dynamics.noise_size))
        self._steps, self._rows = np.zeros(num_envs, dtype=np.int64), np.arange(num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episodes and return the observations of all copies.

        Args:
            seed: seed of each copy, or the seed of the first copy, which increases by 1 from copy to copy; None keeps
                the current random number generators.
            options: ``reset_mask``, bool ``(copy,)``, selects the copies to reset; by default all of them.
        """
        mask, seeds = reset_arguments(self.num_envs, seed, options)
        self._states = self._states.copy()
        for row in np.flatnonzero(mask):
            if seeds[row] is not None:
                self._rngs[row] = seeding.np_random(seeds[row])[0]
            self._states[row] = self.dynamics.start(self._rngs[row])
        self._steps = np.where(mask, 0, self._steps)
        return self.dynamics.observe(self._states), {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step in each copy."""
        self._states, rewards, terminated = self.dynamics.step(self._states, np.asarray(actions), self._next_noise())
        self._steps = self._steps + 1
        truncated = (self._steps >= self._limit) & ~terminated
        return self.dynamics.observe(self._states), rewards, terminated, truncated, {}

    def _next_noise(self) -> np.ndarray:
        """Return the random numbers of the next step of each copy, ``(copy, noise_size)``."""
        if not self.dynamics.noise_size:
            return self._noise[:, 0]
        position = self._steps % _BLOCK
        for row in np.flatnonzero(position == 0):
            self._noise[row] = self.dynamics.noise(self._rngs[row], _BLOCK)
        return self._noise[self._rows, position]


class TableDynamics(Dynamics):
    """Dynamics of a transition table; states are int64 ``(copy,)`` and equal the observations.

    A copy uses one uniform number for its initial state and one for each step, like Gymnasium's environments with a
    table, so that both play the same episodes with the same seeds.

    Args:
        table: transition table.
        initial: probability of each initial state, ``(state,)``.
        first_action: number of the first action.
    """

    noise_size = 1

    def __init__(self, table: TransitionTable, initial: np.ndarray, first_action: int = 0) -> None:
        self.table = table
        self.observation_space = spaces.Discrete(table.num_states)
        self.action_space = spaces.Discrete(table.num_actions, start=first_action)
        self._initial, self._first_action = np.cumsum(initial), first_action
        self._cumulated = np.cumsum(table.probability, axis=-1)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a state from the initial distribution."""
        return np.asarray((self._initial > rng.random()).argmax(), dtype=np.int64)

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states."""
        return states

    def step(self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> Transition:
        """Sample the outcome of each action."""
        actions = actions - self._first_action
        outcome = (self._cumulated[states, actions] > noise).argmax(1)
        picked = (states, actions, outcome)
        return self.table.next_state[picked], self.table.reward[picked], self.table.terminated[picked]


# Gymnasium's CartPole and mountain cars. Gymnasium's own vectorized CartPole samples all copies from one generator, so
# that an episode depends on the other copies, and it has no vectorized mountain cars.

_TAU, _GRAVITY, _FORCE = 0.02, 9.8, 10.0
_POLE_MASS, _MASS, _LENGTH = 0.1, 1.1, 0.5
_POLE_MOMENT = _POLE_MASS * _LENGTH
_LIMITS = np.array([2.4, 12 * 2 * math.pi / 360])


class CartPole(Dynamics):
    """Dynamics of ``CartPole-v1``; states are float64 ``(copy, 4)``, and observations are the states as float32."""

    def __init__(self) -> None:
        high = np.array([_LIMITS[0] * 2, np.inf, _LIMITS[1] * 2, np.inf], dtype=np.float32)
        self.observation_space, self.action_space = spaces.Box(-high, high, dtype=np.float32), spaces.Discrete(2)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample all four numbers from [-0.05, 0.05)."""
        return rng.uniform(-0.05, 0.05, 4)

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states as float32."""
        return states.astype(np.float32)

    def step(self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> Transition:
        """Integrate by Euler's method; the reward of each step is 1."""
        theta, speed = states[:, 2], states[:, 3]
        cos, sin = np.cos(theta), np.sin(theta)
        # As in Gymnasium: pushed is its `temp`, angular is its `thetaacc`.
        pushed = (np.where(actions == 1, _FORCE, -_FORCE) + _POLE_MOMENT * np.square(speed) * sin) / _MASS
        angular = (_GRAVITY * sin - cos * pushed) / (_LENGTH * (4.0 / 3.0 - _POLE_MASS * np.square(cos) / _MASS))
        derivative = np.empty_like(states)
        derivative[:, ::2] = states[:, 1::2]
        derivative[:, 1] = pushed - _POLE_MOMENT * angular * cos / _MASS
        derivative[:, 3] = angular
        states = states + _TAU * derivative
        return states, np.ones(len(states)), np.any(np.abs(states[:, ::2]) > _LIMITS, axis=1)


class MountainCar(Dynamics):
    """Dynamics of ``MountainCar-v0``; states are float64 ``(copy, 2)``, and observations are the states as float32."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = _car_space(), spaces.Discrete(3)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a position from [-0.6, -0.4) with velocity 0."""
        return np.array([rng.uniform(-0.6, -0.4), 0.0])

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states as float32."""
        return states.astype(np.float32)

    def step(self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> Transition:
        """Push the car; the reward of each step is -1, and the episode terminates at position 0.5."""
        position, velocity = states.T
        velocity = velocity + ((actions - 1) * 0.001 + np.cos(3 * position) * -0.0025)
        states = _moved(position, np.minimum(np.maximum(velocity, -0.07), 0.07))
        return states, np.full(len(states), -1.0), (states[:, 0] >= 0.5) & (states[:, 1] >= 0)


class MountainCarContinuous(Dynamics):
    """Dynamics of ``MountainCarContinuous-v0``; states and observations are float32 ``(copy, 2)``.

    Gymnasium computes the first step of an episode in float64; here the initial state is rounded to float32 as well.
    """

    def __init__(self) -> None:
        self.observation_space = _car_space()
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a position from [-0.6, -0.4) with velocity 0."""
        return np.array([rng.uniform(-0.6, -0.4), 0.0], dtype=np.float32)

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states."""
        return states

    def step(self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray) -> Transition:
        """Push the car; the reward is 100 at position 0.45, minus a tenth of the squared action."""
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
    """Return the states of cars that move at a velocity; the left wall stops them."""
    low, high = position.dtype.type(-1.2), position.dtype.type(0.6)
    position = np.minimum(np.maximum(position + velocity, low), high)
    return np.stack([position, np.where((position == low) & (velocity < 0), 0, velocity)], axis=1)

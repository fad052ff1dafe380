"""Environments whose transitions are written for many copies at once, in NumPy.

One implementation serves as a :class:`gymnasium.Env` and as a :class:`gymnasium.vector.VectorEnv`. With equal seeds
both play the same episode, whatever copies are beside it: each copy has a random number generator of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from lrl.envs.separate import reset_arguments

_BLOCK = 64
"""Number of steps for which the random numbers of a copy are sampled together."""


class Dynamics(ABC):
    """Abstract base class of transitions of independent copies; each copy is a row of the arrays."""

    observation_space: gym.Space
    """Observation space of one copy."""
    action_space: gym.Space
    """Action space of one copy."""
    noise_size: int = 0
    """Number of random numbers that a copy needs for a step."""

    @abstractmethod
    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample the initial state of one copy.

        Returns:
            An array of the shape and type of all states of a copy, ``(...)``.
        """

    def noise(self, rng: np.random.Generator, steps: int) -> np.ndarray:
        """Sample the random numbers of the next steps of one copy, ``(steps, noise_size)``; by default uniform."""
        return rng.random((steps, self.noise_size))

    @abstractmethod
    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the observations ``(copy, ...)`` in states ``(copy, ...)``."""

    @abstractmethod
    def step(
        self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take one step in each copy.

        Args:
            states: ``(copy, ...)``; not modified.
            actions: ``(copy, ...)``.
            noise: ``(copy, noise_size)``.

        Returns:
            The next states ``(copy, ...)``, rewards, float64 ``(copy,)``, and whether the episode terminates, bool
            ``(copy,)``.
        """


class DynamicsEnv(gym.Env):
    """One copy of an environment.

    Args:
        dynamics: Its transitions.
    """

    metadata = {"render_modes": []}

    def __init__(self, dynamics: Dynamics) -> None:
        self.dynamics = dynamics
        self.observation_space, self.action_space = dynamics.observation_space, dynamics.action_space
        self._states = np.zeros((1, 0))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; there are no options."""
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
    """Many copies of an environment without autoreset.

    Copies whose episode has ended may be stepped together with the others; what they return has no meaning.

    Args:
        dynamics: The transitions.
        num_envs: Number of copies.
        max_episode_steps: Number of steps after which an episode is truncated; None for no limit.

    Attributes:
        name: Name of the environment, for error messages.
        steps_ended_copies: True: copies need not be reset before the next step, see above.
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
        """Begin episodes and return the observations of all copies.

        Args:
            seed: One for each copy, or the first of successive ones; None continues with the current random numbers.
            options: ``reset_mask``, bool ``(copy,)``, selects the copies; by default all of them.
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

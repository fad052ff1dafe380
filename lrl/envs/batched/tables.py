"""Environments with a transition table for many copies at once."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from lrl.envs.batched.dynamics import Dynamics
from lrl.envs.tabular import TransitionTable


class TableDynamics(Dynamics):
    """Implements any transition table; states are int64 ``(copy,)``, and observed as they are.

    A copy uses one uniform number for its start and one for each step, as Gymnasium's environments with a table do, so
    equal seeds play equal episodes.

    Args:
        table: The transitions.
        initial: Probability of each state at the start, ``(state,)``.
        first_action: Number of the first action.
    """

    noise_size = 1

    def __init__(self, table: TransitionTable, initial: np.ndarray, first_action: int = 0) -> None:
        self.table = table
        self.observation_space = spaces.Discrete(table.num_states)
        self.action_space = spaces.Discrete(table.num_actions, start=first_action)
        self._initial, self._first_action = np.cumsum(initial), first_action
        self._cumulated = np.cumsum(table.probability, axis=-1)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a state of the initial distribution."""
        return np.asarray((self._initial > rng.random()).argmax(), dtype=np.int64)

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Return the states."""
        return states

    def step(
        self, states: np.ndarray, actions: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sample an outcome of each action."""
        actions = actions - self._first_action
        outcome = (self._cumulated[states, actions] > noise).argmax(1)
        picked = (states, actions, outcome)
        return self.table.next_state[picked], self.table.reward[picked], self.table.terminated[picked]

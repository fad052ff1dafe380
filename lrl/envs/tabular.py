"""Environments with a transition table: their best values, and what a policy achieves in them, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np


@dataclass(frozen=True, kw_only=True)
class TransitionTable:
    """What follows each action in each state. All arrays are ``(state, action, outcome)``."""

    next_state: np.ndarray
    """int64."""
    probability: np.ndarray
    """float64; 0 where an action has fewer outcomes than others."""
    reward: np.ndarray
    """float64."""
    terminated: np.ndarray
    """bool: the outcome ends the episode."""

    @classmethod
    def of(cls, transitions: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]) -> TransitionTable:
        """Read a ``P`` as Gymnasium's toy-text environments have it."""
        width = max(len(outcomes) for actions in transitions.values() for outcomes in actions.values())
        nothing = [(0.0, 0, 0.0, True)]
        padded = [
            [list(outcomes) + nothing * (width - len(outcomes)) for outcomes in actions.values()]
            for actions in transitions.values()
        ]
        cells = np.array(padded, dtype=np.float64)
        probability, next_state, reward, terminated = np.moveaxis(cells, -1, 0)
        return cls(
            next_state=next_state.astype(np.int64),
            probability=probability,
            reward=reward,
            terminated=terminated.astype(bool),
        )

    @property
    def num_states(self) -> int:
        """Number of states, ends included."""
        return self.next_state.shape[0]

    @property
    def num_actions(self) -> int:
        """Number of actions."""
        return self.next_state.shape[1]

    @property
    def dynamics(self) -> tuple[np.ndarray, np.ndarray]:
        """Expected reward ``(state, action)``, and probability of going on in each state ``(state, action, state)``."""
        going_on = np.zeros((self.num_states, self.num_actions, self.num_states))
        state, action, _ = np.indices(self.next_state.shape)
        np.add.at(going_on, (state, action, self.next_state), self.probability * ~self.terminated)
        return (self.probability * self.reward).sum(-1), going_on


def optimal_q(tables: Sequence[TransitionTable], gamma: float = 0.99, tolerance: float = 1e-10) -> np.ndarray:
    """Q-values of the best policies, by value iteration on all tables at once.

    Args:
        tables: of one shape.
        gamma: discount per step.
        tolerance: stop when no state's value changes by more.

    Returns:
        float64 ``(table, state, action)``; rows of states that end the episode are 0.
    """
    rewards, going_on = (np.stack(parts) for parts in zip(*(table.dynamics for table in tables), strict=True))
    shape = rewards.shape
    discounted = gamma * going_on.reshape(shape[0], -1, shape[1])
    values = np.zeros(shape[:2])
    while True:
        q = rewards + (discounted @ values[..., None]).reshape(shape)
        previous, values = values, q.max(-1)
        if np.abs(values - previous).max() <= tolerance:
            return q


def success_probability(table: TransitionTable, policy: np.ndarray, steps: int = 100, start: int = 0) -> float:
    """Probability that a stationary policy earns a positive reward within ``steps``, without sampling.

    The distribution over states is propagated through the table. Meant for environments that pay once, at the goal.

    Args:
        table: the environment.
        policy: probability of each action ``(state, action)``, or the action of each state, integer ``(state,)``.
        steps: the time limit.
        start: where episodes begin.
    """
    probabilities = np.eye(table.num_actions)[policy] if policy.ndim == 1 else policy
    _, going_on = table.dynamics
    paid = (table.probability * (table.reward > 0)).sum(-1)
    state, success = np.eye(table.num_states)[start], 0.0
    for _ in range(steps):
        chosen = state[:, None] * probabilities
        success += float((chosen * paid).sum())
        state = np.einsum("sa,san->n", chosen, going_on)
    return success


def greedy_success(table: TransitionTable, steps: int = 100, start: int = 0, gamma: float = 0.99) -> float:
    """Success within ``steps`` of the policy that value iteration finds; ties go to the first action.

    It knows no clock and discounts, so it stays a little below :func:`optimal_success` (slippery 4x4: .7402).
    """
    return success_probability(table, optimal_q([table], gamma)[0].argmax(-1), steps, start)


def optimal_success(table: TransitionTable, steps: int = 100, start: int = 0) -> float:
    """The highest success within ``steps`` that any policy reaches, one that watches the clock included.

    By dynamic programming backwards from the time limit (slippery 4x4: .7442).
    """
    _, going_on = table.dynamics
    paid = (table.probability * (table.reward > 0)).sum(-1)
    values = np.zeros(table.num_states)
    for _ in range(steps):
        values = (paid + going_on @ values).max(-1)
    return float(values[start])


def reachable_states(table: TransitionTable, start: int = 0) -> list[int]:
    """States in which some policy that begins at ``start`` acts, ascending; ends of episodes are not among them."""
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        going_on = table.next_state[state][(table.probability[state] > 0) & ~table.terminated[state]]
        fresh = set(going_on.tolist()) - found
        found |= fresh
        frontier += fresh
    return sorted(found)


def q_learning(
    env: gym.Env[Any, Any],
    num_episodes: int = 50_000,
    seed: int = 0,
    *,
    learning_rate: float = 0.1,
    gamma: float = 0.99,
    epsilon_decay: float = 0.995,
    min_epsilon: float = 0.01,
) -> np.ndarray:
    """Q-values by tabular Q-learning, with the settings of the original experiment.

    Where all actions look the same, the choice is random: taking the first one would never leave the start on dry ice.

    Args:
        env: discrete observations and actions.
        num_episodes: episodes to learn from.
        seed: of the environment and of the exploration.
        learning_rate: step size of each update.
        gamma: discount per step.
        epsilon_decay: factor on the rate of random actions, which starts at 1, after each episode.
        min_epsilon: where the decay ends.

    Returns:
        float64 ``(state, action)``.
    """
    shape = (int(env.observation_space.n), int(env.action_space.n))  # pyright: ignore[reportAttributeAccessIssue]
    q, rng, epsilon = np.zeros(shape), np.random.default_rng(seed), 1.0
    for episode in range(num_episodes):
        state, _ = env.reset(seed=seed if episode == 0 else None)
        ended = False
        while not ended:
            explores = rng.random() < epsilon or q[state].max() == q[state].min()
            action = int(rng.integers(shape[1])) if explores else int(q[state].argmax())
            after, reward, terminated, truncated, _ = env.step(action)
            target = float(reward) + (0.0 if terminated else gamma * q[after].max())
            q[state, action] += learning_rate * (target - q[state, action])
            state, ended = after, terminated or truncated
        epsilon = max(min_epsilon, epsilon * epsilon_decay)
    return q

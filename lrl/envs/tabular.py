"""Environments with a transition table: optimal values and exact success probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TransitionTable:
    """Holds the outcomes of each action in each state. All arrays have shape ``(state, action, outcome)``."""

    next_state: np.ndarray
    """Next state, int64."""
    probability: np.ndarray
    """Probability of the outcome, float64; 0 for padding of actions with fewer outcomes."""
    reward: np.ndarray
    """Reward, float64."""
    terminated: np.ndarray
    """Whether the outcome ends the episode, bool."""

    @classmethod
    def from_gymnasium(
        cls, transitions: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
    ) -> TransitionTable:
        """Convert the attribute ``P`` of Gymnasium's toy-text environments."""
        num_outcomes = max(len(outcomes) for actions in transitions.values() for outcomes in actions.values())
        padding = [(0.0, 0, 0.0, True)]
        padded = [
            [list(outcomes) + padding * (num_outcomes - len(outcomes)) for outcomes in actions.values()]
            for actions in transitions.values()
        ]
        probability, next_state, reward, terminated = np.moveaxis(np.array(padded, dtype=np.float64), -1, 0)
        return cls(
            next_state=next_state.astype(np.int64),
            probability=probability,
            reward=reward,
            terminated=terminated.astype(bool),
        )

    @property
    def num_states(self) -> int:
        """Number of states, including terminal ones."""
        return self.next_state.shape[0]

    @property
    def num_actions(self) -> int:
        """Number of actions."""
        return self.next_state.shape[1]

    @property
    def dynamics(self) -> tuple[np.ndarray, np.ndarray]:
        """Expected rewards and transition probabilities.

        The rewards are float64 ``(state, action)``. The probabilities are those of transitions that do not end the
        episode, float64 ``(state, action, next state)``.
        """
        transitions = np.zeros((self.num_states, self.num_actions, self.num_states))
        state, action, _ = np.indices(self.next_state.shape)
        np.add.at(transitions, (state, action, self.next_state), self.probability * ~self.terminated)
        return (self.probability * self.reward).sum(-1), transitions

    @property
    def goal_probability(self) -> np.ndarray:
        """Probability of a positive reward, float64 ``(state, action)``."""
        return (self.probability * (self.reward > 0)).sum(-1)


def optimal_q(tables: Sequence[TransitionTable], gamma: float = 0.99, tolerance: float = 1e-10) -> np.ndarray:
    """Compute the Q-values of optimal policies by value iteration on all tables at once.

    Args:
        tables: transition tables of the same shape.
        gamma: discount factor.
        tolerance: the iteration stops when no state's value changes by more.

    Returns:
        Q-values, float64 ``(table, state, action)``; 0 in terminal states.
    """
    rewards, transitions = (np.stack(arrays) for arrays in zip(*(table.dynamics for table in tables), strict=True))
    shape = rewards.shape
    discounted = gamma * transitions.reshape(shape[0], -1, shape[1])
    values = np.zeros(shape[:2])
    while True:
        q = rewards + (discounted @ values[..., None]).reshape(shape)
        previous, values = values, q.max(-1)
        if np.abs(values - previous).max() <= tolerance:
            return q


def policy_values(
    table: TransitionTable, policy: np.ndarray, steps: int = 100, gamma: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the exact values of a stationary policy at each turn of an episode with a time limit.

    Args:
        table: the transition table.
        policy: action probabilities, ``(state, action)``.
        steps: time limit in steps, after which there are no rewards.
        gamma: discount factor.

    Returns:
        Q-values, float64 ``(turn, state, action)``, and values, float64 ``(turn, state)``.
    """
    rewards, transitions = table.dynamics
    q, values = np.zeros((steps, *rewards.shape)), np.zeros((steps, len(rewards)))
    after = np.zeros(len(rewards))
    for turn in reversed(range(steps)):
        q[turn] = rewards + gamma * transitions @ after
        after = values[turn] = (policy * q[turn]).sum(-1)
    return q, values


def success_probability(table: TransitionTable, policy: np.ndarray, steps: int = 100, start: int = 0) -> float:
    """Compute the probability that a stationary policy receives a positive reward, without sampling.

    The distribution over states is propagated through the table. The result is exact for environments that give a
    positive reward only at the end of an episode.

    Args:
        table: the transition table.
        policy: action probabilities, ``(state, action)``, or one action per state, integer ``(state,)``.
        steps: time limit in steps.
        start: initial state.
    """
    probabilities = np.eye(table.num_actions)[policy] if policy.ndim == 1 else policy
    _, transitions = table.dynamics
    goal, state, success = table.goal_probability, np.eye(table.num_states)[start], 0.0
    for _ in range(steps):
        state_action = state[:, None] * probabilities
        success += float((state_action * goal).sum())
        state = np.einsum("sa,san->n", state_action, transitions)
    return success


def optimal_success(table: TransitionTable, steps: int = 100, start: int = 0) -> float:
    """Compute the highest success probability of any policy, including policies that know the remaining time.

    It is computed by dynamic programming backwards from the time limit. On the slippery 4x4 map it is 0.7442.

    Args:
        table: the transition table.
        steps: time limit in steps.
        start: initial state.
    """
    _, transitions = table.dynamics
    goal = table.goal_probability
    values = np.zeros(table.num_states)
    for _ in range(steps):
        values = (goal + transitions @ values).max(-1)
    return float(values[start])


def reachable_states(table: TransitionTable, start: int = 0) -> list[int]:
    """Return the non-terminal states that some policy can reach from ``start``, in ascending order."""
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        successors = table.next_state[state][(table.probability[state] > 0) & ~table.terminated[state]]
        new = set(successors.tolist()) - found
        found |= new
        frontier += new
    return sorted(found)

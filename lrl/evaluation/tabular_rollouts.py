"""Rollouts of a known policy on FrozenLake, with the exact value before each token and the exact advantage of each.

No network takes part: actions and transitions are sampled from tables, so thousands of episodes take a second.

A turn has one token, or three that stand in for a text: one that names two of the four actions, one that chooses among
these two, and an end token, on which nothing depends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lrl.envs.tabular import TransitionTable, policy_values
from lrl.evaluation.exact import Lake
from lrl.types import Rollout

TOKENS = (1, 3)
"""Possible numbers of tokens of a turn."""


@dataclass(frozen=True, kw_only=True)
class ExactRollout:
    """Holds a rollout whose values are exact, and the exact advantages of its tokens."""

    rollout: Rollout
    """Whole episodes, one for each environment, float64, without inputs."""
    advantages: Tensor
    """``Q(prefix and token) - V(prefix)`` for the policy that played, given the turns that are left, float64
    ``(time, env, token)``; 0 where masked."""
    choice: Tensor
    """int64 ``(time, env, token)``: the same number for the same token after the same prefix in the same state."""


def sample_rollout(
    lake: Lake, policy: np.ndarray, num_groups: int, group_size: int, *, tokens: int = 1, gamma: float = 1.0, seed: int
) -> ExactRollout:
    """Play groups of whole episodes, all from the start.

    Args:
        lake: the map.
        policy: action probabilities ``(state, action)``, all positive.
        num_groups: number of groups.
        group_size: episodes per group.
        tokens: tokens per turn, see :data:`TOKENS`.
        gamma: discount per turn of values and advantages.
        seed: of actions and transitions.

    Raises:
        ValueError: another number of tokens.
    """
    if tokens not in TOKENS:
        raise ValueError(f"tokens is {tokens}; it must be one of {', '.join(map(str, TOKENS))}.")
    played = _play(lake, policy, num_groups * group_size, np.random.default_rng(seed))
    path = _values_of_prefixes(lake.table, policy, lake.steps, gamma, tokens)
    turn = np.arange(len(played["active"]))[:, None]
    values = path[turn, played["state"], played["action"]] * played["active"][..., None]
    tensors = {name: torch.from_numpy(column) for name, column in played.items() if name != "action"}
    before = torch.from_numpy(values[..., :-1])
    rollout = Rollout(
        inputs={},
        response_mask=tensors["active"][..., None].expand_as(before),
        logprobs=torch.zeros_like(before),
        turn=torch.from_numpy(turn * played["active"]),
        group=torch.arange(num_groups).repeat_interleave(group_size),
        observations=[],
        responses=[],
        metrics={},
        values=before,
        final_values=torch.zeros_like(tensors["rewards"]),
        **tensors,
    )
    position, action = np.arange(tokens), played["action"][..., None]
    prefix = action // 2 * (position == 0) + action * (position > 0) if tokens > 1 else action
    choice = (played["state"][..., None] * lake.table.num_actions + prefix) * tokens + position
    advantages = torch.from_numpy(np.diff(values, axis=-1))
    return ExactRollout(rollout=rollout, advantages=advantages, choice=torch.from_numpy(choice))


def _play(lake: Lake, policy: np.ndarray, episodes: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return what happened at each turn of each episode, arrays ``(time, env)`` by name."""
    table, state, active = lake.table, np.full(episodes, lake.start), np.ones(episodes, dtype=bool)
    of_actions, of_outcomes = policy.cumsum(-1), table.probability.cumsum(-1)
    turns: list[dict[str, np.ndarray]] = []
    while active.any() and len(turns) < lake.steps:
        action = _sample(of_actions[state], rng)
        at = state, action, _sample(of_outcomes[state, action], rng)
        ended = active & table.terminated[at]
        cut = active & ~ended & (len(turns) + 1 == lake.steps)
        turns.append(
            {
                "state": state * active,
                "action": action,
                "rewards": table.reward[at] * active,
                "terminated": ended,
                "truncated": cut,
                "active": active,
            }
        )
        state, active = table.next_state[at], active & ~ended & ~cut
    return {name: np.stack([turn[name] for turn in turns]) for name in turns[0]}


def _sample(cumulative: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return one index per row of cumulative probabilities ``(row, index)``."""
    return (rng.random(len(cumulative))[:, None] * cumulative[:, -1:] >= cumulative).sum(-1)


def _values_of_prefixes(
    table: TransitionTable, policy: np.ndarray, steps: int, gamma: float, tokens: int
) -> np.ndarray:
    """Return the exact values before each token of a turn and after its last, by the action that the turn chooses.

    Returns:
        float64 ``(turn, state, action, token + 1)``.
    """
    q, values = policy_values(table, policy, steps, gamma)
    state_values = np.broadcast_to(values[..., None], q.shape)
    if tokens == 1:
        return np.stack([state_values, q], axis=-1)
    pairs = (*q.shape[:-1], 2, 2)
    probability = np.broadcast_to(policy, q.shape).reshape(pairs)
    first = (probability * q.reshape(pairs)).sum(-1) / probability.sum(-1)
    return np.stack([state_values, first.repeat(2, axis=-1), q, q], axis=-1)

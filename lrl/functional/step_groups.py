"""Advantages of single turns without a critic: turns of a group in the same state, or at the same time, are compared.

All tensors lie on the grid of a rollout, ``(time, env)``, on which each environment plays one whole episode: its turns
are ``active`` from the first row on until the episode ends; what stands below is ignored. Nothing follows an episode
that is truncated. Environments with equal numbers in ``group``, ``(env,)``, started from the same state; turns of one
group with equal numbers in ``state`` form a *step group*.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lrl.functional.advantages import gae, group_advantages

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks."""


def step_groups(state: Tensor, group: Tensor, active: Tensor) -> Tensor:
    """Number the step groups: turns of one group of episodes before which the same state was observed.

    Args:
        state: int64 ``(time, env)``; equal numbers stand for the same observation.
        group: int64 ``(env,)``.
        active: bool ``(time, env)``.

    Returns:
        int64 ``(time, env)``, consecutive from 0 on; -1 where inactive.
    """
    out = torch.full_like(state, -1)
    pairs = torch.stack([group.expand_as(state)[active], state[active]], dim=-1)
    out[active] = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return out


def discounted_returns(rewards: Tensor, active: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each turn to the end of its episode, ``(time, env)``; 0 where inactive.

    Args:
        rewards: float ``(time, env)``.
        active: bool ``(time, env)``.
        gamma: discount per turn.
    """
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for time in reversed(range(len(rewards))):
        returns[time] = following = (rewards[time] + gamma * following) * active[time]
    return returns


def step_advantages(
    rewards: Tensor,
    state: Tensor,
    group: Tensor,
    active: Tensor,
    *,
    gamma: float,
    scale: str = "group_std",
    leave_one_out: bool = False,
    reduce: Reduce | None = None,
) -> Tensor:
    """Compare the turns of each step group by the discounted return from there: GiGPO's step advantage.

    ``A_t = (R_t - mean(R of its step group)) / scale`` with ``R_t = sum_k gamma^k r_{t+k}``, arXiv:2505.10978, section
    4.3. A turn whose state no other turn of the group observed gets 0, and so does a step group that agrees.

    Args:
        rewards: float ``(time, env)``.
        state: int64 ``(time, env)``.
        group: int64 ``(env,)``.
        active: bool ``(time, env)``.
        gamma: discount per turn.
        scale: ``group_std`` (of the step group), ``batch_std`` (of the returns from all turns) or ``none``.
        leave_one_out: whether the baseline of a turn is the mean of the *other* turns of its step group.
        reduce: None is for one rank.

    Returns:
        float ``(time, env)``, 0 where inactive.
    """
    index, out = step_groups(state, group, active)[active], torch.zeros_like(rewards)
    returns = discounted_returns(rewards, active, gamma)[active]
    advantages = group_advantages(returns, index, scale, reduce=reduce)
    if leave_one_out:
        count = torch.bincount(index)[index].to(returns.dtype)
        advantages = advantages * count / (count - 1).clamp(min=1)
    out[active] = advantages
    return out


def turn_numbers(active: Tensor) -> Tensor:
    """Return the number of each turn in its episode, int64 ``(time, env)``, to compare turns of equal numbers.

    With these in place of states, :func:`step_advantages` has a baseline that depends on time: the
    mean over the episodes of a group that are still going, 0 where only one is left. It suits episodes of similar
    length that are rewarded at every step. Turns are counted, not env steps: an invalid response uses up one.

    Args:
        active: bool ``(time, env)``.
    """
    return torch.arange(len(active), device=active.device)[:, None].expand_as(active)


def grouped_values(returns: Tensor, state: Tensor, group: Tensor, active: Tensor) -> Tensor:
    """Return the mean return of each turn's step group, which stands for the value of the state before it.

    Args:
        returns: float ``(time, env)``, from each turn on.
        state: int64 ``(time, env)``.
        group: int64 ``(env,)``.
        active: bool ``(time, env)``.

    Returns:
        float ``(time, env)``, 0 where inactive.
    """
    index, out = step_groups(state, group, active)[active], torch.zeros_like(returns)
    count = torch.bincount(index).to(returns.dtype)
    total = torch.zeros_like(count).index_add(0, index, returns[active])
    out[active] = (total / count)[index]
    return out


def grouped_gae(
    rewards: Tensor,
    state: Tensor,
    group: Tensor,
    active: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    scale: str = "group_std",
    reduce: Reduce | None = None,
) -> Tensor:
    """Estimate advantages by GAE with the mean returns of step groups as values, as GAGPO does (arXiv:2605.13217).

    ``V(s)`` is the mean discounted return of the group's turns in ``s`` (:func:`grouped_values`), advantages follow by
    :func:`~lrl.functional.advantages.gae`, and are centred and scaled over all turns of their group of episodes. A turn
    whose state no other turn observed is its own baseline: the value before it is the return that followed.

    The paper's text was not at hand when this was written, only its abstract and summaries by others. They state the
    exact matching of states, the grouped value in place of a critic, temporal differences with GAE's recursion, and
    that advantages are normalised by group; over which turns of a group, and that values are plain means, is assumed.
    Its ratio of whole responses is no part of this.

    Args:
        rewards: float ``(time, env)``.
        state: int64 ``(time, env)``.
        group: int64 ``(env,)``.
        active: bool ``(time, env)``.
        terminated: bool ``(time, env)``.
        gamma: discount per turn.
        gae_lambda: per turn; 0 trusts the grouped values, 1 compares returns.
        scale: ``group_std`` (of the turns of a group), ``batch_std`` (of all turns) or ``none``.
        reduce: None is for one rank.

    Returns:
        float ``(time, env)``, 0 where inactive.
    """
    values = grouped_values(discounted_returns(rewards, active, gamma), state, group, active)
    ends = (torch.zeros_like(values), terminated, active & ~terminated & _is_last_turn(active))
    advantages, _ = gae(rewards, values, *ends, gamma=gamma, gae_lambda=gae_lambda)
    out = torch.zeros_like(rewards)
    out[active] = group_advantages(advantages[active], group.expand_as(state)[active], scale, reduce=reduce)
    return out


def shared_states(state: Tensor, group: Tensor, active: Tensor) -> Tensor:
    """Return which active turns have a state that another turn of their group observed too, bool ``(active turn,)``.

    Args:
        state: int64 ``(time, env)``.
        group: int64 ``(env,)``.
        active: bool ``(time, env)``.
    """
    index = step_groups(state, group, active)[active]
    return torch.bincount(index)[index] > 1


def _is_last_turn(active: Tensor) -> Tensor:
    """Return where the last turn of each environment is, bool ``(time, env)``."""
    return active & ~torch.cat([active[1:], torch.zeros_like(active[:1])])

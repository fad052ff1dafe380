"""Estimators of advantages without a critic, which compare the episodes or the turns of a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lrl.functional.advantages import Reduce, lambda_returns, variance


def group_advantages(returns: Tensor, group: Tensor, scale: str = "group_std", reduce: Reduce | None = None) -> Tensor:
    """Return the advantages of episodes over the mean of their group, as in GRPO.

    ``A_i = (R_i - mean(R of its group)) / scale``, arXiv:2402.03300 section 4.1.2. If all returns of a group are equal,
    its advantages are exactly 0. RLOO (arXiv:2402.14740, eq. 8) subtracts the mean of the *other* episodes instead;
    its advantages are ``n / (n - 1)`` times the unscaled ones, for a group of ``n`` episodes.

    Args:
        returns: float ``(episode,)``.
        group: int64 ``(episode,)``; equal numbers form a group.
        scale: divisor: ``group_std`` (standard deviation of the group, GRPO), ``batch_std`` (standard deviation of all
            episodes), or ``none`` (no division, Dr. GRPO, arXiv:2503.20783).
        reduce: sums a tensor over ranks, for ``batch_std``; every rank must have whole groups. None if ``returns``
            contains the episodes of all ranks.

    Returns:
        Advantages, float ``(episode,)``.
    """
    _, index = torch.unique(group, return_inverse=True)
    count = torch.bincount(index).to(returns.dtype)
    mean = torch.zeros_like(count).index_add(0, index, returns) / count
    centred = returns - mean[index]
    squares = torch.zeros_like(count).index_add(0, index, centred.square())
    if scale == "none":
        return centred
    if scale == "batch_std":
        std = _std(returns, reduce)
    else:
        assert scale == "group_std"
        std = (squares / (count - 1).clamp(min=1)).sqrt()[index]
    all_equal = squares[index] <= (1e-6 * returns.abs().clamp(min=1)).square()
    return torch.where(all_equal, torch.zeros_like(centred), centred / (std + 1e-4))


def _std(values: Tensor, reduce: Reduce | None) -> Tensor:
    """Return the sample standard deviation of values ``(n,)`` over all ranks; 0 for a single value."""
    if reduce is None:
        return values.std(correction=1) if len(values) > 1 else torch.zeros_like(values)
    count = reduce(values.new_tensor(float(len(values)), dtype=torch.float64))
    return (variance(values, reduce) * count / (count - 1).clamp(min=1)).sqrt().to(values.dtype)


class GroupedTurns(NamedTuple):
    """Holds the turns of groups of episodes; each environment has played one whole episode.

    ``active`` marks the turns of an episode, which begin at the first row; other cells are ignored. The turns of one
    group with the same number in ``state`` form a *step group*.
    """

    rewards: Tensor
    """float ``(time, env)``."""
    state: Tensor
    """An integer for the state before each turn, the same for equal observations, int64 ``(time, env)``."""
    group: Tensor
    """Number of the group of each environment; its episodes start from the same state, int64 ``(env,)``."""
    active: Tensor
    """Whether a turn was taken, bool ``(time, env)``."""


def step_groups(turns: GroupedTurns) -> Tensor:
    """Return the number of each active turn's step group, int64 ``(active turn,)``, consecutive from 0."""
    active = turns.active
    pairs = torch.stack([turns.group.expand_as(turns.state)[active], turns.state[active]], dim=-1)
    return torch.unique(pairs, dim=0, return_inverse=True)[1]


def discounted_returns(turns: GroupedTurns, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each turn to the end of its episode, ``(time, env)``; 0 if inactive.

    Args:
        turns: turns of whole episodes; ``state`` and ``group`` are not used.
        gamma: discount per turn.
    """
    rewards = turns.rewards
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for time in reversed(range(len(rewards))):
        returns[time] = following = (rewards[time] + gamma * following) * turns.active[time]
    return returns


def step_advantages(
    turns: GroupedTurns, *, gamma: float, scale: str = "group_std", reduce: Reduce | None = None
) -> Tensor:
    """Return the advantage of each turn over the mean of its step group: the step advantage of GiGPO.

    ``A_t = (R_t - mean(R of its step group)) / scale`` with the discounted return ``R_t = sum_k gamma^k r_{t+k}``
    (arXiv:2505.10978, section 4.3). The advantage is 0 if no other turn of the group has the same state, or if all
    returns of the step group are equal.

    Args:
        turns: turns of whole episodes.
        gamma: discount per turn.
        scale: divisor: ``group_std`` (standard deviation of the step group), ``batch_std`` (of all turns) or ``none``.
        reduce: sums a tensor over ranks, for ``batch_std``; None if there is one rank.

    Returns:
        Advantages, float ``(time, env)``, 0 where inactive.
    """
    index, out = step_groups(turns), torch.zeros_like(turns.rewards)
    returns = discounted_returns(turns, gamma)[turns.active]
    out[turns.active] = group_advantages(returns, index, scale, reduce)
    return out


def turn_numbers(active: Tensor) -> Tensor:
    """Return the index of each turn in its episode, int64 ``(time, env)``.

    If these indices are used as ``GroupedTurns.state``, :func:`step_advantages` compares a turn with the turns of the
    group at the same time. This suits episodes of similar length with a reward at every step. A turn with an invalid
    response counts, although it is not a step of the environment.

    Args:
        active: bool ``(time, env)``.
    """
    return torch.arange(len(active), device=active.device)[:, None].expand_as(active)


def grouped_values(returns: Tensor, turns: GroupedTurns) -> Tensor:
    """Return the mean return of each turn's step group, an estimate of the value of the state before it.

    Args:
        returns: sum of rewards from each turn to the end of its episode, float ``(time, env)``.
        turns: turns of whole episodes; ``rewards`` are not used.

    Returns:
        Values, float ``(time, env)``, 0 where inactive.
    """
    index, out = step_groups(turns), torch.zeros_like(returns)
    count = torch.bincount(index).to(returns.dtype)
    total = torch.zeros_like(count).index_add(0, index, returns[turns.active])
    out[turns.active] = (total / count)[index]
    return out


def grouped_gae(
    turns: GroupedTurns,
    terminated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    scale: str = "group_std",
    reduce: Reduce | None = None,
) -> Tensor:
    """Estimate advantages by GAE with the mean returns of step groups as values, as in GAGPO (arXiv:2605.13217).

    ``V(s)`` is the mean discounted return of the group's turns in ``s`` (:func:`grouped_values`); for a state that
    occurs only once, it is the return of that turn. The advantages are then centred and scaled over all turns of their
    group of episodes.

    The implementation follows the paper's abstract and summaries by others; the full text was not available. According
    to them, states are matched exactly, the grouped value replaces a critic in GAE, and advantages are normalised per
    group. Two details are assumptions: the normalisation of a group covers all its turns, and values are unweighted
    means. The paper's ratio of whole responses is not implemented.

    Args:
        turns: turns of whole episodes.
        terminated: whether the episode terminated with the turn, bool ``(time, env)``.
        gamma: discount per turn.
        gae_lambda: GAE coefficient per turn; 0 gives one-step targets from the grouped values, 1 uses whole returns.
        scale: divisor: ``group_std`` (standard deviation over the turns of a group), ``batch_std`` (over all turns) or
            ``none``.
        reduce: sums a tensor over ranks, for ``batch_std``; None if there is one rank.

    Returns:
        Advantages, float ``(time, env)``, 0 where inactive.
    """
    rewards, state, group, active = turns
    values = grouped_values(discounted_returns(turns, gamma), turns)
    is_last_turn = active & ~torch.cat([active[1:], torch.zeros_like(active[:1])])
    final_values, cut = torch.zeros_like(values), is_last_turn & ~terminated  # truncation adds no value
    returns = lambda_returns(rewards, values, final_values, terminated, cut, gamma=gamma, gae_lambda=gae_lambda)
    advantages = returns - values
    out = torch.zeros_like(rewards)
    out[active] = group_advantages(advantages[active], group.expand_as(state)[active], scale, reduce)
    return out


def shared_states(turns: GroupedTurns) -> Tensor:
    """Return whether another turn of the same group has the same state, bool ``(active turn,)``."""
    index = step_groups(turns)
    return torch.bincount(index)[index] > 1

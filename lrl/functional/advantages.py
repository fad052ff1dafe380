"""Estimators of advantages: GAE over turns and tokens, and comparisons within groups of episodes.

Tensors lie on the grid of a rollout, with axes ``(time, env)`` for turns and ``(time, env, token)`` for their tokens.
Consecutive rows of a column are consecutive turns of one environment. Two masks mark where an episode ends. Nothing
follows a turn that is ``terminated``. A turn that is ``cut`` was truncated, or is the environment's last turn in this
rollout; the value of the state after it (``final_values``) replaces the rewards that would follow.

With one token per turn, :func:`gae`, :func:`nested_gae` and :func:`token_gae` agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks; all ranks must call it."""


class Discounts(NamedTuple):
    """Holds the discount factors and the GAE coefficients per turn and per token."""

    gamma: float
    """Discount per turn."""
    gae_lambda: float
    """GAE coefficient per turn; 0 relies on the value function, 1 on the rewards."""
    token_gamma: float = 1.0
    """Discount per token inside a turn."""
    token_lambda: float = 1.0
    """GAE coefficient per token inside a turn."""


class TurnGrid(NamedTuple):
    """Holds the rewards and values of a rollout, from which advantages are estimated."""

    rewards: Tensor
    """Rewards of the turns, float ``(time, env)``."""
    token_rewards: Tensor
    """Rewards of single tokens, such as a KL penalty, float ``(time, env, token)``; 0 where masked."""
    values: Tensor
    """Values of the states before each token, float ``(time, env, token)``."""
    mask: Tensor
    """Sampled tokens, which come first in each turn, bool ``(time, env, token)``."""
    final_values: Tensor
    """Values of the states after turns that are cut, float ``(time, env)``."""
    terminated: Tensor
    """Whether the episode terminated with the turn, bool ``(time, env)``."""
    cut: Tensor
    """Whether the episode was truncated or continues after the rollout, bool ``(time, env)``."""


def gae(
    grid: TurnGrid, discounts: Discounts, *, bootstrap_last: bool = False, local_penalties: bool = False
) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of turns by generalised advantage estimation (arXiv:1506.02438, eq. 16).

    ``R_t = r_t + gamma ((1 - gae_lambda) V_{t+1} + gae_lambda R_{t+1})`` and ``A_t = R_t - V_t``, which equals the
    paper's discounted sum of temporal-difference errors. ``V_t`` is the value before the first token of turn ``t``.

    Args:
        grid: rewards and values; token rewards are not read.
        discounts: those per turn are used.
        bootstrap_last: whether ``V_{t+1}`` is the value before the last token of the next turn instead of its first.
        local_penalties: whether a negative reward counts for its own turn only, not for the turns before.

    Returns:
        Advantages and lambda returns, each float ``(time, env)``.
    """
    rewards, values = grid.rewards, grid.values[..., 0]
    next_values = _values_before_last_token(grid.values, grid.mask) if bootstrap_last else values
    returns = torch.zeros_like(rewards)
    next_value = next_return = torch.zeros_like(rewards[0])
    for time in reversed(range(len(rewards))):
        value = torch.where(grid.cut[time], grid.final_values[time], next_value)
        target = torch.where(grid.cut[time], grid.final_values[time], next_return)
        mixed = (1 - discounts.gae_lambda) * value + discounts.gae_lambda * target
        future = discounts.gamma * mixed * ~grid.terminated[time]
        returns[time] = rewards[time] + future
        passed_on = rewards[time].clamp(min=0) if local_penalties else rewards[time]
        next_value, next_return = next_values[time], passed_on + future
    return returns - values, returns


def nested_gae(
    grid: TurnGrid, discounts: Discounts, *, bootstrap_last: bool = False, local_penalties: bool = False
) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of tokens by GAE over turns, then by GAE inside each turn.

    The lambda return of a turn (:func:`gae`) is the reward of its last token, after which no value follows.

    Args:
        grid: rewards and values.
        discounts: per turn and per token.
        bootstrap_last: see :func:`gae`.
        local_penalties: see :func:`gae`.

    Returns:
        Advantages and returns, each float ``(time, env, token)``, 0 where masked.
    """
    _, returns = gae(grid, discounts, bootstrap_last=bootstrap_last, local_penalties=local_penalties)
    return _gae_inside_turns(returns, grid, discounts)


def bandit(grid: TurnGrid, discounts: Discounts) -> tuple[Tensor, Tensor]:
    """Estimate advantages as if each turn were a contextual bandit whose reward is that of the episode's last turn.

    Otherwise the estimator is that of :func:`nested_gae`.

    Args:
        grid: rewards and values; every episode must end in the rollout.
        discounts: those per token are used.

    Returns:
        Advantages and returns, each float ``(time, env, token)``, 0 where masked.
    """
    ended = grid.terminated | grid.cut
    returns, last = torch.zeros_like(grid.rewards), torch.zeros_like(grid.rewards[0])
    for time in reversed(range(len(grid.rewards))):
        returns[time] = last = torch.where(ended[time], grid.rewards[time], last)
    return _gae_inside_turns(returns, grid, discounts)


def token_gae(grid: TurnGrid, discounts: Discounts) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of tokens by GAE over the sequence of all tokens of an episode.

    The discounts per token apply between tokens of one turn, the discounts per turn between the last token of a turn
    and the first token of the next. The reward of a turn is received at its last token.

    Args:
        grid: rewards and values.
        discounts: per turn and per token.

    Returns:
        Advantages and returns, each float ``(time, env, token)``, 0 where masked.
    """
    gamma, gae_lambda, token_gamma, token_lambda = discounts
    values = grid.values
    rewards = grid.token_rewards + grid.rewards[..., None] * _is_last_token(grid.mask)
    advantages = torch.zeros_like(values)
    first_value = first_advantage = torch.zeros_like(grid.final_values[0])
    for time in reversed(range(len(rewards))):
        cut, goes_on = grid.cut[time], ~grid.terminated[time]
        value = gamma * torch.where(cut, grid.final_values[time], first_value) * goes_on
        carry = gamma * gae_lambda * torch.where(cut, 0.0, first_advantage) * goes_on
        for token in reversed(range(values.shape[-1])):
            sampled, own = grid.mask[time, :, token], values[time, :, token]
            advantage = torch.where(sampled, rewards[time, :, token] + value - own + carry, 0.0)
            advantages[time, :, token] = advantage
            value = torch.where(sampled, token_gamma * own, value)
            carry = torch.where(sampled, token_gamma * token_lambda * advantage, carry)
        first_value, first_advantage = values[time, :, 0], advantages[time, :, 0]
    return advantages, (advantages + values) * grid.mask


def _gae_inside_turns(turn_returns: Tensor, grid: TurnGrid, discounts: Discounts) -> tuple[Tensor, Tensor]:
    """Estimate advantages inside each turn, whose last token is rewarded by ``turn_returns`` ``(time, env)``."""
    mask, values = grid.mask, grid.values
    rewards = grid.token_rewards + turn_returns[..., None] * _is_last_token(mask)
    advantages = torch.zeros_like(values)
    carry = next_value = torch.zeros_like(turn_returns)
    for token in reversed(range(values.shape[-1])):
        sampled, own = mask[..., token], values[..., token]
        delta = rewards[..., token] + discounts.token_gamma * next_value - own
        carry = (delta + discounts.token_gamma * discounts.token_lambda * carry) * sampled
        advantages[..., token] = carry
        next_value = own * sampled
    return advantages, (advantages + values) * mask


def _is_last_token(mask: Tensor) -> Tensor:
    """Return whether each token is the last sampled one of its turn, bool with the shape of ``mask``."""
    following = torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], dim=-1)
    return mask & ~following


def _values_before_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """Return the value before the last sampled token of each turn, ``(time, env)``."""
    last = mask.sum(-1, keepdim=True).clamp(min=1) - 1
    return values.gather(-1, last).squeeze(-1)


# Comparisons within groups, which need no critic.


def group_advantages(
    returns: Tensor, group: Tensor, scale: str = "group_std", leave_one_out: bool = False, reduce: Reduce | None = None
) -> Tensor:
    """Compare the return of each episode with those of its group, as in GRPO.

    ``A_i = (R_i - mean(R of its group)) / scale``, arXiv:2402.03300 section 4.1.2. With ``leave_one_out`` the
    baseline is the mean of the *other* members (RLOO, arXiv:2402.14740, eq. 8). If all returns of a group are equal,
    its advantages are exactly 0.

    Args:
        returns: float ``(episode,)``.
        group: int64 ``(episode,)``; equal numbers form a group.
        scale: ``group_std`` (GRPO), ``batch_std`` (standard deviation over all episodes), or ``none`` (Dr. GRPO,
            arXiv:2503.20783).
        leave_one_out: whether the baseline leaves out the episode itself; groups must have at least two members.
        reduce: for ``batch_std`` over ranks that each hold whole groups; None if ``returns`` are those of all ranks.

    Returns:
        float ``(episode,)``.

    Raises:
        ValueError: If ``scale`` is unknown, or a group has one member and ``leave_one_out`` is true.
    """
    _, index = torch.unique(group, return_inverse=True)
    count = torch.bincount(index).to(returns.dtype)
    mean = torch.zeros_like(count).index_add(0, index, returns) / count
    centred = returns - mean[index]
    squares = torch.zeros_like(count).index_add(0, index, centred.square())
    if leave_one_out:
        if bool((count < 2).any()):
            raise ValueError("model.leave_one_out is true, but a group has one episode; data.group_size must be >= 2.")
        centred = centred * (count / (count - 1))[index]
    if scale == "none":
        return centred
    if scale == "batch_std":
        std = _std(returns, reduce)
    elif scale == "group_std":
        std = (squares / (count - 1).clamp(min=1)).sqrt()[index]
    else:
        raise ValueError(f"advantage_scale is {scale!r}; it must be group_std, batch_std or none.")
    all_equal = squares[index] <= (1e-6 * returns.abs().clamp(min=1)).square()
    return torch.where(all_equal, torch.zeros_like(centred), centred / (std + 1e-4))


def _std(values: Tensor, reduce: Reduce | None) -> Tensor:
    """Return the sample standard deviation of values ``(n,)`` over all ranks; 0 for a single value."""
    if reduce is None:
        return values.std(correction=1) if len(values) > 1 else torch.zeros_like(values)
    count = reduce(values.new_tensor(float(len(values)), dtype=torch.float64))
    return (variance(values, reduce) * count / (count - 1).clamp(min=1)).sqrt().to(values.dtype)


class GroupedTurns(NamedTuple):
    """Holds turns that are compared within their group: each environment plays one whole episode.

    The turns of an episode are ``active`` from the first row on; other rows are ignored. Turns of one group with equal
    numbers in ``state`` form a *step group*.
    """

    rewards: Tensor
    """float ``(time, env)``."""
    state: Tensor
    """Number of the state before each turn, equal for equal observations, int64 ``(time, env)``."""
    group: Tensor
    """Number of each environment's group, whose episodes start from the same state, int64 ``(env,)``."""
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
        turns: only rewards and ``active`` are read.
        gamma: discount per turn.
    """
    rewards = turns.rewards
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for time in reversed(range(len(rewards))):
        returns[time] = following = (rewards[time] + gamma * following) * turns.active[time]
    return returns


def step_advantages(
    turns: GroupedTurns,
    *,
    gamma: float,
    scale: str = "group_std",
    leave_one_out: bool = False,
    reduce: Reduce | None = None,
) -> Tensor:
    """Compare the discounted return from each turn with those of its step group: the step advantage of GiGPO.

    ``A_t = (R_t - mean(R of its step group)) / scale`` with ``R_t = sum_k gamma^k r_{t+k}``, arXiv:2505.10978, section
    4.3. The advantage is 0 if no other turn of the group has the same state, or if all returns of a step group are
    equal.

    Args:
        turns: what is compared.
        gamma: discount per turn.
        scale: ``group_std`` (of the step group), ``batch_std`` (of the returns from all turns) or ``none``.
        leave_one_out: whether the baseline of a turn is the mean of the *other* turns of its step group.
        reduce: for ``batch_std`` over ranks; None for one rank.

    Returns:
        float ``(time, env)``, 0 where inactive.
    """
    index, out = step_groups(turns), torch.zeros_like(turns.rewards)
    returns = discounted_returns(turns, gamma)[turns.active]
    advantages = group_advantages(returns, index, scale, reduce=reduce)
    if leave_one_out:
        count = torch.bincount(index)[index].to(returns.dtype)
        advantages = advantages * count / (count - 1).clamp(min=1)
    out[turns.active] = advantages
    return out


def turn_numbers(active: Tensor) -> Tensor:
    """Return the index of each turn in its episode, int64 ``(time, env)``.

    With these in place of states, the baseline of :func:`step_advantages` depends on time: it is the mean over the
    episodes of the group that have not ended. It suits episodes of similar length with a reward at every step. Turns
    are counted, not steps of the environment: a turn with an invalid response counts as well.

    Args:
        active: bool ``(time, env)``.
    """
    return torch.arange(len(active), device=active.device)[:, None].expand_as(active)


def grouped_values(returns: Tensor, turns: GroupedTurns) -> Tensor:
    """Return the mean return of each turn's step group, an estimate of the value of the state before it.

    Args:
        returns: return from each turn on, float ``(time, env)``.
        turns: their states and groups.

    Returns:
        float ``(time, env)``, 0 where inactive.
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

    ``V(s)`` is the mean discounted return of the group's turns in ``s`` (:func:`grouped_values`). The advantages of
    :func:`gae` are centred and scaled over all turns of their group of episodes. If no other turn has the same state,
    the value before a turn is the return that followed.

    This was written from the paper's abstract and from summaries by others, not from its full text. They state that
    states are matched exactly, that the grouped value replaces a critic in the recursion of GAE, and that advantages
    are normalised by group. That a group's normalisation covers all its turns, and that values are unweighted means,
    is an assumption. The paper's ratio of whole responses is not implemented.

    Args:
        turns: what is compared.
        terminated: whether the episode terminated with the turn, bool ``(time, env)``.
        gamma: discount per turn.
        gae_lambda: GAE coefficient; 0 relies on the grouped values, 1 compares returns.
        scale: ``group_std`` (of the turns of a group), ``batch_std`` (of all turns) or ``none``.
        reduce: for ``batch_std`` over ranks; None for one rank.

    Returns:
        float ``(time, env)``, 0 where inactive.
    """
    rewards, state, group, active = turns
    values = grouped_values(discounted_returns(turns, gamma), turns)
    is_last_turn = active & ~torch.cat([active[1:], torch.zeros_like(active[:1])])
    grid = TurnGrid(
        rewards=rewards,
        token_rewards=torch.zeros_like(values)[..., None],
        values=values[..., None],
        mask=active[..., None],
        final_values=torch.zeros_like(values),
        terminated=terminated,
        cut=is_last_turn & ~terminated,
    )
    advantages, _ = gae(grid, Discounts(gamma, gae_lambda))
    out = torch.zeros_like(rewards)
    out[active] = group_advantages(advantages[active], group.expand_as(state)[active], scale, reduce=reduce)
    return out


def shared_states(turns: GroupedTurns) -> Tensor:
    """Return whether another turn of the same group has the same state, bool ``(active turn,)``."""
    index = step_groups(turns)
    return torch.bincount(index)[index] > 1


# Statistics over the sampled tokens of all ranks.


def whiten(advantages: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Scale advantages to mean 0 and standard deviation 1 over the sampled tokens of all ranks.

    Args:
        advantages: float, any shape.
        mask: sampled tokens, bool of the same shape.
        reduce: sums a tensor over ranks; None for one rank.

    Returns:
        float of the same shape, 0 where masked.
    """
    centred, squares, count = _deviations(advantages[mask], reduce)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    out = torch.zeros_like(advantages)
    out[mask] = (centred / (std + 1e-8)).to(out.dtype) if count > 1 else advantages[mask]
    return out


def _deviations(values: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return deviations from the mean over ranks, float64 ``(token,)``, the sum of their squares, and their number."""
    reduce = reduce or (lambda tensor: tensor)
    wide = values.double()
    total, count = reduce(torch.stack([wide.sum(), wide.new_tensor(float(len(wide)))]))
    centred = wide - total / count.clamp(min=1)
    return centred, reduce(centred.square().sum()), count


def variance(values: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return the variance of values over all ranks, float64 ``()``.

    Args:
        values: float ``(token,)``.
        reduce: sums a tensor over ranks; None for one rank.
    """
    _, squares, count = _deviations(values, reduce)
    return squares / count.clamp(min=1)


def explained_variance(values: Tensor, targets: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return ``1 - Var(target - value) / Var(target)``, float64 ``()``; NaN if all targets are equal.

    It is 1 for a perfect critic and 0 for one that predicts the mean.

    Args:
        values: float ``(token,)``.
        targets: float ``(token,)``.
        reduce: sums a tensor over ranks; None for one rank.
    """
    spread, error = variance(targets, reduce), variance(targets - values, reduce)
    return torch.where(spread > 0, 1 - error / spread, torch.nan)

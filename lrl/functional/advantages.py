"""Advantages from rewards: over turns, over tokens, over both, and over groups of episodes.

All tensors but those of :func:`group_advantages` lie on the grid of a rollout, with axes ``(time, env)`` for turns and
``(time, env, token)`` for the tokens of turns. A row of a column follows the row before it. Two masks say where an
episode ends: after a turn that is ``terminated`` nothing follows; a turn that is ``cut`` was truncated, or is the last
of its environment in this rollout, and the value of the state after it (``final_values``) stands for what follows.

With one token per turn, :func:`gae`, :func:`nested_gae` and :func:`token_gae` agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    cut: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    next_values: Tensor | None = None,
    local_penalties: bool = False,
) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of turns by generalised advantage estimation (arXiv:1506.02438, eq. 16).

    ``R_t = r_t + gamma ((1 - gae_lambda) V_{t+1} + gae_lambda R_{t+1})`` and ``A_t = R_t - V_t``, which is the sum of
    discounted temporal-difference errors of the paper.

    Args:
        rewards: float ``(time, env)``.
        values: float ``(time, env)``, of the state before each turn.
        final_values: float ``(time, env)``, of the state after each turn that is cut.
        terminated: bool ``(time, env)``.
        cut: bool ``(time, env)``.
        gamma: discount per turn.
        gae_lambda: per turn; 0 trusts the value function, 1 the rewards.
        next_values: float ``(time, env)``: the value of each turn's state as the turn before sees it; None takes
            ``values``.
        local_penalties: a negative reward counts for its own turn only, not for the turns before.

    Returns:
        Advantages and lambda returns, each float ``(time, env)``.
    """
    next_values = values if next_values is None else next_values
    returns = torch.zeros_like(rewards)
    next_value = next_return = torch.zeros_like(rewards[0])
    for time in reversed(range(len(rewards))):
        value = torch.where(cut[time], final_values[time], next_value)
        target = torch.where(cut[time], final_values[time], next_return)
        future = gamma * ((1 - gae_lambda) * value + gae_lambda * target) * ~terminated[time]
        returns[time] = rewards[time] + future
        passed_on = rewards[time].clamp(min=0) if local_penalties else rewards[time]
        next_value, next_return = next_values[time], passed_on + future
    return returns - values, returns


def nested_gae(
    rewards: Tensor,
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    cut: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    token_gamma: float,
    token_lambda: float,
    next_values: Tensor | None = None,
    local_penalties: bool = False,
) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of tokens by GAE over turns, then inside each turn.

    The lambda return of a turn (:func:`gae`) is the reward of its last token; no value follows that token.

    Args:
        rewards: float ``(time, env)``, of turns.
        token_rewards: float ``(time, env, token)``, of single tokens (a KL penalty); 0 where masked.
        values: float ``(time, env, token)``, of the state before each token.
        mask: bool ``(time, env, token)``: sampled tokens, a prefix of each turn.
        final_values: float ``(time, env)``, of the state after each turn that is cut.
        terminated: bool ``(time, env)``.
        cut: bool ``(time, env)``.
        gamma: discount per turn.
        gae_lambda: per turn.
        token_gamma: discount per token inside a turn.
        token_lambda: per token inside a turn.
        next_values: see :func:`gae`.
        local_penalties: see :func:`gae`.

    Returns:
        Advantages and returns, each float ``(time, env, token)``, 0 where masked.
    """
    ends, discounts = (final_values, terminated, cut), {"gamma": gamma, "gae_lambda": gae_lambda}
    options = {"next_values": next_values, "local_penalties": local_penalties}
    _, returns = gae(rewards, values[..., 0], *ends, **discounts, **options)
    return _inside_turns(returns, token_rewards, values, mask, token_gamma, token_lambda)


def bandit(
    rewards: Tensor,
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    ended: Tensor,
    *,
    token_gamma: float,
    token_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages as if each turn were a contextual bandit that is rewarded by the end of its episode.

    As :func:`nested_gae`, but the reward of a turn's last token is the reward of the episode's last turn.

    Args:
        rewards: float ``(time, env)``, of turns.
        token_rewards: float ``(time, env, token)``, of single tokens; 0 where masked.
        values: float ``(time, env, token)``, of the state before each token.
        mask: bool ``(time, env, token)``: sampled tokens, a prefix of each turn.
        ended: bool ``(time, env)``: the last turn of an episode; every episode must have one.
        token_gamma: discount per token inside a turn.
        token_lambda: per token inside a turn.

    Returns:
        Advantages and returns, each float ``(time, env, token)``, 0 where masked.
    """
    returns, last = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for time in reversed(range(len(rewards))):
        returns[time] = last = torch.where(ended[time], rewards[time], last)
    return _inside_turns(returns, token_rewards, values, mask, token_gamma, token_lambda)


def token_gae(
    rewards: Tensor,
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    cut: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    token_gamma: float,
    token_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of tokens by GAE along one chain of all tokens of an episode.

    From a token to the next of the same turn, discounts are those of tokens; from a turn's last token to the first of
    the next turn, those of turns. A turn's reward belongs to its last token.

    Args:
        rewards: float ``(time, env)``, of turns.
        token_rewards: float ``(time, env, token)``, of single tokens; 0 where masked.
        values: float ``(time, env, token)``, of the state before each token.
        mask: bool ``(time, env, token)``: sampled tokens, a prefix of each turn.
        final_values: float ``(time, env)``, of the state after each turn that is cut.
        terminated: bool ``(time, env)``.
        cut: bool ``(time, env)``.
        gamma: discount per turn.
        gae_lambda: per turn.
        token_gamma: discount per token inside a turn.
        token_lambda: per token inside a turn.

    Returns:
        Advantages and returns, each float ``(time, env, token)``, 0 where masked.
    """
    rewards = token_rewards + rewards[..., None] * _is_last_token(mask)
    advantages = torch.zeros_like(values)
    first_value = first_advantage = torch.zeros_like(final_values[0])
    for time in reversed(range(len(rewards))):
        value = gamma * torch.where(cut[time], final_values[time], first_value) * ~terminated[time]
        carry = gamma * gae_lambda * torch.where(cut[time], 0.0, first_advantage) * ~terminated[time]
        for token in reversed(range(values.shape[-1])):
            sampled, own = mask[time, :, token], values[time, :, token]
            advantage = torch.where(sampled, rewards[time, :, token] + value - own + carry, 0.0)
            advantages[time, :, token] = advantage
            value = torch.where(sampled, token_gamma * own, value)
            carry = torch.where(sampled, token_gamma * token_lambda * advantage, carry)
        first_value, first_advantage = values[time, :, 0], advantages[time, :, 0]
    return advantages, (advantages + values) * mask


def _inside_turns(
    turn_returns: Tensor, token_rewards: Tensor, values: Tensor, mask: Tensor, token_gamma: float, token_lambda: float
) -> tuple[Tensor, Tensor]:
    """GAE over the tokens of each turn, whose last token is rewarded by ``turn_returns`` ``(time, env)``."""
    rewards = token_rewards + turn_returns[..., None] * _is_last_token(mask)
    advantages = torch.zeros_like(values)
    carry = next_value = torch.zeros_like(turn_returns)
    for token in reversed(range(values.shape[-1])):
        sampled, own = mask[..., token], values[..., token]
        delta = rewards[..., token] + token_gamma * next_value - own
        advantages[..., token] = carry = (delta + token_gamma * token_lambda * carry) * sampled
        next_value = own * sampled
    return advantages, (advantages + values) * mask


def _is_last_token(mask: Tensor) -> Tensor:
    """Return where the last sampled token of each turn is, bool in the shape of ``mask``."""
    following = torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], dim=-1)
    return mask & ~following


def value_before_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values before the last sampled token of each turn, ``(time, env)``.

    Args:
        values: float ``(time, env, token)``.
        mask: bool ``(time, env, token)``.
    """
    last = mask.sum(-1, keepdim=True).clamp(min=1) - 1
    return values.gather(-1, last).squeeze(-1)


def group_advantages(
    returns: Tensor,
    group: Tensor,
    scale: str = "group_std",
    leave_one_out: bool = False,
    eps: float = 1e-4,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Advantage of each episode over its group: the critic-free baseline of GRPO.

    ``A_i = (R_i - mean(R of its group)) / scale``, arXiv:2402.03300 section 4.1.2. With ``leave_one_out`` the
    baseline is the mean of the *other* members (RLOO, arXiv:2402.14740, eq. 8). A group that agrees gets exactly 0.

    Args:
        returns: float ``(episode,)``.
        group: int64 ``(episode,)``; equal numbers form a group.
        scale: ``group_std`` (GRPO), ``batch_std`` (standard deviation over all episodes), or ``none`` (Dr. GRPO,
            arXiv:2503.20783).
        leave_one_out: baseline without the episode itself; needs groups of at least two.
        eps: added to the standard deviation.
        reduce: sums a tensor over ranks, where each holds whole groups; None is for the episodes of all ranks.

    Returns:
        float ``(episode,)``.

    Raises:
        ValueError: an unknown scale, or leave-one-out in a group of one.
    """
    _, index = torch.unique(group, return_inverse=True)
    count = torch.bincount(index).to(returns.dtype)
    mean = torch.zeros_like(count).index_add(0, index, returns) / count
    centred = returns - mean[index]
    squares = torch.zeros_like(count).index_add(0, index, centred.square())
    if leave_one_out:
        if bool((count < 2).any()):
            raise ValueError("leave_one_out needs group_size >= 2; there is a group of one episode.")
        centred = centred * (count / (count - 1))[index]
    if scale == "none":
        return centred
    if scale == "batch_std":
        std = _std(returns, reduce)
    elif scale == "group_std":
        std = (squares / (count - 1).clamp(min=1)).sqrt()[index]
    else:
        raise ValueError(f"advantage_scale is {scale!r}; it must be group_std, batch_std or none.")
    agrees = squares[index] <= (1e-6 * returns.abs().clamp(min=1)).square()
    return torch.where(agrees, torch.zeros_like(centred), centred / (std + eps))


def _std(values: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the standard deviation of values ``(n,)``, by n - 1; ``reduce`` sums over ranks. 0 for a single value."""
    if reduce is None:
        return values.std(correction=1) if len(values) > 1 else torch.zeros_like(values)
    count = reduce(values.new_tensor(float(len(values)), dtype=torch.float64))
    return (variance(values, reduce) * count / (count - 1).clamp(min=1)).sqrt().to(values.dtype)


# Advantages of single turns without a critic: turns of a group in the same state, or at the same time, are compared.
#
# All tensors lie on the grid of a rollout, ``(time, env)``, on which each environment plays one whole
# episode: its turns are ``active`` from the first row on until the episode ends; what stands below is
# ignored. Nothing follows an episode that is truncated. Environments with equal numbers in ``group``,
# ``(env,)``, started from the same state; turns of one group with equal numbers in ``state`` form a *step
# group*.

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


# Statistics over the sampled tokens of all ranks.


def whiten(
    advantages: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None = None, eps: float = 1e-8
) -> Tensor:
    """Scale advantages to mean 0 and standard deviation 1 over the sampled tokens of all ranks.

    Args:
        advantages: float ``(turn, token)``, or any other shape.
        mask: bool, the same shape.
        reduce: sums a tensor over ranks; None is for one rank.
        eps: added to the standard deviation.

    Returns:
        float, the same shape, 0 where masked.
    """
    centred, squares, count = _deviations(advantages[mask], reduce)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    out = torch.zeros_like(advantages)
    out[mask] = (centred / (std + eps)).to(out.dtype) if count > 1 else advantages[mask]
    return out


def _deviations(values: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Deviations from the mean over ranks, float64 ``(token,)``; the sum of their squares, and their number."""
    reduce = reduce or (lambda tensor: tensor)
    wide = values.double()
    total, count = reduce(torch.stack([wide.sum(), wide.new_tensor(float(len(wide)))]))
    centred = wide - total / count.clamp(min=1)
    return centred, reduce(centred.square().sum()), count


def variance(values: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the variance of values over all ranks, float64 ``()``.

    Args:
        values: float ``(token,)``.
        reduce: sums a tensor over ranks; None is for one rank.
    """
    _, squares, count = _deviations(values, reduce)
    return squares / count.clamp(min=1)


def explained_variance(values: Tensor, targets: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return ``1 - Var(target - value) / Var(target)``, float64 ``()``; NaN if the targets do not vary.

    1 is a perfect critic, 0 one that predicts the mean.

    Args:
        values: float ``(token,)``.
        targets: float ``(token,)``.
        reduce: sums a tensor over ranks; None is for one rank.
    """
    spread, error = variance(targets, reduce), variance(targets - values, reduce)
    return torch.where(spread > 0, 1 - error / spread, torch.nan)

"""From the rewards of turns to the advantages of tokens: generalised advantage estimation on two levels.

A turn is one decision of an environment; a token is one decision of a language model. With one token per turn all of
``turn``, ``token`` and ``nested`` are plain GAE (arXiv:1506.02438, eq. 16).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lrl.types import Rollout

CREDITS = ("turn", "token", "nested", "bandit")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What was collected: axes ``(time, env)`` and ``(time, env, token)``; each row of a column follows the one before.

    A row that neither ends an episode nor is the column's last active one is followed by the next turn of its episode.
    """

    rewards: Tensor
    """float ``(time, env)``."""
    token_rewards: Tensor
    """float ``(time, env, token)``: paid for single tokens (a KL penalty); 0 where masked."""
    values: Tensor
    """float ``(time, env, token)``: of the state before each token."""
    final_values: Tensor
    """float ``(time, env)``: of the state after a turn that was truncated or is the last of its column."""
    mask: Tensor
    """bool ``(time, env, token)``: sampled tokens, a prefix of each turn."""
    terminated: Tensor
    """bool ``(time, env)``."""
    truncated: Tensor
    """bool ``(time, env)``."""
    active: Tensor
    """bool ``(time, env)``: a turn was taken; a prefix of each column."""


@dataclass(frozen=True, kw_only=True)
class Discounts:
    """How far credit reaches."""

    gamma: float = 0.99
    """Per turn."""
    gae_lambda: float = 0.95
    """Per turn."""
    token_gamma: float = 1.0
    """Per token inside a turn."""
    token_lambda: float = 0.98
    """Per token inside a turn."""
    local_penalties: bool = False
    """Whether a negative reward counts for its own turn only."""
    bootstrap_last: bool = False
    """Whether a turn's successor is valued before its last token, not before its first."""


def assign_credit(how: str, turns: Turns, discounts: Discounts) -> tuple[Tensor, Tensor]:
    """Advantages and value targets ``(time, env, token)``, 0 where masked.

    Args:
        how: ``turn``: all tokens of a turn share ``G_t - V_t``, and every token's value is drawn to ``G_t``;
            ``token``: one chain of all tokens of an episode; ``nested``: ``G_t`` is the reward of the turn's last
            token, GAE inside the turn; ``bandit``: as nested, but ``G_t`` is the reward of the episode's last turn.
        turns: what was collected.
        discounts: how far credit reaches.

    Raises:
        ValueError: an unknown ``how``, or ``bandit`` with episodes that have not ended.
    """
    if how == "token":
        return _chain(turns, discounts)
    if how == "turn":
        local = turns.rewards + turns.token_rewards.sum(-1)
        targets = turn_returns(local, turns, discounts)
        advantages = (targets - turns.values[..., 0])[..., None] * turns.mask
        return advantages, targets[..., None] * turns.mask
    if how == "nested":
        targets = turn_returns(turns.rewards, turns, discounts)
    elif how == "bandit":
        targets = last_rewards(turns)
    else:
        raise ValueError(f"credit is {how!r}; it must be one of {', '.join(CREDITS)}.")
    advantages = token_advantages(targets, turns, discounts)
    return advantages, (advantages + turns.values) * turns.mask


def credit_rollout(
    how: str, rollout: Rollout, values: Tensor, token_rewards: Tensor, discounts: Discounts
) -> tuple[Tensor, Tensor]:
    """:func:`assign_credit` for the turns that were taken: advantages and value targets ``(turn, token)``.

    Args:
        how: see there.
        rollout: of a policy with a critic.
        values: ``(turn, token)`` of the state before each token.
        token_rewards: ``(turn, token)`` paid for single tokens.
        discounts: how far credit reaches.
    """
    assert rollout.final_values is not None
    active, device = rollout.active.to(torch.bool), values.device  # what environments say is on the CPU
    turns = Turns(
        rewards=rollout.rewards.to(device),
        token_rewards=_spread(token_rewards, active),
        values=_spread(values, active),
        final_values=rollout.final_values.to(device),
        mask=rollout.response_mask,
        terminated=rollout.terminated.to(device),
        truncated=rollout.truncated.to(device),
        active=active.to(device),
    )
    advantages, returns = (part[active] for part in assign_credit(how, turns, discounts))
    return advantages, returns


def _spread(values: Tensor, active: Tensor) -> Tensor:
    """``(turn, token)`` back to ``(time, env, token)``, 0 where no turn was taken."""
    out = values.new_zeros(*active.shape, values.shape[-1])
    out[active] = values
    return out


def turn_returns(rewards: Tensor, turns: Turns, discounts: Discounts) -> Tensor:
    """Lambda returns of turns ``(time, env)``.

    ``G_t = r_t + gamma (1 - lambda) V_{t+1} + gamma lambda G'_{t+1}``, where ``G'`` is ``G``, or with
    ``local_penalties`` the same with ``max(0, r_t)``. After a terminal turn both are 0; after a truncated one, and
    after the last of a column, both are the final value.
    """
    gamma, mix = discounts.gamma, discounts.gae_lambda
    following = turns.values[..., 0]
    if discounts.bootstrap_last:
        last = turns.mask.sum(-1, keepdim=True).clamp(min=1) - 1
        following = turns.values.gather(-1, last).squeeze(-1)
    targets = torch.zeros_like(rewards)
    next_value = next_target = torch.zeros_like(rewards[0])
    for time in range(len(rewards) - 1, -1, -1):
        cut = turns.truncated[time] | _is_last(turns, time)
        value = torch.where(cut, turns.final_values[time], next_value)
        target = torch.where(cut, turns.final_values[time], next_target)
        beyond = gamma * ((1 - mix) * value + mix * target) * ~turns.terminated[time]
        targets[time] = (rewards[time] + beyond) * turns.active[time]
        handed_on = rewards[time].clamp(min=0) if discounts.local_penalties else rewards[time]
        next_value, next_target = following[time], handed_on + beyond
    return targets


def last_rewards(turns: Turns) -> Tensor:
    """The reward of the last turn of each turn's episode, ``(time, env)``.

    Raises:
        ValueError: an episode has not ended.
    """
    ends = turns.terminated | turns.truncated
    targets, last = torch.zeros_like(turns.rewards), torch.zeros_like(turns.rewards[0])
    for time in range(len(ends) - 1, -1, -1):
        if bool((_is_last(turns, time) & ~ends[time]).any()):
            raise ValueError("credit is bandit, which needs whole episodes; data.num_steps must be null.")
        last = torch.where(ends[time], turns.rewards[time], last)
        targets[time] = last * turns.active[time]
    return targets


def token_advantages(targets: Tensor, turns: Turns, discounts: Discounts) -> Tensor:
    """GAE inside each turn, ``(time, env, token)``: ``targets`` is paid for the last token, nothing comes after it."""
    rewards = turns.token_rewards + targets[..., None] * _last_token(turns.mask)
    out = torch.zeros_like(turns.values)
    carry = value = torch.zeros_like(targets)
    for token in range(out.shape[-1] - 1, -1, -1):
        mask, own = turns.mask[..., token], turns.values[..., token]
        delta = rewards[..., token] + discounts.token_gamma * value - own
        out[..., token] = carry = (delta + discounts.token_gamma * discounts.token_lambda * carry) * mask
        value = own * mask
    return out


def _chain(turns: Turns, discounts: Discounts) -> tuple[Tensor, Tensor]:
    """Advantages and value targets of all tokens of an episode in one chain, discounted per turn between turns."""
    rewards = turns.token_rewards + turns.rewards[..., None] * _last_token(turns.mask)
    out = torch.zeros_like(turns.values)
    next_value = next_advantage = torch.zeros_like(turns.rewards[0])
    for time in range(len(rewards) - 1, -1, -1):
        cut = turns.truncated[time] | _is_last(turns, time)
        going_on = ~turns.terminated[time] & turns.active[time]
        value = discounts.gamma * torch.where(cut, turns.final_values[time], next_value) * going_on
        carry = discounts.gamma * discounts.gae_lambda * torch.where(cut, 0.0, next_advantage) * going_on
        for token in range(out.shape[-1] - 1, -1, -1):
            mask, own = turns.mask[time, :, token], turns.values[time, :, token]
            advantage = torch.where(mask, rewards[time, :, token] + value - own + carry, 0.0)
            out[time, :, token] = advantage
            inner = discounts.token_gamma
            value = torch.where(mask, inner * own, value)
            carry = torch.where(mask, inner * discounts.token_lambda * advantage, carry)
        next_value, next_advantage = turns.values[time, :, 0], out[time, :, 0]
    return out, (out + turns.values) * turns.mask


def _is_last(turns: Turns, time: int) -> Tensor:
    """Where the column has no further turn, bool ``(env,)``."""
    if time + 1 == len(turns.active):
        return turns.active[time]
    return turns.active[time] & ~turns.active[time + 1]


def _last_token(mask: Tensor) -> Tensor:
    """The last sampled token of each turn, bool as ``mask``."""
    following = torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], dim=-1)
    return mask & ~following


def whiten(
    advantages: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None = None, eps: float = 1e-8
) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over the tokens that count; 0 elsewhere.

    Args:
        advantages: any shape.
        mask: bool, the same shape.
        reduce: sums a tensor over ranks; None takes it as it is.
        eps: added to the standard deviation.
    """
    centred, squares, count = _deviations(advantages[mask], reduce)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    out = torch.zeros_like(advantages)
    out[mask] = (centred / (std + eps)).to(out.dtype) if count > 1 else advantages[mask]
    return out


def _deviations(values: Tensor, reduce: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """From the mean over ranks, float64 as ``values``; the sum of their squares and their number over ranks."""
    reduce = reduce or (lambda tensor: tensor)
    wide = values.double()
    total, count = reduce(torch.stack([wide.sum(), wide.new_tensor(float(len(wide)))]))
    centred = wide - total / count.clamp(min=1)
    return centred, reduce(centred.square().sum()), count


def variance(values: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Mean squared deviation from the mean, a float64 scalar.

    Args:
        values: ``(token,)``.
        reduce: sums a tensor over ranks; None takes it as it is.
    """
    _, squares, count = _deviations(values, reduce)
    return squares / count.clamp(min=1)


def explained_variance(values: Tensor, targets: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """``1 - Var(target - value) / Var(target)``: 1 is a perfect critic, 0 one that knows the mean. NaN for no variance.

    Args:
        values: ``(token,)``.
        targets: ``(token,)``.
        reduce: sums a tensor over ranks; None takes it as it is.
    """
    spread, error = variance(targets, reduce), variance(targets - values, reduce)
    return torch.where(spread > 0, 1 - error / spread, torch.nan)

"""Estimators of advantages with a critic: generalised advantage estimation (GAE) over turns and tokens.

Tensors have the axes ``(time, env)`` for turns and ``(time, env, token)`` for their tokens. Consecutive indices of
``time`` are consecutive turns of an environment. Two bool masks mark where the sum of rewards ends: after a turn that
is ``terminated`` there are no rewards; after a turn that is ``cut``, the value of the next state (``final_values``)
replaces the rewards that follow. A turn is cut if it was truncated, or if it is the environment's last turn in the
rollout and its episode has not ended.

With one token per turn, :func:`turn_gae`, :func:`nested_gae` and :func:`token_gae` are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lrl.ranges import ClosedUnitInterval, LateSettingError, check_fields
from lrl.types import Credit, Rollout

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks; all ranks must call it."""


@dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Configures the estimator of advantages of an algorithm with a critic."""

    kind: Literal["turn", "token", "nested", "bandit"] = "nested"
    """Estimator: :func:`turn_gae`, :func:`token_gae`, :func:`nested_gae` or :func:`bandit`."""
    gamma: ClosedUnitInterval = 0.99
    """Discount per turn; not used by bandit credit."""
    gae_lambda: ClosedUnitInterval = 0.95
    """GAE coefficient (lambda) per turn; 0 gives one-step targets from the value function, 1 sums all rewards. Not
    used by bandit credit."""
    critic_lambda: ClosedUnitInterval | None = None
    """GAE coefficient (lambda) of the targets of the value function, per turn and per token (decoupled GAE,
    arXiv:2503.01491). With 1, a critic learns from its own predictions only where an episode continues after the
    collection. Null uses ``gae_lambda`` and ``token_lambda``."""
    token_gamma: ClosedUnitInterval = 1.0
    """Discount per token inside a turn; not used by turn credit."""
    token_lambda: ClosedUnitInterval = 0.98
    """GAE coefficient (lambda) per token inside a turn; not used by turn credit."""
    local_penalties: bool = False
    """Whether a negative reward affects only the advantage of its own turn, and not those of earlier turns."""
    bootstrap_last: bool = False
    """Whether to bootstrap from the value before the last token of the next turn instead of before its first token."""
    normalise: bool = True
    """Whether to scale advantages to mean 0 and standard deviation 1 over all tokens of a collection."""

    def __post_init__(self) -> None:
        check_fields(self, "model.credit")
        for name in ("local_penalties", "bootstrap_last"):
            if getattr(self, name) and self.kind not in ("turn", "nested"):
                raise ValueError(
                    f"model.credit.{name} is true; it must be false, because {self.kind} credit ignores it."
                )
        if self.critic_lambda is not None and self.kind == "bandit":
            raise ValueError(
                f"model.credit.critic_lambda is {self.critic_lambda}; it must be null, because bandit credit ignores "
                "it."
            )

    def estimate(self, rollout: Rollout, token_rewards: Tensor | None = None, reduce: Reduce | None = None) -> Credit:
        """Estimate the advantages of a rollout's tokens, and the targets of the value function.

        Args:
            rollout: a rollout with values.
            token_rewards: additional rewards of single tokens, such as a KL penalty, ``(time, env, token)``, 0 where
                masked; None adds none.
            reduce: sums a tensor over ranks; None if there is one rank.

        Raises:
            ValueError: If ``kind`` is ``bandit`` and an episode does not end in the rollout.
        """
        estimators = {"turn": turn_gae, "token": token_gae, "nested": nested_gae, "bandit": bandit}
        values, mask = rollout.values, rollout.response_mask
        assert values is not None
        token_rewards = torch.zeros_like(values) if token_rewards is None else token_rewards
        advantages, returns = estimators[self.kind](rollout, token_rewards, self)
        if self.critic_lambda is not None:
            critic = replace(self, gae_lambda=self.critic_lambda, token_lambda=self.critic_lambda)
            returns = estimators[self.kind](rollout, token_rewards, critic)[1]
        metrics = {
            "train/explained_variance": explained_variance(values[mask], returns[mask], reduce),
            "train/advantage_std": variance(advantages[mask], reduce).sqrt(),
        }
        if self.normalise:
            advantages = whiten(advantages, mask, reduce)
        return Credit(advantages=advantages, returns=returns, metrics=metrics)


def turn_gae(rollout: Rollout, token_rewards: Tensor, credit: CreditConfig) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE over turns; all tokens of a turn have the advantage of the turn.

    The reward of a turn is that of the environment plus the sum of its ``token_rewards``. The value of a turn is the
    value before its first token.

    Args:
        rollout: a rollout with values.
        token_rewards: additional rewards of single tokens, such as a KL penalty, ``(time, env, token)``; 0 where
            masked.
        credit: discounts per turn.

    Returns:
        Advantages, and targets of the value function, each float ``(time, env, token)``, 0 where masked.
    """
    assert rollout.values is not None
    returns = _turn_returns(rollout, rollout.rewards + token_rewards.sum(-1), credit)
    advantages = returns - rollout.values[..., 0]
    return advantages[..., None] * rollout.response_mask, returns[..., None] * rollout.response_mask


def nested_gae(rollout: Rollout, token_rewards: Tensor, credit: CreditConfig) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of tokens by GAE over turns, then by GAE inside each turn.

    Inside a turn, the reward of the last token is the lambda return of the turn, and no value is added after it.

    Args:
        rollout: a rollout with values.
        token_rewards: see :func:`turn_gae`.
        credit: discounts per turn and per token.

    Returns:
        Advantages, and targets of the value function, each float ``(time, env, token)``, 0 where masked.
    """
    return _gae_inside_turns(_turn_returns(rollout, rollout.rewards, credit), rollout, token_rewards, credit)


def bandit(rollout: Rollout, token_rewards: Tensor, credit: CreditConfig) -> tuple[Tensor, Tensor]:
    """Estimate advantages as in a contextual bandit: the return of every turn is the reward of the episode's last turn.

    Inside a turn, the estimator is that of :func:`nested_gae`.

    Args:
        rollout: a rollout with values.
        token_rewards: see :func:`turn_gae`.
        credit: discounts per token.

    Returns:
        Advantages, and targets of the value function, each float ``(time, env, token)``, 0 where masked.

    Raises:
        ValueError: If an episode does not end in the rollout.
    """
    check_episodes(rollout, "bandit credit")
    ended = rollout.terminated | rollout.truncated
    returns, last = torch.zeros_like(rollout.rewards), torch.zeros_like(rollout.rewards[0])
    for time in reversed(range(len(returns))):
        returns[time] = last = torch.where(ended[time], rollout.rewards[time], last)
    return _gae_inside_turns(returns, rollout, token_rewards, credit)


def token_gae(rollout: Rollout, token_rewards: Tensor, credit: CreditConfig) -> tuple[Tensor, Tensor]:
    """Estimate the advantages of tokens by GAE over one sequence that contains all tokens of an episode.

    ``token_gamma`` and ``token_lambda`` apply between two tokens of a turn, ``gamma`` and ``gae_lambda`` between the
    last token of a turn and the first token of the next turn. The environment's reward is that of the last token of a
    turn.

    Args:
        rollout: a rollout with values.
        token_rewards: see :func:`turn_gae`.
        credit: discounts per turn and per token.

    Returns:
        Advantages, and targets of the value function, each float ``(time, env, token)``, 0 where masked.
    """
    values, final_values, mask, cuts = rollout.values, rollout.final_values, rollout.response_mask, rollout.cut
    assert values is not None
    assert final_values is not None
    gamma, token_gamma = credit.gamma, credit.token_gamma
    rewards = token_rewards + rollout.rewards[..., None] * _is_last_token(mask)
    advantages = torch.zeros_like(values)
    first_value = first_advantage = torch.zeros_like(final_values[0])
    for time in reversed(range(len(rewards))):
        cut, goes_on = cuts[time], ~rollout.terminated[time]
        value = gamma * torch.where(cut, final_values[time], first_value) * goes_on
        carry = gamma * credit.gae_lambda * torch.where(cut, 0.0, first_advantage) * goes_on
        for token in reversed(range(values.shape[-1])):
            sampled, own = mask[time, :, token], values[time, :, token]
            advantage = torch.where(sampled, rewards[time, :, token] + value - own + carry, 0.0)
            advantages[time, :, token] = advantage
            value = torch.where(sampled, token_gamma * own, value)
            carry = torch.where(sampled, token_gamma * credit.token_lambda * advantage, carry)
        first_value, first_advantage = values[time, :, 0], advantages[time, :, 0]
    return advantages, (advantages + values) * mask


def lambda_returns(
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
) -> Tensor:
    """Return the lambda returns of turns, ``(time, env)``; advantages of GAE are lambda returns minus values.

    ``R_t = r_t + gamma ((1 - gae_lambda) V_{t+1} + gae_lambda R_{t+1})``. ``A_t = R_t - V_t`` equals the discounted sum
    of temporal-difference errors of arXiv:1506.02438, eq. 16. All tensors are ``(time, env)``.

    Args:
        rewards: rewards of the turns.
        values: values ``V_t`` of the states before the turns.
        final_values: values of the states after turns that are cut.
        terminated: whether the episode terminated with the turn, bool.
        cut: whether ``final_values`` replaces the rewards after the turn, bool; see :mod:`lrl.functional.advantages`.
        gamma: discount per turn.
        gae_lambda: GAE coefficient per turn.
        next_values: values that replace ``values`` where they serve as ``V_{t+1}``; None replaces none.
        local_penalties: whether a negative reward affects only the return of its own turn, and not those of earlier
            turns.

    Returns:
        The returns without gradient, float32, or float64 if ``rewards`` are; numbers of half precision are summed in
        float32.
    """
    rewards, values, final_values, next_values = (
        part.detach().to(torch.promote_types(part.dtype, torch.float32))
        for part in (rewards, values, final_values, values if next_values is None else next_values)
    )
    following = torch.cat([next_values[1:], torch.zeros_like(next_values[:1])])
    bootstrap = (1 - gae_lambda) * torch.where(cut, final_values, following)
    passed_on = rewards.clamp(min=0) if local_penalties else rewards
    # The loop has only what depends on the return of the next turn, and NumPy takes a fifth of the time for it.
    parts = (bootstrap, final_values, passed_on, cut, ~terminated)
    value, final_value, reward, ends, goes_on = (part.cpu().numpy() for part in parts)
    future = np.zeros_like(reward)
    next_return = np.zeros_like(reward[0])
    for time in reversed(range(len(reward))):
        target = np.where(ends[time], final_value[time], next_return)
        future[time] = gamma * (value[time] + gae_lambda * target) * goes_on[time]
        next_return = reward[time] + future[time]
    return rewards + torch.from_numpy(future).to(rewards)


def _turn_returns(rollout: Rollout, rewards: Tensor, credit: CreditConfig) -> Tensor:
    """Return the lambda returns ``(time, env)`` of turns with rewards ``(time, env)``.

    The value of a turn is the value before its first token. With ``bootstrap_last``, the value of the *next* turn is
    instead the value before its last token.
    """
    values, next_values = rollout.values, None
    assert values is not None
    assert rollout.final_values is not None
    if credit.bootstrap_last:
        last = rollout.response_mask.sum(-1, keepdim=True).clamp(min=1) - 1
        next_values = values.gather(-1, last).squeeze(-1)
    return lambda_returns(
        rewards,
        values[..., 0],
        rollout.final_values,
        rollout.terminated,
        rollout.cut,
        gamma=credit.gamma,
        gae_lambda=credit.gae_lambda,
        next_values=next_values,
        local_penalties=credit.local_penalties,
    )


def _gae_inside_turns(
    turn_returns: Tensor, rollout: Rollout, token_rewards: Tensor, credit: CreditConfig
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE inside each turn; the last token has the reward ``turn_returns``, ``(time, env)``."""
    mask, values = rollout.response_mask, rollout.values
    assert values is not None
    rewards = token_rewards + turn_returns[..., None] * _is_last_token(mask)
    advantages = torch.zeros_like(values)
    carry = next_value = torch.zeros_like(turn_returns)
    for token in reversed(range(values.shape[-1])):
        sampled, own = mask[..., token], values[..., token]
        delta = rewards[..., token] + credit.token_gamma * next_value - own
        carry = (delta + credit.token_gamma * credit.token_lambda * carry) * sampled
        advantages[..., token] = carry
        next_value = own * sampled
    return advantages, (advantages + values) * mask


def _is_last_token(mask: Tensor) -> Tensor:
    """Return whether each token is the last sampled one of its turn, bool with the shape of ``mask``."""
    following = torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], dim=-1)
    return mask & ~following


def check_episodes(rollout: Rollout, method: str, single: bool = False) -> None:
    """Check that every episode of a rollout has ended.

    Args:
        rollout: rollout whose turns get advantages.
        method: name of the algorithm or estimator that needs whole episodes, for the error message.
        single: whether each environment must have played exactly one episode.

    Raises:
        LateSettingError: If an episode has not ended, or if ``single`` is true and an environment has played more than
            one episode.
    """
    ended = rollout.terminated | rollout.truncated
    if bool((rollout.cut & ~ended).any()) or (single and bool((ended.sum(0) > 1).any())):
        raise LateSettingError(
            f"data.num_steps is {len(rollout.rewards)}; it must be null, because {method} needs whole episodes."
        )


def whiten(advantages: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Scale advantages to mean 0 and standard deviation 1 over the sampled tokens of all ranks.

    Args:
        advantages: float, any shape.
        mask: sampled tokens, bool of the same shape.
        reduce: sums a tensor over ranks; None if there is one rank.

    Returns:
        float of the same shape, 0 where masked.
    """
    centred, squares, count = _deviations(advantages[mask], reduce)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    out = torch.zeros_like(advantages)
    out[mask] = (centred / (std + 1e-8)).to(out.dtype) if count > 1 else advantages[mask]
    return out


def _deviations(values: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compare values ``(token,)`` with their mean over all ranks.

    Returns:
        The deviations of this rank, float64 ``(token,)``; the sum of squared deviations and the number of values, both
        over all ranks.
    """
    reduce = reduce or (lambda tensor: tensor)
    wide = values.double()
    total, count = reduce(torch.stack([wide.sum(), wide.new_tensor(float(len(wide)))]))
    centred = wide - total / count.clamp(min=1)
    return centred, reduce(centred.square().sum()), count


def variance(values: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return the variance of values over all ranks, float64 ``()``.

    Args:
        values: float ``(token,)``.
        reduce: sums a tensor over ranks; None if there is one rank.
    """
    _, squares, count = _deviations(values, reduce)
    return squares / count.clamp(min=1)


def explained_variance(values: Tensor, targets: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return ``1 - Var(target - value) / Var(target)``, float64 ``()``; NaN if all targets are equal.

    It is 1 for a perfect critic and 0 for a critic that always predicts the mean.

    Args:
        values: predictions of the critic, float ``(token,)``.
        targets: float ``(token,)``.
        reduce: sums a tensor over ranks; None if there is one rank.
    """
    spread, error = variance(targets, reduce), variance(targets - values, reduce)
    return torch.where(spread > 0, 1 - error / spread, torch.nan)


def weighted_credit(credit: Credit, rollout: Rollout, cap: float | None, reduce: Reduce | None = None) -> Credit:
    """Multiply advantages by truncated importance weights if the tokens were sampled by another program (a server).

    The weight of a token is ``w = min(pi_old / pi_behaviour, cap)``, where ``pi_old`` is the trainer's policy and
    ``pi_behaviour`` the one that sampled; both have the same weights, but different rounding. As ``w`` is constant and
    not negative, multiplying the advantage multiplies the (clipped) surrogate of the token:
    ``min(r w A, clip(r) w A) = w min(r A, clip(r) A)``. KL terms, entropy and value loss have no weights.

    Metrics are the mean and the maximum of the ratio before truncation, and the effective sample size
    ``(sum w)^2 / sum w^2`` as a share of the number of tokens.

    Args:
        credit: advantages of the rollout.
        rollout: the rollout; without ``behaviour_logprobs``, ``credit`` is returned unchanged.
        cap: largest weight.
        reduce: sums a tensor over ranks; None if there is one rank.
    """
    if cap is None or rollout.behaviour_logprobs is None:
        return credit
    mask = rollout.response_mask
    ratio = torch.where(mask, rollout.logprobs - rollout.behaviour_logprobs, 0.0).exp()
    weights = ratio.clamp(max=cap)
    sampled = weights[mask].double()
    sums = torch.stack([sampled.sum(), sampled.square().sum(), mask.sum().double()]).float()
    total, squares, count = sums if reduce is None else reduce(sums)
    metrics = {
        "train/importance_ratio": ratio[mask],
        "train/importance_ratio_max": ratio[mask],
        "train/effective_sample_share": (total.square() / (squares * count))[None],
    }
    return replace(credit, advantages=credit.advantages * weights, metrics={**credit.metrics, **metrics})

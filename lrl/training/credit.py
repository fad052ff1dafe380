"""Settings of credit assignment, with and without a critic, and of KL penalties to a reference policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from lrl.functional.advantages import (
    Discounts,
    GroupedTurns,
    Reduce,
    TurnGrid,
    bandit,
    explained_variance,
    gae,
    grouped_gae,
    nested_gae,
    shared_states,
    step_advantages,
    token_gae,
    turn_numbers,
    variance,
    whiten,
)
from lrl.policies.policy import Policy
from lrl.ranges import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt, check_fields
from lrl.types import Credit, Rollout


@dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Estimator of advantages for algorithms with a critic, and its discounts."""

    kind: Literal["turn", "token", "nested", "bandit"] = "nested"
    """``turn``: GAE over turns, all tokens of a turn share its advantage; ``token``: GAE over the sequence of all
    tokens of an episode; ``nested``: GAE over turns, then inside each turn; ``bandit``: the reward of each turn is that
    of the episode's last turn. See :mod:`lrl.functional.advantages`."""
    gamma: ClosedUnitInterval = 0.99
    """Discount per turn."""
    gae_lambda: ClosedUnitInterval = 0.95
    """GAE coefficient per turn."""
    token_gamma: ClosedUnitInterval = 1.0
    """Discount per token inside a turn."""
    token_lambda: ClosedUnitInterval = 0.98
    """GAE coefficient per token inside a turn."""
    local_penalties: bool = False
    """Whether a negative reward counts for its own turn only, not for the turns before."""
    bootstrap_last: bool = False
    """Whether the value of the next turn is that before its last token instead of before its first."""
    normalise: bool = True
    """Whether advantages are scaled to mean 0 and standard deviation 1 over the tokens of a collection."""

    def __post_init__(self) -> None:
        check_fields(self, "model.credit")
        for name in ("local_penalties", "bootstrap_last"):
            if getattr(self, name) and self.kind not in ("turn", "nested"):
                raise ValueError(f"model.credit.{name} is true; it must be false, {self.kind} credit does not read it.")

    def check_policy(self, policy: Policy, algorithm: str) -> None:
        """Check that a policy has a critic.

        Raises:
            ValueError: If it has none.
        """
        if not policy.has_critic:
            raise ValueError(
                f"model.policy is a {type(policy).__name__} without critic; {algorithm} needs one: set value_head of a "
                "language model's policy, or critic of an MLPPolicy or a HeadPolicy."
            )

    def estimate(self, rollout: Rollout, token_rewards: Tensor | None = None, reduce: Reduce | None = None) -> Credit:
        """Return advantages and returns of a rollout's tokens.

        Args:
            rollout: a rollout with values.
            token_rewards: rewards of single tokens (a KL penalty), ``(time, env, token)``, 0 where masked; None for
                none.
            reduce: sums a tensor over ranks; None for one rank.

        Raises:
            ValueError: If ``kind`` is ``bandit`` and an episode has not ended.
        """
        advantages, returns = self._estimate(rollout, token_rewards)
        values, mask = _values(rollout), rollout.response_mask
        metrics = {
            "train/explained_variance": explained_variance(values[mask], returns[mask], reduce),
            "train/advantage_std": variance(advantages[mask], reduce).sqrt(),
        }
        if self.normalise:
            advantages = whiten(advantages, mask, reduce)
        return Credit(advantages=advantages, returns=returns, metrics=metrics)

    def _estimate(self, rollout: Rollout, token_rewards: Tensor | None) -> tuple[Tensor, Tensor]:
        values, mask = _values(rollout), rollout.response_mask
        assert rollout.final_values is not None
        token_rewards = torch.zeros_like(values) if token_rewards is None else token_rewards
        ends = (rollout.final_values, rollout.terminated, rollout.cut)
        grid = TurnGrid(rollout.rewards, token_rewards, values, mask, *ends)
        discounts = Discounts(self.gamma, self.gae_lambda, self.token_gamma, self.token_lambda)
        if self.kind == "bandit":
            check_episodes(rollout, "bandit credit")
            return bandit(grid, discounts)
        if self.kind == "token":
            return token_gae(grid, discounts)
        options = {"bootstrap_last": self.bootstrap_last, "local_penalties": self.local_penalties}
        if self.kind == "nested":
            return nested_gae(grid, discounts, **options)
        grid = grid._replace(rewards=rollout.rewards + token_rewards.sum(-1))
        advantages, returns = gae(grid, discounts, **options)
        return advantages[..., None] * mask, returns[..., None] * mask


def check_episodes(rollout: Rollout, reader: str, single: bool = False) -> None:
    """Check that all episodes are whole.

    Args:
        rollout: rollout whose turns get advantages.
        reader: name of the method that needs whole episodes, for the error message.
        single: whether each environment must have played exactly one episode.

    Raises:
        ValueError: If an episode continues in the next collection, or ``single`` is true and an environment has played
            several.
    """
    ended = rollout.terminated | rollout.truncated
    if bool((rollout.cut & ~ended).any()) or (single and bool((ended.sum(0) > 1).any())):
        raise ValueError(f"data.num_steps is {len(rollout.rewards)}; it must be null, {reader} needs whole episodes.")


def _values(rollout: Rollout) -> Tensor:
    assert rollout.values is not None
    return rollout.values


# Credit assignment without a critic.

_READ = {"episode": (), "turn": ("gamma",), "step": ("gamma", "step_weight"), "grouped_gae": ("gamma", "gae_lambda")}
"""The settings that each kind uses."""


@dataclass(frozen=True, kw_only=True)
class GroupCreditConfig:
    """Estimator of the advantages of turns, by comparison with the other episodes of a group."""

    kind: Literal["episode", "turn", "step", "grouped_gae"] = "episode"
    """``episode``: all turns have the advantage of their episode; ``turn``: the return from a turn on is compared with
    those of the group's turns with the same index; ``step``: the advantage of the episode, plus a comparison with the
    group's turns that have the same observation (GiGPO); ``grouped_gae``: GAE with the mean return of these turns as
    the value of the state (GAGPO). See :mod:`lrl.functional.advantages`."""
    gamma: ClosedUnitInterval = 0.95
    """Discount per turn of the returns from a turn on; returns of whole episodes are not discounted."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the comparison of turns with the same observation, for ``step``."""
    gae_lambda: ClosedUnitInterval = 0.95
    """GAE coefficient per turn, for ``grouped_gae``."""

    def __post_init__(self) -> None:
        check_fields(self, "model.credit")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and field.name not in _READ[self.kind] and value != field.default:
                raise ValueError(
                    f"model.credit.{field.name} is {value}; it must be left out, {self.kind} credit does not read it."
                )

    @property
    def needs_states(self) -> bool:
        """Return whether turns with equal observations are compared."""
        return self.kind in ("step", "grouped_gae")

    def check_baseline(self, leave_one_out: bool) -> None:
        """Check that the estimator has a baseline that can leave out the episode itself.

        Raises:
            ValueError: If ``leave_one_out`` is true and ``kind`` is ``grouped_gae``.
        """
        if leave_one_out and self.kind == "grouped_gae":
            raise ValueError(
                "model.leave_one_out is true; it must be false, grouped_gae credit uses values instead of a baseline."
            )

    def estimate(
        self,
        rollout: Rollout,
        episode_advantages: Tensor,
        scale: str,
        leave_one_out: bool = False,
        reduce: Reduce | None = None,
    ) -> Tensor:
        """Return the advantages of a rollout's turns, ``(time, env)``, 0 where inactive.

        Args:
            rollout: one whole episode per environment, with ``state`` if :attr:`needs_states`.
            episode_advantages: advantages of the episodes over their groups, ``(env,)``.
            scale: divisor of centred returns, see :func:`~lrl.functional.advantages.group_advantages`.
            leave_one_out: whether the baseline of a turn leaves out the turn itself.
            reduce: sums a tensor over ranks that each hold whole groups; None for one rank.
        """
        if self.kind == "episode":
            return episode_advantages * rollout.active
        turns = _grouped_turns(rollout, turn_numbers(rollout.active) if self.kind == "turn" else rollout.state)
        if self.kind == "grouped_gae":
            discounts = {"gamma": self.gamma, "gae_lambda": self.gae_lambda}
            return grouped_gae(turns, rollout.terminated, **discounts, scale=scale, reduce=reduce)
        options = {"scale": scale, "leave_one_out": leave_one_out}
        steps = step_advantages(turns, gamma=self.gamma, **options, reduce=reduce)
        return steps if self.kind == "turn" else episode_advantages * rollout.active + self.step_weight * steps

    def metrics(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return the share of turns whose observation occurs again in the group; empty unless ``needs_states``."""
        if not self.needs_states:
            return {}
        return {"rollout/shared_state_rate": shared_states(_grouped_turns(rollout, rollout.state))}


def _grouped_turns(rollout: Rollout, state: Tensor | None) -> GroupedTurns:
    assert state is not None
    return GroupedTurns(rollout.rewards, state, rollout.group, rollout.active)


# KL terms to the reference policy, with a fixed or an adaptive weight.


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """KL term of GRPO to the policy at the start of the run."""

    coef: NonNegativeFloat = 0.0
    """Weight; 0 keeps no reference policy."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from sampled tokens (:func:`lrl.functional.losses.kl_estimate`)."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")


@dataclass(frozen=True, kw_only=True)
class AdaptiveKLConfig:
    """KL penalties of PPO; the weight of that to the reference can follow a target (arXiv:1909.08593, section 2.2)."""

    coef: NonNegativeFloat = 0.0
    """Weight of the penalty to the reference, with ``target`` the initial one; 0 keeps no reference policy."""
    target: PositiveFloat | None = None
    """Divergence from the reference in nats per turn to which the weight adapts; null keeps the weight fixed."""
    horizon: PositiveInt = 10_000
    """Number of turns over which the weight adapts; a larger number changes it more slowly."""
    old_coef: NonNegativeFloat = 0.0
    """Weight of KL(pi_old || pi), the divergence from the policy that sampled."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")
        if self.target is not None and self.coef == 0:
            raise ValueError(f"model.kl.target is {self.target}, but model.kl.coef is 0; it must be positive.")


class KLCoefficient:
    """Holds the adaptive weight of a KL penalty, which changes between collections.

    Args:
        config: initial weight, target and horizon.
    """

    def __init__(self, config: AdaptiveKLConfig) -> None:
        self.config = config
        self.value = self._next = float(config.coef)

    def observe(self, kl: float, turns: float) -> None:
        """Compute the next weight from the divergence in a collection; :meth:`advance` puts it into effect.

        Args:
            kl: mean KL divergence per turn, in nats.
            turns: number of turns over all ranks.
        """
        if self.config.target is not None:
            error = min(max(kl / self.config.target - 1, -0.2), 0.2)
            self._next = self.value * math.exp(error * turns / self.config.horizon)

    def advance(self) -> None:
        """Switch to the weight that the last :meth:`observe` computed."""
        self.value = self._next

    def state(self) -> list[float]:
        """Return the current and the next weight."""
        return [self.value, self._next]

    def load(self, state: list[float]) -> None:
        """Restore the result of :meth:`state` if the weight is adaptive; a fixed one is that of the configuration."""
        if self.config.target is not None:
            self.value, self._next = state

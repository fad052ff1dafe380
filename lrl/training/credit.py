"""How the rewards of a rollout become advantages, for algorithms with a value function."""

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
    """Which estimator turns rewards into advantages, and its discounts."""

    kind: Literal["turn", "token", "nested", "bandit"] = "nested"
    """``turn``: GAE over turns, all tokens of a turn share its advantage; ``token``: GAE along one chain of all tokens
    of an episode; ``nested``: GAE over turns, then inside each turn; ``bandit``: each turn is rewarded by the end of
    its episode. See :mod:`lrl.functional.advantages`."""
    gamma: ClosedUnitInterval = 0.99
    """Discount per turn."""
    gae_lambda: ClosedUnitInterval = 0.95
    """Per turn."""
    token_gamma: ClosedUnitInterval = 1.0
    """Discount per token inside a turn."""
    token_lambda: ClosedUnitInterval = 0.98
    """Per token inside a turn."""
    local_penalties: bool = False
    """Whether a negative reward counts for its own turn only."""
    bootstrap_last: bool = False
    """Whether the value of the next turn is read before its last token instead of before its first."""
    normalise: bool = True
    """Whether advantages are scaled to mean 0 and standard deviation 1 over the tokens of a collection."""

    def __post_init__(self) -> None:
        check_fields(self, "model.credit")
        for name in ("local_penalties", "bootstrap_last"):
            if getattr(self, name) and self.kind not in ("turn", "nested"):
                raise ValueError(f"model.credit.{name} is true; it must be false, {self.kind} credit does not read it.")

    def check_policy(self, policy: Policy, algorithm: str) -> None:
        """Raise if a policy has no value function.

        Raises:
            ValueError: so it is.
        """
        if not policy.has_critic:
            raise ValueError(
                f"model.policy is a {type(policy).__name__} without critic; {algorithm} needs one: set value_head of a "
                "language model's policy, critic of an MLPPolicy or a HeadPolicy."
            )

    def estimate(self, rollout: Rollout, token_rewards: Tensor | None = None, reduce: Reduce | None = None) -> Credit:
        """Return advantages and returns of a rollout's tokens.

        Args:
            rollout: with values.
            token_rewards: ``(time, env, token)``, rewards of single tokens (a KL penalty), 0 where masked; None has
                none.
            reduce: sums a tensor over ranks; None is for one rank.

        Raises:
            ValueError: ``bandit`` credit, and an episode that has not ended.
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
    """Raise unless all episodes are whole.

    Args:
        rollout: to be credited.
        reader: what needs whole episodes, as the first words of the reason.
        single: whether each environment must have played one episode only.

    Raises:
        ValueError: an episode goes on in the next collection, or an environment has played several.
    """
    ended = rollout.terminated | rollout.truncated
    if bool((rollout.cut & ~ended).any()) or (single and bool((ended.sum(0) > 1).any())):
        raise ValueError(f"data.num_steps is {len(rollout.rewards)}; it must be null, {reader} needs whole episodes.")


def _values(rollout: Rollout) -> Tensor:
    assert rollout.values is not None
    return rollout.values


# How the rewards of a rollout become advantages of its turns, for algorithms without a value function.

_READ = {"episode": (), "turn": ("gamma",), "step": ("gamma", "step_weight"), "grouped_gae": ("gamma", "gae_lambda")}
"""The settings that each kind reads."""


@dataclass(frozen=True, kw_only=True)
class GroupCreditConfig:
    """How the turns of an episode get advantages over its group."""

    kind: Literal["episode", "turn", "step", "grouped_gae"] = "episode"
    """``episode``: all turns carry the advantage of their episode; ``turn``: the return from a turn on is compared with
    those of the group's turns of the same number; ``step``: the advantage of the episode, plus that over the turns of
    the group that observed the same state (GiGPO); ``grouped_gae``: GAE, where the mean return of these turns is the
    value of the state (GAGPO). See :mod:`lrl.functional.advantages`."""
    gamma: ClosedUnitInterval = 0.95
    """Discount per turn of the returns of turns that are compared; ``episode`` and the episode's part of ``step`` are
    not discounted."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the advantage over turns in the same state, for ``step``."""
    gae_lambda: ClosedUnitInterval = 0.95
    """Per turn, for ``grouped_gae``."""

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
        """Return whether turns are compared by what was observed before them."""
        return self.kind in ("step", "grouped_gae")

    def check_baseline(self, leave_one_out: bool) -> None:
        """Raise if the baseline of an episode cannot leave out the episode itself.

        Raises:
            ValueError: so it is.
        """
        if leave_one_out and self.kind == "grouped_gae":
            raise ValueError(
                "model.leave_one_out is true; it must be false, grouped_gae credit has values in place of a baseline."
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
            rollout: each environment has played one whole episode; ``state`` is there if ``needs_states``.
            episode_advantages: ``(env,)``, of the episodes over their groups.
            scale: what centred returns are divided by, see :func:`~lrl.functional.advantages.group_advantages`.
            leave_one_out: whether a baseline leaves out the turn itself.
            reduce: sums a tensor over ranks, each of which holds whole groups; None is for one rank.
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
        """Return what tells whether states can be compared, to be logged by name; empty unless ``needs_states``."""
        if not self.needs_states:
            return {}
        return {"rollout/shared_state_rate": shared_states(_grouped_turns(rollout, rollout.state))}


def _grouped_turns(rollout: Rollout, state: Tensor | None) -> GroupedTurns:
    assert state is not None
    return GroupedTurns(rollout.rewards, state, rollout.group, rollout.active)


# The weight of the KL term to the reference policy: fixed, or steered towards a target.


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL term that keeps a policy near the one that the run started from."""

    coef: NonNegativeFloat = 0.0
    """Weight; 0 keeps no reference policy."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How GRPO estimates the divergence from sampled tokens (:func:`lrl.functional.losses.kl_estimate`)."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")


@dataclass(frozen=True, kw_only=True)
class AdaptiveKLConfig:
    """KL penalties of PPO; the one to the reference can follow a target (arXiv:1909.08593, section 2.2)."""

    coef: NonNegativeFloat = 0.0
    """Weight, at first if it is steered; 0 keeps no reference policy."""
    target: PositiveFloat | None = None
    """Nats per turn that the weight is steered towards; null leaves it fixed."""
    horizon: PositiveInt = 10_000
    """Turns over which it is steered."""
    old_coef: NonNegativeFloat = 0.0
    """Weight of KL(pi_old || pi), the divergence from the policy that sampled."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")
        if self.target is not None and self.coef == 0:
            raise ValueError(f"model.kl.target is {self.target}, but model.kl.coef is 0; it must be positive.")


class KLCoefficient:
    """Holds the weight of a KL penalty, which changes between collections.

    Args:
        config: where it starts, and what it is steered towards.
    """

    def __init__(self, config: AdaptiveKLConfig) -> None:
        self.config = config
        self.value = self._next = float(config.coef)

    def observe(self, kl: float, turns: float) -> None:
        """Take the mean KL per turn of a collection into account, from :meth:`advance` on.

        Args:
            kl: mean over turns, in nats.
            turns: how many there were, over all ranks.
        """
        if self.config.target is not None:
            error = min(max(kl / self.config.target - 1, -0.2), 0.2)
            self._next = self.value * math.exp(error * turns / self.config.horizon)

    def advance(self) -> None:
        """Use the weight that the last collection asked for: its advantages have been estimated."""
        self.value = self._next

    def state(self) -> list[float]:
        """Return the current weight and the next."""
        return [self.value, self._next]

    def load(self, state: list[float]) -> None:
        """Restore :meth:`state`, if the weight is steered; else the configured one counts."""
        if self.config.target is not None:
            self.value, self._next = state

"""How close estimated advantages are to the true ones, which are known on FrozenLake.

A policy that does not learn plays groups of episodes. Each estimator of :mod:`lrl.training` turns the rewards into
advantages, and these are compared with the exact ``A(s, a)`` of that policy, over all tokens that were sampled: each by
itself, and after averaging over the tokens that are the same choice in the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.statistics import bootstrap_interval
from lrl.evaluation.tabular_rollouts import TOKENS, ExactRollout, sample_rollout
from lrl.functional.advantages import group_advantages
from lrl.ranges import ClosedUnitInterval, PositiveInt, check_fields
from lrl.training.credit import CreditConfig
from lrl.training.group_credit import GroupCreditConfig

_GROUPED: Mapping[str, tuple[Literal["episode", "turn", "step", "grouped_gae"], str]] = {
    "episode groups (GRPO)": ("episode", "group_std"),
    "episode groups, not scaled": ("episode", "none"),
    "turns of the same number": ("turn", "group_std"),
    "turns of the same number, not scaled": ("turn", "none"),
    "step groups (GiGPO)": ("step", "group_std"),
    "step groups, not scaled": ("step", "none"),
    "grouped GAE (GAGPO)": ("grouped_gae", "group_std"),
    "grouped GAE, not scaled": ("grouped_gae", "none"),
}
"""Estimators without a critic: kind of credit, and what centred returns are divided by."""
_CRITICS = ("exact critic", "critic of zeros")
_WITH_CRITIC: tuple[Literal["turn", "token", "nested", "bandit"], ...] = ("turn", "token", "nested", "bandit")


@dataclass(frozen=True, kw_only=True)
class TruthConfig:
    """Sizes of the comparison."""

    temperatures: tuple[float, ...] = (0.1, 0.03)
    """Policies beside the uniform one: softmax of the optimal Q-values divided by each of these."""
    num_groups: PositiveInt = 128
    """Groups per seed."""
    group_size: PositiveInt = 16
    """Episodes per group."""
    seeds: PositiveInt = 10
    """Number of seeds, from 0 on."""
    gamma: ClosedUnitInterval = 1.0
    """Discount per turn of the truth, and of every estimator that has one."""
    gae_lambda: ClosedUnitInterval = 0.95
    """Per turn, of every estimator that has one."""

    def __post_init__(self) -> None:
        check_fields(self, "credit_truth")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Says how well advantages agree with the true ones."""

    correlation: float
    """Pearson's; 0 where the estimates do not vary."""
    error_variance: float
    """Variance of the error that is left when the estimates are rescaled linearly in the best way."""
    averaged_correlation: float
    """Pearson's, between means over all tokens of the collection that are the same choice, weighted by their number:
    what an update by the whole collection goes by."""


def score(estimated: Tensor, true: Tensor, choice: Tensor) -> Score:
    """Compare estimates with the truth.

    Args:
        estimated: ``(token,)``.
        true: ``(token,)``.
        choice: int64 ``(token,)``; equal numbers are the same choice.
    """
    index = torch.unique(choice, return_inverse=True)[1]
    averaged, _ = _compared(_means(estimated, index), _means(true, index))
    correlation, left = _compared(estimated, true)
    return Score(correlation=correlation, error_variance=left, averaged_correlation=averaged)


def _means(values: Tensor, index: Tensor) -> Tensor:
    """Return for each value the mean of those with the same index, float64 ``(token,)``."""
    count = torch.bincount(index).double()
    return (torch.zeros_like(count).index_add(0, index, values.double()) / count)[index]


def _compared(estimated: Tensor, true: Tensor) -> tuple[float, float]:
    """Return the correlation and the error variance of estimates ``(token,)``."""
    estimated, true = estimated.double() - estimated.double().mean(), true.double() - true.double().mean()
    covariance, spread, variance = ((a * b).mean() for a, b in ((estimated, true), (estimated,) * 2, (true,) * 2))
    if float(spread) <= 1e-20 or float(variance) <= 1e-20:
        return 0.0, float(variance)
    left = (true - covariance / spread * estimated).square().mean()
    return float(covariance / (spread * variance).sqrt()), float(left)


def estimates(sample: ExactRollout, gamma: float, gae_lambda: float) -> dict[str, Tensor]:
    """Return the advantages of all estimators by name, each ``(time, env, token)``.

    Args:
        sample: episodes with exact values.
        gamma: discount per turn.
        gae_lambda: per turn.
    """
    rollout, found = sample.rollout, dict[str, Tensor]()
    for name, (kind, scale) in _GROUPED.items():
        episode = group_advantages(rollout.returns, rollout.group, scale)
        discounts = {} if kind == "episode" else {"gamma": gamma}
        if kind == "grouped_gae":
            discounts["gae_lambda"] = gae_lambda
        turns = GroupCreditConfig(kind=kind, **discounts).estimate(rollout, episode, scale)
        found[name] = turns[..., None] * rollout.response_mask
    assert rollout.values is not None
    for critic, values in zip(_CRITICS, (rollout.values, torch.zeros_like(rollout.values)), strict=True):
        for kind in _WITH_CRITIC:
            config = CreditConfig(kind=kind, gamma=gamma, gae_lambda=gae_lambda, normalise=False)
            found[f"{kind}, {critic}"] = config.estimate(rollout.replace(values=values)).advantages
    return found


def policies(lake: Lake, temperatures: Sequence[float]) -> dict[str, np.ndarray]:
    """Return the policies that play, action probabilities ``(state, action)`` by name.

    Args:
        lake: the map.
        temperatures: of the softmax of optimal Q-values, each positive.

    Raises:
        ValueError: a temperature is not positive.
    """
    found = {"uniform": np.full_like(lake.q_values, 1 / lake.table.num_actions)}
    for temperature in temperatures:
        if temperature <= 0:
            raise ValueError(f"credit_truth.temperatures holds {temperature}; each must be positive.")
        weights = np.exp((lake.q_values - lake.q_values.max(-1, keepdims=True)) / temperature)
        found[f"softmax {temperature:g}"] = weights / weights.sum(-1, keepdims=True)
    return found


def measure(config: TruthConfig) -> dict[str, Any]:
    """Score all estimators on the slippery 4x4 map.

    Returns:
        ``policies``, each with its exact success and the variance of its true advantages; ``scores``, one for each
        policy, number of tokens and estimator, with means and 95% intervals over seeds, and the values of all seeds.
    """
    (lake,) = lakes_of(GymnasiumEnvs("FrozenLake-v1"))
    about, scores = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, policy in policies(lake, config.temperatures).items():
        about.append({"policy": name, "success": lake.success(policy)})
        for tokens in TOKENS:
            runs = [_scores_of(lake, policy, tokens, seed, config) for seed in range(config.seeds)]
            about[-1][f"truth_variance_{tokens}"] = float(np.mean([run["truth"].error_variance for run in runs]))
            for estimator in runs[0]:
                if estimator != "truth":
                    row = {"policy": name, "tokens": tokens, "estimator": estimator}
                    scores.append(row | _summary([run[estimator] for run in runs]))
    return {"policies": about, "scores": scores}


def _scores_of(lake: Lake, policy: np.ndarray, tokens: int, seed: int, config: TruthConfig) -> dict[str, Score]:
    """Return the scores of all estimators on one seed; ``truth`` is that of no estimate at all."""
    sizes = (config.num_groups, config.group_size)
    sample = sample_rollout(lake, policy, *sizes, tokens=tokens, gamma=config.gamma, seed=seed)
    mask, found = sample.rollout.response_mask, estimates(sample, config.gamma, config.gae_lambda)
    found["truth"] = torch.zeros_like(sample.advantages)
    true, choice = sample.advantages[mask], sample.choice[mask]
    return {name: score(advantages[mask], true, choice) for name, advantages in found.items()}


def _summary(seeds: Sequence[Score]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in ("correlation", "averaged_correlation", "error_variance"):
        values = [getattr(one, name) for one in seeds]
        bounds = list(bootstrap_interval(values)) if len(values) > 1 else [values[0]] * 2
        row |= {name: float(np.mean(values)), f"{name}_ci95": bounds, f"{name}_seeds": values}
    return row

"""Compare estimated advantages with the exact ones on FrozenLake, and write the table, the numbers and a figure.

python scripts/credit_truth.py --json assets/results/credit_truth.json --figure assets/pictures/credit_truth.png
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from lrl.algorithms.grpo import GroupCreditConfig
from lrl.cli.command import command, command_line
from lrl.cli.run_directory import commit
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.tabular import TransitionTable, policy_values
from lrl.evaluation.exact import Lake, lakes_of
from lrl.evaluation.pictures import Colour, new_figure, save_figure, shades, styled
from lrl.evaluation.report import markdown_table, result_text
from lrl.evaluation.statistics import bootstrap_interval
from lrl.files import write_whole
from lrl.functional.advantages import CreditConfig
from lrl.functional.groups import group_advantages
from lrl.ranges import ClosedUnitInterval, PositiveInt, check_fields
from lrl.types import Rollout

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class TruthConfig:
    """Sizes of the comparison."""

    temperatures: list[float] = field(default_factory=lambda: [0.1, 0.03])
    """Temperatures of policies besides the uniform one: the softmax of the optimal Q-values divided by a
    temperature."""
    num_groups: PositiveInt = 128
    """Groups per seed."""
    group_size: PositiveInt = 16
    """Episodes per group."""
    seeds: PositiveInt = 10
    """Number of seeds, from 0 on."""
    gamma: ClosedUnitInterval = 1.0
    """Discount per turn of the exact advantages, and of every estimator that has one."""
    gae_lambda: ClosedUnitInterval = 0.95
    """GAE lambda per turn of every estimator that has one."""

    def __post_init__(self) -> None:
        check_fields(self, "credit_truth")


def credit_truth(
    *,
    config: TruthConfig,
    machine: str = "2-core x86-64 virtual machine",
    json: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Compare estimated advantages with the exact ones on FrozenLake, and write the table, the numbers and a figure.

    python scripts/credit_truth.py --json assets/results/credit_truth.json --figure assets/pictures/credit_truth.png

    Args:
        config: sizes of the comparison.
        machine: description of the machine, for the file.
        json: write all figures to this file.
        figure: draw the correlations to this PNG.
    """
    about = {"title": "Advantages scored against the truth"}
    about |= {"command": command_line("python scripts/credit_truth.py"), "commit": commit(), "machine": machine}
    result = about | {"settings": vars(config)} | measure(config)
    for tokens in TOKENS:
        heading = f"{tokens} token{'s' * (tokens > 1)} per turn"
        print(f"{heading}\n\n{credit_table(result, tokens)}\n")
        print(f"{heading}, averaged\n\n{credit_table(result, tokens, averaged=True)}\n")
    if json is not None:
        with write_whole(json) as file:
            file.write(result_text(result))
    if figure is not None:
        draw_scores(result, figure)


main = command(credit_truth)


# Rollouts of a known policy on FrozenLake, with exact values and advantages of each token. Actions and transitions are
# sampled from tables, without a network, so that thousands of episodes take a second.
#
# A turn has one token, or three tokens as a model of a text: the first selects two of the four actions, the second
# selects one of these, and the end token has no effect.

TOKENS = (1, 3)
"""Possible numbers of tokens of a turn."""


@dataclass(frozen=True, kw_only=True)
class ExactRollout:
    """Rollout with exact values, and the exact advantages of its tokens."""

    rollout: Rollout
    """Whole episodes, one for each environment, float64, without inputs."""
    advantages: Tensor
    """``Q(prefix and token) - V(prefix)`` of the policy, given the remaining turns, float64 ``(time, env, token)``; 0
    for masked tokens."""
    choice: Tensor
    """Number of each token's choice, int64 ``(time, env, token)``: equal tokens after equal prefixes in the same state
    have the same number."""


def sample_rollout(
    lake: Lake, policy: np.ndarray, num_groups: int, group_size: int, *, tokens: int = 1, gamma: float = 1.0, seed: int
) -> ExactRollout:
    """Play groups of whole episodes from the initial state.

    Args:
        lake: map of FrozenLake.
        policy: action probabilities ``(state, action)``, all positive.
        num_groups: number of groups.
        group_size: number of episodes per group.
        tokens: number of tokens per turn, see :data:`TOKENS`.
        gamma: discount per turn of values and advantages.
        seed: seed of actions and transitions.

    Raises:
        ValueError: If ``tokens`` is not in :data:`TOKENS`.
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
    """Return states, actions, rewards and flags of each turn of each episode, arrays ``(time, env)`` by name."""
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
    """Return the exact values before each token of a turn and after the last, for each action that the turn selects.

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


# Comparison of estimated advantages with exact ones. A fixed policy plays groups of episodes. Each estimator computes
# advantages from the rewards, and these are compared with the exact ``A(s, a)`` of the policy over all sampled tokens:
# token by token, and after averaging over equal choices in the same state.

_GROUPED: Mapping[Literal["episode", "turn", "step", "grouped_gae"], tuple[str, str]] = {
    "episode": ("episode groups", " (GRPO)"),
    "turn": ("turns of the same number", ""),
    "step": ("step groups", " (GiGPO)"),
    "grouped_gae": ("grouped GAE", " (GAGPO)"),
}
"""Name of each estimator without a critic, by the kind of credit, and the algorithm that scales it by the group's
standard deviation."""
_CRITICS = ("exact critic", "critic of zeros")
_WITH_CRITIC: tuple[Literal["turn", "token", "nested", "bandit"], ...] = ("turn", "token", "nested", "bandit")


Score = dict[str, float]
"""Agreement of estimated advantages with exact ones:

- ``correlation``: Pearson correlation; 0 if the estimates do not vary.
- ``averaged_correlation``: Pearson correlation between means over equal choices of the collection, weighted by their
  number, which matter for an update on the whole collection.
- ``error_variance``: variance of the error after the best linear rescaling of the estimates.
"""


def score(estimated: Tensor, true: Tensor, choice: Tensor) -> Score:
    """Compare estimated advantages with exact ones.

    Args:
        estimated: estimated advantages ``(token,)``.
        true: exact advantages ``(token,)``.
        choice: equal numbers for equal choices, int64 ``(token,)``.
    """
    index = torch.unique(choice, return_inverse=True)[1]
    averaged, _ = _compared(_means(estimated, index), _means(true, index))
    correlation, left = _compared(estimated, true)
    return {"correlation": correlation, "averaged_correlation": averaged, "error_variance": left}


def _means(values: Tensor, index: Tensor) -> Tensor:
    """Return for each value the mean of the values with the same index, float64 ``(token,)``."""
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
        gae_lambda: GAE lambda per turn.
    """
    rollout, found = sample.rollout, dict[str, Tensor]()
    for kind, (name, algorithm) in _GROUPED.items():
        discounts = {} if kind == "episode" else {"gamma": gamma}
        if kind == "grouped_gae":
            discounts["gae_lambda"] = gae_lambda
        for scale, full_name in (("group_std", name + algorithm), ("none", f"{name}, not scaled")):
            episode = group_advantages(rollout.episode_returns, rollout.group, scale)
            turns = GroupCreditConfig(kind=kind, **discounts).estimate(rollout, episode, scale)
            found[full_name] = turns[..., None] * rollout.response_mask
    assert rollout.values is not None
    for critic, values in zip(_CRITICS, (rollout.values, torch.zeros_like(rollout.values)), strict=True):
        for kind in _WITH_CRITIC:
            config = CreditConfig(kind=kind, gamma=gamma, gae_lambda=gae_lambda, normalise=False)
            found[f"{kind}, {critic}"] = config.estimate(rollout.replace(values=values)).advantages
    return found


def policies(lake: Lake, temperatures: Sequence[float]) -> dict[str, np.ndarray]:
    """Return the action probabilities ``(state, action)`` of all policies by name.

    Args:
        lake: map of FrozenLake.
        temperatures: temperatures of the softmax of optimal Q-values.

    Raises:
        ValueError: If a temperature is not positive.
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
        ``policies``: the exact success of each policy and the variance of its exact advantages. ``scores``: for each
        policy, number of tokens and estimator, means and 95% intervals over seeds, and the values of all seeds.
    """
    (lake,) = lakes_of(GymnasiumEnvs("FrozenLake-v1"))
    about, scores = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, policy in policies(lake, config.temperatures).items():
        about.append({"policy": name, "success": lake.success(policy)})
        for tokens in TOKENS:
            runs = [_scores_of(lake, policy, tokens, seed, config) for seed in range(config.seeds)]
            about[-1][f"truth_variance_{tokens}"] = float(np.mean([run["truth"]["error_variance"] for run in runs]))
            for estimator in runs[0]:
                if estimator != "truth":
                    row = {"policy": name, "tokens": tokens, "estimator": estimator}
                    scores.append(row | _summary([run[estimator] for run in runs]))
    return {"policies": about, "scores": scores}


def _scores_of(lake: Lake, policy: np.ndarray, tokens: int, seed: int, config: TruthConfig) -> dict[str, Score]:
    """Return the scores of all estimators on one seed; ``truth`` is the score of zero advantages."""
    sizes = (config.num_groups, config.group_size)
    sample = sample_rollout(lake, policy, *sizes, tokens=tokens, gamma=config.gamma, seed=seed)
    mask, found = sample.rollout.response_mask, estimates(sample, config.gamma, config.gae_lambda)
    found["truth"] = torch.zeros_like(sample.advantages)
    true, choice = sample.advantages[mask], sample.choice[mask]
    return {name: score(advantages[mask], true, choice) for name, advantages in found.items()}


def _summary(seeds: Sequence[Score]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in seeds[0]:
        values = [score[name] for score in seeds]
        bounds = list(bootstrap_interval(values)) if len(values) > 1 else [values[0]] * 2
        row |= {name: float(np.mean(values)), f"{name}_ci95": bounds, f"{name}_seeds": values}
    return row


def credit_table(result: Mapping[str, Any], tokens: int, averaged: bool = False) -> str:
    """Return a Markdown table of correlations with intervals over seeds, one row per estimator.

    Args:
        result: result of :func:`measure`, or the content of its file.
        tokens: number of tokens per turn.
        averaged: True shows correlations of averages, False correlations and error variances of single tokens.
    """
    names = [policy["policy"] for policy in result["policies"]]
    key = "averaged_correlation" if averaged else "correlation"
    heads = [f"{policy['policy']} (success {policy['success']:.3f})" for policy in result["policies"]]
    if not averaged:
        heads = [cell for head in heads for cell in (head, "error variance")]
    rows: dict[str, dict[str, list[str]]] = {}
    for row in result["scores"]:
        if row["tokens"] == tokens:
            low, high = row[f"{key}_ci95"]
            cells = [f"{row[key]:.3f} ({low:.3f} to {high:.3f})"]
            cells += [] if averaged else [f"{row['error_variance']:.3e}"]
            rows.setdefault(row["estimator"], {})[row["policy"]] = cells
    if not averaged:
        variances = {policy["policy"]: policy[f"truth_variance_{tokens}"] for policy in result["policies"]}
        rows["no estimate"] = {name: ["0", f"{variances[name]:.3e}"] for name in names}
    lines = [[estimator, *(cell for name in names for cell in cells[name])] for estimator, cells in rows.items()]
    return markdown_table(["estimator", *heads], lines)


def draw_scores(result: Mapping[str, Any], path: Path) -> None:
    """Draw the correlations of each estimator with their intervals to a PNG file; open markers mean three tokens.

    Args:
        result: result of :func:`measure`, or the content of its file.
        path: path of the PNG file; missing folders are created.
    """
    figure, axes = new_figure(11, 7)
    axes.remove()
    left, right = map(styled, figure.subplots(1, 2, sharey=True))
    estimators = list(dict.fromkeys(row["estimator"] for row in result["scores"]))
    names = [policy["policy"] for policy in result["policies"]]
    colours = shades(len(names))
    for axes, key in ((left, "correlation"), (right, "averaged_correlation")):
        for row in result["scores"]:
            _draw_score(axes, row, key, estimators.index(row["estimator"]), names.index(row["policy"]), colours)
        axes.axvline(0, color="0.6", linewidth=0.8)
    left.set_yticks(range(len(estimators)), estimators)
    left.invert_yaxis()
    left.set_xlabel("correlation with the true advantage, single tokens")
    right.set_xlabel("correlation with the true advantage, mean over a state's equal choices")
    for number, policy in enumerate(result["policies"]):
        right.plot([], [], "o", color=colours[number], label=f"{policy['policy']}, success {policy['success']:.3f}")
    for tokens in sorted({row["tokens"] for row in result["scores"]}):
        filled = "none" if tokens > 1 else "full"
        right.plot([], [], "o", color="0.4", fillstyle=filled, label=f"{tokens} token{'s' * (tokens > 1)} per turn")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    save_figure(figure, path)


def _draw_score(
    axes: Axes, row: Mapping[str, Any], key: str, height: int, policy: int, colours: Sequence[Colour]
) -> None:
    several = row["tokens"] > 1
    at = height + 0.22 * (policy - 1) + 0.09 * several
    axes.plot(row[f"{key}_ci95"], [at, at], color=colours[policy], linewidth=1.2)
    axes.plot(row[key], at, "o", color=colours[policy], markersize=4.5, fillstyle="none" if several else "full")

"""Advantages of the configured estimators, by plain loops, and those that known mistakes give instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np

from lrl.diagnosis.sample import Sample

_DISCOUNTS = (0.0, 0.5, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
"""Values of gamma and gae_lambda that are tried."""

_DIVIDED = "advantages are divided by the number of tokens"

Estimates = Iterator[tuple[str, np.ndarray]]
"""Advantages ``(turn, token)`` of the configured estimator, and then of mistakes, with their causes."""
_Credit = tuple[np.ndarray, np.ndarray]
"""Advantages and targets of the critic, each ``(turn, token)``."""


def ppo_credit(
    sample: Sample,
    *,
    gamma: float | None = None,
    lam: float | None = None,
    token_lambda: float | None = None,
    reward_scale: float = 1.0,
    kl_scale: float = 1.0,
    across_ends: bool = False,
    no_bootstrap: Literal["nowhere", "everywhere", "truncated", "unfinished"] = "nowhere",
    bootstrap_terminal: Literal["", "next episode", "final state"] = "",
    shifted: bool = False,
    shifted_ends: int = 0,
) -> _Credit:
    """Return advantages and targets of the critic by loops over turns and tokens, float64 ``(turn, token)``.

    Args:
        sample: turns with values.
        gamma: discount per turn; None uses the configured one.
        lam: GAE coefficient per turn; None uses the configured one.
        token_lambda: GAE coefficient per token; None uses the configured one.
        reward_scale: factor of the rewards.
        kl_scale: factor of the KL penalty in the rewards.
        across_ends: a mistake that adds rewards of the next episode.
        no_bootstrap: a mistake that uses no value where an episode is truncated or unfinished.
        bootstrap_terminal: a mistake that uses a value after a terminal state: that of the first state of the next
            episode, or that of the terminal state.
        shifted: a mistake that uses the reward of the previous turn.
        shifted_ends: a mistake that uses terminations of the turn that is so many turns later.
    """
    credit, mask, values = sample.settings["credit"], sample["mask"], sample["values"]
    gamma = float(credit["gamma"]) if gamma is None else gamma
    lam = float(credit["gae_lambda"]) if lam is None else lam
    inner = credit["token_lambda"] if token_lambda is None else token_lambda
    kind, token_gamma = credit["kind"], credit["token_gamma"]
    rewards, penalties = _rewards(sample, reward_scale, kl_scale)
    last = np.maximum(mask.sum(1), 1) - 1
    entry = values[np.arange(len(values)), last] if credit["bootstrap_last"] else values[:, 0]
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    for turns in sample.envs():
        of_env = np.concatenate([[0.0], rewards[turns][:-1]]) if shifted else rewards[turns]
        terminated = _shifted(sample["terminated"][turns], shifted_ends)
        follow_value = follow_return = follow_advantage = last_reward = 0.0
        for turn, reward, ended in zip(reversed(turns), reversed(of_env), reversed(terminated), strict=True):
            is_last, carry, cut = turn == turns[-1], 0.0, bool(sample["cut"][turn])
            if across_ends and not is_last:
                ended = cut = False
            final = float(sample["final_values"][turn]) if ended or cut else 0.0
            if ended:
                after_end = {"": 0.0, "next episode": 0.0 if is_last else follow_value, "final state": final}
                value = target = after_end[bootstrap_terminal]
            elif cut:
                kind_of_cut = "truncated" if sample["truncated"][turn] else "unfinished"
                value = target = 0.0 if no_bootstrap in ("everywhere", kind_of_cut) else final
            else:
                value, target, carry = follow_value, follow_return, follow_advantage
            future = gamma * ((1 - lam) * value + lam * target)
            lambda_return = reward + future
            if kind == "bandit":
                last_reward = reward if sample["terminated"][turn] or sample["truncated"][turn] else last_reward
                lambda_return = last_reward
            tokens = np.flatnonzero(mask[turn])
            if kind == "turn":
                advantages[turn, tokens], returns[turn, tokens] = lambda_return - values[turn, 0], lambda_return
            else:
                bonus = reward if kind == "token" else lambda_return
                next_value, sum_later = (gamma * value, gamma * lam * carry) if kind == "token" else (0.0, 0.0)
                for token in reversed(tokens):
                    own = values[turn, token]
                    sum_later += penalties[turn, token] + bonus + next_value - own
                    advantages[turn, token], returns[turn, token] = sum_later, sum_later + own
                    next_value, sum_later, bonus = token_gamma * own, token_gamma * inner * sum_later, 0.0
            follow_value = float(entry[turn])
            follow_advantage = float(advantages[turn, 0])
            follow_return = (max(reward, 0.0) if credit["local_penalties"] else reward) + future
    return advantages, returns


def _shifted(ends: np.ndarray, steps: int) -> np.ndarray:
    """Return what an array ``(turn,)`` has so many turns later, and false where there are none."""
    later = np.arange(len(ends)) + steps
    return np.where((later >= 0) & (later < len(ends)), ends[later.clip(0, len(ends) - 1)], False)


def _rewards(sample: Sample, reward_scale: float, kl_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards of turns, ``(turn,)``, and the KL penalties of tokens, ``(turn, token)``."""
    rewards, penalties = reward_scale * sample["rewards"], np.zeros_like(sample["values"])
    if "ref_logprobs" in sample:
        kl_coef = kl_scale * sample.settings.get("kl_coef", 0.0)
        penalties = -kl_coef * (sample["logprobs"] - sample["ref_logprobs"]) * sample["mask"]
    if sample.settings["credit"]["kind"] == "turn":
        rewards = rewards + penalties.sum(1)
    return rewards, penalties


def _ppo(sample: Sample) -> Estimates:
    mistakes: list[tuple[str, dict[str, Any]]] = [
        ("correct", {}),
        ("advantages leak across episodes", {"across_ends": True}),
        ("truncation treated as termination", {"no_bootstrap": "everywhere"}),
        ("truncation treated as termination", {"no_bootstrap": "truncated"}),
        ("end of the collection treated as termination", {"no_bootstrap": "unfinished"}),
        ("termination treated as truncation", {"bootstrap_terminal": "next episode"}),
        ("termination treated as truncation", {"bootstrap_terminal": "final state"}),
        ("ends of episodes are shifted by one turn", {"shifted_ends": 1}),
        ("ends of episodes are shifted by one turn", {"shifted_ends": -1}),
        ("reward has the wrong sign", {"reward_scale": -1.0}),
        ("rewards are shifted by one turn", {"shifted": True}),
        ("rewards are not discounted", {"gamma": 1.0}),
        ("only the next reward counts", {"gamma": 0.0}),
        ("gae_lambda is ignored", {"lam": 1.0}),
        ("gae_lambda is 0", {"lam": 0.0}),
        ("token_lambda is ignored", {"token_lambda": 1.0}),
        ("KL penalty is missing", {"kl_scale": 0.0}),
        ("KL penalty has the wrong sign", {"kl_scale": -1.0}),
    ]
    for cause, mistake in mistakes:
        yield cause, ppo_credit(sample, **mistake)[0]
    correct = ppo_credit(sample)[0]
    yield "advantages are returns without baseline", correct + sample["values"]
    yield "advantages are negated", -correct
    yield "negative advantages are missing", np.maximum(correct, 0.0)
    yield "end token not trained", correct * without_last(sample["mask"])
    yield "shifted mask", correct * np.roll(sample["mask"], 1, axis=1)
    yield _DIVIDED, correct / _lengths(sample)
    for cause, values in _other_values(sample).items():
        other = replace(sample, arrays={**sample.arrays, "values": np.repeat(values[:, None], correct.shape[1], 1)})
        yield cause, ppo_credit(other)[0]
        if sample.settings["credit"]["kind"] == "turn":  # only as the baseline
            yield cause, correct + (sample["values"][:, 0] - values)[:, None] * sample["mask"]
    configured = sample.settings["credit"]["gamma"], sample.settings["credit"]["gae_lambda"]
    for gamma, lam in product(_DISCOUNTS, _DISCOUNTS):
        if (gamma, lam) != configured:
            yield "another gamma or gae_lambda is used", ppo_credit(sample, gamma=gamma, lam=lam)[0]


def _other_values(sample: Sample) -> dict[str, np.ndarray]:
    """Return the values of turns that mistakes use instead of those before the first token, ``(turn,)``, by cause."""
    mask, values = sample["mask"], sample["values"]
    count = np.maximum(mask.sum(1), 1)
    return {
        "values are averaged over padding": values.mean(1),
        "values are averaged over tokens": (values * mask).sum(1) / count,
        "values are those after the last token": values[np.arange(len(values)), count - 1],
        "values are those of padding": values[:, -1],
        "values are those of other turns": np.roll(values[:, 0], 1),
        "values are not used": np.zeros(len(values)),
    }


def _reinforce(sample: Sample) -> Estimates:
    mask = sample["mask"]
    penalties = np.zeros_like(sample["advantages"])
    if "ref_logprobs" in sample:
        penalties = -sample.settings.get("kl_coef", 0.0) * (sample["logprobs"] - sample["ref_logprobs"]) * mask

    def sums(rewards: np.ndarray, penalties: np.ndarray, across_ends: bool = False, future: bool = True) -> np.ndarray:
        out = np.zeros_like(penalties)
        for turns in sample.envs():
            total = 0.0
            for turn in reversed(turns):
                ended = bool(sample["terminated"][turn] or sample["truncated"][turn])
                total = 0.0 if (ended and not across_ends) or not future else total
                total += rewards[turn]
                for token in reversed(np.flatnonzero(mask[turn])):
                    total += penalties[turn, token]
                    out[turn, token] = total
            if sample.settings.get("group_baseline"):
                out[turns] -= baselines[int(sample["group"][turns[0]])] * mask[turns]
        return out

    returns = {int(sample["env"][turns[0]]): sample["rewards"][turns].sum() for turns in sample.envs()}
    group_of = {int(env): int(group) for env, group in zip(sample["env"], sample["group"], strict=True)}
    baselines = {
        group: np.mean([returns[env] for env in returns if group_of[env] == group]) for group in set(group_of.values())
    }
    correct = sums(sample["rewards"], penalties)
    yield from {
        "correct": correct,
        "reward has the wrong sign": sums(-sample["rewards"], penalties),
        "KL penalty is missing": sums(sample["rewards"], 0 * penalties),
        "KL penalty has the wrong sign": sums(sample["rewards"], -penalties),
        "advantages leak across episodes": sums(sample["rewards"], penalties, across_ends=True),
        "later rewards are missing": sums(sample["rewards"], penalties, future=False),
        "advantages are negated": -correct,
        _DIVIDED: correct / _lengths(sample),
    }.items()


def _grpo(sample: Sample) -> Estimates:
    if sample.settings["credit"]["kind"] != "episode":
        return
    scale = sample.settings["advantage_scale"]
    if scale == "batch_std":
        scale = "none"  # compared up to a factor
    returns, groups = np.zeros(len(sample)), sample["group"]
    for turns in sample.envs():
        returns[turns] = sample["rewards"][turns].sum()
    env_first = np.array([turns[0] for turns in sample.envs()])

    def relative(values: np.ndarray, of: np.ndarray, by: str) -> np.ndarray:
        out = np.zeros(len(sample))
        for group in np.unique(of):
            members = env_first[of[env_first] == group]
            mean, spread = values[members].mean(), values[members].std(ddof=1) if len(members) > 1 else 0.0
            centred = values[of == group] - mean
            if by == "group_std":
                centred = np.zeros_like(centred) if spread < 1e-6 else centred / (spread + 1e-4)
            out[of == group] = centred
        return out

    everything, envs = np.zeros_like(groups), np.unique(sample["env"])
    interleaved = np.arange(len(envs)) % len(np.unique(groups))
    correct = relative(returns, groups, scale)
    everywhere = {
        "correct": correct,
        "advantages leak between groups": relative(returns, everything, scale),
        "baselines are those of other groups": _other_baselines(sample, returns, groups, scale),
        "groups are not those of the episodes": relative(returns, np.roll(groups, 1), scale),
        "groups are interleaved": relative(returns, interleaved[np.searchsorted(envs, sample["env"])], scale),
        "advantages are returns without baseline": returns,
        "advantages are not scaled": relative(returns, groups, "none"),
        "advantages are scaled": relative(returns, groups, "group_std"),
        "reward has the wrong sign": -correct,
        "episodes have the advantages of others": np.roll(correct, 1),
    }
    for cause, values in everywhere.items():
        yield cause, np.broadcast_to(values[:, None], sample["mask"].shape)
    yield "end token not trained", correct[:, None] * without_last(sample["mask"])
    yield "shifted mask", correct[:, None] * np.roll(sample["mask"], 1, axis=1)
    yield _DIVIDED, correct[:, None] * sample["mask"] / _lengths(sample)


def _lengths(sample: Sample) -> np.ndarray:
    """Return the number of tokens of each response, at least 1, ``(turn, 1)``."""
    return np.maximum(sample["mask"].sum(1, keepdims=True), 1)


def without_last(mask: np.ndarray) -> np.ndarray:
    """Return a mask without the last token of each turn."""
    return mask & np.concatenate([mask[:, 1:], np.zeros_like(mask[:, :1])], axis=1)


def _other_baselines(sample: Sample, returns: np.ndarray, groups: np.ndarray, scale: str) -> np.ndarray:
    """Return advantages whose means are over every G-th episode instead of G consecutive ones."""
    envs, count = np.unique(sample["env"]), len(np.unique(groups))
    first = np.array([np.flatnonzero(sample["env"] == env)[0] for env in envs])
    if len(envs) % count:
        return np.zeros(len(sample))
    of_episodes = returns[first].reshape(count, -1)
    means = returns[first].reshape(-1, count).mean(0)
    centred = of_episodes - means[:, None]
    if scale == "group_std":
        spread = of_episodes.std(1, ddof=1)[:, None] if of_episodes.shape[1] > 1 else np.zeros((count, 1))
        centred = np.where(spread < 1e-6, 0.0, centred / (spread + 1e-4))
    return centred.reshape(-1)[np.searchsorted(envs, sample["env"])]


HYPOTHESES: dict[str, Callable[[Sample], Estimates]] = {
    "PPOValueHeadModule": _ppo,
    "GRPOModule": _grpo,
    "REINFORCEPlusPlusModule": _reinforce,
}
"""Generator of estimates for each algorithm."""

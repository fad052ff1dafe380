"""Detectors of mistakes in advantages and in the targets of the critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np

from lrl.diagnosis.sample import Finding, Sample

_EQUAL = 1e-3
"""Relative difference up to which recorded and recomputed advantages count as equal."""
_FITTED = 1e-2
"""Relative difference up to which advantages count as those of rewards of another scale."""

_MIN_OUTSIDE, _MIN_SHARE, _MOST = 8, 0.2, 0.95
"""Number and share of right advantages from which the others are the place of a mistake; share of the turns that must
agree with a mistake."""
_MIN_PAIRS, _FLOAT32 = 4, 2e-6
"""Smallest number of targets of the critic that are compared with those of the next turn, and rounding of them."""
_DISCOUNTS = (0.0, 0.5, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
"""Values of gamma and gae_lambda that are tried."""

Estimates = Iterator[tuple[str, np.ndarray]]
"""Advantages ``(turn, token)`` of the configured estimator, and then of mistakes, with their causes."""
_Credit = tuple[np.ndarray, np.ndarray]
"""Advantages and targets of the critic, each ``(turn, token)``."""


def advantages(sample: Sample) -> Iterator[Finding]:
    """Compare the advantages with those of the configured estimator, and with those of known mistakes."""
    candidates, mask = _HYPOTHESES.get(sample.settings["algorithm"]), sample["mask"]
    recorded = sample["advantages"][mask]
    if candidates is None or not np.isfinite(recorded).all() or sample.settings.get("weighted"):
        return
    estimates = candidates(sample)
    expected = next(estimates, ("", None))[1]
    if expected is None:
        return
    expected = expected[mask]
    correct = _distance(recorded, expected, sample)
    if correct < max(_EQUAL, _rounding(sample, expected)):
        return
    other = [(cause, values[mask]) for cause, values in estimates]
    distances = [(_distance(recorded, values, sample), name) for name, values in other]
    distance, cause = min(distances, key=lambda known: known[0], default=(2.0, ""))
    where, why = np.argwhere(mask)[0], ""
    if np.abs(recorded).max(initial=0.0) < _EQUAL * max(float(np.abs(expected).max()), 1e-9):
        cause, why = "advantages are all 0", ", and are all 0"
    elif distance < _EQUAL:
        why = f", and are those of this mistake up to {distance:.1g}"
    elif (scale := _reward_scale(recorded, sample)) is not None and abs(scale - 1) > _FITTED:
        cause = "reward has the wrong sign" if scale < 0 else "reward has the wrong scale"
        why = f", and are those of rewards multiplied by {scale:.3g}"
    elif (line := _line(recorded, expected)) is not None:
        cause = (
            "advantages have an offset" if abs(line[1]) > _EQUAL * recorded.std() else "advantages are scaled wrongly"
        )
        why = f", and are {line[0]:.3g} times these plus {line[1]:.3g}"
    elif np.allclose(recorded, np.clip(expected, recorded.min(), recorded.max()), atol=_EQUAL * recorded.std()):
        cause, why = "advantages are clipped", f", and are these between {recorded.min():.3g} and {recorded.max():.3g}"
    else:
        cause = next((name for name, values in other if _line(recorded, values) is not None), "")
        why = ", and are those of this mistake up to a factor and an offset" if cause else ""
        if not cause:
            cause, why = _localised(recorded, expected, sample)
    yield sample.finding(
        cause if why else "wrong advantages",
        f"advantages differ from those of the configured estimator by {correct:.2g} of their spread{why} "
        f"({sample.place(int(where[0]))} has {recorded[0]:.4g})",
        "compare the estimator of advantages, and the rewards and ends of episodes that it gets",
        confidence=1.0 if why else 0.8,
    )


def critic_targets(sample: Sample) -> Iterator[Finding]:
    """Compare the targets of the critic with those of the configured estimator."""
    if sample.settings["algorithm"] != "PPOValueHeadModule" or "returns" not in sample or "values" not in sample:
        return
    mask, credit = sample["mask"], sample.settings["credit"]
    lam = credit["gae_lambda"] if credit.get("critic_lambda") is None else credit["critic_lambda"]
    recorded, expected = sample["returns"][mask], ppo_credit(sample, lam=lam)[1][mask]
    spread = max(float(expected.std()), float((expected - sample["values"][mask]).std()), 1e-9)
    difference = float(np.abs(recorded - expected).max()) / spread
    if difference > 10 * _EQUAL:
        yield sample.finding(
            "wrong targets of the critic",
            f"the targets differ from those of the configured estimator by {difference:.2g} of their spread "
            f"({sample.place(int(np.argwhere(mask)[0][0]))} has {recorded[0]:.4g}, should have {expected[0]:.4g})",
            "compare the lambda returns, and the rewards and ends of episodes that they are computed from",
            confidence=0.75,
        )


def neighbours(sample: Sample) -> Iterator[Finding]:
    """Check that the targets of the critic follow from those of the next turn, and not of another environment or turn.

    Only recorded numbers are used, so that this also works where estimates for the whole sample do not.
    """
    credit = sample.settings.get("credit") or {}
    if "returns" not in sample or "values" not in sample or credit.get("kind") != "turn":
        return
    lam = credit["gae_lambda"] if credit.get("critic_lambda") is None else credit["critic_lambda"]
    first = sample["mask"].argmax(1), np.arange(len(sample))
    values, returns = sample["values"][:, 0], sample["returns"][first[1], first[0]]
    place = {(int(time), int(env)): turn for turn, (time, env) in enumerate(zip(sample["time"], sample["env"]))}
    steps = {
        (1, 0): "",
        (0, 1): "time and environments are swapped",
        (0, -1): "time and environments are swapped",
        (-1, 0): "returns run backwards in time",
    }
    for (later, beside), cause in steps.items():
        pairs = [
            (turn, place[time + later, env + beside])
            for (time, env), turn in place.items()
            if not (sample["terminated"][turn] or sample["cut"][turn]) and (time + later, env + beside) in place
        ]
        if len(pairs) < (2 if cause else _MIN_PAIRS):  # the first are refuted before the others are tried
            if not cause:
                return
            continue
        turns, following = np.array(pairs).T
        future = (1 - lam) * values[following] + lam * returns[following]
        expected = sample["rewards"][turns] + credit["gamma"] * future
        close = np.abs(expected - returns[turns]) < _FLOAT32 * max(float(np.abs(returns).max()), 1e-6)
        if close.mean() > _MOST:
            if cause:
                yield sample.finding(
                    cause,
                    f"the target of the critic in {sample.place(int(turns[0]))} follows from that of environment "
                    f"{sample['env'][following[0]]} at time {sample['time'][following[0]]}, and so do "
                    f"{close.mean():.0%} of {len(turns)}",
                    "arrays have the axes time and environment; compare the order in which returns are summed",
                )
            return


def _normalised(sample: Sample) -> bool:
    """Return whether advantages are scaled by numbers of the whole collection, of which a sample is only a part."""
    return (
        bool(sample.settings.get("credit", {}).get("normalise"))
        or sample.settings["algorithm"].startswith("REINFORCE")
        or sample.settings.get("advantage_scale") == "batch_std"
    )


def _distance(recorded: np.ndarray, expected: np.ndarray, sample: Sample) -> float:
    """Return the largest difference of two arrays ``(token,)`` as a share of the spread of the recorded one.

    Normalised advantages are compared up to a positive factor and an offset.
    """
    if _normalised(sample) and expected.std() < 1e-9:
        return 0.0 if recorded.std() < 1e-6 else 2.0
    if _normalised(sample):
        design = np.stack([expected, np.ones_like(expected)], axis=1)
        (factor, offset), *_ = np.linalg.lstsq(design, recorded, rcond=None)
        if factor <= 0:
            return 2.0
        expected = factor * expected + offset
    return float(np.abs(recorded - expected).max() / max(recorded.std(), np.abs(recorded - expected).std(), 1e-9))


def _localised(recorded: np.ndarray, expected: np.ndarray, sample: Sample) -> tuple[str, str]:
    """Return the cause and a description of tokens outside which all advantages are right; empty if none is known."""
    mask, shape = sample["mask"], sample["mask"].shape
    last = mask & ~_without_last(mask)
    ends: dict[str, np.ndarray] = {}
    for kind in ("terminated", "truncated"):
        before = np.zeros(len(sample), dtype=bool)  # turns of episodes that end so in the sample
        for turns in sample.envs():
            follows = False
            for turn in reversed(turns):
                if sample["terminated"][turn] or sample["truncated"][turn]:
                    follows = bool(sample[kind][turn])
                before[turn] = follows
        ends[kind] = before
    invalid = sample["valid"] == 0 if "valid" in sample else np.zeros(len(sample), dtype=bool)
    turns = {
        "advantages of invalid responses are wrong": (invalid, "of invalid responses"),
        "advantages before a termination are wrong": (ends["terminated"], "of episodes that terminate"),
        "advantages before a truncation are wrong": (ends["truncated"], "of episodes that are truncated"),
    }
    places = {"end token not trained": (last[mask], "of the last token of each response")}
    places |= {
        cause: (np.broadcast_to(some[:, None], shape)[mask], what)
        for cause, (some, what) in turns.items()
        if some.any() and not some.all()
    }
    for cause, (inside, what) in places.items():
        outside = ~inside
        if outside.sum() < _MIN_OUTSIDE or outside.sum() < _MIN_SHARE * len(outside):
            continue
        if expected[outside].std() < 1e-9 or len(np.unique(expected[outside])) < 3:
            continue
        line = (1.0, 0.0) if not _normalised(sample) else _line(recorded[outside], expected[outside])
        if line is None:
            continue
        wrong = np.abs(recorded - line[0] * expected - line[1]) > _EQUAL * recorded.std()
        if wrong.any() and not wrong[outside].any():
            return cause, f", but only those {what}"
    return "", ""


def _rounding(sample: Sample, expected: np.ndarray) -> float:
    """Return the error of advantages in float32 as a share of their spread: they are differences of large values."""
    values = np.abs(sample["values"][sample["mask"]]).max(initial=0.0) if "values" in sample else 0.0
    return 1e-6 * float(values) / max(float(expected.std()), 1e-12)


def _line(recorded: np.ndarray, expected: np.ndarray) -> tuple[float, float] | None:
    """Return positive factor and offset of the linear function that explains the advantages; None if none does."""
    if expected.std() < 1e-9 or recorded.std() < 1e-9:
        return None
    factor, offset = (float(value) for value in np.polyfit(expected, recorded, 1))
    explained = np.abs(factor * expected + offset - recorded).max() < _EQUAL * recorded.std()
    return (factor, offset) if explained and factor > 0 else None


def _reward_scale(recorded: np.ndarray, sample: Sample) -> float | None:
    """Return the factor of the rewards that explains the advantages; None if none does.

    Advantages are linear in rewards and values.
    """
    if sample.settings["algorithm"] != "PPOValueHeadModule":
        return None
    mask = sample["mask"]
    of_values = ppo_credit(sample, reward_scale=0.0)[0][mask]
    of_rewards = ppo_credit(sample)[0][mask] - of_values
    columns = [of_values, of_rewards, *([np.ones_like(recorded)] if _normalised(sample) else [])]
    design = np.stack(columns, axis=1)
    solution, *_ = np.linalg.lstsq(design, recorded, rcond=None)
    if np.linalg.matrix_rank(design) < design.shape[1] or solution[0] <= 0:
        return None
    if np.abs(design @ solution - recorded).max() > _FITTED * recorded.std():
        return None
    return float(solution[1] / solution[0])


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
    bootstrap_terminal: bool = False,
    shifted: bool = False,
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
        bootstrap_terminal: a mistake that uses the value of the next episode after a terminal state.
        shifted: a mistake that uses the reward of the previous turn.
    """
    credit, mask, values = sample.settings["credit"], sample["mask"], sample["values"]
    gamma = float(credit["gamma"]) if gamma is None else gamma
    lam = float(credit["gae_lambda"]) if lam is None else lam
    inner = credit["token_lambda"] if token_lambda is None else token_lambda
    kind, token_gamma = credit["kind"], credit["token_gamma"]
    penalties = np.zeros_like(values)
    if "ref_logprobs" in sample:
        kl_coef = kl_scale * sample.settings.get("kl_coef", 0.0)
        penalties = -kl_coef * (sample["logprobs"] - sample["ref_logprobs"]) * mask
    rewards = reward_scale * sample["rewards"]
    if kind == "turn":
        rewards = rewards + penalties.sum(1)
    last = np.maximum(mask.sum(1), 1) - 1
    entry = values[np.arange(len(values)), last] if credit["bootstrap_last"] else values[:, 0]
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    for turns in sample.envs():
        of_env = np.concatenate([[0.0], rewards[turns][:-1]]) if shifted else rewards[turns]
        follow_value = follow_return = follow_advantage = last_reward = 0.0
        for turn, reward in zip(reversed(turns), reversed(of_env), strict=True):
            is_last = turn == turns[-1]
            ended, cut = bool(sample["terminated"][turn]), bool(sample["cut"][turn])
            if across_ends and not is_last:
                ended = cut = False
            if ended and bootstrap_terminal and not is_last:
                value = target = follow_value
                carry = 0.0
            elif ended:
                value = target = carry = 0.0
            elif cut:
                kind_of_cut = "truncated" if sample["truncated"][turn] else "unfinished"
                without = no_bootstrap in ("everywhere", kind_of_cut)
                value = target = 0.0 if without else float(sample["final_values"][turn])
                carry = 0.0
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
            passed_on = max(reward, 0.0) if credit["local_penalties"] else reward
            follow_return = passed_on + future
    return advantages, returns


def _ppo(sample: Sample) -> Estimates:
    mistakes: list[tuple[str, dict[str, Any]]] = [
        ("correct", {}),
        ("advantages leak across episodes", {"across_ends": True}),
        ("truncation treated as termination", {"no_bootstrap": "everywhere"}),
        ("truncation treated as termination", {"no_bootstrap": "truncated"}),
        ("end of the collection treated as termination", {"no_bootstrap": "unfinished"}),
        ("termination treated as truncation", {"bootstrap_terminal": True}),
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
    yield "end token not trained", correct * _without_last(sample["mask"])
    for cause, values in _other_values(sample).items():
        other = replace(sample, arrays={**sample.arrays, "values": np.repeat(values[:, None], correct.shape[1], 1)})
        yield cause, ppo_credit(other)[0]
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
    yield "end token not trained", correct[:, None] * _without_last(sample["mask"])


def _without_last(mask: np.ndarray) -> np.ndarray:
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


def group_means(sample: Sample) -> Iterator[Finding]:
    """Check that the advantages of a group have the mean 0, whatever they are divided by."""
    if sample.settings["algorithm"] != "GRPOModule" or sample.settings["credit"]["kind"] != "episode":
        return
    advantages = sample["advantages"][:, 0]
    first = np.array([turns[0] for turns in sample.envs()])
    means = [advantages[first[sample["group"][first] == group]].mean() for group in np.unique(sample["group"][first])]
    if np.abs(means).max() > 1e-2 * max(float(advantages.std()), 1e-9):
        yield sample.finding(
            "baseline of a group is not its mean",
            f"the mean advantage of a group is {means[int(np.abs(means).argmax())]:.3g}, and should be 0 "
            f"(collection {sample.collection})",
            "compare how returns are divided into groups",
            confidence=0.85,
        )


def normalisation(sample: Sample) -> Iterator[Finding]:
    """Check that normalised advantages have mean 0 and standard deviation 1 over the tokens of the collection."""
    moments = sample.settings.get("advantage_moments")
    if moments is None or not sample.settings.get("credit", {}).get("normalise"):
        return
    mean, std = moments
    if (abs(mean) > 0.02 or abs(std - 1) > 0.02) and std > 0:
        yield sample.finding(
            "advantages are not normalised over the sampled tokens",
            f"over all sampled tokens of collection {sample.collection} they have mean {mean:.3g} and "
            f"standard deviation {std:.3g}",
            "padding must not be counted, and all ranks and turns must be",
            confidence=0.95,
        )


_HYPOTHESES: dict[str, Callable[[Sample], Estimates]] = {
    "PPOValueHeadModule": _ppo,
    "GRPOModule": _grpo,
    "REINFORCEPlusPlusModule": _reinforce,
}

CREDIT_DETECTORS = (neighbours, advantages, group_means, normalisation, critic_targets)
"""Detectors that use one sample."""

"""Detectors of mistakes in advantages and in the targets of the critic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lrl.diagnosis.estimators import HYPOTHESES, ppo_credit, without_last
from lrl.diagnosis.sample import Finding, Sample

_EQUAL = 1e-3
"""Relative difference up to which recorded and recomputed advantages count as equal."""
_FITTED = 1e-2
"""Relative difference up to which advantages count as those of rewards of another scale."""

_MIN_OUTSIDE, _MIN_VALUES, _MOST = 8, 4, 0.95
"""Number of right advantages, and of different ones among them, from which the others are the place of a mistake; share
of the turns that must agree with a mistake."""
_MIN_MASKED = 4
"""Number of turns with advantages of 0, and only these, from which the advantages are masked by a property."""
_MIN_PAIRS, _FLOAT32 = 4, 2e-6
"""Smallest number of targets of the critic that are compared with those of the next turn, and rounding of them."""


def advantages(sample: Sample) -> Iterator[Finding]:
    """Compare the advantages with those of the configured estimator, and with those of known mistakes."""
    candidates, mask = HYPOTHESES.get(sample.settings["algorithm"]), sample["mask"]
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
    equal = min(_EQUAL, correct / 10)  # a mistake must explain a small difference as well
    other = [(cause, values[mask]) for cause, values in estimates]
    distances = [(_distance(recorded, values, sample), name) for name, values in other]
    distance, cause = min(distances, key=lambda known: known[0], default=(2.0, ""))
    where, why = np.argwhere(mask)[0], ""
    masked = _masked(expected, sample)
    if masked is not None:
        cause, why = masked
    elif np.abs(recorded).max(initial=0.0) < _EQUAL * max(float(np.abs(expected).max()), 1e-9):
        cause, why = "advantages are all 0", ", and are all 0"
    elif distance < equal:
        why = f", and are those of this mistake up to {distance:.1g}"
    elif (fit := _changed_rewards(recorded, sample, min(_FITTED, correct / 10))) is not None:
        cause, why = fit
    elif (line := _line(recorded, expected, equal)) is not None:
        cause = (
            "advantages have an offset" if abs(line[1]) > _EQUAL * recorded.std() else "advantages are scaled wrongly"
        )
        why = f", and are {line[0]:.3g} times these plus {line[1]:.3g}"
    elif np.allclose(recorded, np.clip(expected, recorded.min(), recorded.max()), atol=equal * recorded.std()):
        cause, why = "advantages are clipped", f", and are these between {recorded.min():.3g} and {recorded.max():.3g}"
    else:
        cause = next((name for name, values in other if _line(recorded, values, equal) is not None), "")
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
    inner = credit.get("critic_lambda")
    recorded, expected = sample["returns"][mask], ppo_credit(sample, lam=lam, token_lambda=inner)[1][mask]
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


def _places(sample: Sample) -> dict[str, tuple[np.ndarray, str]]:
    """Return turns to which a mistake may be confined, bool ``(turn,)``, with a description, by the cause."""
    none, ended = np.zeros(len(sample), dtype=bool), sample["terminated"] | sample["truncated"]
    before = {"terminated": none.copy(), "truncated": none.copy()}  # turns of episodes that end so in the sample
    last = none.copy()
    for turns in sample.envs():
        last[turns[-1]] = True
        for kind, found in before.items():
            follows = False
            for turn in reversed(turns):
                follows = bool(sample[kind][turn]) if ended[turn] else follows
                found[turn] = follows
    return {
        "advantages of invalid responses are wrong": (
            sample["valid"] == 0 if "valid" in sample else none,
            "of invalid responses",
        ),
        "advantages of valid responses are wrong": (
            sample["valid"] == 1 if "valid" in sample else none,
            "of valid responses",
        ),
        "advantages of first turns are wrong": (sample["turn"] == 0, "of the first turn of each episode"),
        "advantages of terminal turns are wrong": (sample["terminated"], "of turns that terminate an episode"),
        "advantages of truncated turns are wrong": (sample["truncated"], "of turns at which an episode is truncated"),
        "advantages of last turns are wrong": (ended, "of the last turn of each episode"),
        "advantages at the end of a collection are wrong": (last, "of the last turn of each environment"),
        "advantages before a termination are wrong": (before["terminated"], "of episodes that terminate"),
        "advantages before a truncation are wrong": (before["truncated"], "of episodes that are truncated"),
    }


def _masked(expected: np.ndarray, sample: Sample) -> tuple[str, str] | None:
    """Return the cause and a description if exactly the turns with a property have advantages of 0; None otherwise."""
    mask, recorded = sample["mask"], sample["advantages"]
    zero = ((recorded == 0) | ~mask).all(1)
    should = np.zeros(mask.shape)
    should[mask] = expected
    varies = np.ptp(should[zero][mask[zero]]) > 1e-9 if (zero & mask.any(1)).any() else False
    moments = sample.settings.get("advantage_moments")
    if zero.sum() < _MIN_MASKED or not varies or (zero.all() and (moments is None or moments[1] == 0)):
        return None
    for cause, (inside, what) in _places(sample).items():
        if np.array_equal(zero, inside):
            return cause, f", and exactly those {what} are 0"
    return None


def _localised(recorded: np.ndarray, expected: np.ndarray, sample: Sample) -> tuple[str, str]:
    """Return the cause and a description of tokens outside which all advantages are right; empty if none is known."""
    mask, shape = sample["mask"], sample["mask"].shape
    last = mask & ~without_last(mask)
    places = {"end token not trained": (last[mask], "of the last token of each response")}
    places |= {
        cause: (np.broadcast_to(some[:, None], shape)[mask], what)
        for cause, (some, what) in _places(sample).items()
        if some.any() and not some.all()
    }
    for cause, (inside, what) in sorted(places.items(), key=lambda place: int(place[1][0].sum())):  # the smallest first
        outside = ~inside
        if outside.sum() < _MIN_OUTSIDE or len(np.unique(expected[outside].round(9))) < _MIN_VALUES:
            continue
        line = (1.0, 0.0) if not _normalised(sample) else _line(recorded[outside], expected[outside], _EQUAL)
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


def _line(recorded: np.ndarray, expected: np.ndarray, equal: float) -> tuple[float, float] | None:
    """Return positive factor and offset of the linear function that explains the advantages; None if none does.

    Args:
        recorded: advantages, ``(token,)``.
        expected: those of an estimator.
        equal: largest error, as a share of the spread of the recorded ones.
    """
    if expected.std() < 1e-9 or recorded.std() < 1e-9:
        return None
    factor, offset = (float(value) for value in np.polyfit(expected, recorded, 1))
    explained = np.abs(factor * expected + offset - recorded).max() < equal * recorded.std()
    return (factor, offset) if explained and factor > 0 else None


def _changed_rewards(recorded: np.ndarray, sample: Sample, equal: float) -> tuple[str, str] | None:
    """Return the cause and a description if a linear function of the rewards explains the advantages of PPO.

    Advantages are linear in rewards and values.

    Args:
        recorded: advantages, ``(token,)``.
        sample: the sample.
        equal: largest error, as a share of the spread of the recorded ones.
    """
    if sample.settings["algorithm"] != "PPOValueHeadModule":
        return None
    mask = sample["mask"]
    of_values = ppo_credit(sample, reward_scale=0.0)[0][mask]
    of_rewards = ppo_credit(sample)[0][mask] - of_values
    constant = replace(sample, arrays={**sample.arrays, "rewards": np.ones_like(sample["rewards"])})
    of_ones = ppo_credit(constant)[0][mask] - of_values
    free = [np.ones_like(recorded)] if _normalised(sample) else []
    for columns in ([of_values, of_rewards, *free], [of_values, of_rewards, *free, of_ones]):
        design = np.stack(columns, axis=1)
        solution, *_ = np.linalg.lstsq(design, recorded, rcond=None)
        if np.linalg.matrix_rank(design) < design.shape[1] or solution[0] <= 0:
            continue
        if np.abs(design @ solution - recorded).max() > equal * recorded.std():
            continue
        scale = float(solution[1] / solution[0])
        if len(columns) > 2 + len(free):
            offset = float(solution[-1] / solution[0])
            return "reward has an offset", f", and are those of rewards multiplied by {scale:.3g} plus {offset:.3g}"
        if abs(scale - 1) > _FITTED:
            cause = "reward has the wrong sign" if scale < 0 else "reward has the wrong scale"
            return cause, f", and are those of rewards multiplied by {scale:.3g}"
    return None


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
            f"(collection {sample.number})",
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
            f"over all sampled tokens of collection {sample.number} they have mean {mean:.3g} and "
            f"standard deviation {std:.3g}",
            "padding must not be counted, and all ranks and turns must be",
            confidence=0.95,
        )


CREDIT_DETECTORS = (neighbours, advantages, group_means, normalisation, critic_targets)
"""Detectors that use one sample."""

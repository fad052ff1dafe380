"""Detectors of mistakes: pure functions of what a run records.

Each detector computes again, by plain loops that share no code with training, what a number should be, and compares it
with the number that training used. Where they differ, it tries the mistakes that are known to be made: the one that
explains the recorded numbers is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lrl.diagnosis.sample import Sample

_EQUAL = 1e-3
"""Relative difference up to which recorded and recomputed advantages count as equal."""
_LOGPROB_TOLERANCE = {False: 2e-3, True: 0.5}
"""Largest difference of a log-probability in nats, by whether numbers of 16 bits take part."""
_Z = 6.0
"""Number of standard errors from which a mean counts as different."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Describes a mistake or a problem of a run."""

    cause: str
    """Short name of the cause."""
    evidence: str
    """Where it shows, with numbers."""
    remedy: str
    """What to try."""
    confidence: float
    """From 0 to 1; 1 if the numbers are contradictory."""
    collection: int = -1
    """First collection that shows it; -1 if it is not known."""
    severity: Literal["error", "warning"] = "error"
    """``error`` for what is certainly a mistake, ``warning`` for what may be intended."""


SampleDetector = Callable[[Sample], Iterator[Finding]]


def diagnose_samples(samples: Sequence[Sample]) -> list[Finding]:
    """Return the findings of all detectors on samples of one run, the most certain first, one per cause."""
    found: dict[str, Finding] = {}
    for sample in samples:
        for detector in DETECTORS:
            for finding in detector(sample):
                found.setdefault(finding.cause, finding)
    for finding in sampled_distribution(samples):
        found.setdefault(finding.cause, finding)
    return sorted(found.values(), key=lambda finding: -finding.confidence)


# -- which tokens are trained ---------------------------------------------------------------------------------------


def response_mask(sample: Sample) -> np.ndarray:
    """Return the tokens that were sampled, bool ``(turn, token)``: up to and including the first that ends a response.

    A response without such a token ends where only padding, a constant, follows.
    """
    ids, stops = sample["ids"], np.array(sample.settings["stop_ids"])
    is_stop = np.isin(ids, stops)
    first = np.where(is_stop.any(1), is_stop.argmax(1) + 1, ids.shape[1])
    return np.arange(ids.shape[1]) < first[:, None]


def trained_tokens(sample: Sample) -> Iterator[Finding]:
    """Compare the tokens that contribute to the loss with those that were sampled."""
    if "ids" not in sample:
        return
    expected, ids = response_mask(sample), sample["ids"]
    weighted = sample["advantages"] != 0
    trained = np.where(weighted, sample["gradients"] != 0, sample["mask"])  # tokens with advantage 0 have no gradient
    is_stop = np.isin(ids, sample.settings["stop_ids"]) & expected
    ends = expected & ~np.concatenate([expected[:, 1:], np.zeros_like(expected[:, :1])], axis=1)
    for name, tokens in (("in the mask of trained tokens", sample["mask"]), ("in the loss", trained)):
        if np.array_equal(tokens, expected):
            continue
        extra, missing = tokens & ~expected, expected & ~tokens
        known = np.flatnonzero((extra | missing).any(1))
        turn = int(known[0])
        if np.array_equal(tokens, _shifted(expected)):
            cause, what = "shifted mask", "the mask of trained tokens is shifted by one token"
        elif not extra.any() and is_stop.any() and (missing == ends)[known].all():
            cause, what = "end token not trained", f"the token that ends a response is not {name}"
        elif extra.any() and not missing.any():
            cause, what = "padding trained", f"tokens after the end of a response are {name}"
        elif not extra.any():
            cause, what = "sampled tokens not trained", f"sampled tokens are missing {name}"
        else:
            cause, what = "wrong mask", f"tokens that were not sampled are {name}, and sampled ones are missing"
        token = int(np.flatnonzero((extra | missing)[turn])[0])
        yield Finding(
            cause=cause,
            evidence=f"{what}, in {len(known)} of {len(sample)} turns ({sample.place(turn, token)})",
            remedy="the response mask must be true for each sampled token, the end token included, and for no other",
            confidence=1.0,
            collection=sample.collection,
        )
        return


def _shifted(mask: np.ndarray) -> np.ndarray:
    """Return a mask that begins one token later."""
    return np.concatenate([np.zeros_like(mask[:, :1]), mask[:, :-1]], axis=1)


def gradient_sign(sample: Sample) -> Iterator[Finding]:
    """Check that the loss raises the probability of tokens by their advantage, up to a factor and an offset."""
    known = sample["mask"] & np.isfinite(sample["advantages"])
    push = -sample["gradients"]
    if sample.settings.get("loss_normalisation") == "sequence":  # a token of a long response has a smaller weight
        push = push * sample["mask"].sum(1, keepdims=True)
    push, advantages = push[known], sample["advantages"][known]
    if push.std() < 1e-12 or advantages.std() < 1e-12:
        return
    correlation = float(np.corrcoef(push, advantages)[0, 1])
    if correlation < -0.3:
        cause, remedy = "loss has the wrong sign", "compare the loss with the formula of the algorithm"
    elif correlation < 0.3:
        cause = "advantages do not determine the update"
        remedy = "compare the loss with the formula of the algorithm; terms such as the KL penalty may be too large"
    elif sample.collection == 0 and _nonlinear(push, advantages) > (0.1 if sample.settings["half_precision"] else 0.01):
        cause = "tokens have wrong weights in the loss"
        remedy = "compare the sum over tokens with loss_normalisation: padding may be counted, or turns left out"
    else:
        return
    wrong = correlation < -0.3
    yield Finding(
        cause=cause,
        evidence="the correlation of the advantage of a token with the direction in which the loss moves its "
        f"probability is {correlation:.3f} (collection {sample.collection})",
        remedy=remedy,
        confidence=1.0 if wrong else 0.6,
        collection=sample.collection,
        severity="error" if wrong else "warning",
    )


def _nonlinear(values: np.ndarray, of: np.ndarray) -> float:
    """Return the largest deviation of values from a linear function of others, as a share of their spread."""
    slope, offset = np.polyfit(of, values, 1)
    return float(np.abs(values - slope * of - offset).max() / values.std())


# -- advantages -----------------------------------------------------------------------------------------------------


def advantages(sample: Sample) -> Iterator[Finding]:
    """Compare the advantages with those of the configured estimator, and with those of known mistakes."""
    candidates = _HYPOTHESES.get(sample.settings["algorithm"])
    first = sample["advantages"][:, 0]
    if candidates is None or not np.isfinite(first).all() or first.std() == 0:
        return
    estimates = candidates(sample)
    if not estimates:
        return
    correct = _distance(first, estimates.pop("correct"), sample)
    if correct < _EQUAL:
        return
    distances = {cause: _distance(first, values, sample) for cause, values in estimates.items()}
    cause = min(distances, key=lambda name: distances[name], default="")
    explained = bool(cause) and distances[cause] < _EQUAL
    turn = 0
    yield Finding(
        cause=cause if explained else "wrong advantages",
        evidence=f"advantages differ from those of the configured estimator by {correct:.2g} of their spread"
        + (f", and are those of this mistake up to {distances[cause]:.1g}" if explained else "")
        + f" ({sample.place(turn)} has {first[turn]:.4g})",
        remedy="compare the estimator of advantages, and the rewards and ends of episodes that it gets",
        confidence=1.0 if explained else 0.8,
        collection=sample.collection,
    )


def _distance(recorded: np.ndarray, expected: np.ndarray, sample: Sample) -> float:
    """Return the largest difference of two arrays ``(turn,)`` as a share of the spread of the recorded one.

    Normalised advantages are compared up to a positive factor and an offset, because a sample does not contain the
    other turns of the collection.
    """
    scaled = sample.settings.get("credit", {}).get("normalise", False) or sample.settings["algorithm"].startswith(
        "REINFORCE"
    )
    if scaled or sample.settings.get("advantage_scale") == "batch_std":
        design = np.stack([expected, np.ones_like(expected)], axis=1)
        (factor, offset), *_ = np.linalg.lstsq(design, recorded, rcond=None)
        if factor <= 0:
            return 2.0
        expected = factor * expected + offset
    return float(np.abs(recorded - expected).max() / max(recorded.std(), 1e-12))


def gae(sample: Sample, *, gamma: float, lam: float, **mistakes: bool) -> np.ndarray:
    """Return the advantages of turns by GAE, float64 ``(turn,)``, by a loop over each environment's turns.

    Args:
        sample: turns with values.
        gamma: discount per turn.
        lam: GAE coefficient per turn.
        mistakes: ``across_ends`` adds rewards of the next episode; ``no_bootstrap`` uses no value where an episode is
            truncated or goes on; ``bootstrap_terminal`` uses the value of the next episode after a terminal state;
            ``negated`` negates the rewards.
    """
    values, out = sample["values"][:, 0], np.zeros(len(sample))
    for turns in sample.envs():
        carry, following = 0.0, 0.0
        for turn in reversed(turns):
            reward = float(sample["rewards"][turn]) * (-1 if mistakes.get("negated") else 1)
            last = turn == turns[-1]
            ended, cut = bool(sample["terminated"][turn]), bool(sample["cut"][turn])
            next_value = following
            if mistakes.get("across_ends") and not last:
                pass
            elif ended:
                next_value = following if mistakes.get("bootstrap_terminal") else 0.0
                carry = 0.0
            elif cut:
                next_value = 0.0 if mistakes.get("no_bootstrap") else float(sample["final_values"][turn])
                carry = 0.0
            delta = reward + gamma * next_value - values[turn]
            carry = delta + gamma * lam * carry
            out[turn], following = carry, float(values[turn])
    return out


def _ppo(sample: Sample) -> dict[str, np.ndarray]:
    credit = sample.settings["credit"]
    plain = not (credit["local_penalties"] or credit["bootstrap_last"]) and not sample.settings.get("kl", {}).get(
        "coef"
    )
    one_token = sample["mask"].sum(1).max() == 1
    if (credit["kind"] not in ("turn",) and not (one_token and credit["kind"] in ("nested", "token"))) or not plain:
        return {}
    discounts = {"gamma": credit["gamma"], "lam": credit["gae_lambda"]}
    mistakes = {
        "advantages leak across episodes": {"across_ends": True},
        "truncation treated as termination": {"no_bootstrap": True},
        "termination treated as truncation": {"bootstrap_terminal": True},
        "reward has the wrong sign": {"negated": True},
    }
    estimates = {"correct": gae(sample, **discounts)}
    estimates |= {cause: gae(sample, **discounts, **mistake) for cause, mistake in mistakes.items()}
    estimates["undiscounted rewards"] = gae(sample, gamma=1.0, lam=discounts["lam"])
    estimates["advantages are returns without baseline"] = estimates["correct"] + sample["values"][:, 0]
    estimates["advantages are negated"] = -estimates["correct"]
    return estimates


def _grpo(sample: Sample) -> dict[str, np.ndarray]:
    if sample.settings["credit"]["kind"] != "episode":
        return {}
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

    everything = np.zeros_like(groups)
    correct = relative(returns, groups, scale)
    return {
        "correct": correct,
        "advantages leak between groups": relative(returns, everything, scale),
        "groups are not those of the episodes": relative(returns, np.roll(groups, 1), scale),
        "reward has the wrong sign": relative(-returns, groups, scale),
        "advantages are returns without baseline": returns,
        "advantages are not scaled": relative(returns, groups, "none"),
        "advantages are scaled": relative(returns, groups, "group_std"),
    }


_HYPOTHESES: dict[str, Callable[[Sample], dict[str, np.ndarray]]] = {"PPOValueHeadModule": _ppo, "GRPOModule": _grpo}


# -- log-probabilities ----------------------------------------------------------------------------------------------


def recorded_logprobs(sample: Sample) -> Iterator[Finding]:
    """Compare the log-probabilities of sampling and of training with those of a separate forward pass."""
    if "plain_logprobs" not in sample:
        return
    mask = response_mask(sample) & np.isfinite(sample["plain_logprobs"])
    parties = {"sampling": sample["logprobs"], "training": sample["evaluated"]}
    wrong = {}
    for name, logprobs in parties.items():
        difference = np.where(mask & sample["mask"], np.abs(logprobs - sample["plain_logprobs"]), 0.0)
        if difference.max(initial=0.0) > _tolerance(sample):
            wrong[name] = difference
    if not wrong:
        return
    name, difference = next(iter(wrong.items()))
    turn, token = (int(place) for place in np.unravel_index(difference.argmax(), difference.shape))
    yield Finding(
        cause=f"{' and '.join(wrong)} {'use' if len(wrong) > 1 else 'uses'} wrong log-probabilities",
        evidence=f"in {name} the log-probability of a token is {parties[name][turn, token]:.4f}, in a separate forward "
        f"pass {sample['plain_logprobs'][turn, token]:.4f} ({sample.place(turn, token)}); the mean difference is "
        f"{difference[mask].mean():.2g} nats",
        remedy="sampling and training must use the same weights, temperature, dtype and positions",
        confidence=1.0,
        collection=sample.collection,
    )


def _tolerance(sample: Sample) -> float:
    return _LOGPROB_TOLERANCE[sample.settings["half_precision"]]


def sampled_distribution(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Check that tokens were sampled from the distribution whose log-probabilities are recorded.

    The log-probability of a sampled token is minus the entropy on average. A larger mean shows that the likeliest
    tokens were sampled too often, as with a lower temperature or with greedy decoding.
    """
    excess, variance, last = 0.0, 0.0, -1
    for sample in samples:
        if "plain_logprobs" not in sample:
            continue
        mask = response_mask(sample) & np.isfinite(sample["plain_logprobs"])
        excess += float((sample["plain_logprobs"] + sample["plain_entropy"])[mask].sum())
        variance += float(sample["plain_variance"][mask].sum())
        last = sample.collection
        if variance > 0 and abs(excess) > _Z * np.sqrt(variance):
            more = "likely" if excess > 0 else "unlikely"
            yield Finding(
                cause="tokens are sampled from another distribution",
                evidence=f"{more} tokens were sampled too often: the sum of log-probabilities differs from its "
                f"expectation by {abs(excess) / np.sqrt(variance):.0f} standard errors, up to collection {last}",
                remedy="training must not use top_k, top_p, greedy decoding, or another temperature than sampling",
                confidence=0.95,
                collection=last,
            )
            return


def reference(sample: Sample) -> Iterator[Finding]:
    """Check that the reference is the policy at the start of the run, before the first update."""
    if sample.collection != 0 or "ref_logprobs" not in sample:
        return
    own = sample["evaluated"] if "evaluated" in sample else sample["logprobs"]
    difference = np.nan_to_num(np.where(sample["mask"], np.abs(sample["ref_logprobs"] - own), 0.0))
    if difference.max() > _tolerance(sample):
        turn, token = (int(place) for place in np.unravel_index(difference.argmax(), difference.shape))
        yield Finding(
            cause="wrong reference policy",
            evidence=f"before the first update, log-probabilities of the reference differ by up to "
            f"{difference.max():.3g} nats from those of the policy ({sample.place(turn, token)})",
            remedy="the reference must have the weights, temperature and prompt of the policy at the start of the run",
            confidence=1.0,
            collection=0,
        )


# -- rewards --------------------------------------------------------------------------------------------------------


def rewards(sample: Sample) -> Iterator[Finding]:
    """Check that rewards are not all equal."""
    if len(sample) >= 32 and np.ptp(sample["rewards"]) == 0 and not sample["terminated"].all():
        return  # such as 0 in all turns of a sparse task, or 1 per step
    if len(sample) >= 32 and np.ptp(sample["rewards"]) == 0:
        yield Finding(
            cause="constant reward",
            evidence=f"all {len(sample)} episodes have the reward {sample['rewards'][0]:g}, whatever the response "
            f"(collection {sample.collection})",
            remedy="compare the reward of a right and of a wrong response",
            confidence=0.5,
            collection=sample.collection,
            severity="warning",
        )


DETECTORS: tuple[SampleDetector, ...] = (
    trained_tokens,
    gradient_sign,
    advantages,
    recorded_logprobs,
    reference,
    rewards,
)
"""Detectors that use one sample."""

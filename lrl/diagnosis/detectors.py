"""Detectors of mistakes: pure functions of what a run records.

Each detector computes again, by plain loops that share no code with training, what a number should be, and compares it
with the number that training used. Where they differ, it tries the mistakes that are known to be made: the one that
explains the recorded numbers is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lrl.diagnosis.credit import CREDIT_DETECTORS
from lrl.diagnosis.environments import ENVIRONMENT_DETECTORS, new_episodes, start_states
from lrl.diagnosis.episodes import EPISODE_DETECTORS, success_and_return
from lrl.diagnosis.losses import LOSS_DETECTORS, inverts_ratio
from lrl.diagnosis.sample import Finding, Sample

_MIN_SHIFTED = 3
"""Smallest number of tokens by which log-probabilities are compared with those of neighbouring tokens."""
_LOGPROB_TOLERANCE = {False: 2e-3, True: 0.5}
"""Largest difference of a log-probability in nats, by whether numbers of 16 bits take part."""
_REDRAWN_BY_CHANCE = -8.0
"""Logarithm of the probability of tokens below which it is no coincidence that other random numbers give them."""
_Z = 6.0
"""Number of standard errors from which a mean counts as different."""
_RARE = np.geomspace(1e-9, 0.5, 200)
_OF_TWO = (
    -_RARE * np.log(_RARE) - (1 - _RARE) * np.log1p(-_RARE),
    _RARE * (1 - _RARE) * np.square(np.log(_RARE) - np.log1p(-_RARE)),
)
"""Entropies of a choice between two tokens, increasing, and the variances of its log-probability."""


SampleDetector = Callable[[Sample], Iterator[Finding]]


def diagnose_samples(samples: Sequence[Sample]) -> list[Finding]:
    """Return the findings of all detectors on samples of one run, the most certain first, one per cause."""
    found: dict[str, Finding] = {}
    for sample in samples:
        for detector in DETECTORS:
            for finding in detector(sample):
                found.setdefault(finding.cause, finding)
    for of_all in SERIES_DETECTORS:
        for finding in of_all(samples):
            found.setdefault(finding.cause, finding)
    return sorted(found.values(), key=lambda finding: -finding.confidence)


# -- which tokens are trained ---------------------------------------------------------------------------------------


def response_mask(sample: Sample) -> np.ndarray:
    """Return the tokens that were sampled, bool ``(turn, token)``: up to and including the first that ends a response.

    A response without such a token has the maximum number of tokens, and so all tokens of its row.
    """
    ids, stops = sample["ids"], np.array(sample.settings["stop_ids"])
    if "stopped_at" in sample:
        return np.arange(ids.shape[1]) < sample["stopped_at"][:, None]
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
        yield sample.finding(
            cause,
            f"{what}, in {len(known)} of {len(sample)} turns ({sample.place(turn, token)})",
            "the response mask must be true for each sampled token, the end token included, and for no other",
        )
        return


def _shifted(mask: np.ndarray) -> np.ndarray:
    """Return a mask that begins one token later."""
    return np.concatenate([np.zeros_like(mask[:, :1]), mask[:, :-1]], axis=1)


def gradient_sign(sample: Sample) -> Iterator[Finding]:
    """Check that the loss raises the probability of tokens by their advantage, up to a factor and an offset."""
    known = sample["mask"] & np.isfinite(sample["advantages"])
    push = -sample.arrays.get("surrogate", sample["gradients"])  # without the KL term, which may be larger
    if sample.settings.get("loss_normalisation") == "sequence":  # a token of a long response has a smaller weight
        push = push * sample["mask"].sum(1, keepdims=True)
    push, advantages = push[known], sample["advantages"][known]
    if push.std() < 1e-12 or advantages.std() < 1e-12:
        return
    correlation = float(np.corrcoef(push, advantages)[0, 1])
    if correlation < -0.3 and inverts_ratio(sample):
        return
    if correlation < -0.3:
        cause, remedy = "loss has the wrong sign", "compare the loss with the formula of the algorithm"
    elif correlation < 0.3:
        cause = "advantages do not determine the update"
        remedy = "compare the loss with the formula of the algorithm"
    elif sample.collection == 0 and _nonlinear(push, advantages) > (0.1 if sample.settings["half_precision"] else 0.01):
        cause = "tokens have wrong weights in the loss"
        remedy = "compare the sum over tokens with loss_normalisation: padding may be counted, or turns left out"
    else:
        return
    wrong = correlation < -0.3
    yield sample.finding(
        cause,
        "the correlation of the advantage of a token with the direction in which the loss moves its "
        f"probability is {correlation:.3f} (collection {sample.number})",
        remedy,
        confidence=1.0 if wrong else 0.6,
        warning=not wrong,
    )


def _nonlinear(values: np.ndarray, of: np.ndarray) -> float:
    """Return the largest deviation of values from a linear function of others, as a share of their spread."""
    slope, offset = np.polyfit(of, values, 1)
    return float(np.abs(values - slope * of - offset).max() / values.std())


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
    for other, step in (("next", 1), ("previous", -1)):
        if _is_of_neighbour(sample, parties[name], step):
            yield sample.finding(
                "log-probabilities are those of other tokens",
                f"in {name} they are the probabilities of the {other} token of the response "
                f"(collection {sample.number})",
                "the logits at a position belong to the token after it; compare how tokens and logits are sliced",
            )
            return
    turn, token = (int(place) for place in np.unravel_index(difference.argmax(), difference.shape))
    yield sample.finding(
        f"{' and '.join(wrong)} {'use' if len(wrong) > 1 else 'uses'} wrong log-probabilities",
        f"in {name} the log-probability of a token is {parties[name][turn, token]:.4f}, in a separate forward "
        f"pass {sample['plain_logprobs'][turn, token]:.4f} ({sample.place(turn, token)}); the mean difference is "
        f"{difference[mask].mean():.2g} nats",
        "sampling and training must use the same weights, temperature, dtype and positions",
    )


def _is_of_neighbour(sample: Sample, logprobs: np.ndarray, step: int) -> bool:
    """Return whether log-probabilities are those of the next token (``step`` 1) or the previous one (-1)."""
    name, mask = "next_logprobs" if step == 1 else "previous_logprobs", response_mask(sample)
    if name not in sample:
        return False
    known = mask & np.roll(mask, -step, axis=1)
    known[:, -1 if step == 1 else 0] = False
    of_other = sample[name]
    known &= np.isfinite(of_other) & sample["mask"]
    different = known & (np.abs(of_other - sample["plain_logprobs"]) > _tolerance(sample))
    return bool(
        different.sum() >= _MIN_SHIFTED and (np.abs(logprobs - of_other)[known] < _tolerance(sample)).mean() > 0.95
    )


def sampled_and_trained(sample: Sample) -> Iterator[Finding]:
    """Compare the log-probabilities of sampling with those that training computes before the first update."""
    if "evaluated" not in sample or sample.settings.get("weighted"):
        return
    place = _largest(sample["evaluated"] - sample["logprobs"], sample["mask"], _tolerance(sample))
    if place is not None:
        yield sample.finding(
            "sampling and training disagree",
            f"the log-probability of a token is {sample['logprobs'][place]:.4f} in sampling, and "
            f"{sample['evaluated'][place]:.4f} in training before the first update ({sample.place(*place)})",
            "sampling and training must use the same weights, inputs, actions, temperature and dtype",
            confidence=0.9,
        )


def drawn_tokens(sample: Sample) -> Iterator[Finding]:
    """Compare sampled tokens with those that the current weights give with the same random numbers."""
    if "drawn" not in sample or sample.settings["half_precision"]:
        return
    known = response_mask(sample) & (sample["drawn"] >= 0)
    wrong = known & (sample["drawn"] != sample["ids"])
    if wrong.sum() >= 2:  # rounding changes one in a million tokens
        turn, token = (int(place) for place in np.argwhere(wrong)[0])
        turns = np.flatnonzero(wrong.any(1))
        explained = np.flatnonzero(sample["drawn_by"][turns].all(0)) if "drawn_by" in sample else []
        if (
            len(explained)
            and float(sample["plain_logprobs"][known & wrong.any(1, keepdims=True)].sum()) < _REDRAWN_BY_CHANCE
        ):
            yield sample.finding(
                "random numbers are used again",
                f"the tokens of {len(turns)} turns, such as those of {sample.place(turn)}, are those that the policy "
                f"gives with random numbers that do not depend on {sample.settings['random_keys'][explained[0]]}",
                "the random numbers of a token must depend on the collection, the environment and the time",
            )
            return
        yield sample.finding(
            "tokens are not sampled by the current weights",
            f"{int(wrong.sum())} of {int(known.sum())} sampled tokens are not those that the policy gives with "
            f"the same random numbers ({sample.place(turn, token)})",
            "sampling must use the weights of the latest update, the configured temperature, and the random numbers "
            "of its own environment and turn",
            confidence=0.9,
        )


def _largest(difference: np.ndarray, known: np.ndarray, tolerance: float) -> tuple[int, int] | None:
    """Return the turn and the token of the largest known difference; None if it is not above the tolerance."""
    difference = np.where(known, np.abs(np.nan_to_num(difference)), 0.0)
    if not difference.max(initial=0.0) > tolerance:
        return None
    turn, token = np.unravel_index(difference.argmax(), difference.shape)
    return int(turn), int(token)


def _tolerance(sample: Sample) -> float:
    return _LOGPROB_TOLERANCE[sample.settings["half_precision"]]


def sampled_distribution(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Check that tokens were sampled from the distribution whose log-probabilities are recorded.

    The log-probability of a sampled token is minus the entropy on average. A larger mean shows that the likeliest
    tokens were sampled too often, as with a lower temperature or with greedy decoding. The variance of the differences
    is measured, but it is too small where no unlikely token is among the samples, so it is at least that of a choice
    between two tokens with the same entropy.
    """
    excess, squares = 0.0, 0.0
    for sample in samples:
        if "entropy" not in sample:
            continue
        known = sample["mask"] & np.isfinite(sample["evaluated"]) & np.isfinite(sample["entropy"])
        if "by_index" in sample:  # episodes that were chosen by their ends are longer than others
            known &= sample["by_index"][:, None]
        of_turns = np.where(known, sample["evaluated"] + sample["entropy"], 0.0).sum(1)
        least = float(np.interp(sample["entropy"][known], *_OF_TWO).sum())
        excess, squares = excess + float(of_turns.sum()), squares + max(float(np.square(of_turns).sum()), least)
        if squares > 0 and abs(excess) > _Z * np.sqrt(squares):
            more = "likely" if excess > 0 else "unlikely"
            yield sample.finding(
                "tokens are sampled from another distribution",
                f"{more} tokens were sampled too often: the sum of log-probabilities differs from its "
                f"expectation by {abs(excess) / np.sqrt(squares):.0f} standard errors, up to collection "
                f"{sample.number}",
                "training must not use top_k, top_p, greedy decoding, or another temperature than sampling",
                confidence=0.95,
            )
            return


def recorded_entropy(sample: Sample) -> Iterator[Finding]:
    """Compare the entropies of training with those of a separate forward pass."""
    if "plain_entropy" not in sample or "entropy" not in sample:
        return
    known = response_mask(sample) & sample["mask"]
    place = _largest(sample["entropy"] - sample["plain_entropy"], known, _tolerance(sample))
    if place is not None:
        yield sample.finding(
            "entropy is not that of the policy",
            f"in training the entropy of a token is {sample['entropy'][place]:.4f}, in a separate "
            f"forward pass {sample['plain_entropy'][place]:.4f} ({sample.place(*place)})",
            "compare the formula of the entropy, and the logits and the temperature from which it is computed",
            confidence=0.9,
        )


def recorded_values(sample: Sample) -> Iterator[Finding]:
    """Compare recorded values with those that training computes, and those after a cut with those of the next state."""
    if sample.settings.get("fits_critic"):  # which changed it after it gave the recorded values
        return
    spread = float(np.abs(sample["values"][sample["mask"]]).max(initial=0.0)) if "values" in sample else 0.0
    tolerance = max(spread, 1e-3) * (0.1 if sample.settings["half_precision"] else 1e-2)
    if "evaluated_values" in sample and "values" in sample:
        place = _largest(sample["values"] - sample["evaluated_values"], sample["mask"], tolerance)
        if place is not None:
            yield sample.finding(
                "values are not those of the critic",
                f"the value from which advantages are estimated is {sample['values'][place]:.4g}, and "
                f"{sample['evaluated_values'][place]:.4g} in training ({sample.place(*place)})",
                "compare the positions and the weights with which values are computed",
                confidence=0.95,
            )
    if "plain_values" in sample and "values" in sample:
        known = response_mask(sample) & sample["mask"] & np.isfinite(sample["plain_values"])
        place = _largest(sample["values"] - sample["plain_values"], known, tolerance)
        if place is not None:
            later = np.roll(sample["plain_values"], -1, axis=1)
            both = known & np.roll(known, -1, axis=1) & (np.arange(known.shape[1]) < known.shape[1] - 1)
            shifted = both.any() and _largest(sample["values"] - later, both, tolerance) is None
            yield sample.finding(
                "values are those of other tokens" if shifted else "values are not those of the critic",
                f"the value from which advantages are estimated is {sample['values'][place]:.4g}, and "
                f"{sample['plain_values'][place]:.4g} in a separate forward pass ({sample.place(*place)})",
                "the value of a token is computed from the hidden state that predicts the token",
                confidence=0.9,
            )
    if "values" in sample and "final_values" in sample and "cut" in sample and spread > 0:
        cut = sample["cut"] & ~sample["terminated"]
        if cut.any() and not sample["final_values"][cut].any():
            turn = int(cut.argmax())
            kind = "truncation" if sample["truncated"][cut].all() else "end of the collection"
            yield sample.finding(
                f"{kind} treated as termination",
                f"the value after all {int(cut.sum())} turns at which an episode is cut is 0 ({sample.place(turn)})",
                "the rewards after a cut are replaced by the value of the state that the last step returned",
                confidence=0.95,
            )
            return
    if "replay_final_values" in sample and "final_values" in sample:
        expected = sample["replay_final_values"]
        difference = np.where(np.isfinite(expected), np.abs(sample["final_values"] - np.nan_to_num(expected)), 0.0)
        if difference.max(initial=0.0) > tolerance:
            turn = int(difference.argmax())
            missing = np.abs(sample["final_values"][np.isfinite(expected)]).max() == 0
            yield sample.finding(
                "truncation treated as termination" if missing else "values after a cut are of another state",
                f"the value after a turn at which the episode is cut is {sample['final_values'][turn]:.4g}; "
                f"that of the state after it is {expected[turn]:.4g} ({sample.place(turn)})",
                "rewards after a truncation are replaced by the value of the state that the last step returned, "
                "before a reset",
                confidence=0.95,
            )


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


def reference_moves(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Check that the reference does not change with the policy."""
    moved = 0.0
    for sample in samples:
        if "ref_logprobs" not in sample or "evaluated" not in sample:
            return
        mask = sample["mask"] & np.isfinite(sample["evaluated"])
        difference = (
            float(np.abs(sample["ref_logprobs"] - sample["evaluated"])[mask].mean()) if mask.any() else math.inf
        )
        if moved > 1e-4 and difference < 0.02 * moved:
            yield sample.finding(
                "reference moves with the policy",
                f"in collection {sample.number}, the log-probabilities of the reference differ on average by "
                f"{difference:.1g} nats from those of the policy, whose own have changed by {moved:.2g} nats",
                "the reference must be a copy of the policy at the start of the run",
            )
            return
        if "moved" in sample:
            moved = max(moved, float(np.abs(sample["moved"][sample["mask"]]).mean()))


# -- rewards --------------------------------------------------------------------------------------------------------


def rewards(sample: Sample) -> Iterator[Finding]:
    """Check that rewards are not all equal."""
    if len(sample) >= 32 and np.ptp(sample["rewards"]) == 0 and not sample["terminated"].all():
        return  # such as 0 in all turns of a sparse task, or 1 per step
    legal = "valid" not in sample or sample["valid"].mean() > 0.5  # else invalid responses explain the reward
    solved = "success" in sample and bool((sample["success"] == 1).all())
    unlike = legal and not solved and len(set(sample.responses)) > 1
    if len(sample) >= 32 and np.ptp(sample["rewards"]) == 0 and unlike:
        yield sample.finding(
            "constant reward",
            f"all {len(sample)} episodes have the reward {sample['rewards'][0]:g}, whatever the response "
            f"(collection {sample.number})",
            "compare the reward of a right and of a wrong response",
            confidence=0.5,
            warning=True,
        )


OF_EPISODES: tuple[SampleDetector, ...] = (*ENVIRONMENT_DETECTORS, *EPISODE_DETECTORS, rewards)
OF_TOKENS: tuple[SampleDetector, ...] = (
    trained_tokens,
    recorded_logprobs,
    sampled_and_trained,
    drawn_tokens,
    recorded_entropy,
    recorded_values,
    reference,
)
OF_LOSS: tuple[SampleDetector, ...] = (gradient_sign, *LOSS_DETECTORS)
DETECTORS: tuple[SampleDetector, ...] = (
    *ENVIRONMENT_DETECTORS,
    *EPISODE_DETECTORS,
    *OF_TOKENS,
    *CREDIT_DETECTORS,
    rewards,
    *OF_LOSS,
)
"""Detectors that use one sample, in the order in which numbers are computed: the first finding is nearest the cause."""
SERIES_DETECTORS = (sampled_distribution, reference_moves, success_and_return, start_states, new_episodes)
"""Detectors that use all samples of a run."""

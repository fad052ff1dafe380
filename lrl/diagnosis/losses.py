"""Detectors of mistakes in the loss and in the update: clipping, entropy, KL term, critic, direction and size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lrl.diagnosis.sample import Finding, Sample

PROBE = 1.0
"""Change of the log-probability of all tokens at which the gradient of the loss is computed, in nats: beyond the range
in which ratios are not clipped."""
REFERENCE_PROBE = 0.5
"""Excess over the log-probabilities of the reference where the gradient of the KL term is computed, in nats."""
_FIRST = 3
"""Number of collections at the start of a run that are always recorded."""
_SMALL_UPDATE = 2e-3
"""Mean change of a log-probability by the updates of each of the first collections, in nats, that is too small."""
_UNCHANGED = 1e-6
"""Mean change of a log-probability up to which it is rounding, in nats."""
GRADIENT_ERROR = 0.05
"""Difference of two computations of a gradient in 32 bits, as a share of its norm, that is too large."""
STEP_ERROR = 0.05
"""The same for the change of weights in an optimiser step."""
_LARGE_UPDATE = 0.5
"""Mean KL divergence of the updates of one collection, in nats per token, that is certainly too large."""
_LARGEST_UPDATE = 1.0
"""KL divergence above which the direction of the updates says nothing about the sign of the loss."""


def _factors(sample: Sample) -> list[tuple[int, bool, float]]:
    """Return the gradients of the surrogate at other ratios than 1, as multiples of those at ratio 1.

    Returns:
        The sign of the logarithm of the ratio, whether advantages are positive, and the median multiple of such tokens.
    """
    if "surrogate" not in sample:
        return []
    advantages, at_one = sample["advantages"], sample["surrogate"]
    known = sample["mask"] & np.isfinite(advantages) & (np.abs(at_one) > 1e-9 * np.abs(at_one).max(initial=0.0))
    out: list[tuple[int, bool, float]] = []
    for sign, name in ((1, "surrogate_above"), (-1, "surrogate_below")):
        for positive in (True, False):
            some = known & ((advantages > 0) == positive) & (advantages != 0)
            if some.any():
                out.append((sign, positive, float(np.median(sample[name][some] / at_one[some]))))
    return out


def _clips(sample: Sample) -> bool:
    """Return whether the algorithm clips ratios that are as far from 1 as those of :data:`PROBE`."""
    clip = sample.settings.get("clip")
    return clip is not None and clip[0] < 1 - math.exp(-PROBE) and clip[1] < math.exp(PROBE) - 1


def inverts_ratio(sample: Sample) -> bool:
    """Return whether gradients are those of the surrogate with the old policy in the numerator of the ratio."""
    factors, clips = _factors(sample), _clips(sample)
    expected = [0.0 if clips and (sign > 0) != positive else math.exp(-sign * PROBE) for sign, positive, _ in factors]
    fits = [abs(one - known[2]) < 0.02 * max(1.0, one) for one, known in zip(expected, factors, strict=True)]
    return bool(fits) and all(fits) and any(expected)


def _multiplies_ratios(sample: Sample) -> bool:
    """Return whether the ratio of each token is the product of the ratios of all tokens of its response."""
    number = np.broadcast_to(sample["mask"].sum(1, keepdims=True), sample["mask"].shape)
    known = sample["mask"] & (sample["advantages"] < 0) & (sample["surrogate"] != 0)  # large ratios are not clipped
    if not known.any() or number[known].max() < 2:
        return False
    factors = sample["surrogate_above"][known] / sample["surrogate"][known]
    return float(np.abs(factors / np.exp(PROBE * number[known]) - 1).max()) < 0.02


def surrogate(sample: Sample) -> Iterator[Finding]:
    """Check how the gradient of the surrogate depends on the ratio: proportional to it, and 0 where it is clipped."""
    clipped = _clips(sample)
    if inverts_ratio(sample):
        found = ", ".join(
            f"{factor:.3g} at {math.exp(sign * PROBE):.2f} ({'positive' if positive else 'negative'} advantages)"
            for sign, positive, factor in _factors(sample)
        )
        yield sample.finding(
            "ratio is inverted",
            f"the gradient of the loss, as a multiple of that at ratio 1, is {found}: that of a ratio with the "
            f"old policy in its numerator (collection {sample.number})",
            "the ratio is the probability under the current policy divided by that under the sampling policy",
        )
        return
    for sign, positive, factor in _factors(sample):
        ratio = math.exp(sign * PROBE)
        is_clipped = clipped and (sign > 0) == positive
        expected = 0.0 if is_clipped else ratio
        if abs(factor - expected) < 0.02 * max(1.0, ratio):
            continue
        if abs(factor - 1) < 0.02:
            cause = "ratio does not depend on the policy"
            remedy = "the ratio must compare the current policy with the recorded log-probabilities of sampling"
        elif is_clipped and abs(factor - ratio) < 0.02 * ratio:
            cause, remedy = "ratios are not clipped", "compare the loss with the formula of the algorithm"
        elif factor == 0:
            cause = "ratios are clipped on the wrong side"
            remedy = "min(r A, clip(r) A) clips large ratios only for positive advantages, and small ones only for "
            remedy += "negative advantages"
        elif _multiplies_ratios(sample):
            cause = "ratios are those of whole responses"
            remedy = "the ratio of a token must not contain the log-probabilities of the other tokens of its response"
        else:
            cause, remedy = "wrong surrogate objective", "compare the loss with the formula of the algorithm"
        yield sample.finding(
            cause,
            f"for tokens with {'positive' if positive else 'negative'} advantage whose ratio is "
            f"{ratio:.2f}, the gradient of the loss is {factor:.3g} times that at ratio 1, and should be "
            f"{expected:.3g} times (collection {sample.number})",
            remedy,
            confidence=0.95,
        )
        return


def terms(sample: Sample) -> Iterator[Finding]:
    """Check the signs of the entropy bonus, of the KL term and of the value loss, and if they are right, the sizes."""
    wrong = list(_signs(sample))
    yield from wrong or _sizes(sample)


def _signs(sample: Sample) -> Iterator[Finding]:
    mask, settings = sample["mask"], sample.settings
    push = sample["entropy_gradients"][mask] if "entropy_gradients" in sample else np.zeros(0)
    if push.size and settings.get("ent_coef"):
        if (push > 0).all():
            yield _term(sample, "entropy bonus has the wrong sign", "the loss rises with the entropy", "model.ent_coef")
        elif (push == 0).all():
            yield _term(sample, "entropy bonus has no effect", "the loss does not depend on the entropy", "ent_coef")
    kl = settings.get("kl") or {}
    if "kl_gradients" in sample and kl.get("coef") and settings["algorithm"] == "GRPOModule":
        push = sample["kl_gradients"][mask]  # of tokens that are more probable than under the reference
        if (push < 0).all():
            what = "the loss moves the policy away from the reference"
            yield _term(sample, "KL term has the wrong sign", what, "model.kl")
        elif (push == 0).all():
            yield _term(sample, "KL term has no effect", "the loss does not depend on the reference", "model.kl")
    if "value_gradients" in sample and settings.get("vf_coef"):
        error, push = (sample["values"] - sample["returns"])[mask], sample["value_gradients"][mask]
        some = np.abs(error) > 1e-3 * np.abs(error).max(initial=0.0)
        if some.any() and (push[some] == 0).all():
            yield _term(sample, "critic is not trained", "the loss does not depend on the values", "model.vf_coef")
        elif some.any() and (push[some] * error[some] < 0).mean() > 0.5:
            yield _term(sample, "value loss has the wrong sign", "it moves values away from returns", "model.vf_coef")


def _sizes(sample: Sample) -> Iterator[Finding]:
    """Compare the gradients of the terms of the loss with those of the formula, as multiples of the token's weight."""
    settings, advantages = sample.settings, sample["advantages"]
    known = sample["mask"] & np.isfinite(advantages)
    known &= np.abs(advantages) > 1e-3 * np.abs(advantages[known]).max(initial=0.0)
    if "surrogate" not in sample or not known.any():
        return
    weights = -sample["surrogate"][known] / advantages[known]
    if not (weights > 0).all():
        return  # another mistake
    kl = settings.get("kl") or {}
    terms = {  # cause, option, gradient, and gradient of the formula for a token of weight 1
        "entropy bonus": ("model.ent_coef", "entropy_gradients", -(settings.get("ent_coef") or 0.0)),
        "KL term": ("model.kl.coef", "kl_gradients", kl.get("coef", 0.0) * (1 - math.exp(-REFERENCE_PROBE))),
        "KL term to the sampling policy": ("model.kl.old_coef", "offset_gradients", -kl.get("old_coef", 0.0)),
    }
    if settings["algorithm"] != "GRPOModule":
        terms.pop("KL term")
    if "values" in sample and "returns" in sample and settings.get("vf_coef") and not settings.get("fits_critic"):
        errors = (sample["values"] - sample["returns"])[known]
        terms["value loss"] = ("model.vf_coef", "value_gradients", settings["vf_coef"] * errors)
    for name, (option, gradient, of_formula) in terms.items():
        if gradient not in sample:
            continue
        found, expected = sample[gradient][known], of_formula * weights
        size = np.abs(expected).max(initial=0.0)
        if np.abs(found - expected).max() > 0.02 * max(float(size), 1e-3 * float(weights.max())):
            factor = float(found @ expected) / float(expected @ expected) if size else math.inf
            yield sample.finding(
                f"{name} has the wrong size",
                f"the gradient of the {name} is {factor:.3g} times that of the formula with the configured "
                f"{option}, relative to the surrogate (collection {sample.number})",
                "compare the loss with the formula of the algorithm, and its coefficient with the configuration",
                confidence=0.9,
            )
            return


def _term(sample: Sample, cause: str, what: str, name: str) -> Finding:
    return sample.finding(
        cause,
        f"{what}, although {name} is positive (collection {sample.number})",
        "compare the loss with the formula of the algorithm",
    )


def update(sample: Sample) -> Iterator[Finding]:
    """Check the change of the log-probabilities of sampled tokens in the updates of the collection."""
    if "moved" not in sample:
        return
    yield from _completeness(sample)
    known = sample["mask"] & np.isfinite(sample["moved"]) & (sample["advantages"] != 0)
    moved, advantages = sample["moved"][known], sample["advantages"][known]
    if len(moved) < 30 or advantages.std() < 1e-12:
        return
    error, several = sample.settings.get("largest_ratio_error"), sample.settings.get("minibatches", 1) > 1
    if several and error is not None and error < 1e-4 and np.abs(moved).mean() > 1e-3:
        yield sample.finding(
            "ratio does not depend on the policy",
            f"all ratios are 1 in all {sample.settings['minibatches']} minibatches, although updates change "
            f"log-probabilities by {np.abs(moved).mean():.2g} nats (collection {sample.number})",
            "the ratio must compare the current policy with the recorded log-probabilities of sampling",
            confidence=0.95,
        )
    if np.abs(moved).mean() < _UNCHANGED and sample.collection > 0:
        yield sample.finding(
            "weights are not trained",
            f"the updates of collection {sample.number} change log-probabilities by {np.abs(moved).mean():.1g} nats",
            "compare the weights that the optimiser gets, the gradients, and the learning rate and its "
            "schedule (train/lr)",
            confidence=0.7,
            warning=True,
        )
    elif np.abs(moved).mean() < _SMALL_UPDATE and 0 < sample.collection < _FIRST:
        yield sample.finding(
            "learning rate too low",
            f"the updates of collection {sample.number} change log-probabilities by only "
            f"{np.abs(moved).mean():.2g} nats",
            "a larger model.optimizer.lr, or more data.num_epochs or data.num_minibatches",
            confidence=0.5,
            warning=True,
        )
    kl = -float(moved.mean())  # tokens were sampled before the updates
    if kl > _LARGE_UPDATE and sample.collection < _FIRST:  # a single one later may be harmless, see metrics.step_size
        yield sample.finding(
            "learning rate too high",
            f"the updates of collection {sample.number} change the policy by {kl:.3g} nats per token",
            smaller_steps(sample.settings.get("lr")),
            confidence=0.8,
            warning=True,
        )
    if moved.std() == 0 or kl > _LARGEST_UPDATE:
        return
    turns = len(np.unique(np.flatnonzero(known.any(1))))  # the tokens of a turn are not independent
    correlation = float(np.corrcoef(moved, advantages)[0, 1])
    if correlation < -4 / math.sqrt(turns):
        yield sample.finding(
            "update has the wrong sign",
            "the updates make tokens with positive advantages less probable: the correlation of the advantage "
            f"with the change of the log-probability is {correlation:.2f} (collection {sample.number})",
            "compare the sign of the loss, and whether the optimiser minimises it",
            confidence=0.85 if correlation < -0.3 else 0.6,
        )


def smaller_steps(rate: float | None) -> str:
    """Return what to try against updates that are too large, with the learning rate if it is known."""
    known = "a smaller model.optimizer.lr" if not rate else f"the learning rate is {rate:.2g}: try {rate / 3:.1g}"
    return f"{known}, or model.optimizer.update_kl: 0.01, model.target_kl: 0.03, or fewer data.num_epochs"


def _minibatches(sample: Sample) -> Iterator[Finding]:
    """Check that the minibatches of each pass have all turns as they are, in a random order."""
    settings, collection = sample.settings, sample.number
    if settings.get("mixed_turns"):
        yield sample.finding(
            "minibatches mix the fields of different turns",
            f"{settings['mixed_turns']} turns of minibatches have fields that no turn has "
            f"together (collection {collection})",
            "tokens, masks, log-probabilities and advantages of a turn must be selected by the same index",
        )
    if settings.get("repeated_turns"):
        yield sample.finding(
            "turns are not trained on equally often",
            f"{settings['repeated_turns']} turns are more often in the minibatches of collection {collection} than "
            "data.num_epochs",
            "each pass over a collection must contain each turn once",
            confidence=0.95,
        )
    if settings.get("untrained_turns"):
        yield sample.finding(
            "turns are not trained on equally often",
            f"{settings['untrained_turns']} turns are missing in the minibatches of collection {collection}",
            "each pass over a collection must contain each turn once",
            confidence=0.95,
        )
    if settings.get("order"):
        kind = "of the collection" if settings["order"] == "recorded" else "of the pass before"
        yield sample.finding(
            "minibatches are not shuffled",
            f"the minibatches of a pass over collection {collection} have the turns in the order {kind}",
            "each pass over a collection must divide the turns at random, otherwise the turns of a minibatch are alike",
            confidence=0.85,
        )


def _completeness(sample: Sample) -> Iterator[Finding]:
    """Check that all turns and weights are trained, at the scheduled rate and with clipped gradients."""
    settings, collection = sample.settings, sample.number
    yield from _minibatches(sample)
    yield from gradients(sample)
    norm, limit = settings.get("largest_gradient", 0.0), settings.get("gradient_clip_val")
    if limit and norm > 1.01 * limit:
        yield sample.finding(
            "gradients are not clipped",
            f"in collection {collection} the optimiser gets gradients of norm {norm:.3g}, and "
            f"trainer.gradient_clip_val is {limit:g}",
            "compare where gradients are clipped with where the optimiser steps",
            confidence=0.9,
        )
    yield from _step(sample)
    unchanged, count = settings.get("unchanged_weights", []), settings.get("num_weights", 0)
    if 0 < len(unchanged) < count and (sample["advantages"][sample["mask"]] != 0).any():
        of_critic = all("value" in name or "critic" in name for name in unchanged)
        yield sample.finding(
            "critic is not trained" if of_critic else "some weights are not trained",
            f"the updates of collection {collection} change {count - len(unchanged)} of {count} weights, and "
            f"not {', '.join(unchanged[:3])}" + (", ..." if len(unchanged) > 3 else ""),
            "compare the weights that the optimiser gets, and whether the loss depends on them",
            confidence=0.8,
        )
    if "scheduled_lr" in settings:
        actual, scheduled = settings["lr"], settings["scheduled_lr"]
        if abs(actual - scheduled) > 0.02 * max(actual, scheduled):
            yield sample.finding(
                "learning rate does not follow its schedule",
                f"after collection {collection} it is {actual:.3g}, and {scheduled:.3g} according to model.optimizer",
                "compare the number of optimiser steps of the run with the length of the schedule, and how "
                "often the schedule advances",
                confidence=0.95,
            )


def _step(sample: Sample) -> Iterator[Finding]:
    """Check one optimiser step, and when the updates of a collection end."""
    settings, collection = sample.settings, sample.number
    error, factor = settings.get("step_error", 0.0), settings.get("step_factor", 1.0)
    if error > STEP_ERROR:
        yield sample.finding(
            "weights do not follow the optimiser",
            f"in collection {collection} an optimiser step changes weights by {factor:.3g} times what AdamW gives for "
            f"the same gradients, and differs from it by {error:.2g} of its norm",
            "compare the optimiser with model.optimizer, and what else changes weights or the optimiser's state",
            confidence=0.9,
        )
    before, after = settings.get("norms") or (0.0, 0.0)
    limit = settings.get("gradient_clip_val")
    expected = min(before, limit) if limit else before
    if before and after < 0.98 * expected:
        yield sample.finding(
            "gradients shrink before the optimiser step",
            f"in collection {collection} the norm of the gradients is {before:.3g}, and {after:.3g} in the optimiser "
            f"step, with trainer.gradient_clip_val {limit or 'null'}",
            "compare where gradients are clipped and changed between the backward pass and the optimiser step",
            confidence=0.9,
        )
    kl, target = settings.get("stop_kl"), settings.get("target_kl")
    if kl is None or not target:
        return
    stopped = bool(settings["stopped"])
    if (stopped and kl < 0.9 * target) or (not stopped and kl > 1.1 * target):
        yield sample.finding(
            "updates end at another divergence than target_kl",
            f"the updates of collection {collection} {'end' if stopped else 'do not end'} at a minibatch whose mean "
            f"divergence is {kl:.3g} nats per token, and model.target_kl is {target:g}",
            "target_kl limits the mean divergence of a minibatch over its sampled tokens",
            confidence=0.95,
        )


def gradients(sample: Sample) -> Iterator[Finding]:
    """Check that the optimiser gets the gradients of one minibatch."""
    settings, collection = sample.settings, sample.number
    if settings.get("left_gradient"):
        yield sample.finding(
            "gradients accumulate over minibatches",
            f"before the first backward pass of a minibatch of collection {collection}, weights have gradients of "
            f"up to {settings['left_gradient']:.3g}, and should have none",
            "gradients must be dropped before the first backward pass of each optimiser step",
            confidence=0.95,
        )
        return
    minibatch = "a minibatch" + (f" of collection {collection}" if collection > 0 else "")
    error, factor = settings.get("gradient_error", 0.0), settings.get("gradient_factor", 1.0)
    of_tokens: dict[str, float] = dict(settings.get("token_weights") or {})
    shown = ", ".join(f"{weight:.2g} ({kind})" for kind, weight in of_tokens.items())
    has_padding = abs(of_tokens.pop("padding", 0.0)) > GRADIENT_ERROR
    missing = [kind for kind, weight in of_tokens.items() if abs(weight) < GRADIENT_ERROR]
    if has_padding or 0 < len(missing) < len(of_tokens):
        cause = "sampled tokens not trained"
        if has_padding:
            cause = "shifted mask" if missing else "padding trained"
        elif all(kind.endswith("and last") for kind in missing):
            cause = "end token not trained"
        yield sample.finding(
            cause,
            f"for {minibatch}, the optimiser gets gradients in which tokens of responses have the weights {shown}",
            "compare the mask with which the losses of tokens are averaged",
            confidence=0.95,
        )
    elif error > GRADIENT_ERROR:
        beside = math.sqrt(max(error**2 - (factor - 1) ** 2, 0.0))  # the part that is no multiple
        is_multiple = beside < GRADIENT_ERROR * abs(factor)
        yield sample.finding(
            "gradients have the wrong size" if is_multiple else "gradients are not those of the minibatch",
            f"for {minibatch}, the optimiser gets gradients that are {factor:.3g} times "
            f"those of another backward pass" + ("" if is_multiple else f", and differ by {error:.2g} of their norm"),
            "compare which minibatch the loss is computed for, what is done with gradients before the optimiser step, "
            "and when they are dropped",
            confidence=0.9,
        )


LOSS_DETECTORS = (surrogate, terms, update)
"""Detectors that use one sample."""

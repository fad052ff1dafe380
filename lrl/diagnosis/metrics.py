"""Detectors that use only the metrics of a run, and the diagnosis of a run directory."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lrl.diagnosis.detectors import diagnose_samples
from lrl.diagnosis.losses import smaller_steps
from lrl.diagnosis.sample import Finding, read_samples

Columns = Mapping[str, np.ndarray]
"""The values of each metric of a run, float64 ``(row,)``, in the order of ``metrics.csv`` and without empty cells."""

_WINDOW = 5
"""Number of collections at the start or the end of a run that are averaged."""
_LASTING_UPDATES = 0.2
"""Median KL divergence of the updates of several collections that is too large; of 53 runs that learned, none had more
than half of it, although single updates had up to 1.6."""
_RISE = 0.5
"""Increase of the entropy, in nats per token, without an increase of the return, that is too large; chosen by hand."""
_HELD_OUT = ("val/exact_success", "val/success_rate", "val/return")
"""Metrics of held-out episodes; the first that a run has logged is used."""


def diagnose(run: Path) -> list[Finding]:
    """Return what is wrong with a run, according to its samples and its metrics, the most certain first, one per cause.

    Args:
        run: a run directory; the run may still be going on.

    Raises:
        ValueError: If a file cannot be read.
    """
    findings = diagnose_samples(read_samples(run)) + diagnose_metrics(read_columns(run / "metrics.csv"))
    found: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda finding: -finding.confidence):
        found.setdefault(finding.cause, finding)
    return list(found.values())


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a ``metrics.csv``; empty if there is no such file.

    Raises:
        ValueError: If a value is not a number.
    """
    if not path.exists():
        return {}
    values: dict[str, list[float]] = {}
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            for name, text in row.items():
                if not text:
                    continue
                try:
                    values.setdefault(name, []).append(float(text))
                except (TypeError, ValueError):
                    raise ValueError(f"{path.name} has {text!r} as {name}; it must be a number.") from None
    return {name: np.array(column) for name, column in values.items()}


def diagnose_metrics(columns: Columns) -> list[Finding]:
    """Return the findings of all detectors that use metrics."""
    return [finding for detector in METRIC_DETECTORS for finding in detector(columns)]


def _first(column: np.ndarray) -> float:
    return float(np.nanmean(column[:_WINDOW]))


def _last(column: np.ndarray) -> float:
    return float(np.nanmean(column[-_WINDOW:]))


def _rises(returns: np.ndarray) -> bool:
    """Return whether the last returns are larger than the first two, by more than two of their standard deviations."""
    return _last(returns) > float(np.nanmean(returns[:2])) + 2 * float(np.nanstd(returns[:_WINDOW]))


def _solved(columns: Columns) -> bool:
    """Return whether training episodes succeed nearly always at the end."""
    return "rollout/success_rate" in columns and _last(columns["rollout/success_rate"]) > 0.9


def disagreement(columns: Columns) -> Iterator[Finding]:
    """Detect sampling and training that compute different log-probabilities with the same weights."""
    errors = columns.get("train/ratio_error", np.zeros(0))
    wrong = np.flatnonzero(errors > 0.2)  # bfloat16 alone gives up to 0.1
    if len(wrong) and "train/importance_ratio" not in columns:
        yield Finding(
            cause="sampling and training disagree",
            evidence=f"before the first update on a collection, a probability ratio differs from 1 by "
            f"{errors[wrong[0]]:.3g} (train/ratio_error, collection {wrong[0] + 1})",
            remedy="sampling and training must use the same weights, temperature and dtype",
            confidence=0.9 if errors[wrong[0]] > 0.5 else 0.6,
            collection=int(wrong[0]),
            severity="error" if errors[wrong[0]] > 0.5 else "warning",
        )


def step_size(columns: Columns) -> Iterator[Finding]:
    """Detect updates that change the policy too much, or hardly at all."""
    kl = columns.get("train/update_kl", np.zeros(0))
    if len(kl) < 3:
        return
    size = min(2 * _WINDOW, len(kl))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(kl, size), axis=1)
    large = np.flatnonzero(medians > np.where(np.arange(len(medians)) == 0, 0.1, _LASTING_UPDATES))
    if len(large):
        first = int(large[0])
        yield Finding(
            cause="learning rate too high",
            evidence=f"updates change the policy by {medians[first]:.3g} nats per token (train/update_kl, median of "
            f"collections {first + 1} to {first + size})",
            remedy=smaller_steps(float(columns["train/lr"].max()) if "train/lr" in columns else None),
            confidence=0.8,
            collection=first + int(np.argmax(kl[first:] > 0.1)),
            severity="warning",
        )
    elif len(kl) >= 2 * _WINDOW and float(np.median(kl)) < 1e-6 and not _solved(columns):
        yield Finding(
            cause="learning rate too low",
            evidence=f"an update changes the policy by {float(np.median(kl)):.1g} nats per token (train/update_kl)",
            remedy="a larger model.optimizer.lr or more data.num_minibatches",
            confidence=0.7,
            severity="warning",
        )


def critic(columns: Columns) -> Iterator[Finding]:
    """Detect a critic that predicts worse than a constant, or nothing."""
    explained = columns.get("train/explained_variance", np.zeros(0))
    if len(explained) < 4 * _WINDOW or _solved(columns):
        return
    late = float(np.nanmedian(explained[len(explained) // 2 :]))
    if late < -0.2:
        yield Finding(
            cause="critic is harmful",
            evidence=f"the critic predicts worse than a constant: explained variance {late:.2f} (median of the second "
            "half of the run)",
            remedy="a smaller learning rate or clip of the value loss, larger collections, or critic_lambda: 1",
            confidence=0.6,
            severity="warning",
        )
    elif late < 0.02:
        yield Finding(
            cause="critic learns nothing",
            evidence=f"the critic explains {late:.0%} of the variance of its targets (median of the second half)",
            remedy="a larger vf_coef, larger collections, or critic_lambda: 1",
            confidence=0.5,
            severity="warning",
        )


def exploration(columns: Columns) -> Iterator[Finding]:
    """Detect a policy that is deterministic or becomes random, or groups that agree, before the task is solved."""
    entropy, returns = (columns.get(name, np.zeros(0)) for name in ("train/entropy", "rollout/return"))
    if (entropy < 0).any() or "train/std" in columns:
        entropy = np.zeros(0)  # of a Gaussian
    if len(entropy) >= 2 * _WINDOW and not _solved(columns) and _last(entropy) < 0.05 * _first(entropy):
        yield Finding(
            cause="entropy collapsed",
            evidence=f"the entropy fell from {_first(entropy):.3g} to {_last(entropy):.2g} nats per token",
            remedy="a larger ent_coef or kl.coef, or a smaller learning rate",
            confidence=0.6,
            collection=int(np.argmax(entropy < 0.05 * _first(entropy))),
            severity="warning",
        )
    if len(entropy) >= 8 and len(returns) == len(entropy) and not _solved(columns) and not _rises(returns):
        start = float(np.nanmean(entropy[:2]))
        if _last(entropy) > start + _RISE:
            yield Finding(
                cause="entropy rises",
                evidence=f"the entropy rose from {start:.3g} to {_last(entropy):.3g} nats per token, while the return "
                f"was {float(np.nanmean(returns[:2])):.3g} at first and {_last(returns):.3g} at the end",
                remedy="a smaller ent_coef, or a smaller learning rate",
                confidence=0.5,
                collection=int(np.argmax(entropy > start + _RISE)),
                severity="warning",
            )
    deviations = columns.get("rollout/group_return_std", np.zeros(0))
    if len(deviations) >= 2 * _WINDOW and not _solved(columns) and _last(deviations) < 1e-3:
        yield Finding(
            cause="groups are dead",
            evidence="the episodes of each group have the same return, so that all advantages are 0 "
            f"(rollout/group_return_std {_last(deviations):.1g})",
            remedy="a larger group_size, an entropy bonus, other start states, or a reward with more levels",
            confidence=0.7,
            collection=int(np.argmax(deviations < 1e-3)),
            severity="warning",
        )


def gaussian_exploration(columns: Columns) -> Iterator[Finding]:
    """Detect a Gaussian whose standard deviation falls to a small part, or rises, while the return does not rise.

    The entropy of a Gaussian has no lowest value, and is a sum over dimensions, so it is not compared.
    """
    std, returns = (columns.get(name, np.zeros(0)) for name in ("train/std", "rollout/return"))
    if len(std) < 2 * _WINDOW or len(returns) == 0 or _solved(columns) or _rises(returns):
        return
    start, end = _first(std), _last(std)
    if not 0.05 * start <= end <= math.exp(_RISE) * start:
        yield Finding(
            cause="entropy collapsed" if end < start else "entropy rises",
            evidence=f"the standard deviation of actions went from {start:.3g} to {end:.2g}, while the return did not "
            "rise",
            remedy=f"a {'larger' if end < start else 'smaller'} ent_coef, or a smaller learning rate",
            confidence=0.5,
            severity="warning",
        )


def responses(columns: Columns) -> Iterator[Finding]:
    """Detect responses that have become invalid, or as long as they may be."""
    problems = {
        "rollout/invalid_action_rate": ("invalid actions increase", "a penalty for invalid actions, or a KL term"),
        "rollout/token_limit_rate": ("responses grow to the token limit", "a larger max_new_tokens, or a KL term"),
    }
    for name, (cause, remedy) in problems.items():
        rate = columns.get(name, np.zeros(0))
        if len(rate) >= 2 * _WINDOW and _last(rate) > max(0.2, _first(rate) + 0.15):
            yield Finding(
                cause=cause,
                evidence=f"{name} rose from {_first(rate):.2f} to {_last(rate):.2f}",
                remedy=remedy,
                confidence=0.6,
                severity="warning",
            )


def collapse(columns: Columns) -> Iterator[Finding]:
    """Detect held-out episodes that are much worse than before."""
    name = next((name for name in _HELD_OUT if name in columns), None)
    if name is None or len(columns[name]) < 4:
        return
    values = columns[name]
    best, last = int(values.argmax()), float(values[-1])
    gain = float(values[best] - values[0])
    if math.isfinite(gain) and gain > 0 and last < values[best] - 0.5 * gain and best < len(values) - 1:
        yield Finding(
            cause="policy collapsed after its best",
            evidence=f"{name} was {values[best]:.3g} at validation {best + 1} of {len(values)} and is {last:.3g} at "
            "the end",
            remedy="a decaying learning rate, optimizer.update_kl, or larger collections; see the page on lasting runs",
            confidence=0.7,
            severity="warning",
        )


def reward_hacking(columns: Columns) -> Iterator[Finding]:
    """Detect rewards in training that rise while held-out episodes become worse."""
    name = next((name for name in _HELD_OUT if name in columns), None)
    rewards = [column for column in columns if column.startswith("rollout/reward_")]
    if name is None or not rewards or len(columns[name]) < 4 or "rollout/return" not in columns:
        return
    held_out, modelled = columns[name], columns["rollout/return"]
    best = int(held_out.argmax())
    then = modelled[: max(int(len(modelled) * (best + 1) / len(held_out)), 1)]
    spread = float(modelled.std())
    lost = float(held_out[best] - held_out[-2:].mean()) / max(float(np.ptp(held_out)), 1e-9)
    if best < len(held_out) - 2 and lost > 0.3 and _last(modelled) > _last(then) + 0.2 * spread:
        yield Finding(
            cause="reward rises while the result falls",
            evidence=f"rollout/return rose from {_last(then):.3g} to {_last(modelled):.3g} after the best {name}; "
            f"this fell from {held_out[best]:.3g} to {held_out[-1]:.3g}",
            remedy="a larger kl.coef, fewer collections, or another reward: the policy exploits errors of the reward",
            confidence=0.75,
            severity="warning",
        )


METRIC_DETECTORS: Sequence[Callable[[Columns], Iterator[Finding]]] = (
    disagreement,
    step_size,
    critic,
    exploration,
    gaussian_exploration,
    responses,
    reward_hacking,
    collapse,
)
"""Detectors that use metrics."""

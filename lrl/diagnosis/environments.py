"""Detectors of mistakes in start states, in the format of responses, and in the states of a data set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lrl.diagnosis.sample import Finding, Sample

_CHANCE = -18.0
"""Logarithm of the probability below which equal start states are no coincidence."""
_MIN_STARTS = 30
"""Number of start states from which pairs of equal ones are counted."""
_MORE, _ADDED = 3.0, 20
"""Factor by which pairs of equal start states must be more frequent than in a separate environment, and number of pairs
by which they must exceed this."""
_LEAKED_SHARE = 0.05
"""Share of episodes with seeds of others from which seeds are not equal by chance."""


def start_states(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Compare how often start states are equal with the same in a separate environment, or in the data set.

    The probability that two start states are equal is overestimated, so that environments with few start states, or
    with one that is very likely, are not reported.
    """
    together: list[int] = []
    for sample in samples:
        separate, found = sample.settings.get("separate_starts"), sample.settings.get("starts")
        if not separate or found is None:
            return
        together += found
        for some in (found, together):
            expected = _too_equal(some, separate)
            if expected is not None:
                source = "the data set" if separate["all"] else "a separate environment with other seeds"
                yield sample.finding(
                    "episodes start in too few states",
                    f"{len(some)} episodes up to collection {sample.number} start in {len(set(some))} "
                    f"different states, and {sum(separate['counts'])} of {source} in {len(separate['counts'])}",
                    "compare the seeds of resets, or the rows, that the episodes of a collection get: each episode or "
                    "group must have its own",
                    confidence=0.95,
                )
                return


def _too_equal(found: Sequence[int], separate: Mapping[str, Sequence[int]]) -> float | None:
    """Return the expected number of pairs of equal start states if there are far more; None otherwise."""
    counts, total, number = np.array(separate["counts"]), sum(separate["counts"]), len(found)
    certain, most = bool(separate["all"]), int(counts.max())
    largest = most / total if certain else min((most + 4 * math.sqrt(most + 1) + 4) / total, 1.0)
    if number > 1 and len(set(found)) == 1 and (number - 1) * math.log(largest) < _CHANCE:
        return 0.0
    equal, pairs = (float(sum(one * (one - 1) / 2 for one in some)) for some in (Counter(found).values(), [number]))
    if certain:
        share = float((counts / total) @ (counts / total))
    else:
        share = float((counts * (counts - 1)).sum()) / max(total * (total - 1), 1) + largest**2
    expected = pairs * share
    return expected if number >= _MIN_STARTS and equal > _MORE * expected + _ADDED else None


def new_episodes(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Check that each episode, or each group, is reset with a seed of its own, also in later collections."""
    first: dict[tuple[str, int, int], tuple[int, ...]] = {}
    for sample in samples:
        if "origin" not in sample:
            return
        seeds: dict[tuple[str, int, int], set[tuple[int, ...]]] = {}
        for turn in np.flatnonzero(sample["turn"] == 0).tolist():
            seed, _, noise = sample["origin"][turn].tolist()
            env, group, time = (int(sample[name][turn]) for name in ("env", "group", "time"))
            seeds.setdefault(("reset", seed, -1), set()).add((sample.collection, group, time))
            if noise >= 0:  # the members of a group have their own noise
                seeds.setdefault(("noise", seed, noise), set()).add((sample.collection, env, time))
        for kind in ("reset", "noise"):
            of_kind = {key: places for key, places in seeds.items() if key[0] == kind}
            total = sum(map(len, of_kind.values()))
            again = [(key, len(places) - (key not in first)) for key, places in of_kind.items()]
            repeated = [key for key, count in again if count]
            if sum(count for _, count in again) > max(_LEAKED_SHARE * total, 1):
                earlier = first.get(repeated[0]) or min(of_kind[repeated[0]])
                yield sample.finding(
                    "the same episodes are played again",
                    f"{sum(count for _, count in again)} of {total} episodes of collection {sample.number} "
                    f"have the seeds of others, such as those of an episode of collection {earlier[0] + 1}",
                    "the seeds of an episode must depend on the collection, and on the environment or group",
                    confidence=0.95,
                )
                return
        for key, places in seeds.items():
            first.setdefault(key, min(places))


def order_of_turns(sample: Sample) -> Iterator[Finding]:
    """Check that each end of an episode is followed by the first turn of another."""
    for turns in sample.envs():
        ended, number = (sample["terminated"] | sample["truncated"])[turns[:-1]], sample["turn"][turns]
        expected = np.where(ended, 0, number[:-1] + 1)
        wrong = np.flatnonzero(number[1:] != expected)
        if len(wrong):
            turn = int(turns[1:][wrong[0]])
            after_end = bool(ended[wrong[0]])
            yield sample.finding(
                "episode goes on after its end" if after_end else "turns of an episode are missing",
                f"{sample.place(turn)} follows a turn that "
                + ("ended the episode" if after_end else f"is number {number[wrong[0]]}"),
                "compare the loop that plays the environments, and when it resets them",
            )
            return


def formats(sample: Sample) -> Iterator[Finding]:
    """Compare which responses count as valid with the documentation of the codec and of the format of responses."""
    for response, expected, found in sample.settings.get("misread", ()):
        names = sample.settings.get("action_names") or []
        if expected is None:
            cause, what = "codec accepts invalid responses", f"contains no legal action, but is read as action {found}"
        elif found is None:
            cause, what = "codec rejects legal responses", f"is action {expected}, but is rejected"
        else:
            cause, what = "codec reads another action", f"is action {expected}, but is read as action {found}"
        yield sample.finding(
            cause,
            f"the response {response!r} {what}" + (f" of {', '.join(names[:10])}" if names else ""),
            "compare the codec of the environment, and how the action is extracted from a response, with its "
            "documentation",
        )
        return
    if "named" not in sample or "valid" not in sample:
        return
    kinds = {
        "invalid responses are executed": ((sample["named"] == 0) & (sample["valid"] == 1), "contains no legal action"),
        "legal responses are rejected": ((sample["named"] == 1) & (sample["valid"] == 0), "is a legal action"),
    }
    for cause, (wrong, what) in kinds.items():
        if wrong.any():
            turn = int(wrong.argmax())
            counts = "valid" if sample["valid"][turn] else "invalid"
            yield sample.finding(
                cause,
                f"the response {sample.responses[turn][:60]!r} {what}, but counts as {counts}, in "
                f"{int(wrong.sum())} of {len(sample)} turns ({sample.place(turn)})",
                "compare how the environment reads responses with the documentation of its codec",
            )
            return


def data_set(sample: Sample) -> Iterator[Finding]:
    """Check that Q-values, actions and texts of the rows of a data set belong to the same state."""
    kinds = {
        "wrong_texts": ("texts of the data set are of other states", "a text that is not that of its state and map"),
        "wrong_q_values": (
            "Q-values are not those of the states",
            "Q-values that do not follow from the transitions of the environment and the largest Q-values of the next "
            "states",
        ),
        "wrong_actions": ("actions of the data set are not the best", "an action without the largest Q-value"),
    }
    for name, (cause, what) in kinds.items():
        known = sample.settings.get(name)
        if known and known["wrong"]:
            yield sample.finding(
                cause,
                f"{known['wrong']} of {known['rows']} rows have {what}, such as {known['first']}",
                "compare how rows are made: text, Q-values and action must have the index of the same state",
            )
            return


def resets(sample: Sample) -> Iterator[Finding]:
    """Check that the first observation of an episode is not that after the last turn of the one before."""
    if "unreset" not in sample:
        return
    wrong = np.flatnonzero(sample["unreset"] == 1)
    if len(wrong):
        yield sample.finding(
            "environment is not reset after an episode",
            f"{len(wrong)} episodes begin with the observation after the last turn of the episode before, which is "
            f"not that of a reset ({sample.place(int(wrong[0]))})",
            "an environment must be reset after the end of each episode",
        )


ENVIRONMENT_DETECTORS = (order_of_turns, resets, formats, data_set)
"""Detectors that use one sample."""

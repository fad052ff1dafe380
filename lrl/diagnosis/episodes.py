"""Detectors of mistakes in episodes: rewards, ends, observations, start states and invalid responses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from lrl.diagnosis.sample import Finding, Sample

_MIN_EPISODES = 5
"""Number of episodes of each kind from which their returns are compared."""
_LEAKED_SHARE = 0.05
"""Share of training episodes with seeds of held-out episodes from which seeds are not shared by chance."""
_IMPOSSIBLE = -25.0
"""Logarithm of a probability below which an event is no coincidence."""
_MIN_TEXTS, _CHANCE = 30, 1e-6
"""Number of texts from which their numbers are compared with the observations; probability of a coincidence."""
_WRONG_NUMBERS = 0.01
"""Share of wrong numbers in texts that is too large for rounding."""
_REMEDY = "compare the loop that plays the environments, and the wrappers of the environment"


def replayed(sample: Sample) -> Iterator[Finding]:
    """Compare what was recorded with the same episodes played again by a separate loop in a new environment."""
    if "replay_rewards" not in sample:
        return
    known = np.isfinite(sample["replay_rewards"])
    if not known.any():
        return
    if (sample["replay_repeats"][known] == 0).any():
        turn = int(np.flatnonzero(known & (sample["replay_repeats"] == 0))[0])
        yield sample.finding(
            "environment is not deterministic",
            f"after a reset with the same seed the same actions give other results ({sample.place(turn)})",
            "all random numbers of an environment must come from the seed of reset; without this, episodes of a "
            "group start from different states, and a run cannot be resumed",
            confidence=0.95,
        )
        return
    legal, counted = (sample.arrays.get(name, np.ones(len(sample))) for name in ("replay_valid", "valid"))
    kinds = {
        "invalid responses are executed": (
            known & (legal == 0) & (counted == 1),
            "contains no legal action, but counts as valid",
            "an environment must not be stepped with a response that contains no legal action",
        ),
        "legal responses are rejected": (
            known & (legal == 1) & (counted == 0),
            "contains a legal action, but counts as invalid",
            "compare how the action is extracted from a response",
        ),
    }
    for cause, (wrong, what, remedy) in kinds.items():
        if wrong.any():
            turn = int(wrong.argmax())
            yield sample.finding(
                cause,
                f"the response {_short(sample.responses[turn])} {what}, in {int(wrong.sum())} of "
                f"{int(known.sum())} turns ({sample.place(turn)})",
                remedy,
            )
            return
    yield from _replayed_rewards(sample, known)
    yield from _replayed_ends(sample, known)
    wrong = np.flatnonzero(known & (sample["replay_observed"] == 0))
    if len(wrong):
        yield sample.finding(
            "observations are not those of the environment",
            f"the observation differs from that of the same episode played again, in {len(wrong)} of "
            f"{int(known.sum())} turns ({sample.place(int(wrong[0]))})",
            _REMEDY,
            confidence=0.9,  # wrong seeds have this consequence, and are named by other detectors
        )


def _replayed_rewards(sample: Sample, known: np.ndarray) -> Iterator[Finding]:
    rewards, expected = sample["rewards"][known], sample["replay_rewards"][known]
    wrong = np.abs(rewards - expected) > 1e-4 * np.maximum(1, np.abs(expected))
    if not wrong.any():
        return
    size = float(expected @ expected)
    factor = float(rewards @ expected) / size if size else 0.0
    shifted = _shifted_by_one(sample, known)
    varies = np.ptp(rewards) > 0 and np.ptp(expected) > 0
    if np.ptp(rewards) == 0 and np.ptp(expected) > 0:
        cause, what = "constant reward", f"all recorded rewards are {rewards[0]:g}"
    elif varies and factor >= 0 and np.corrcoef(rewards, expected)[0, 1] < -0.3:
        cause, what = "reward has the wrong sign", "recorded rewards fall as those of the environment rise"
    elif np.allclose(rewards, factor * expected, rtol=1e-3, atol=1e-4) and factor < 0:
        cause, what = "reward has the wrong sign", f"recorded rewards are {factor:g} times those of the environment"
    elif np.allclose(rewards, factor * expected, rtol=1e-3, atol=1e-4):
        cause, what = "reward has the wrong scale", f"recorded rewards are {factor:g} times those of the environment"
    elif np.allclose(rewards - expected, (rewards - expected)[0], atol=1e-4):
        cause, what = "reward has an offset", f"recorded rewards are larger by {(rewards - expected)[0]:g}"
    elif _after_invalid(sample, known, wrong):
        cause, what = (
            "rewards are shifted after invalid responses",
            "rewards are right up to the first invalid response",
        )
    elif shifted:
        cause, what = "rewards are shifted by one turn", "recorded rewards are those of the turn before or after"
    elif np.allclose(rewards, np.clip(expected, rewards.min(), rewards.max()), atol=1e-4):
        cause, what = "reward is clipped", f"recorded rewards are between {rewards.min():g} and {rewards.max():g}"
    else:
        cause, what = "rewards are not those of the environment", "recorded rewards have other values"
    turn = int(np.flatnonzero(known)[wrong.argmax()])
    yield sample.finding(
        cause,
        f"{what}: {sample['rewards'][turn]:.4g}, and {sample['replay_rewards'][turn]:.4g} in the same episode "
        f"played again ({sample.place(turn)}; {int(wrong.sum())} of {len(wrong)} turns differ)",
        _REMEDY,
    )


def _after_invalid(sample: Sample, known: np.ndarray, wrong: np.ndarray) -> bool:
    """Return whether all wrong rewards are those of an invalid response or of environments after one."""
    if "valid" not in sample:
        return False
    turns, before = np.flatnonzero(known), 0
    for time in np.unique(sample["time"][turns]):
        at = sample["time"][turns] == time
        invalid = sample["env"][(sample["time"] == time) & (sample["valid"] == 0)]
        early = at & (sample["env"][turns] < invalid.min(initial=np.iinfo(np.int64).max))
        if (wrong & early).any():
            return False
        before += int(early.sum())
    return before >= _MIN_EPISODES


def _shifted_by_one(sample: Sample, known: np.ndarray) -> bool:
    """Return whether the recorded rewards of each environment are those of the turn before or after."""
    fits = {-1: 0, 1: 0}
    envs = [turns[known[turns]] for turns in sample.envs()]
    envs = [turns for turns in envs if len(turns) > 2]
    for turns in envs:
        rewards, expected = sample["rewards"][turns], sample["replay_rewards"][turns]
        fits[1] += np.allclose(rewards[1:], expected[:-1], atol=1e-4)
        fits[-1] += np.allclose(rewards[:-1], expected[1:], atol=1e-4)
    return bool(envs) and max(fits.values()) == len(envs)


def _replayed_ends(sample: Sample, known: np.ndarray) -> Iterator[Finding]:
    terminated, truncated = sample["terminated"], sample["truncated"]
    expected = sample["replay_terminated"] == 1, sample["replay_truncated"] == 1
    kinds = {
        "truncation treated as termination": terminated & ~expected[0] & expected[1],
        "termination treated as truncation": truncated & ~terminated & expected[0],
        "end of an episode is missed": ~(terminated | truncated) & (expected[0] | expected[1]),
        "episodes end too early": (terminated | truncated) & ~(expected[0] | expected[1]),
    }
    for cause, wrong in kinds.items():
        turns = np.flatnonzero(wrong & known)
        if len(turns):
            if cause == "end of an episode is missed" and "valid" in sample and not sample["valid"][turns].any():
                cause = "invalid responses do not end the episode"
            yield sample.finding(
                cause,
                f"terminated or truncated differ from those of the same episode played again, at {len(turns)} "
                f"turns ({sample.place(int(turns[0]))})",
                _REMEDY,
            )
            return


def prompts(sample: Sample) -> Iterator[Finding]:
    """Check that prompts contain the observation, and that responses are the text of the sampled tokens."""
    parts = {
        "in_prompt": ("prompts do not contain the observation", "a prompt does not contain the observation"),
        "with_system": ("prompts do not contain the system message", "a prompt does not contain the system message"),
        "decoded": ("responses are not the sampled tokens", "the text of the sampled tokens is not the response"),
    }
    for name, (cause, what) in parts.items():
        if name in sample and not sample[name].all():
            turn = int(np.flatnonzero(~sample[name])[0])
            yield sample.finding(
                cause,
                f"{what}, in {int((~sample[name]).sum())} of {len(sample)} turns ({sample.place(turn)}, "
                f"observation {_short(sample.observations[turn])}, response {_short(sample.responses[turn])})",
                "compare the prompt and the response of this turn with what the environment gave and got",
                confidence=0.9,
            )


def _short(text: str) -> str:
    return repr(text if len(text) < 60 else text[:57] + "...")


def groups(sample: Sample) -> Iterator[Finding]:
    """Check that the episodes of a group start from the same observation and have different random numbers."""
    first = np.flatnonzero(sample["turn"] == 0)
    agreement = 0.0  # log-probability that the other members of groups sample the same response as the first
    for group in np.unique(sample["group"]):
        members = [int(turn) for turn in first if sample["group"][turn] == group]
        envs = {int(sample["env"][turn]) for turn in members}
        if len(envs) < 2 or len(envs) < len(members):
            continue
        starts = {"first observations": {sample.observations[turn] for turn in members}}
        if "origin" in sample:
            starts["seeds"] = {str(sample["origin"][turn, 0]) for turn in members}
        differing = [f"{len(found)} different {name}" for name, found in starts.items() if len(found) > 1]
        if differing:
            yield sample.finding(
                "episodes of a group start from different states",
                f"group {group} has {' and '.join(differing)} (collection {sample.number})",
                "the episodes of a group must be reset with the same seed",
            )
            return
        if len({sample.responses[turn] for turn in members}) > 1:
            agreement = np.nan
        agreement += (len(members) - 1) * float(sample["logprobs"][members[0]][sample["mask"][members[0]]].sum())
    if agreement < _IMPOSSIBLE:
        yield sample.finding(
            "members of a group use the same random numbers",
            f"all members of each group have the same first response, which has probability "
            f"exp({agreement:.0f}) by chance (collection {sample.number})",
            "the random numbers of a token must depend on the episode, not only on its group",
        )


def invalid_responses(sample: Sample) -> Iterator[Finding]:
    """Check that an invalid response gets the configured reward and does not change the state of the environment."""
    if "valid" not in sample:
        return
    invalid, rewards = sample["valid"] == 0, sample["rewards"]
    penalty = sample.settings.get("invalid_penalty")
    wrong = np.flatnonzero(invalid & (np.abs(rewards - penalty) > 1e-6)) if penalty is not None else []
    if len(wrong):
        yield sample.finding(
            "invalid responses have the wrong reward",
            f"an invalid response has the reward {rewards[wrong[0]]:g}, and env.invalid_penalty is "
            f"{penalty:g} ({sample.place(int(wrong[0]))}, response {_short(sample.responses[int(wrong[0])])})",
            "compare the wrapper of the environment that rejects responses",
        )
    both = invalid.any() and not invalid.all()
    as_good = both and rewards[invalid].max() >= rewards[~invalid].max() > rewards[~invalid].min()
    if penalty is None and both and (as_good or rewards[invalid].mean() > max(rewards[~invalid].mean(), 0) + 1e-6):
        turn = int(np.flatnonzero(invalid & (rewards == rewards[invalid].max()))[0])
        yield sample.finding(
            "invalid responses are rewarded",
            f"invalid responses have rewards up to {rewards[invalid].max():.3g}, valid ones up to "
            f"{rewards[~invalid].max():.3g} (collection {sample.number}, for example "
            f"{_short(sample.responses[turn])})",
            "a response that cannot be read must have the lowest reward",
            confidence=0.9,
        )
    nameless = ~invalid & ~sample["names_action"] if "names_action" in sample else invalid & False
    if nameless.any():
        turn = int(nameless.argmax())
        yield sample.finding(
            "invalid responses are executed",
            f"the response {_short(sample.responses[turn])} contains the name of no action, but counts as "
            f"valid, in {int(nameless.sum())} of {len(sample)} turns ({sample.place(turn)})",
            "a response without a legal action must count as invalid",
        )
        return
    yield from _moved_by_invalid(sample, invalid)


def _moved_by_invalid(sample: Sample, invalid: np.ndarray) -> Iterator[Finding]:
    for turns in sample.envs():
        for turn, following in pairwise(map(int, turns)):
            before, after = sample.observations[turn], sample.observations[following]
            ended = sample["terminated"][turn] or sample["truncated"][turn]
            if invalid[turn] and not ended and before and not after.endswith(_without_reason(before)):
                yield sample.finding(
                    "invalid responses are executed",
                    f"the invalid response {_short(sample.responses[turn])} changes the observation "
                    f"({sample.place(turn)})",
                    "an environment must not be stepped with a response that contains no legal action",
                )
                return


def _without_reason(observation: str) -> str:
    """Return an observation without the line that says why the last response was invalid."""
    return observation.partition("\n")[2] if observation.startswith("Invalid action: ") else observation


def success_and_return(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Check that successful episodes have larger returns than others, over all samples."""
    returns: dict[bool, list[float]] = {True: [], False: []}
    for sample in samples:
        if "success" not in sample:
            return
        for turns in sample.envs():
            start = 0
            for place, turn in enumerate(turns):
                if sample["terminated"][turn] or sample["truncated"][turn]:
                    whole = turns[start : place + 1]
                    if sample["turn"][whole[0]] == 0 and np.isfinite(sample["success"][turn]):
                        returns[bool(sample["success"][turn])].append(float(sample["rewards"][whole].sum()))
                    start = place + 1
        if min(map(len, returns.values())) < _MIN_EPISODES:
            continue
        success, failure = np.mean(returns[True]), np.mean(returns[False])
        if success > failure + 1e-9:
            continue
        equal = bool(np.ptp(returns[True] + returns[False]) == 0)
        yield sample.finding(
            "constant reward" if equal else "reward has the wrong sign",
            f"the mean return of {len(returns[True])} successful episodes is {success:.3g}, that of "
            f"{len(returns[False])} others {failure:.3g} (up to collection {sample.number})",
            "compare the reward of a successful and of a failed episode",
            confidence=0.9,
        )
        return


def observation_texts(sample: Sample) -> Iterator[Finding]:
    """Compare the texts of observations with the native observations of the same episodes played again."""
    if "replay_native" not in sample or not all(sample.observations):
        return
    native = sample["replay_native"]
    known = np.flatnonzero(np.isfinite(native).all(1))
    texts = [_without_reason(sample.observations[int(turn)]) for turn in known]
    native, what = native[known], ""
    states = {(text, *row) for text, row in zip(texts, native.tolist(), strict=True)}
    if native.shape[1] == 1 and (native == native.round()).all() and len(states) > len(set(texts)):
        what = f"{len(states)} different states have only {len(set(texts))} different texts"
    numbers = [[float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)] for text in texts]
    if len(texts) >= _MIN_TEXTS and {len(one) for one in numbers} == {native.shape[1]}:
        shown = np.array(numbers)
        for index in range(native.shape[1]):
            of_text, of_state = shown[:, index], native[:, index]
            varied = min(len(np.unique(of_text)), len(np.unique(of_state))) >= _MIN_EPISODES
            if varied and abs(np.corrcoef(of_text, of_state)[0, 1]) < 0.5:
                what = f"number {index} of the text does not follow number {index} of the observation"
        what = what or _wrong_numbers(shown, native, sample.settings.get("numbers"))
    if what:
        yield sample.finding(
            "observations do not show the state",
            f"{what} ({sample.place(int(known[0]))}, text {_short(texts[0])})",
            "compare the codec that writes observations with the observation space",
            confidence=0.9,
        )


def _wrong_numbers(shown: np.ndarray, native: np.ndarray, form: Mapping[str, Any] | None) -> str:
    """Return which numbers of texts differ from the observation in the documented format; empty if none do.

    Args:
        shown: numbers in the texts, ``(turn, number)``.
        native: those of the observations.
        form: see :func:`lrl.training.environment_facts.number_format`.
    """
    if not form or len(form["offset"]) != native.shape[1]:
        return ""
    low, high = np.array(form["low"]), np.array(form["high"])
    expected = np.clip((native - np.array(form["offset"])) * np.array(form["factor"]), low, high)
    wrong = np.abs(shown - expected) > form["error"] + 1e-5 * np.abs(expected)
    if wrong.mean() < _WRONG_NUMBERS:
        return ""
    turn, index = (int(place) for place in np.argwhere(wrong)[0])
    return (
        f"number {index} of an observation is {native[turn, index]:.4g} and is written as {shown[turn, index]:g} "
        f"instead of {expected[turn, index]:.4g}; {wrong.mean():.0%} of all numbers are wrong"
    )


def shown_answers(sample: Sample) -> Iterator[Finding]:
    """Check that observations do not end with the action that is right, in episodes of one turn."""
    names = sample.settings.get("action_names")
    if not names or "success" not in sample or not sample["terminated"].all() or not all(sample.observations):
        return

    def last(text: str) -> str:
        places = {name: match.end() for name in names for match in re.finditer(rf"\b{re.escape(name)}\b", text.lower())}
        return max(places, key=lambda name: places[name], default="")

    shown, chosen = (np.array([last(text) for text in texts]) for texts in (sample.observations, sample.responses))
    success, same = sample["success"] == 1, (shown == chosen) & (shown != "")
    others = success[~same & (chosen != "")]
    by_chance = float(success.mean()) ** int(same.sum())
    if len(np.unique(shown)) > 1 and len(others) and success[same].all() and by_chance < _CHANCE:
        yield sample.finding(
            "prompts contain the answer",
            f"all {int(same.sum())} responses with the action that the observation names last succeed, and "
            f"{others.mean():.0%} of the others (collection {sample.number}, observation "
            f"{_short(sample.observations[int(same.argmax())])})",
            "the observation must not contain the action of the data set",
            confidence=0.9,
        )


def rewards_of_states(sample: Sample) -> Iterator[Finding]:
    """Compare the rewards of responses to the same observation, in episodes of one turn."""
    if "success" not in sample or not sample["terminated"].all() or not all(sample.observations):
        return
    rewards, success = sample["rewards"], sample["success"] == 1
    valid = sample["valid"] == 1 if "valid" in sample else np.ones(len(sample), dtype=bool)
    worse, states = 0, np.array(sample.observations)
    for state in np.unique(states):
        good, bad = (states == state) & success, (states == state) & ~success & valid
        worse += bool(good.any() and bad.any() and rewards[bad].max() > rewards[good].min() + 1e-6)
    if worse:
        yield sample.finding(
            "rewards prefer failures",
            f"in {worse} of {len(np.unique(states))} states a response without success has a larger reward "
            f"than one with success (collection {sample.number})",
            "compare the reward function with the definition of success",
            confidence=0.6,
            warning=True,
        )


def held_out_seeds(sample: Sample) -> Iterator[Finding]:
    """Check that training episodes do not have the seeds of held-out episodes."""
    held_out = sample.settings.get("validation_seeds")
    if held_out is None or "origin" not in sample:
        return
    used = np.unique(sample["origin"][:, 0])
    shared = np.intersect1d(used, np.arange(held_out[0], held_out[0] + held_out[1]))
    if len(shared) > max(_LEAKED_SHARE * len(used), 1):
        yield sample.finding(
            "held-out episodes are used in training",
            f"{len(shared)} of {len(used)} training episodes have seeds of held-out episodes, such as "
            f"{shared[0]} (collection {sample.number})",
            "the seeds of training episodes must differ from those of validation",
        )


def missing_turns(sample: Sample) -> Iterator[Finding]:
    """Check that all turns that were played are trained on."""
    missing = sample.settings.get("missing_turns")
    if missing:
        yield sample.finding(
            "turns are left out of training",
            f"{missing} turns of collection {sample.number} were played, but are not in its batch",
            "invalid responses and unfinished episodes must be trained on as well",
            confidence=0.95,
        )


EPISODE_DETECTORS = (
    replayed,
    prompts,
    groups,
    invalid_responses,
    observation_texts,
    shown_answers,
    rewards_of_states,
    held_out_seeds,
    missing_turns,
)
"""Detectors that use one sample."""

"""Checks of an environment, of a collection and of one update, as pure functions of recorded numbers.

``lrl preflight`` records these numbers before a run. The detectors of :mod:`lrl.diagnosis.detectors` compare single
numbers of training with an independent computation; the checks here compare the environment with itself, the rewards
of actors whose order is known, and the policy before and after one optimiser step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lrl.diagnosis.losses import gradients
from lrl.diagnosis.sample import Finding, Sample

_Z = 4.0
"""Number of standard errors from which two mean returns count as different."""
_MIN_TURNS = 100
"""Number of turns after which the returns of episodes that were cut are expected to differ."""
_FEW_VALID = 0.02
"""Share of valid responses below which a run has hardly anything to learn from."""
_UNLIKELY = -10.0
"""Log-probability below which equal responses are not a coincidence."""
_TOLERANCE = {False: 1e-3, True: 0.5}
"""Largest difference of a log-probability in nats, by whether numbers of 16 bits take part."""
_MIN_EACH = 5
"""Number of successful and of other episodes from which their returns are compared."""
_LARGE_STEP = 0.2
"""Mean change of the log-probabilities of sampled tokens by one optimiser step, in nats, that is too large."""


def _finding(cause: str, evidence: str, remedy: str, warning: bool = False) -> Finding:
    """Return a finding of the checks before a run."""
    return Finding(
        cause=cause,
        evidence=evidence,
        remedy=remedy,
        confidence=0.6 if warning else 1.0,
        collection=0,
        severity="warning" if warning else "error",
    )


# -- rewards of actors without weights ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Played:
    """Holds episodes that an actor has played side by side from given seeds, cut after the same number of turns."""

    rewards: np.ndarray
    """float64 ``(time, episode)``, 0 after the end of an episode."""
    active: np.ndarray
    """bool ``(time, episode)``: a turn was taken."""
    states: np.ndarray
    """int64 ``(time, episode)``: hash of the observation before each turn, 0 after the end of an episode."""
    cut: bool
    """Whether an episode was cut."""
    success: np.ndarray | None = None
    """bool ``(episode,)``: whether the episode is a success; None if the environment does not say so."""

    def returns(self, horizon: int) -> np.ndarray:
        """Return the sum of the rewards of the first ``horizon`` turns, float64 ``(episode,)``."""
        return self.rewards[:horizon].sum(0)

    @property
    def reward_per_turn(self) -> float:
        """Mean reward of a turn."""
        return float(self.rewards.sum() / max(self.active.sum(), 1))


def baselines(played: Mapping[str, Played]) -> Iterator[Finding]:
    """Compare the returns of actors whose order is known.

    Args:
        played: episodes from the same seeds by the name of the actor: ``random``, ``expert``, ``unreadable``, whose
            responses contain no action, and ``constant <action>``.
    """
    if not played:
        return
    horizon = common_horizon(played)
    returns = {name: one.returns(horizon) for name, one in played.items()}
    means = {name: float(values.mean()) for name, values in returns.items()}
    everything = np.concatenate(list(returns.values()))
    is_long = horizon >= _MIN_TURNS or not any(one.cut for one in played.values())
    if len(returns) > 1 and np.ptp(everything) == 0 and is_long:
        known = "expert" in returns
        yield _finding(
            "constant reward",
            f"the return is {everything[0]:g} in all episodes of {', '.join(returns)}",
            "compare the reward of a right and of a wrong action"
            + ("" if known else "; if success is rare, more episodes per collection or rewards of intermediate steps"),
            warning=not known,
        )
        return
    yield from _successes(played, returns)
    expert = returns.get("expert")
    if expert is not None and "random" in returns:
        distance = _distance(expert, returns["random"])
        text = f"the mean return of the expert is {means['expert']:.3g}, that of random actions {means['random']:.3g}"
        if distance < -_Z:
            yield _finding("reward has the wrong sign", text, "negate the reward, or correct the expert")
            return
        if distance < _Z and is_long:
            yield _finding(
                "reward does not separate right from wrong actions",
                f"{text} ({len(expert)} episodes of at most {horizon} turns)",
                "compare the reward of a right and of a wrong action; with rare rewards, use longer episodes",
                warning=True,
            )
    for name, values in returns.items():
        if expert is not None and name.startswith("constant ") and _distance(values, expert) > _Z:
            yield _finding(
                "a wrong answer is rewarded",
                f"the mean return of the {name} is {means[name]:.3g}, that of the expert {means['expert']:.3g}",
                "compare the reward of this action with that of the expert's action in the same states",
            )
            break
    yield from _unreadable(played, returns, means)


def _successes(played: Mapping[str, Played], returns: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    """Check that successful episodes of all actors have larger returns than the others."""
    parts = [(returns[name], one.success) for name, one in played.items() if one.success is not None and not one.cut]
    if not parts:
        return
    values, success = (np.concatenate(column) for column in zip(*parts, strict=True))
    if min(success.sum(), (~success).sum()) < _MIN_EACH:
        return
    if values[success].mean() <= values[~success].mean():
        yield _finding(
            "reward has the wrong sign",
            f"the mean return of {success.sum()} successful episodes is {values[success].mean():.3g}, that of "
            f"{(~success).sum()} others {values[~success].mean():.3g}",
            "compare the reward of a successful and of a failed episode",
        )


def common_horizon(played: Mapping[str, Played]) -> int:
    """Return the number of turns up to which no episode of any actor was cut."""
    cut = [len(one.rewards) for one in played.values() if one.cut]
    return min(cut) if cut else max((len(one.rewards) for one in played.values()), default=0)


def _unreadable(
    played: Mapping[str, Played], returns: Mapping[str, np.ndarray], means: Mapping[str, float]
) -> Iterator[Finding]:
    """Check that responses that contain no action are not worth more than actions."""
    if "unreadable" not in played or not {"random", "expert"} & returns.keys():
        return
    other = "expert" if "expert" in returns else "random"
    others = [other] if other == "expert" else [name for name in returns if name != "unreadable"]
    is_paid = played["unreadable"].reward_per_turn > max(0.0, played[other].reward_per_turn - 1e-9)
    is_best = all(_distance(returns["unreadable"], returns[name]) > _Z for name in others)
    if is_paid or is_best:
        yield _finding(
            "a wrong answer is rewarded",
            f"responses without an action have the mean return {means['unreadable']:.3g} "
            f"({played['unreadable'].reward_per_turn:.3g} per turn), {other} actions {means[other]:.3g} "
            f"({played[other].reward_per_turn:.3g} per turn)",
            "responses that contain no action must have a lower return than actions: decrease env.invalid_penalty, or "
            "increase env.max_invalid",
            warning=not is_paid,
        )


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the difference of the means of paired values, in standard errors."""
    difference = first - second
    error = max(float(difference.std()) / np.sqrt(len(difference)), 1e-9)
    return float(difference.mean()) / error


# -- the environment ------------------------------------------------------------------------------------------------


def repeated(first: Played, second: Played) -> Iterator[Finding]:
    """Compare two plays of the same actor from the same seeds."""
    turns = min(len(first.rewards), len(second.rewards))
    for name in ("states", "rewards", "active"):
        differs = getattr(first, name)[:turns] != getattr(second, name)[:turns]
        if differs.any():
            time, episode = (int(place[0]) for place in np.nonzero(differs))
            what = {"states": "observation", "rewards": "reward", "active": "end of the episode"}[name]
            yield _finding(
                "environment is not deterministic",
                f"with the same seed and the same actions, the {what} of turn {time} differs (episode {episode})",
                "the environment must draw all random numbers from a generator that reset(seed=...) seeds, and reset "
                "must restore its whole state",
            )
            return


# -- a collection ---------------------------------------------------------------------------------------------------


def groups(returns: np.ndarray, group: np.ndarray) -> Iterator[Finding]:
    """Check that the returns of some group differ, without which the advantages of GRPO are 0.

    Args:
        returns: return of each episode, float64 ``(env,)``.
        group: its group, int64 ``(env,)``.
    """
    numbers = np.unique(group)
    if len(numbers) < len(group) and all(np.ptp(returns[group == number]) == 0 for number in numbers):
        yield _finding(
            "groups are dead",
            f"the episodes of each of {len(numbers)} groups have the same return ({returns.min():g} to "
            f"{returns.max():g}), so that all advantages are 0",
            "a larger group_size, an easier task, a reward with more levels, or SFT first",
            warning=True,
        )


def responses(valid: np.ndarray, texts: Sequence[str], lengths: np.ndarray, limit: int) -> Iterator[Finding]:
    """Check that some responses contain a legal action, and that they end before the limit.

    Args:
        valid: whether each response contains a legal action, bool ``(turn,)``.
        texts: the responses.
        lengths: their numbers of tokens, int64 ``(turn,)``.
        limit: maximum number of tokens of a response.
    """
    if len(valid) and valid.mean() < _FEW_VALID:
        example = next((text for text, is_valid in zip(texts, valid, strict=True) if not is_valid), "")
        yield _finding(
            "hardly any response contains a legal action",
            f"{valid.sum()} of {len(valid)} responses are valid; an invalid one is {example[:80]!r}, and "
            f"{(lengths >= limit).mean():.0%} of the responses have the maximum of {limit} tokens",
            "names of the actions in policy.prompt.system, policy.prompt.num_examples, a larger max_new_tokens, "
            "ScoringPolicy, or SFT first",
            warning=True,
        )


def prompts(cut: np.ndarray, wrong: np.ndarray, limit: int) -> Iterator[Finding]:
    """Check that prompts are complete, and those of their observations.

    Args:
        cut: whether turns of history were removed from the prompt of a turn, bool ``(turn,)``.
        wrong: whether the recorded prompt is not that of the recorded observation and history, bool ``(turn,)``.
        limit: maximum number of tokens of a prompt.
    """
    if wrong.any():
        yield _finding(
            "prompts do not belong to their observations",
            f"the prompt of {wrong.sum()} of {len(wrong)} turns is not that of the recorded observation and history, "
            f"first of turn {int(np.flatnonzero(wrong)[0])}",
            "the prompt of a turn must contain its own observation and the past turns of its own episode",
        )
    if cut.any():
        yield _finding(
            "prompts are cut",
            f"turns of history were removed from {cut.mean():.0%} of the prompts, which may have {limit} tokens",
            "a larger policy.max_prompt_tokens, or a smaller policy.prompt.history",
            warning=True,
        )


def ends(mask: np.ndarray, is_end: np.ndarray) -> Iterator[Finding]:
    """Check that each demonstrated response ends with a token that ends a response.

    Args:
        mask: tokens that are trained, bool ``(turn, token)``.
        is_end: tokens that end a response, bool ``(turn, token)``.
    """
    without = ~(mask & is_end).any(1)
    if without.any():
        yield _finding(
            "end token not trained",
            f"{without.sum()} of {len(mask)} demonstrated responses contain no token that ends a response",
            "the end token must follow each response and be part of the mask",
        )


def random_numbers(responses: Sequence[str], logprobs: np.ndarray, states: np.ndarray) -> Iterator[Finding]:
    """Check that environments with equal observations sample their responses independently.

    Args:
        responses: responses of turns that were sampled at the same time.
        logprobs: log-probability of each response, float64 ``(turn,)``.
        states: hash of the observation, int64 ``(turn,)``.
    """
    total, copies, followers = 0.0, 0, 0
    for state in np.unique(states):
        first, *others = np.flatnonzero(states == state).tolist()
        followers += len(others)
        same = [turn for turn in others if responses[turn] == responses[first]]
        copies, total = copies + len(same), total + float(logprobs[same].sum())
    if followers and copies == followers and total < _UNLIKELY:
        yield _finding(
            "environments share random numbers",
            f"all {copies} environments with the same observation as another one gave the same response, which has "
            f"the probability e^{total:.0f}",
            "the random numbers of a token must depend on its environment",
        )


# -- one update -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Update:
    """Holds what one optimiser step on a collection or batch changed; arrays are float64 ``(turn, token)``."""

    mask: np.ndarray
    """Tokens that are trained, bool."""
    advantages: np.ndarray
    """Their advantages; for demonstrations, their weights."""
    before: np.ndarray
    """Log-probabilities before the step."""
    after: np.ndarray
    """Log-probabilities after the step."""
    sampled: np.ndarray | None = None
    """Log-probabilities recorded while sampling; None for demonstrations."""
    reference: tuple[np.ndarray, np.ndarray] | None = None
    """Log-probabilities of the reference before and after the step."""
    critic: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """Predictions of the critic before and after the step, and their targets."""
    left_out: Sequence[str] = ()
    """Trainable weights that the optimiser does not have."""
    without_gradient: Sequence[str] = ()
    """Trainable weights on which the loss does not depend."""
    moved: float = 0.0
    """Largest change of a trainable weight."""
    frozen_moved: Sequence[str] = ()
    """Weights that are not trainable and have changed."""
    learning_rates: Sequence[float] = (1.0,)
    """Learning rates at some steps of the run, the first one included."""
    trust_region: bool = False
    """Whether a line search may reject the step."""
    passes: tuple[np.ndarray, np.ndarray] | None = None
    """Log-probabilities with which the policy is compared in the first and in the second pass over the collection, each
    ``(trained token,)`` in any order; None if there is one pass."""
    half_precision: bool = False
    """Whether numbers of 16 bits take part."""
    gradient: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Comparison of the gradient with another backward pass, see :class:`~lrl.diagnosis.sample.Sample`."""


def update(step: Update) -> Iterator[Finding]:
    """Check that one optimiser step changes what it should, in the right direction."""
    yield from _ratio(step)
    yield from _weights(step)
    recorded = Sample(collection=-1, settings=step.gradient, observations=[], responses=[], pieces=[], arrays={})
    yield from gradients(recorded)
    yield from _direction(step)
    yield from _size(step)
    if step.reference is not None:
        moved = float(np.abs(step.reference[1] - step.reference[0])[step.mask].max(initial=0.0))
        if moved > _TOLERANCE[step.half_precision]:
            yield _finding(
                "reference moves with the policy",
                f"an update changed log-probabilities of the reference by up to {moved:.3g} nats",
                "the reference must have weights of its own, or be the model without its adapter",
            )


def _ratio(step: Update) -> Iterator[Finding]:
    """Check that probability ratios are 1 before the step, and that they refer to the sampling policy after it."""
    if step.sampled is None:
        return
    tolerance = _TOLERANCE[step.half_precision]
    error = float(np.abs(step.before - step.sampled)[step.mask].max(initial=0.0))
    if error > tolerance:
        yield _finding(
            "sampling and training disagree",
            f"before the first update, a log-probability differs by {error:.3g} nats from that of sampling",
            "sampling and training must use the same weights, temperature, dtype and dropout",
        )
    if step.passes is None:
        return
    first, second = step.passes
    changed = float(np.abs(np.sort(second) - np.sort(first)).max(initial=0.0))
    if changed > tolerance:
        yield _finding(
            "old log-probabilities are not those of sampling",
            f"in the second pass over a collection they differ by up to {changed:.3g} nats from those of the first",
            "the ratio must compare the policy with the one that sampled, not with the one before this minibatch",
        )


def _weights(step: Update) -> Iterator[Finding]:
    """Check which weights changed."""
    if max(step.learning_rates) == 0:
        yield _finding(
            "learning rate is 0",
            "the learning rate is 0 at all steps of the run",
            "a positive model.optimizer.lr, and a schedule that does not begin at its end",
        )
    if step.left_out:
        yield _finding(
            "weights are missing in the optimiser",
            f"the optimiser does not have {len(step.left_out)} trainable weights, such as {step.left_out[0]}",
            "the optimiser must be created with all weights that require a gradient, after they are replaced",
        )
    if step.without_gradient:
        yield _finding(
            "weights without gradient",
            f"the loss does not depend on {len(step.without_gradient)} trainable weights, such as "
            f"{step.without_gradient[0]}",
            "a detached tensor or a block under no_grad cuts the graph; weights that are not trained must be frozen",
        )
    if step.frozen_moved:
        yield _finding(
            "frozen weights change",
            f"an update changed {len(step.frozen_moved)} frozen weights, such as {step.frozen_moved[0]}",
            "only trainable weights may be updated",
        )
    if step.moved == 0 and not step.trust_region and _is_informative(step):
        yield _finding(
            "weights are not trained",
            "one optimiser step changed no weight, although advantages are not 0",
            "compare optimizer_step, the gradients and the weights that the optimiser has",
        )


def _is_informative(step: Update) -> bool:
    return bool(np.abs(step.advantages[step.mask]).max(initial=0.0) > 0)


def _size(step: Update) -> Iterator[Finding]:
    """Check that one step does not change the policy by as much as a whole run should in several collections."""
    lost = float((step.before - step.after)[step.mask].mean()) if step.mask.any() else 0.0
    if step.sampled is not None and lost > _LARGE_STEP:
        yield _finding(
            "learning rate too high",
            f"one step lowers log-probabilities of sampled tokens by {lost:.2g} nats on average (0.01 is usual)",
            f"model.optimizer.lr divided by 10 or 100 (this step had {step.learning_rates[0]:.2g})",
            warning=True,
        )


def _direction(step: Update) -> Iterator[Finding]:
    """Check that the step raised the probability of tokens with large advantages, and moved the critic to its targets.

    The sum of advantage times change of log-probability is, to first order, the improvement of the objective.
    """
    advantages, change = step.advantages[step.mask], (step.after - step.before)[step.mask]
    scale = float(np.sqrt((advantages**2).sum() * (change**2).sum()))
    if scale > 1e-12 and float((advantages * change).sum()) < -0.1 * scale:
        yield _finding(
            "update has the wrong sign",
            "one optimiser step lowered the probability of tokens with positive advantages: the correlation of "
            f"advantage and change is {float((advantages * change).sum()) / scale:.2f}",
            "compare the sign of the loss and of the step with the formula of the algorithm",
        )
    if step.critic is not None:
        before, after, targets = (part[step.mask] for part in step.critic)
        moved, error = after - before, targets - before
        scale = float(np.sqrt((moved**2).sum() * (error**2).sum()))
        if scale > 1e-12 and float((moved * error).sum()) < -0.1 * scale:
            yield _finding(
                "value loss has the wrong sign",
                f"one optimiser step changed predictions against their errors (correlation "
                f"{float((moved * error).sum()) / scale:.2f})",
                "compare the sign of the value loss, and its targets",
            )

"""Prompts that ask a language model for parameters: of an unknown function (ProPS), or of a policy (ProPS+)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lrl.chat.model import Message
from lrl.ranges import NonNegativeInt, PositiveFloat, check_fields
from lrl.search.searchers import ParameterSpace, Trial


class ProposalError(ValueError):
    """Raised for a response without a legal proposal. The message is one sentence, which is shown to the model."""


# Style `integers`, for language models that were trained to search. The model is asked for each parameter separately,
# and its prompt contains the values of that parameter only: a model of a few million weights does not find a parameter
# in lists of many. An integer below 1000 is one token in many tokenizers, and ranks, unlike returns, are comparable
# between tasks.

_LARGEST = 999
TOP_RANK = 99
"""Rank of the best policy; the rank of the worst is 0."""


def integer_space(space: ParameterSpace) -> ParameterSpace:
    """Return the space of integers that represent the parameters of a space.

    The integer of a real parameter is its distance from the lower end of the range, in units of the last decimal place.
    An action represents itself.

    Raises:
        ValueError: If parameters are not rounded, or have more than 1000 possible values.
    """
    if space.actions is not None:
        return space
    steps = None if space.decimals is None else round((space.high - space.low) * 10**space.decimals)
    if steps is None or steps > _LARGEST:
        raise ValueError(
            f"searcher.history.style is integers, but decimals is {space.decimals} for parameters from {space.low:g} "
            f"to {space.high:g}; there must be at most {_LARGEST + 1} values."
        )
    return ParameterSpace(size=space.size, low=0, high=steps, decimals=0)


def to_integers(parameters: Sequence[float] | np.ndarray, space: ParameterSpace) -> list[int]:
    """Return the integers that represent legal parameters ``(parameter,)``."""
    values = np.asarray(parameters, dtype=np.float64)
    if space.actions is None:
        values = (values - space.low) * 10 ** (space.decimals or 0)
    return np.rint(values).astype(np.int64).tolist()


def from_integers(integers: Sequence[float] | np.ndarray, space: ParameterSpace) -> np.ndarray:
    """Return the legal parameters ``(parameter,)`` that are nearest to those that integers represent."""
    values = np.asarray(integers, dtype=np.float64)
    return space.nearest(values if space.actions is not None else values / 10 ** (space.decimals or 0) + space.low)


def read_integers(replies: Sequence[str], space: ParameterSpace) -> np.ndarray:
    """Return the legal parameters ``(parameter,)`` of replies, each of which is the integer of one parameter.

    Raises:
        ProposalError: If a reply is not an integer, or its value is illegal.
    """
    for index, reply in enumerate(replies):
        if not re.fullmatch(r"\s*\d+\s*", reply, re.ASCII):  # float() fails for others, such as "\x1e93"
            raise ProposalError(f"The reply for params[{index}] is {reply!r}; it must be an integer.")
    values = [float(reply) for reply in replies]
    complaint = integer_space(space).complaint(values)
    if complaint:
        raise ProposalError(complaint)
    return from_integers(values, space)


def ranks(values: Sequence[float] | np.ndarray) -> list[int]:
    """Return the rank of each value, from 0 for the worst to 99 for the best; equal values share their mean rank."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) < 2:
        return [TOP_RANK] * len(given)
    below = (given[:, None] > given).sum(1)
    equal = (given[:, None] == given).sum(1)
    return np.rint(TOP_RANK * (below + (equal - 1) / 2) / (len(given) - 1)).astype(np.int64).tolist()


_FUNCTION = (
    "You search for the maximum of an unknown function f of {size} parameters. Nothing is known of f but the values "
    "that it took at the parameters tried so far, each measured with some randomness."
)
_POLICY = (
    "You search for the best parameters of a policy that acts in the environment below. f(params) is the mean over "
    "episodes of the sum of all rewards of an episode; larger is better.\n\nEnvironment: {environment}\n\n"
    "Policy: {policy}"
)
_REAL = "params has {size} entries. Each is a number from {low:g} to {high:g}{rounded}."
_TABLE = "params has {size} entries. Each is one of {actions}."
_INDEXED = (
    "Reply with two lines. Line 1 holds the parameters to try next, every index from 0 to {last} once and in order, as "
    "in this pattern:\n{pattern}\nLine 2 gives the reason for this choice in one or two sentences."
)
_COMPACT = "Reply with the parameters to try next: {size} numbers in one line, separated by spaces, and nothing else."
_NO_REPEATS = "Parameters that were tried before must not be proposed again."
_STEP = (
    "Move some parameters by about {step:g} from good ones, up as well as down. Where this no longer helps, try "
    "parameters far from all others."
)
_VALUES = "Try every legal value of an entry before it is settled."
_OPTIMUM = "The maximum of f is about {optimum:g}. Values well below it belong to a local maximum: explore further."
_HISTORY = "Tried so far, {order}:\n{history}"
_NOTHING = "Nothing was tried so far."
_ROUND = "This is proposal {iteration} of {total}."
_REJECTED = "Your previous reply to this was rejected: {complaint} Correct that."
_INTEGERS = "{size} numbers from {legal}, {iteration} of {total}:"
"""Everything besides the history in the prompt of a model that was trained to search."""
_PATTERN_ENTRIES = 12
"""Maximum number of parameters for which the pattern of the reply is written in full."""


@dataclass(frozen=True, kw_only=True)
class SearchPrompt:
    """Configuration of everything in a prompt besides the history."""

    describe_environment: bool = False
    """Whether the prompt describes the environment and the policy (ProPS+), or an unknown function (ProPS)."""
    optimum: float | None = None
    """Highest possible mean return; None leaves it out, because a model could not know it."""
    step_size: PositiveFloat | None = 1.0
    """Suggested change of a real parameter between proposals; None leaves the suggestion out."""

    def __post_init__(self) -> None:
        check_fields(self, "searcher.prompt")

    def render(
        self,
        *,
        space: ParameterSpace,
        task: tuple[str, str],
        history: str,
        order: str = "time",
        style: str = "indexed",
        iteration: int = 1,
        total: int = 1,
        complaint: str = "",
    ) -> list[Message]:
        """Return a conversation with one user message.

        Args:
            space: the vectors that may be proposed.
            task: descriptions of the environment and of what the parameters do in the policy.
            history: the policies so far, as :meth:`HistoryConfig.render` writes them.
            order: order of the history, ``time`` or ``value``.
            style: style of the history and the reply, see :attr:`HistoryConfig.style`.
            iteration: number of this proposal, from 1.
            total: number of proposals of the search.
            complaint: reason why the previous reply was rejected, one sentence; empty in the first attempt.
        """
        if style == "integers":
            return [{"role": "user", "content": integer_prompt(space, history, iteration, total)}]
        environment, policy = task
        plain = _FUNCTION.format(size=space.size)
        ordered = "oldest first" if order == "time" else "worst first"
        parts = [
            _POLICY.format(environment=environment, policy=policy) if self.describe_environment else plain,
            _legal(space),
            _reply(space, style),
            "\n".join(f"- {rule}" for rule in self._rules(space)),
            _HISTORY.format(order=ordered, history=history) if history else _NOTHING,
            _ROUND.format(iteration=iteration, total=total),
            _REJECTED.format(complaint=complaint) if complaint else "",
        ]
        return [{"role": "user", "content": "\n\n".join(filter(None, parts))}]

    def _rules(self, space: ParameterSpace) -> list[str]:
        rules = [_NO_REPEATS]
        if space.actions is not None:
            rules.append(_VALUES)
        elif self.step_size is not None:
            rules.append(_STEP.format(step=self.step_size))
        if self.optimum is not None:
            rules.append(_OPTIMUM.format(optimum=self.optimum))
        return rules


def integer_prompt(space: ParameterSpace, history: str, iteration: int, total: int) -> str:
    """Return the prompt of style ``integers``: one line, and the history of one parameter."""
    numbers = integer_space(space)
    legal = f"0 to {numbers.high:g}" if space.actions is None else " ".join(map(str, space.actions))
    head = _INTEGERS.format(size=space.size, legal=legal, iteration=iteration, total=total)
    return f"{head}\n{history}" if history else head


def _legal(space: ParameterSpace) -> str:
    if space.actions is not None:
        return _TABLE.format(size=space.size, actions=", ".join(map(str, space.actions)))
    places = {None: "", 0: ", without decimals", 1: ", with one decimal"}
    rounded = places.get(space.decimals, f", with {space.decimals} decimals")
    return _REAL.format(size=space.size, low=space.low, high=space.high, rounded=rounded)


def _reply(space: ParameterSpace, style: str) -> str:
    if style == "compact":
        return _COMPACT.format(size=space.size)
    entries = [f"params[{index}]: <value>" for index in range(space.size)]
    if space.size > _PATTERN_ENTRIES:
        entries = [*entries[:2], "...", entries[-1]]
    return _INDEXED.format(last=space.size - 1, pattern=", ".join(entries))


_TRAJECTORY_STEPS = 100
"""Maximum number of steps of an episode in a prompt."""


@dataclass(frozen=True)
class Entry:
    """Parameters of one trial and their mean return."""

    parameters: tuple[float, ...]
    value: float
    """Mean return over the episodes."""
    episodes: int
    """Number of these episodes."""
    trajectory: tuple[tuple[str, str, float], ...] = ()
    """Observation, action and reward of the first steps of the first episode; empty if prompts show no trajectories."""

    @classmethod
    def of(cls, trial: Trial) -> Entry:
        """Return the entry of a trial, with the first steps of its trajectory."""
        steps = tuple(trial.trajectory[:_TRAJECTORY_STEPS])
        return cls(tuple(trial.parameters.tolist()), trial.value, len(trial.returns), steps)

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Entry:
        """Return an entry from its fields, in which tuples may have become lists."""
        steps = tuple(map(tuple, state["trajectory"]))
        return cls(tuple(state["parameters"]), state["value"], state["episodes"], steps)


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    """Configuration of the policies in a prompt: which of them, their order, and the format of each.

    A prompt contains the ``recent`` most recent policies, and the ``top_k`` best of all others.
    """

    recent: NonNegativeInt | None = None
    """Number of the most recent policies; None for all."""
    top_k: NonNegativeInt = 0
    """Number of the best policies before the most recent ones."""
    order: Literal["time", "value"] = "time"
    """``time`` (oldest first) or ``value`` (worst first)."""
    style: Literal["indexed", "compact", "integers"] = "indexed"
    """``indexed``: ``params[0]: 1.5; params[1]: -2.0; f(params): 23.40 (mean of 20 episodes)``. ``compact``: ``1.5 -2.0
    = 23.40 (20)``, with a third of the tokens. ``integers``: ``75=50 40=99``, for models that were trained on such
    histories: each prompt contains one parameter of all policies, as integers (see :func:`integer_space`), each with
    the rank of its policy from 0 to 99."""
    trajectories: NonNegativeInt = 0
    """Number of policies at the end of the history whose first episode is shown, too, with at most 100 steps."""

    def __post_init__(self) -> None:
        check_fields(self, "searcher.history")
        if (self.recent is None and self.top_k) or self.recent == self.top_k == 0:
            raise ValueError(
                f"searcher.history.recent is {'null' if self.recent is None else 0} and top_k is {self.top_k}; recent "
                "must be a number where top_k is given, and one of them must be positive."
            )
        if self.trajectories and self.style == "integers":
            raise ValueError(
                f"searcher.history.trajectories is {self.trajectories}, but style is integers, which shows none."
            )

    def selected(self, entries: Sequence[Entry], most: int | None = None) -> list[Entry]:
        """Return the entries of a prompt in order; of equal values the older one counts as better.

        Args:
            entries: all policies so far, oldest first.
            most: maximum number of entries, at least 1; None for all that are configured. The first entries in order,
                which are the oldest or the worst, are left out, but never the best.
        """
        first_recent = 0 if self.recent is None else max(0, len(entries) - self.recent)
        best = sorted(range(first_recent), key=lambda index: (-entries[index].value, index))[: self.top_k]
        shown = [*sorted(best), *range(first_recent, len(entries))]
        if self.order == "value":
            shown.sort(key=lambda index: (entries[index].value, -index))
        if most is not None and most < len(shown):
            best_one = min(shown, key=lambda index: (-entries[index].value, index))
            others = [index for index in shown if index != best_one]
            kept = {best_one, *others[len(others) - most + 1 :]}
            shown = [index for index in shown if index in kept]
        return [entries[index] for index in shown]

    def render(
        self, entries: Sequence[Entry], space: ParameterSpace, most: int | None = None, parameter: int = 0
    ) -> str:
        """Return the lines of the entries of a prompt, with trajectories if they are configured.

        Args:
            entries: all policies so far, oldest first.
            space: space of the parameters.
            most: maximum number of entries, see :meth:`selected`.
            parameter: index of the parameter whose values are written, in style ``integers``.
        """
        shown, lines = self.selected(entries, most), []
        if self.style == "integers":
            places = ranks([entry.value for entry in shown])
            values = to_integers([entry.parameters[parameter] for entry in shown], space)
            return " ".join(f"{value}={place}" for value, place in zip(values, places, strict=True))
        for place, entry in enumerate(shown):
            lines.append(render_entry(entry, space, self.style))
            if entry.trajectory and place >= len(shown) - self.trajectories:
                lines.append("State | Action | Reward")
                lines += [f"{seen} | {done} | {reward:g}" for seen, done, reward in entry.trajectory]
        return "\n".join(lines)


def render_entry(entry: Entry, space: ParameterSpace, style: str) -> str:
    """Return the line of one policy in style ``indexed`` or ``compact``."""
    values = [render_value(value, space) for value in entry.parameters]
    if style == "compact":
        return f"{' '.join(values)} = {entry.value:.2f} ({entry.episodes})"
    named = "; ".join(f"params[{index}]: {value}" for index, value in enumerate(values))
    episodes = "1 episode" if entry.episodes == 1 else f"mean of {entry.episodes} episodes"
    return f"{named}; f(params): {entry.value:.2f} ({episodes})"


def render_reply(parameters: np.ndarray, space: ParameterSpace, style: str) -> str:
    """Return the shortest reply that proposes parameters ``(parameter,)``.

    In style ``integers``, which has a reply for each parameter, it is the longest of these replies.
    """
    if style == "integers":
        return max(map(str, to_integers(parameters, space)), key=len)
    values = [render_value(value, space) for value in parameters.tolist()]
    if style == "compact":
        return " ".join(values)
    return ", ".join(f"params[{index}]: {value}" for index, value in enumerate(values))


def render_value(value: float, space: ParameterSpace) -> str:
    """Return the text of one parameter: an integer for an action, else a number with the decimals of the space."""
    if space.actions is not None:
        return str(int(value))
    return f"{value:.5g}" if space.decimals is None else f"{value:.{space.decimals}f}"


def same_parameters(entries: Sequence[Entry], proposal: np.ndarray) -> Entry | None:
    """Return the first entry with exactly these parameters ``(parameter,)``; None if there is none."""
    wanted = tuple(proposal.tolist())
    return next((entry for entry in entries if entry.parameters == wanted), None)

"""Prompts that ask a language model for parameters: of an unknown function (ProPS), or of a policy (ProPS+)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lrl.chat.model import Message
from lrl.ranges import NonNegativeInt, PositiveFloat, PositiveInt, check_fields
from lrl.search.searchers import ParameterSpace, Trial


class ProposalError(ValueError):
    """Raised for a response without a legal proposal. The message is one sentence, which is shown to the model."""


# Policies and their returns as small integers, for language models that were trained to search.
#
# Such a model is asked for each parameter by itself, and shown the values of that parameter alone: a model of a few
# million weights does not find the same parameter in policies of many. An integer below 1000 is one token of many
# tokenizers, and ranks in place of returns mean the same in every task.

_LARGEST = 999
TOP_RANK = 99
"""Rank of the best policy; the worst has 0."""


def integer_space(space: ParameterSpace) -> ParameterSpace:
    """Return the space of the integers that stand for the parameters of a space.

    A real parameter is counted in its last decimal place from the lower end of its range; an action stands for itself.

    Raises:
        ValueError: If parameters are not rounded, or to so many decimals that they exceed 999.
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
    """Return the integers that stand for legal parameters ``(parameter,)``."""
    values = np.asarray(parameters, dtype=np.float64)
    if space.actions is None:
        values = (values - space.low) * 10 ** (space.decimals or 0)
    return np.rint(values).astype(np.int64).tolist()


def from_integers(integers: Sequence[float] | np.ndarray, space: ParameterSpace) -> np.ndarray:
    """Return the legal parameters ``(parameter,)`` that are nearest to what integers stand for."""
    values = np.asarray(integers, dtype=np.float64)
    return space.nearest(values if space.actions is not None else values / 10 ** (space.decimals or 0) + space.low)


def read_integers(replies: Sequence[str], space: ParameterSpace) -> np.ndarray:
    """Return the legal parameters ``(parameter,)`` that replies stand for, an integer for each parameter.

    Raises:
        ProposalError: If a reply is something else, or a value is illegal.
    """
    for index, reply in enumerate(replies):
        if not re.fullmatch(r"\s*\d+\s*", reply, re.ASCII):  # float reads no others, such as "\x1e93"
            raise ProposalError(f"The reply for params[{index}] is {reply!r}; it must be an integer.")
    values = [float(reply) for reply in replies]
    complaint = integer_space(space).complaint(values)
    if complaint:
        raise ProposalError(complaint)
    return from_integers(values, space)


def ranks(values: Sequence[float] | np.ndarray) -> list[int]:
    """Return integers from 0, the worst value, to 99, the best; equal values have the mean of their ranks."""
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
"""All that a model is shown besides the history if it was trained to search."""
_PATTERN_ENTRIES = 12
"""Number of parameters up to which the pattern of the reply is written in full."""


@dataclass(frozen=True, kw_only=True)
class TaskText:
    """Holds in words what is searched."""

    environment: str = ""
    """What the environment is: its observations, actions and rewards."""
    policy: str = ""
    """What the parameters are to the policy."""


@dataclass(frozen=True, kw_only=True)
class SearchPrompt:
    """Configures what a prompt says besides the history."""

    describe_environment: bool = False
    """Whether the environment and the policy are described (ProPS+), or the parameters are those of an unknown function
    (ProPS)."""
    environment: str | None = None
    """Description of the environment; null takes what is known of it, or the codec's."""
    optimum: float | None = None
    """The largest possible mean return, to be told to the model; null leaves it out, as the model could not know it."""
    step_size: PositiveFloat | None = 1.0
    """How far proposals should be from each other in each real parameter; null leaves it out."""

    def __post_init__(self) -> None:
        check_fields(self, "searcher.prompt")
        if self.environment is not None and not self.describe_environment:
            raise ValueError(
                "searcher.prompt.environment is set, but describe_environment is false; set it to true, or leave the "
                "description out."
            )

    def check_style(self, style: str) -> None:
        """Raise if the prompt of a style would not say what is configured.

        Raises:
            ValueError: If ``style`` is integers, and a setting is not the default.
        """
        unset = SearchPrompt()
        for name in ("describe_environment", "optimum", "step_size") if style == "integers" else ():
            value = getattr(self, name)
            if value != getattr(unset, name):
                raise ValueError(
                    f"searcher.prompt.{name} is {value}, but history.style is integers, which has no such sentence; "
                    "leave it out."
                )

    def render(
        self,
        *,
        space: ParameterSpace,
        task: TaskText,
        history: str,
        order: str = "time",
        style: str = "indexed",
        iteration: int = 1,
        total: int = 1,
        complaint: str = "",
        allow_repeats: bool = False,
    ) -> list[Message]:
        """Return the conversation, which is one message of the user.

        Args:
            space: What may be proposed.
            task: The environment and the policy in words.
            history: The policies so far, as :meth:`lrl.search.prompts.HistoryConfig.render` writes them.
            order: ``time`` or ``value``.
            style: ``indexed`` or ``compact``, for the reply; ``integers``: one line and the history of one parameter.
            iteration: Number of this proposal, from 1.
            total: Number of all proposals.
            complaint: Why the previous reply was rejected, one sentence; empty for the first try.
            allow_repeats: Whether parameters that were tried before may be proposed again.
        """
        if style == "integers":
            return [{"role": "user", "content": integer_prompt(space, history, iteration, total)}]
        task = task if self.environment is None else TaskText(environment=self.environment, policy=task.policy)
        ordered = "oldest first" if order == "time" else "worst first"
        parts = [
            self._role(space, task),
            _legal(space),
            _reply(space, style),
            "\n".join(f"- {rule}" for rule in self._rules(space, allow_repeats)),
            _HISTORY.format(order=ordered, history=history) if history else _NOTHING,
            _ROUND.format(iteration=iteration, total=total),
            _REJECTED.format(complaint=complaint) if complaint else "",
        ]
        return [{"role": "user", "content": "\n\n".join(filter(None, parts))}]

    def _role(self, space: ParameterSpace, task: TaskText) -> str:
        if self.describe_environment:
            return _POLICY.format(environment=task.environment, policy=task.policy)
        return _FUNCTION.format(size=space.size)

    def _rules(self, space: ParameterSpace, allow_repeats: bool) -> list[str]:
        rules = [] if allow_repeats else [_NO_REPEATS]
        if space.actions is not None:
            rules.append(_VALUES)
        elif self.step_size is not None:
            rules.append(_STEP.format(step=self.step_size))
        if self.optimum is not None:
            rules.append(_OPTIMUM.format(optimum=self.optimum))
        return rules


def integer_prompt(space: ParameterSpace, history: str, iteration: int, total: int) -> str:
    """Return the prompt for a model that was trained to search: one line, and the history of one parameter."""
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


# The policies that were tried, and how a prompt shows them.

Step = tuple[str, str, float]
"""Observation, action and reward of one step."""


@dataclass(frozen=True)
class Entry:
    """Holds the parameters of one trial, their mean return, and what the mean rests on."""

    parameters: tuple[float, ...]
    value: float
    """Mean return over the episodes."""
    episodes: int
    """Number of episodes behind the mean."""
    trajectory: tuple[Step, ...] = ()
    """The steps of the first episode; empty where trajectories are not shown."""

    @classmethod
    def of(cls, trial: Trial, max_steps: int = 0) -> Entry:
        """Return the entry of a trial, with up to ``max_steps`` steps of its trajectory."""
        steps = tuple((seen, done, float(reward)) for seen, done, reward in trial.trajectory[:max_steps])
        return cls(tuple(trial.parameters.tolist()), trial.value, len(trial.returns), steps)

    def state(self) -> dict[str, Any]:
        """Return the entry as plain values, for a checkpoint."""
        steps = [list(step) for step in self.trajectory]
        return {
            "parameters": list(self.parameters),
            "value": self.value,
            "episodes": self.episodes,
            "trajectory": steps,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Entry:
        """Return the entry whose :meth:`state` is given."""
        steps = tuple((str(seen), str(done), float(reward)) for seen, done, reward in state["trajectory"])
        return cls(tuple(state["parameters"]), state["value"], state["episodes"], steps)


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    """Configures which of the policies so far a prompt shows, in which order, and how each is written.

    Shown are the ``recent`` last ones, and of the others the ``top_k`` best.
    """

    recent: NonNegativeInt | None = None
    """Number of the most recent policies; null shows all."""
    top_k: NonNegativeInt = 0
    """Number of the best policies, of those before the most recent."""
    order: Literal["time", "value"] = "time"
    """``time``: oldest first; ``value``: worst first."""
    style: Literal["indexed", "compact", "integers"] = "indexed"
    """``indexed``: ``params[0]: 1.5; params[1]: -2.0; f(params): 23.40 (mean of 20 episodes)``; ``compact``: ``1.5 -2.0
    = 23.40 (20)``, in a third of the tokens; ``integers``: ``75=50 40=99``, of one parameter at a time, its values as
    tenths above the lower end of the range, each with the rank of its policy among those shown, 99 being the best, for
    models that were trained on such histories."""
    trajectories: NonNegativeInt = 0
    """Number of policies, the last that are shown, whose first episode is shown as well."""
    trajectory_steps: PositiveInt = 100
    """Maximum number of steps of an episode that is shown."""

    def __post_init__(self) -> None:
        check_fields(self, "searcher.history")
        if self.recent == 0 and self.top_k == 0:
            raise ValueError("searcher.history.recent and top_k are 0; one of them must be positive, or recent null.")
        if self.recent is None and self.top_k:
            raise ValueError(
                f"searcher.history.top_k is {self.top_k}, but recent is null, which shows all; set recent to a number."
            )
        if self.trajectories and self.style == "integers":
            raise ValueError(
                f"searcher.history.trajectories is {self.trajectories}, but style is integers, which shows none."
            )

    def selected(self, entries: Sequence[Entry], most: int | None = None) -> list[Entry]:
        """Return the entries that are shown, in order; of equal values the older one counts as the better.

        Args:
            entries: All policies so far, oldest first.
            most: The maximum number, at least 1; None shows all that are configured. Left out are the first in order,
                the oldest or the worst, but never the best.
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
        """Write the entries that are shown, one line each, with trajectories where they are asked for.

        Args:
            entries: All policies so far, oldest first.
            space: What their parameters are.
            most: The maximum number that is shown, see :meth:`selected`.
            parameter: Index of the parameter whose values are shown, all in one line, in style ``integers``.
        """
        shown, lines = self.selected(entries, most), []
        if self.style == "integers":
            places = ranks([entry.value for entry in shown])
            values = to_integers([entry.parameters[parameter] for entry in shown], space)
            return " ".join(f"{value}={place}" for value, place in zip(values, places, strict=True))
        for place, entry in enumerate(shown):
            lines.append(render_entry(entry, space, self.style))
            if entry.trajectory and place >= len(shown) - self.trajectories:
                lines += [
                    "State | Action | Reward",
                    *(f"{seen} | {done} | {r:g}" for seen, done, r in entry.trajectory),
                ]
        return "\n".join(lines)


def render_entry(entry: Entry, space: ParameterSpace, style: str) -> str:
    """Write one policy in a line, ``indexed`` or ``compact``."""
    values = [render_value(value, space) for value in entry.parameters]
    if style == "compact":
        return f"{' '.join(values)} = {entry.value:.2f} ({entry.episodes})"
    named = "; ".join(f"params[{index}]: {value}" for index, value in enumerate(values))
    episodes = "1 episode" if entry.episodes == 1 else f"mean of {entry.episodes} episodes"
    return f"{named}; f(params): {entry.value:.2f} ({episodes})"


def render_reply(parameters: np.ndarray, space: ParameterSpace, style: str) -> str:
    """Write parameters ``(parameter,)`` as a reply that proposes them and says nothing else.

    In style ``integers``, which asks for one parameter at a time, it is the longest of the replies.
    """
    if style == "integers":
        return max(map(str, to_integers(parameters, space)), key=len)
    values = [render_value(value, space) for value in parameters.tolist()]
    return (
        " ".join(values) if style == "compact" else ", ".join(f"params[{i}]: {value}" for i, value in enumerate(values))
    )


def render_value(value: float, space: ParameterSpace) -> str:
    """Write one parameter: an action as an integer, a real number with the decimals of the space."""
    if space.actions is not None:
        return str(int(value))
    return f"{value:.5g}" if space.decimals is None else f"{value:.{space.decimals}f}"


def same_parameters(entries: Sequence[Entry], proposal: np.ndarray) -> Entry | None:
    """Return the first entry with exactly these parameters ``(parameter,)``; None if there is none."""
    wanted = tuple(proposal.tolist())
    return next((entry for entry in entries if entry.parameters == wanted), None)

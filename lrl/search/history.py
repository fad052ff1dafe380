"""The policies that were tried, and how a prompt shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lrl.ranges import NonNegativeInt, PositiveInt, check_fields
from lrl.search.integers import ranks, to_integers
from lrl.search.searcher import Trial
from lrl.search.space import ParameterSpace

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
            entries: all policies so far, oldest first.
            most: the maximum number, at least 1; None shows all that are configured. Left out are the first in order,
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
            entries: all policies so far, oldest first.
            space: what their parameters are.
            most: the maximum number that is shown, see :meth:`selected`.
            parameter: index of the parameter whose values are shown, all in one line, in style ``integers``.
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

"""The interface of everything that proposes parameters and learns their returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Spaces that parameters of a small policy are searched in.


@dataclass(frozen=True, kw_only=True)
class ParameterSpace:
    """The vectors of parameters that a search may propose: real numbers in a range, or one of some actions each.

    Give either ``actions`` or ``low`` and ``high``.
    """

    size: int
    """Number of parameters."""
    low: float = -6.0
    """Smallest value of a real parameter."""
    high: float = 6.0
    """Largest value of a real parameter."""
    decimals: int | None = 1
    """Decimal places of a real parameter; null does not round."""
    actions: Sequence[int] | None = None
    """The values of each parameter of a tabular policy; null where parameters are real numbers."""
    scale: float = 3.0
    """Standard deviation of the normal distribution that :meth:`sample` draws real parameters from."""

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Draw a random vector, float64 ``(size,)``: normal, clipped and rounded; or uniform among the actions."""
        if self.actions is not None:
            return rng.choice(np.asarray(self.actions, dtype=np.float64), self.size)
        return self.nearest(rng.normal(0.0, self.scale, self.size))

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """Return the legal vector that is nearest to real numbers ``(size,)``: clipped and rounded."""
        if self.actions is not None:
            actions = np.asarray(self.actions, dtype=np.float64)
            return actions[np.abs(np.asarray(values)[:, None] - actions).argmin(axis=1)]
        clipped = np.clip(values, self.low, self.high)
        return clipped if self.decimals is None else clipped.round(self.decimals) + 0.0  # no negative zeros

    def complaint(self, values: Sequence[float]) -> str:
        """Return a sentence on what is wrong with proposed values; empty where they are legal."""
        if len(values) != self.size:
            return f"{len(values)} values were given; there must be {self.size}."
        if self.actions is not None:
            wrong = [i for i, value in enumerate(values) if value not in self.actions]
            legal = f"one of {', '.join(map(str, self.actions))}"
        else:
            wrong = [i for i, value in enumerate(values) if not self.low <= value <= self.high]
            legal = f"between {self.low:g} and {self.high:g}"
        if not wrong:
            return ""
        return f"params[{wrong[0]}] is {values[wrong[0]]:g}; it must be {legal}."


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Parameters that were played, and what they returned."""

    parameters: np.ndarray
    """float64 ``(parameter,)``."""
    returns: np.ndarray
    """Undiscounted return of each episode, float64 ``(episode,)``."""
    env_steps: int
    """Steps of all episodes together."""
    trajectory: list[tuple[str, str, float]] = field(default_factory=list)
    """Observation, action and reward of each step of the first episode; empty unless it was asked for."""

    @property
    def value(self) -> float:
        """The mean return, which a search maximises."""
        return float(self.returns.mean())


class Searcher(ABC):
    """Proposes parameters one vector at a time and is told how they did.

    All its randomness follows from the seed and the number of proposals, so that a restored searcher proposes the same.
    """

    @property
    def needs_trajectory(self) -> bool:
        """Return whether the searcher reads :attr:`Trial.trajectory`."""
        return False

    @property
    def metrics(self) -> Mapping[str, float]:
        """Cost of the last :meth:`ask` by name, logged as ``search/<name>``."""
        return {}

    @property
    def usage(self) -> Mapping[str, float]:
        """Return what a language model behind a server was asked in the whole search, and its cost, by name."""
        return {}

    @property
    def replies(self) -> list[dict[str, str]]:
        """Responses of a language model in the last :meth:`ask`, for the record of the search."""
        return []

    def describe(self, environment: str, policy: str) -> None:  # noqa: B027 (most searchers read no words)
        """Take words for what is searched. Called once, before :meth:`setup`.

        Args:
            environment: what the environment is.
            policy: what the parameters are to the policy.
        """

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search. Called once, before the first :meth:`ask` and before :meth:`load_state_dict`.

        Args:
            space: what may be proposed.
            seed: of the search.
            num_iterations: number of proposals that will be asked for.

        Raises:
            ValueError: the searcher cannot search in this space.
        """
        self.space, self.seed, self.num_iterations = space, seed, num_iterations

    @abstractmethod
    def ask(self) -> np.ndarray:
        """Return the next proposal, float64 ``(size,)``, legal in the space."""

    @abstractmethod
    def tell(self, trial: Trial) -> None:
        """Learn the returns of the last proposal, or of parameters that somebody else has played (warm-up)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that later proposals depend on, as numbers, strings, lists, dicts and tensors."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


def other_proposals(searcher: Searcher) -> ValueError:
    """Return the error of a resumed search whose proposals so far differ from those that were recorded."""
    return ValueError(
        f"ckpt_path holds a search of {type(searcher).__name__} with other proposals than these settings lead to; "
        "resume with the same seed_everything, model.searcher, model.policy and data.num_iterations."
    )

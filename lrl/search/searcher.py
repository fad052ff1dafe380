"""The interface of everything that proposes parameters and learns their returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lrl.search.space import ParameterSpace


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

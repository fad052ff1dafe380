"""The base class of searchers that learn from a generation of proposals at a time."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from typing import Any

import numpy as np

from lrl.search.relaxation import Relaxation
from lrl.search.searcher import Searcher, Trial, other_proposals
from lrl.search.space import ParameterSpace


class GenerationSearcher(Searcher):
    """Proposes the points of a generation one after the other, then learns from all of them.

    Of parameters that others have played before the first proposal (warm-up) the best are where the search starts;
    later ones change nothing. The state of a search is the start and all values that it was told: restoring it repeats
    the search up to there, which takes milliseconds, and compares the proposals by their checksum.
    """

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search."""
        super().setup(space, seed, num_iterations)
        self.relaxation = Relaxation(space)
        self.rng = np.random.default_rng(seed)
        self._values: list[float] = []
        self._checksum = 0  # of the proposals that the values belong to
        self._warm_up: dict[str, Any] | None = None
        self._generation: list[np.ndarray] = []
        self._first = 0  # number of proposals before this generation
        self._pending: np.ndarray | None = None

    @abstractmethod
    def begin(self, start: np.ndarray | None) -> None:
        """Prepare the first generation.

        Args:
            start: parameters ``(parameter,)`` to start from; None where nothing is known.
        """

    @abstractmethod
    def sample(self) -> list[np.ndarray]:
        """Sample the points of the next generation, each ``(...)``."""

    @abstractmethod
    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Learn the values ``(point,)`` of a whole generation; higher ones are better."""

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the legal parameters ``(parameter,)`` of a point."""
        return self.relaxation.proposal(point)

    def ask(self) -> np.ndarray:
        """Return the next proposal; the same one until its value is told."""
        if not self._generation:
            self.begin(None if self._warm_up is None else np.array(self._warm_up["parameters"]))
            self._generation = self.sample()
        elif len(self._values) - self._first == len(self._generation):
            self.learn(self._generation, np.array(self._values[self._first :]))
            self._first = len(self._values)
            self._generation = self.sample()
        self._pending = self.proposal(self._generation[len(self._values) - self._first])
        return self._pending.copy()

    def tell(self, trial: Trial) -> None:
        """Learn the value of the last proposal, or keep the best warm-up parameters."""
        if self._pending is not None and np.array_equal(trial.parameters, self._pending):
            self._checksum = zlib.crc32(self._pending.tobytes(), self._checksum)
            self._pending = None
            self._values.append(trial.value)
        elif not self._generation and (self._warm_up is None or trial.value > self._warm_up["value"]):
            self._warm_up = {"parameters": trial.parameters.tolist(), "value": trial.value}

    def state_dict(self) -> dict[str, Any]:
        """Return the start, and the values and the checksum of all proposals so far."""
        return {"warm_up": self._warm_up, "values": list(self._values), "checksum": self._checksum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Repeat a search with the values that it was told.

        Raises:
            ValueError: the values belong to other proposals, because a setting has changed.
        """
        self.setup(self.space, self.seed, self.num_iterations)
        self._warm_up = state_dict["warm_up"]
        for value in state_dict["values"]:
            self.tell(Trial(parameters=self.ask(), returns=np.array([value]), env_steps=0))
        if self._checksum != state_dict["checksum"]:
            raise other_proposals(self)

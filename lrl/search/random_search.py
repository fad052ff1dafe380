"""Random search, the control that every other searcher must beat."""

from __future__ import annotations

import zlib
from typing import Any, final

import numpy as np

from lrl.search.searcher import Searcher, Trial, other_proposals
from lrl.search.space import ParameterSpace


@final
class RandomSearch(Searcher):
    """Proposes independent random parameters, distributed as warm-up policies are, and learns nothing."""

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search."""
        super().setup(space, seed, num_iterations)
        self._num_told = self._checksum = 0
        self._pending: np.ndarray | None = None

    def ask(self) -> np.ndarray:
        """Return the next proposal, which depends on the seed and the number of earlier ones alone."""
        # The stream of [seed, 0] is that of the seed alone, which other searchers use; the 1 keeps them apart.
        self._pending = self.space.sample(np.random.default_rng([self.seed, self._num_told, 1]))
        return self._pending.copy()

    def tell(self, trial: Trial) -> None:
        """Count a proposal; parameters that were not proposed change nothing."""
        if self._pending is not None and np.array_equal(trial.parameters, self._pending):
            self._checksum = zlib.crc32(self._pending.tobytes(), self._checksum)
            self._pending = None
            self._num_told += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number and the checksum of the proposals so far."""
        return {"num_told": self._num_told, "checksum": self._checksum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Repeat the proposals so far.

        Raises:
            ValueError: they are others, because a setting has changed.
        """
        self.setup(self.space, self.seed, self.num_iterations)
        for _ in range(int(state_dict["num_told"])):
            self.tell(Trial(parameters=self.ask(), returns=np.zeros(1), env_steps=0))
        if self._checksum != state_dict.get("checksum"):
            raise other_proposals(self)

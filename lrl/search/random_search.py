"""Random search, the control that every other searcher must beat."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from lrl.search.searcher import Searcher, Trial
from lrl.search.space import ParameterSpace


@final
class RandomSearch(Searcher):
    """Proposes independent random parameters, distributed as warm-up policies are, and learns nothing."""

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search."""
        super().setup(space, seed, num_iterations)
        self._num_told = 0
        self._pending: np.ndarray | None = None

    def ask(self) -> np.ndarray:
        """Return the next proposal, which depends on the seed and the number of earlier ones alone."""
        # The stream of [seed, 0] is that of the seed alone, which other searchers use; the 1 keeps them apart.
        self._pending = self.space.sample(np.random.default_rng([self.seed, self._num_told, 1]))
        return self._pending.copy()

    def tell(self, trial: Trial) -> None:
        """Count a proposal; parameters that were not proposed change nothing."""
        if self._pending is not None and np.array_equal(trial.parameters, self._pending):
            self._pending = None
            self._num_told += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of proposals."""
        return {"num_told": self._num_told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of proposals."""
        self._num_told = int(state_dict["num_told"])

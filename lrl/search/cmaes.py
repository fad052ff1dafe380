"""CMA-ES, the covariance matrix adaptation evolution strategy (Hansen, arXiv:1604.00772), by the package ``cmaes``."""

from __future__ import annotations

import importlib.util
from typing import final

import numpy as np

from lrl.ranges import PositiveInt, check_arguments
from lrl.search.generations import GenerationSearcher
from lrl.search.space import ParameterSpace


@final
class CMAES(GenerationSearcher):
    """Adapts the mean and the whole covariance of a normal distribution, at first that of random parameters.

    The entries of a table are searched as logits, one for each action (:class:`~lrl.search.relaxation.Relaxation`).
    Values beyond the range are clipped to it. A search that has converged, or that proposed the same rounded parameters
    a whole generation long, starts again from random parameters with twice the population (IPOP).

    Args:
        population_size: proposals of a generation, at least 4; null takes ``4 + 3 ln(dimension)``.
    """

    def __init__(self, population_size: PositiveInt | None = None) -> None:
        check_arguments(CMAES.__init__, locals(), "searcher")
        if population_size is not None and population_size < 4:  # the half that is learned from must be two or more
            raise ValueError(f"searcher.population_size is {population_size}; it must be at least 4.")
        self.population_size = population_size

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search.

        Raises:
            ValueError: the package ``cmaes`` is not installed.
        """
        if importlib.util.find_spec("cmaes") is None:
            raise ValueError("searcher is CMAES, which needs the package cmaes; call pip install 'lrl[search]'.")
        super().setup(space, seed, num_iterations)

    def begin(self, start: np.ndarray | None) -> None:
        """Begin with the distribution of random parameters, around the start if there is one."""
        mean = self.relaxation.zero if start is None else self.relaxation.point(start)
        self._begin(mean, self.population_size)

    def _begin(self, mean: np.ndarray, population_size: int | None) -> None:
        from cmaes import CMA

        self._cma = CMA(
            mean=mean,
            sigma=self.relaxation.scale,
            bounds=self.relaxation.bounds,
            n_max_resampling=1,  # in many dimensions nearly every sample has a number beyond its range
            seed=int(self.rng.integers(2**32)),
            population_size=population_size,
        )

    def sample(self) -> list[np.ndarray]:
        """Sample a population."""
        return [self._cma.ask() for _ in range(self._cma.population_size)]

    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Adapt the distribution, or start again."""
        self._cma.tell([(point, -float(value)) for point, value in zip(points, values, strict=True)])
        proposals = {tuple(self.proposal(point)) for point in points}
        if self._cma.should_stop() or len(proposals) == 1:
            mean = self.relaxation.clip(self.relaxation.scale * self.rng.standard_normal(self.relaxation.size))
            self._begin(mean, 2 * self._cma.population_size)

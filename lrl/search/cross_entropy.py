"""The cross-entropy method (Rubinstein, 1999; Szita and Lörincz, "Learning Tetris", 2006)."""

from __future__ import annotations

from typing import final

import numpy as np

from lrl.ranges import ClosedUnitInterval, LeftOpenUnitInterval, PositiveInt, check_arguments
from lrl.search.generations import GenerationSearcher


@final
class CrossEntropyMethod(GenerationSearcher):
    """Samples parameters independently of each other, and fits their distributions to the best of each generation.

    Real parameters have a normal distribution, at first that of random ones; extra standard deviation, which falls
    linearly to zero, keeps it from shrinking too early. The entries of a table have a categorical distribution each,
    at first a uniform one, mixed with a uniform part that falls likewise.

    Args:
        population_size: proposals of a generation.
        elite_share: share of a generation that the distributions are fit to; at least two proposals.
        extra_noise: extra standard deviation at the start, in multiples of that of random parameters, and the uniform
            part of a categorical distribution.
        learning_rate: weight of the new distribution of a table's entry against the old one.
    """

    def __init__(
        self,
        population_size: PositiveInt = 20,
        elite_share: LeftOpenUnitInterval = 0.25,
        extra_noise: ClosedUnitInterval = 0.1,
        learning_rate: LeftOpenUnitInterval = 0.7,
    ) -> None:
        check_arguments(CrossEntropyMethod.__init__, locals(), "searcher")
        if population_size < 2:
            raise ValueError(f"searcher.population_size is {population_size}; it must be at least 2.")
        self.population_size, self.extra_noise, self.learning_rate = population_size, extra_noise, learning_rate
        self.num_elites = max(2, round(elite_share * population_size))

    def begin(self, start: np.ndarray | None) -> None:
        """Begin with the distribution of random parameters, around the start if there is one."""
        self._num_learned = 0
        if self.space.actions is None:
            self.mean = self.relaxation.zero if start is None else start
            self.std = np.full(self.space.size, self.space.scale)
            return
        self.actions = np.asarray(self.space.actions, dtype=np.float64)
        logits = np.zeros((self.space.size, len(self.actions)))
        if start is not None:
            logits = self.relaxation.point(start).reshape(logits.shape)
        self.probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    def sample(self) -> list[np.ndarray]:
        """Sample legal parameters."""
        shape = (self.population_size, self.space.size)
        if self.space.actions is None:
            noise = self.rng.standard_normal(shape)
            return [self.space.nearest(self.mean + self.std * row) for row in noise]
        uniforms, cumulated = self.rng.random((*shape, 1)), np.cumsum(self.probabilities, axis=1)
        choices = (cumulated[:, :-1] < uniforms).sum(-1)  # the last one ends at 1, whatever its rounding
        return list(self.actions[choices])

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the point: it is legal."""
        return point

    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Fit the distributions to the best proposals; of equal values the earlier one counts as better."""
        elites = np.stack([points[index] for index in np.argsort(-values, kind="stable")[: self.num_elites]])
        self._num_learned += 1
        rest = max(0.0, 1 - self._num_learned * self.population_size / self.num_iterations)
        if self.space.actions is None:
            self.mean, self.std = elites.mean(0), elites.std(0) + self.extra_noise * rest * self.space.scale
            return
        shares = (elites[..., None] == self.actions).mean(0)
        fitted = (1 - self.learning_rate) * self.probabilities + self.learning_rate * shares
        uniform = self.extra_noise * rest
        self.probabilities = (1 - uniform) * fitted + uniform / len(self.actions)

"""Augmented random search (Mania, Guy and Recht, arXiv:1803.07055)."""

from __future__ import annotations

from typing import final

import numpy as np

from lrl.ranges import PositiveFloat, PositiveInt, check_arguments
from lrl.search.generations import GenerationSearcher


@final
class AugmentedRandomSearch(GenerationSearcher):
    """Moves along random directions by the differences of the returns on both sides (variant V1-t).

    The entries of a table are searched as logits, one for each action (:class:`~lrl.search.relaxation.Relaxation`).

    **Departures from the paper**

    1. Observations are not normalised (V2), because the policy is a function of the raw observation.
    2. Step size and noise are multiples of the standard deviation of random parameters, because parameters are rounded
       and their range is known; those of the paper are smaller than the rounding.

    Args:
        num_directions: directions of a generation, each of which takes two proposals.
        num_top: directions that the step is made of, those with the best return on either side.
        step_size: of the parameters, in standard deviations of random ones.
        noise: standard deviation of the directions, likewise.

    Raises:
        ValueError: ``num_top`` is above ``num_directions``.
    """

    def __init__(
        self,
        num_directions: PositiveInt = 8,
        num_top: PositiveInt = 4,
        step_size: PositiveFloat = 0.2,
        noise: PositiveFloat = 0.2,
    ) -> None:
        check_arguments(AugmentedRandomSearch.__init__, locals(), "searcher")
        if num_top > num_directions:
            raise ValueError(f"searcher.num_top is {num_top}; it must be at most num_directions, {num_directions}.")
        self.num_directions, self.num_top, self.step_size, self.noise = num_directions, num_top, step_size, noise

    def begin(self, start: np.ndarray | None) -> None:
        """Begin at the start if there is one, else at zero or the legal point that is nearest to it."""
        self.centre = self.relaxation.zero if start is None else self.relaxation.point(start)

    def sample(self) -> list[np.ndarray]:
        """Sample directions, and return the points on both sides of the current parameters, in pairs."""
        self._directions = self.rng.standard_normal((self.num_directions, self.relaxation.size))
        width = self.noise * self.relaxation.scale
        return [self.centre + sign * width * direction for direction in self._directions for sign in (1, -1)]

    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Step along the best directions, by their difference over the standard deviation of their returns."""
        sides = values.reshape(-1, 2)
        top = np.argsort(-sides.max(1), kind="stable")[: self.num_top]
        spread = sides[top].std()
        if spread == 0:
            return
        step = (sides[top, 0] - sides[top, 1]) @ self._directions[top] / (self.num_top * spread)
        self.centre = self.relaxation.clip(self.centre + self.step_size * self.relaxation.scale * step)

"""The base class of searchers that learn from a generation of proposals at a time."""

from __future__ import annotations

import importlib.util
import zlib
from abc import abstractmethod
from typing import Any, final

import numpy as np

from lrl.ranges import ClosedUnitInterval, LeftOpenUnitInterval, PositiveFloat, PositiveInt, check_arguments
from lrl.registry import register
from lrl.search.searcher import ParameterSpace, Searcher, Trial, other_proposals

# Real vectors that stand for the proposals of a space, for methods that move through real numbers only.


@final
class Relaxation:
    """The real vectors behind the proposals: the parameters themselves, or one logit for each action of each entry.

    Logits order nothing: every action of a table is as far from every other, which numbers of actions are not. The
    proposal is the action with the highest logit.

    Args:
        space: what may be proposed.
    """

    def __init__(self, space: ParameterSpace) -> None:
        self.space = space
        self._actions = None if space.actions is None else np.asarray(space.actions, dtype=np.float64)
        self.size = space.size if self._actions is None else space.size * len(self._actions)
        self.scale = space.scale if self._actions is None else 1.0
        """Standard deviation of the vectors of random proposals."""

    @property
    def bounds(self) -> np.ndarray | None:
        """Lower and upper end of each number, ``(size, 2)``; None for logits, which have none."""
        return None if self._actions is not None else np.tile([self.space.low, self.space.high], (self.size, 1))

    @property
    def zero(self) -> np.ndarray:
        """The vector inside the bounds that is nearest to zero."""
        return self.clip(np.zeros(self.size))

    def clip(self, point: np.ndarray) -> np.ndarray:
        """Return the nearest vector inside the bounds."""
        return point if self._actions is not None else np.clip(point, self.space.low, self.space.high)

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the legal parameters ``(parameter,)`` of a real vector ``(size,)``."""
        if self._actions is None:
            return self.space.nearest(point)
        return self._actions[point.reshape(self.space.size, -1).argmax(1)]

    def point(self, parameters: np.ndarray) -> np.ndarray:
        """Return a real vector ``(size,)`` of some parameters; a chosen action has logit 1, all others 0."""
        if self._actions is None:
            return np.asarray(parameters, dtype=np.float64)
        return (np.asarray(parameters)[:, None] == self._actions).astype(np.float64).ravel()


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


# Random search, the control that every other searcher must beat.


@register
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


# Augmented random search (Mania, Guy and Recht, arXiv:1803.07055).


@register
@final
class AugmentedRandomSearch(GenerationSearcher):
    """Moves along random directions by the differences of the returns on both sides (variant V1-t).

    The entries of a table are searched as logits, one for each action (:class:`~lrl.search.searchers.Relaxation`).

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


# CMA-ES, the covariance matrix adaptation evolution strategy (Hansen, arXiv:1604.00772), by the package ``cmaes``.


@register
@final
class CMAES(GenerationSearcher):
    """Adapts the mean and the whole covariance of a normal distribution, at first that of random parameters.

    The entries of a table are searched as logits, one for each action (:class:`~lrl.search.searchers.Relaxation`).
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


# The cross-entropy method (Rubinstein, 1999; Szita and Lörincz, "Learning Tetris", 2006).


@register
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

"""Searchers, which propose parameters of a small policy, and the algorithms that need no language model.

These are random search, augmented random search, CMA-ES and the cross-entropy method.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from lrl.files import require
from lrl.ranges import ClosedUnitInterval, LeftOpenUnitInterval, PositiveFloat, PositiveInt, check_arguments
from lrl.registry import register


@dataclass(frozen=True, kw_only=True)
class ParameterSpace:
    """The parameter vectors that a searcher may propose.

    Parameters are real numbers between ``low`` and ``high``, or, if ``actions`` is given, one of these actions each.
    """

    size: int
    """Number of parameters."""
    low: float = -6.0
    """Smallest value of a real parameter."""
    high: float = 6.0
    """Largest value of a real parameter."""
    decimals: int | None = 1
    """Number of decimal places that real parameters are rounded to; None does not round."""
    actions: Sequence[int] | None = None
    """Possible values of each parameter of a tabular policy; None if parameters are real numbers."""
    scale: float = 3.0
    """Standard deviation of the normal distribution from which :meth:`sample` samples real parameters."""

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Sample a vector, float64 ``(size,)``: normal, clipped and rounded, or uniform over the actions."""
        if self.actions is not None:
            return rng.choice(np.asarray(self.actions, dtype=np.float64), self.size)
        return self.nearest(rng.normal(0.0, self.scale, self.size))

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """Return the legal vector that is nearest to real numbers ``(size,)``."""
        if self.actions is not None:
            actions = np.asarray(self.actions, dtype=np.float64)
            return actions[np.abs(np.asarray(values)[:, None] - actions).argmin(axis=1)]
        clipped = np.clip(values, self.low, self.high)
        return clipped if self.decimals is None else clipped.round(self.decimals) + 0.0  # turns -0.0 into 0.0

    def complaint(self, values: Sequence[float]) -> str:
        """Return a sentence that says why values are not legal; an empty string if they are."""
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
    """Parameters and the returns of the episodes that were played with them."""

    parameters: np.ndarray
    """The parameters, float64 ``(parameter,)``."""
    returns: np.ndarray
    """Undiscounted return of each episode, float64 ``(episode,)``."""
    env_steps: int
    """Number of steps of all episodes together."""
    trajectory: list[tuple[str, str, float]] = field(default_factory=list)
    """Observation, action and reward of each step of the first episode; empty unless the searcher needs it."""

    @property
    def value(self) -> float:
        """The mean return, which a search maximises."""
        return float(self.returns.mean())


class Searcher(ABC):
    """Abstract base class of algorithms that propose one parameter vector at a time and learn from its returns.

    Proposals depend on the seed and on the trials so far only, so that a restored searcher makes the same proposals.
    """

    needs_trajectory: bool = False
    """Whether the searcher reads :attr:`Trial.trajectory`."""
    metrics: dict[str, float] = {}
    """Costs of the last :meth:`ask` by name, which are logged as ``search/<name>``."""
    usage: dict[str, float] = {}
    """Number of requests to a language model and their costs in the whole search, by name."""
    replies: list[dict[str, str]] = []
    """Replies of a language model in the last :meth:`ask`, with the reason why each was rejected, empty if it was
    not."""

    def describe(self, environment: str, policy: str) -> None:  # noqa: B027 (most searchers do not read descriptions)
        """Set descriptions for prompts. This is called once, before :meth:`setup`.

        Args:
            environment: description of the environment.
            policy: description of what the parameters do in the policy.
        """

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search. This is called once, before the first :meth:`ask` and before :meth:`load_state_dict`.

        Args:
            space: the vectors that may be proposed.
            seed: seed of the search.
            num_iterations: number of proposals of the whole search.

        Raises:
            ValueError: If the searcher does not support this space.
        """
        self.space, self.seed, self.num_iterations = space, seed, num_iterations

    @abstractmethod
    def ask(self) -> np.ndarray:
        """Return the next proposal, float64 ``(size,)``, which is legal in the space."""

    @abstractmethod
    def tell(self, trial: Trial) -> None:
        """Learn from the last proposal, or from a warm-up policy that the searcher did not propose."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything that later proposals depend on, as numbers, strings, lists, dicts and tensors."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""


@final
class Relaxation:
    """Maps parameter vectors to unbounded search points, for methods that search real vectors only.

    The point of real parameters is the vector itself. The point of a table has one logit for each entry and action, and
    the proposal is the action with the highest logit: unlike the numbers of actions, logits do not order the actions.

    Args:
        space: the vectors that may be proposed.

    Attributes:
        size: number of dimensions of a point.
        scale: standard deviation of the points of random proposals.
        bounds: lower and upper bound of each dimension, ``(size, 2)``; None for logits.
    """

    def __init__(self, space: ParameterSpace) -> None:
        self.space = space
        self._actions = None if space.actions is None else np.asarray(space.actions, dtype=np.float64)
        self.size = space.size if self._actions is None else space.size * len(self._actions)
        self.scale = space.scale if self._actions is None else 1.0
        self.bounds = np.tile([space.low, space.high], (self.size, 1)) if self._actions is None else None

    def clip(self, point: np.ndarray) -> np.ndarray:
        """Return the nearest point inside the bounds."""
        return point if self.bounds is None else np.clip(point, *self.bounds.T)

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the legal parameters ``(parameter,)`` of a point ``(size,)``."""
        if self._actions is None:
            return self.space.nearest(point)
        return self._actions[point.reshape(self.space.size, -1).argmax(1)]

    def point(self, parameters: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return a point ``(size,)`` of parameters; in a table the chosen actions have logit 1, all others 0."""
        if self._actions is None:
            return np.asarray(parameters, dtype=np.float64)
        return (np.asarray(parameters)[:, None] == self._actions).astype(np.float64).ravel()


class GenerationSearcher(Searcher):
    """Abstract base class of searchers that propose a generation of points, then learn from all of their values.

    The search starts from the best of the warm-up policies that are told before the first proposal. The state of a
    search consists of this start and the values of all proposals; restoring it repeats the search, which takes
    milliseconds, and compares a checksum of the proposals.
    """

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search."""
        super().setup(space, seed, num_iterations)
        self.relaxation = Relaxation(space)
        self.rng = np.random.default_rng(seed)
        self._values: list[float] = []
        """Values of all proposals so far."""
        self._checksum = 0
        """Checksum of the proposals whose values are known."""
        self._warm_up: dict[str, Any] | None = None
        """Parameters and value of the best warm-up policy; None if there is none."""
        self._generation: list[np.ndarray] = []
        """Points of the current generation."""
        self._first = 0
        """Index of the first proposal of the current generation."""
        self._pending: np.ndarray | None = None
        """Proposal whose value has not been told."""

    def begin(self, start: np.ndarray) -> None:  # noqa: B027 (a searcher without memory prepares nothing)
        """Prepare the first generation.

        Args:
            start: point ``(size,)`` of the best warm-up policy, or without one the legal point nearest to zero.
        """

    @abstractmethod
    def sample(self) -> list[np.ndarray]:
        """Sample the points of the next generation, each ``(...)``."""

    @abstractmethod
    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Learn from the values ``(point,)`` of a whole generation, which are to be maximised."""

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the legal parameters ``(parameter,)`` of a point."""
        return self.relaxation.proposal(point)

    def ask(self) -> np.ndarray:
        """Return the next proposal, which stays the same until its value is told."""
        if not self._generation:
            start = np.zeros(self.relaxation.size)
            if self._warm_up is not None:
                start = self.relaxation.point(self._warm_up["parameters"])
            self.begin(self.relaxation.clip(start))
            self._generation = self.sample()
        elif len(self._values) - self._first == len(self._generation):
            self.learn(self._generation, np.array(self._values[self._first :]))
            self._first = len(self._values)
            self._generation = self.sample()
        self._pending = self.proposal(self._generation[len(self._values) - self._first])
        return self._pending.copy()

    def tell(self, trial: Trial) -> None:
        """Add the value of the last proposal, or keep the best warm-up policy."""
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
        """Repeat a search with its recorded values.

        Raises:
            ValueError: If the proposals differ from the recorded ones, because a setting has changed.
        """
        self.setup(self.space, self.seed, self.num_iterations)
        self._warm_up = state_dict["warm_up"]
        for value in state_dict["values"]:
            self.tell(Trial(parameters=self.ask(), returns=np.array([value]), env_steps=0))
        if self._checksum != state_dict["checksum"]:
            raise ValueError(
                f"the checkpoint contains a search of {type(self).__name__} with other proposals than these settings "
                "lead to; resume with the same seed_everything, model.searcher, model.policy and data.num_iterations."
            )


@register
@final
class RandomSearch(GenerationSearcher):
    """Proposes independent random parameters with the distribution of warm-up policies, and learns nothing.

    It is the baseline that every other searcher must outperform.
    """

    def sample(self) -> list[np.ndarray]:
        """Sample parameters, which depend on the seed and the number of earlier proposals only."""
        # The stream of [seed, 0] equals that of the seed, which other searchers use; the 1 makes the streams differ.
        return [self.space.sample(np.random.default_rng([self.seed, len(self._values), 1]))]

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the point, which is legal."""
        return point

    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Do nothing, because proposals are independent."""


@register
@final
class AugmentedRandomSearch(GenerationSearcher):
    """Augmented random search, variant V1-t (Mania, Guy and Recht, arXiv:1803.07055).

    Each update moves along random directions in proportion to the difference of the returns on both sides. The entries
    of a table are searched as logits, one for each action (:class:`~lrl.search.searchers.Relaxation`).

    **Departures from the paper**

    1. Observations are not normalised (V2), because the policy is a function of the raw observation.
    2. Step size and noise are multiples of the standard deviation of random parameters, because parameters are rounded
       and their range is known; the values in the paper are smaller than the rounding.

    Args:
        num_directions: number of directions of a generation, each of which takes two proposals.
        num_top: number of directions that determine the step: those with the highest return on either side.
        step_size: step size in standard deviations of random parameters.
        noise: standard deviation of the directions, in standard deviations of random parameters.

    Raises:
        ValueError: If ``num_top`` is larger than ``num_directions``.
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

    def begin(self, start: np.ndarray) -> None:
        """Begin at the start."""
        self.centre = start

    def sample(self) -> list[np.ndarray]:
        """Sample directions, and return the points on both sides of the current parameters, in pairs."""
        self._directions = self.rng.standard_normal((self.num_directions, self.relaxation.size))
        width = self.noise * self.relaxation.scale
        return [self.centre + sign * width * direction for direction in self._directions for sign in (1, -1)]

    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Move along the best directions, by the difference of their returns divided by the standard deviation."""
        sides = values.reshape(-1, 2)
        top = np.argsort(-sides.max(1), kind="stable")[: self.num_top]
        spread = sides[top].std()
        if spread == 0:
            return
        step = (sides[top, 0] - sides[top, 1]) @ self._directions[top] / (self.num_top * spread)
        self.centre = self.relaxation.clip(self.centre + self.step_size * self.relaxation.scale * step)


@register
@final
class CMAES(GenerationSearcher):
    """Covariance matrix adaptation evolution strategy (Hansen, arXiv:1604.00772), from the package ``cmaes``.

    It adapts the mean and the covariance matrix of a normal distribution, which is initially the distribution of random
    parameters. The entries of a table are searched as logits, one for each action
    (:class:`~lrl.search.searchers.Relaxation`). Values outside the range are clipped. If the search has converged, or
    if all proposals of a generation are equal after rounding, it restarts from random parameters with twice the
    population (IPOP).

    Args:
        population_size: number of proposals of a generation, at least 4; None uses ``4 + 3 ln(dimension)``.
    """

    def __init__(self, population_size: PositiveInt | None = None) -> None:
        check_arguments(CMAES.__init__, locals(), "searcher")
        if population_size is not None and population_size < 4:  # half of them, at least two, determine the update
            raise ValueError(f"searcher.population_size is {population_size}; it must be at least 4.")
        self.population_size = population_size

    def setup(self, space: ParameterSpace, seed: int, num_iterations: int) -> None:
        """Start a search.

        Raises:
            ValueError: If the package ``cmaes`` is not installed.
        """
        require("cmaes", "search", "searcher CMAES")
        super().setup(space, seed, num_iterations)

    def begin(self, start: np.ndarray) -> None:
        """Begin with the distribution of random parameters around the start."""
        self._begin(start, self.population_size)

    def _begin(self, mean: np.ndarray, population_size: int | None) -> None:
        from cmaes import CMA

        self._cma = CMA(
            mean=mean,
            sigma=self.relaxation.scale,
            bounds=self.relaxation.bounds,
            n_max_resampling=1,  # with many dimensions, nearly every sample has a number outside its range
            seed=int(self.rng.integers(2**32)),
            population_size=population_size,
        )

    def sample(self) -> list[np.ndarray]:
        """Sample a population."""
        return [self._cma.ask() for _ in range(self._cma.population_size)]

    def learn(self, points: list[np.ndarray], values: np.ndarray) -> None:
        """Adapt the distribution, or restart."""
        self._cma.tell([(point, -float(value)) for point, value in zip(points, values, strict=True)])
        proposals = {tuple(self.proposal(point)) for point in points}
        if self._cma.should_stop() or len(proposals) == 1:
            mean = self.relaxation.clip(self.relaxation.scale * self.rng.standard_normal(self.relaxation.size))
            self._begin(mean, 2 * self._cma.population_size)


@register
@final
class CrossEntropyMethod(GenerationSearcher):
    """Cross-entropy method (Rubinstein, 1999; Szita and Lörincz, "Learning Tetris", 2006).

    Parameters are sampled independently of each other, and their distributions are fitted to the best proposals of each
    generation. The distribution of a real parameter is normal, and initially the distribution of random parameters.
    Additional noise, which decreases linearly to zero, prevents it from becoming narrow too early. The distribution of
    an entry of a table is categorical, initially uniform, and mixed with a uniform distribution, whose weight also
    decreases linearly to zero.

    Args:
        population_size: number of proposals of a generation.
        elite_share: fraction of a generation that the distributions are fitted to; at least two proposals are used.
        extra_noise: initial additional standard deviation, in standard deviations of random parameters, and initial
            weight of the uniform distribution.
        learning_rate: weight of the fitted categorical distribution of a table's entry against the previous one.
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

    def begin(self, start: np.ndarray) -> None:
        """Begin with the distribution of random parameters around the start."""
        self._num_learned = 0
        if self.space.actions is None:
            self.mean = start
            self.std = np.full(self.space.size, self.space.scale)
            return
        self.actions = np.asarray(self.space.actions, dtype=np.float64)
        logits = start.reshape(self.space.size, len(self.actions))
        self.probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    def sample(self) -> list[np.ndarray]:
        """Sample legal parameters."""
        shape = (self.population_size, self.space.size)
        if self.space.actions is None:
            noise = self.rng.standard_normal(shape)
            return [self.space.nearest(self.mean + self.std * row) for row in noise]
        uniforms, cumulated = self.rng.random((*shape, 1)), np.cumsum(self.probabilities, axis=1)
        choices = (cumulated[:, :-1] < uniforms).sum(-1)  # the last sum counts as 1, even if rounding makes it smaller
        return list(self.actions[choices])

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the point, which is legal."""
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

"""Synthetic functions to learn searching from, and the proposals of a teacher that sees them.

No function resembles a task: they are random quadratics, ridges, plateaus and steps of 2 to 10 parameters, measured
with random errors. A demonstration is a prompt with a history of proposals, as the style ``integers`` of
:class:`~lrl.search.history.HistoryConfig` writes it, and the proposal of CMA-ES that went on from the best of them on
the exact function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lrl.functional.random import seeds
from lrl.ranges import ClosedUnitInterval, NonNegativeInt, PositiveInt, check_fields
from lrl.search.history import Entry, HistoryConfig
from lrl.search.integers import to_integers
from lrl.search.prompts import integer_prompt
from lrl.search.searcher import Trial
from lrl.search.space import ParameterSpace

KINDS = ("quadratic", "ridge", "plateau", "steps")
"""Shapes of functions."""
FIRST_VALIDATION = 1_000_000
"""Index of the first held-out function that is demonstrated, to measure a run's loss on; searchers are compared on
those before it, so that no checkpoint is selected on them."""
_FAR = 4.0
"""Optima lie in this distance of 0 in every coordinate, where most random proposals lie as well."""
_LEVELS = 8
"""Number of levels of a function with steps."""


@dataclass(frozen=True, kw_only=True)
class SyntheticFunction:
    """A function whose largest value, 0, is known."""

    kind: str
    """One of :data:`KINDS`."""
    optimum: np.ndarray
    """Where the function is 0, ``(parameter,)``."""
    shape: np.ndarray
    """Matrix from distances to rotated and scaled ones, ``(parameter, parameter)``."""
    error: float
    """Standard deviation of a measurement."""

    @property
    def space(self) -> ParameterSpace:
        """The parameters: numbers from -6 to 6 with one decimal."""
        return ParameterSpace(size=len(self.optimum))

    def values(self, parameters: np.ndarray) -> np.ndarray:
        """Return the exact values, at most 0 and about -1 for random parameters.

        Args:
            parameters: ``(row, parameter)``.
        """
        distances = (((parameters - self.optimum) @ self.shape.T) ** 2).mean(-1)
        if self.kind == "ridge":
            return -np.sqrt(distances)
        if self.kind == "plateau":
            return np.expm1(-2 * distances)
        if self.kind == "steps":
            return -np.ceil(np.sqrt(distances) * _LEVELS) / _LEVELS
        return -distances

    def measure(self, parameters: np.ndarray, rng: np.random.Generator, episodes: int = 1) -> Trial:
        """Return a trial of parameters ``(parameter,)``: the exact value and random errors."""
        value = self.values(parameters[None])[0]
        returns = value + self.error * rng.standard_normal(episodes)
        return Trial(parameters=parameters, returns=returns, env_steps=episodes)


def sample_function(seed: int, index: int, held_out: bool = False) -> SyntheticFunction:
    """Sample a function.

    Args:
        seed: of all functions.
        index: of this one.
        held_out: whether it is of those that are never trained on.
    """
    purpose = "synthetic, held out" if held_out else "synthetic"
    rng = np.random.default_rng(int(seeds(purpose, seed, index)))
    kind, size = KINDS[index % len(KINDS)], int(rng.integers(2, 11))
    rotation = np.linalg.qr(rng.standard_normal((size, size)))[0]
    spread = 1.5 if kind == "ridge" else 1.0
    scales = 10 ** rng.uniform(-spread, 0, size)
    if kind == "ridge":
        scales[0] = 1.0  # one direction is steep, the others are not
        scales[1:] *= 0.3
    shape = scales[:, None] * rotation
    optimum = rng.uniform(-_FAR, _FAR, size).round(1)
    typical = (((3 * rng.standard_normal((256, size)) - optimum) @ shape.T) ** 2).mean()
    error = float(rng.choice([0.0, rng.uniform(0, 0.1)]))
    return SyntheticFunction(kind=kind, optimum=optimum, shape=shape / np.sqrt(typical), error=error)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Configures the histories and the proposals that are demonstrated."""

    generations: NonNegativeInt = 6
    """Generations that CMA-ES is ahead of the history, on the exact function; its mean is the proposal."""
    max_warmup: PositiveInt = 10
    """Maximum number of random policies at the beginning of a history."""
    max_iterations: PositiveInt = 40
    """Maximum number of proposals after these."""
    random_share: ClosedUnitInterval = 0.3
    """Fraction of these proposals that are random; the others lie around the teacher's."""
    rows_per_function: PositiveInt = 4
    """Number of demonstrations of a function, at random lengths of its history."""
    history: HistoryConfig = HistoryConfig(recent=16, top_k=16, order="value", style="integers")
    """The policies that a prompt shows."""

    def __post_init__(self) -> None:
        check_fields(self, "teacher")
        if self.history.style != "integers":
            raise ValueError(f"teacher.history.style is {self.history.style!r}; it must be integers.")


def demonstrations(
    seed: int, functions: range, teacher: TeacherConfig, held_out: bool = False
) -> Iterator[dict[str, str]]:
    """Yield demonstrations, ``prompt`` and ``response``, of some functions.

    Args:
        seed: of everything random.
        functions: their indices.
        teacher: what is demonstrated.
        held_out: whether they are of those that are never trained on.
    """
    for index in functions:
        yield from _of_function(sample_function(seed, index, held_out), int(seeds("history", seed, index)), teacher)


def demonstrated(num_functions: int, held_out: bool) -> range:
    """Return the indices of the functions of a number of demonstrations, held out or not."""
    first = FIRST_VALIDATION if held_out else 0
    return range(first, first + num_functions)


def _of_function(function: SyntheticFunction, seed: int, teacher: TeacherConfig) -> Iterator[dict[str, str]]:
    """Yield the demonstrations of one function, at several lengths of one history."""
    rng, space, entries = np.random.default_rng(seed), function.space, list[Entry]()
    warmup, total = int(rng.integers(1, teacher.max_warmup + 1)), int(rng.integers(1, teacher.max_iterations + 1))
    lengths = {int(length) for length in rng.integers(warmup, warmup + total, teacher.rows_per_function)}
    taught: np.ndarray | None = None
    for length in range(1, max(lengths) + 1):
        if taught is None or rng.random() < teacher.random_share:
            proposal = space.sample(rng)
        else:
            proposal = space.nearest(taught + rng.choice([0.2, 0.7, 2.0]) * rng.standard_normal(space.size))
        entries.append(Entry.of(function.measure(proposal, rng)))
        if length in lengths or (length >= warmup and length % 3 == 0):  # not at every length, for speed
            taught = teach(function, entries, teacher.generations, rng)
        if length in lengths:
            assert taught is not None
            history = teacher.history.render(entries, space)
            response = " ".join(map(str, to_integers(taught, space)))
            yield {"prompt": integer_prompt(space, history, length - warmup + 1, total), "response": response}


def teach(function: SyntheticFunction, entries: list[Entry], generations: int, rng: np.random.Generator) -> np.ndarray:
    """Return what CMA-ES proposes after some generations on the exact function, from the best entry.

    A proposal that was made before is moved by one decimal, because it would be rejected.

    Args:
        function: what is searched.
        entries: the history, not empty; only its best entry counts.
        generations: at least 0; none leaves the best entry.
        rng: of the samples of CMA-ES.
    """
    from cmaes import CMA

    space, best = function.space, max(entries, key=lambda entry: entry.value)
    bounds = np.tile([space.low, space.high], (space.size, 1))
    cma = CMA(mean=np.array(best.parameters), sigma=1.0, bounds=bounds, seed=int(rng.integers(2**31)))
    for _ in range(generations):
        points = np.stack([cma.ask() for _ in range(cma.population_size)])
        cma.tell([(point, -float(value)) for point, value in zip(points, function.values(points), strict=True)])
    proposal, tried = space.nearest(cma.mean), {entry.parameters for entry in entries}
    while tuple(proposal.tolist()) in tried:
        moved = proposal.copy()
        moved[rng.integers(space.size)] += rng.choice([-0.1, 0.1])
        proposal = space.nearest(moved)
    return proposal

"""Synthetic functions to learn searching from; no function resembles a task.

Those of real parameters are random quadratics, ridges, plateaus and steps. Those of tables have independent entries,
entries that count in pairs, or entries of which each counts only after all before it (LeadingOnes). All are measured
with random errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import final

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.data.sources import Demonstrations
from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.ranges import ClosedUnitInterval, NonNegativeInt, PositiveInt, check_arguments, check_fields
from lrl.registry import register
from lrl.search.prompts import Entry, HistoryConfig, integer_prompt, to_integers
from lrl.search.searchers import ParameterSpace, Trial
from lrl.types import Demonstration

REAL_KINDS = ("quadratic", "ridge", "plateau", "steps")
"""Shapes of functions of real parameters."""
TABLE_KINDS = ("independent", "pairs", "leading")
"""Kinds of functions of tables."""
KINDS = (*REAL_KINDS, *TABLE_KINDS)
"""All kinds, in the order in which functions have them."""
REAL_SIZES, TABLE_SIZES = (2, 24), (6, 48)
"""Fewest and most parameters."""
FIRST_VALIDATION = 1_000_000
"""Index of the first held-out function that is demonstrated, to measure a run's loss on; searchers are compared on
those before it, so that no checkpoint is selected on them."""
_FAR = 4.0
"""Optima lie in this distance of 0 in every coordinate, where most random proposals lie as well."""
_LEVELS = 8
"""Number of levels of a function with steps."""
_TYPICAL = 256
"""Number of random proposals whose mean value is about -1."""


@dataclass(frozen=True, kw_only=True)
class SyntheticFunction(ABC):
    """A function whose largest value, 0, is known."""

    kind: str
    """One of :data:`KINDS`."""
    optimum: np.ndarray
    """Where the function is 0, ``(parameter,)``."""
    error: float
    """Standard deviation of a measurement."""

    @property
    @abstractmethod
    def space(self) -> ParameterSpace:
        """The parameters: numbers from -6 to 6 with one decimal, or actions."""

    @abstractmethod
    def values(self, parameters: np.ndarray) -> np.ndarray:
        """Return the exact values ``(row,)``, at most 0 and about -1 for random parameters.

        Args:
            parameters: ``(row, parameter)``.
        """

    def measure(self, parameters: np.ndarray, rng: np.random.Generator, episodes: int = 1) -> Trial:
        """Return a trial of parameters ``(parameter,)``: the exact value and random errors."""
        value = self.values(parameters[None])[0]
        returns = value + self.error * rng.standard_normal(episodes)
        return Trial(parameters=parameters, returns=returns, env_steps=episodes)


@final
@dataclass(frozen=True, kw_only=True)
class RealFunction(SyntheticFunction):
    """A function of the distance to its optimum, which is measured in rotated and scaled coordinates."""

    shape: np.ndarray
    """Matrix from distances to rotated and scaled ones, ``(parameter, parameter)``."""

    @property
    def space(self) -> ParameterSpace:
        """Numbers from -6 to 6 with one decimal."""
        return ParameterSpace(size=len(self.optimum))

    def values(self, parameters: np.ndarray) -> np.ndarray:
        """Return the exact values ``(row,)``."""
        distances = (((parameters - self.optimum) @ self.shape.T) ** 2).mean(-1)
        if self.kind == "ridge":
            return -np.sqrt(distances)
        if self.kind == "plateau":
            return np.expm1(-2 * distances)
        if self.kind == "steps":
            return -np.ceil(np.sqrt(distances) * _LEVELS) / _LEVELS
        return -distances


@final
@dataclass(frozen=True, kw_only=True)
class TableFunction(SyntheticFunction):
    """A function of actions: a sum over groups of entries, or the number of leading entries that are right."""

    num_actions: int
    """Number of actions."""
    first_action: int
    """The smallest action."""
    order: np.ndarray
    """The entries in the order of their groups, or in which they count, ``(parameter,)``."""
    losses: np.ndarray
    """What the actions of a group lose against its best ones, ``(group, action)`` or ``(group, action, action)``; empty
    for the kind ``leading``."""

    @property
    def space(self) -> ParameterSpace:
        """One of the actions for each entry."""
        return ParameterSpace(
            size=len(self.optimum), actions=tuple(range(self.first_action, self.first_action + self.num_actions))
        )

    def values(self, parameters: np.ndarray) -> np.ndarray:
        """Return the exact values ``(row,)``."""
        if self.kind == "leading":
            right = (parameters == self.optimum)[:, self.order]
            return np.logical_and.accumulate(right, axis=1).mean(1) - 1.0
        actions = parameters.astype(np.int64)[:, self.order] - self.first_action
        groups = np.arange(len(self.losses))
        if self.kind == "independent":
            return -self.losses[groups, actions].sum(1)
        return -self.losses[groups, actions[:, 0::2], actions[:, 1::2]].sum(1)


def sample_function(seed: int, index: int, held_out: bool = False) -> SyntheticFunction:
    """Sample a function.

    Args:
        seed: Of all functions.
        index: Of this one.
        held_out: Whether it is of those that are never trained on.
    """
    purpose = "synthetic, held out" if held_out else "synthetic"
    rng = np.random.default_rng(int(seeds(purpose, seed, index)))
    kind = KINDS[index % len(KINDS)]
    return _sample_real(kind, rng) if kind in REAL_KINDS else _sample_table(kind, rng)


def _sample_real(kind: str, rng: np.random.Generator) -> RealFunction:
    """Sample a function of real parameters."""
    size = _sample_size(REAL_SIZES, rng)
    rotation = np.linalg.qr(rng.standard_normal((size, size)))[0]
    spread = 1.5 if kind == "ridge" else 1.0
    scales = 10 ** rng.uniform(-spread, 0, size)
    if kind == "ridge":
        scales[0] = 1.0  # one direction is steep, the others are not
        scales[1:] *= 0.3
    shape = scales[:, None] * rotation
    optimum = rng.uniform(-_FAR, _FAR, size).round(1)
    typical = (((3 * rng.standard_normal((_TYPICAL, size)) - optimum) @ shape.T) ** 2).mean()
    error = float(rng.choice([0.0, rng.uniform(0, 0.1)]))
    return RealFunction(kind=kind, optimum=optimum, shape=shape / np.sqrt(typical), error=error)


def _sample_table(kind: str, rng: np.random.Generator) -> TableFunction:
    """Sample a function of a table; about a third of the groups, if it has any, do not count."""
    size, num_actions, first_action = _sample_size(TABLE_SIZES, rng), int(rng.integers(2, 5)), int(rng.integers(2))
    error = float(rng.choice([0.0, rng.uniform(0, 0.2)]))
    if kind == "leading":
        optimum, losses = rng.integers(0, num_actions, size), np.empty(0)
        order = rng.permutation(size)
    else:
        size += size % 2  # so that all entries can have a partner
        together = 2 if kind == "pairs" else 1
        order, optimum = rng.permutation(size), np.zeros(size, dtype=np.int64)
        gains = rng.standard_normal((size // together, *[num_actions] * together))
        weights = rng.lognormal(0, 1, len(gains)) * (rng.random(len(gains)) > 1 / 3)
        weights[0] = 1.0  # never all without effect
        losses = (gains.reshape(len(gains), -1).max(1) - gains.T).T * weights.reshape(-1, *[1] * together)
        losses /= losses.reshape(len(gains), -1).mean(1).sum()  # a random proposal loses 1 in the mean
        best = np.stack(np.unravel_index(gains.reshape(len(gains), -1).argmax(1), gains.shape[1:]), 1)
        optimum[order] = best.ravel()
    return TableFunction(
        kind=kind,
        optimum=optimum + float(first_action),
        error=error,
        num_actions=num_actions,
        first_action=first_action,
        order=order,
        losses=losses,
    )


def _sample_size(ends: tuple[int, int], rng: np.random.Generator) -> int:
    """Return a number of parameters; its logarithm is uniform, so that small functions are as frequent as large."""
    fewest, most = ends
    return int(np.exp(rng.uniform(np.log(fewest), np.log(most + 1))))


# Demonstrations of searching: histories of synthetic functions, and the proposals of a teacher that sees them.
#
# A demonstration is a prompt with the history of one parameter, as the style ``integers`` of
# :class:`~lrl.search.prompts.HistoryConfig` writes it, and what an evolution strategy proposed for it that went on from
# the best policy of the history on the exact function: CMA-ES for real parameters, a (1+λ) evolutionary algorithm for
# tables.

_OFFSPRING = 12
"""Number of mutated tables in a generation of the teacher."""
_PARENTS = 4
"""Number of the best policies that a blind proposal may be made of."""
_STEPS = (0.2, 0.7, 2.0)
"""Standard deviations of the changes of real parameters in a history."""
_CHANGES = (1, 2, 4)
"""Mean numbers of entries of a table that are sampled again in a history, besides one that always is."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Configures the histories and the proposals that are demonstrated.

    A proposal in a history is random, or a changed copy of the best ones so far, as a search makes it that does not see
    the function, or lies around what the teacher proposed before. The share of the last differs between histories, so
    that some get better slowly and some fast.
    """

    generations: NonNegativeInt = 6
    """Generations that the teacher is ahead of the history, on the exact function."""
    max_warmup: PositiveInt = 10
    """Maximum number of random policies at the beginning of a history."""
    min_iterations: PositiveInt = 10
    """Minimum number of proposals after these; that of a history is log-uniform."""
    max_iterations: PositiveInt = 400
    """Maximum number of proposals after these."""
    random_share: ClosedUnitInterval = 0.2
    """Fraction of these proposals that are random."""
    rows_per_function: PositiveInt = 4
    """Maximum number of proposals of the teacher that are demonstrated, at random lengths of a function's history."""
    parameters_per_row: PositiveInt = 4
    """Maximum number of parameters of such a proposal that are demonstrated, each by itself."""
    history: HistoryConfig = HistoryConfig(recent=8, top_k=12, order="value", style="integers")
    """The policies that a prompt shows."""

    def __post_init__(self) -> None:
        check_fields(self, "teacher")
        if self.history.style != "integers":
            raise ValueError(f"teacher.history.style is {self.history.style!r}; it must be integers.")
        if self.min_iterations > self.max_iterations:
            raise ValueError(
                f"teacher.min_iterations is {self.min_iterations}; it must be at most max_iterations, "
                f"{self.max_iterations}."
            )


def demonstrations(
    seed: int, functions: range, teacher: TeacherConfig, held_out: bool = False
) -> Iterator[dict[str, str]]:
    """Yield demonstrations, ``prompt`` and ``response``, of some functions.

    Args:
        seed: Of everything random.
        functions: Their indices.
        teacher: What is demonstrated.
        held_out: Whether they are of those that are never trained on.
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
    warmup = int(rng.integers(1, teacher.max_warmup + 1))
    total = int(np.exp(rng.uniform(np.log(teacher.min_iterations), np.log(teacher.max_iterations + 1))))
    if space.actions is not None:  # so that a small table always has entries that were not tried
        total = max(1, min(total, len(space.actions) ** space.size // 4 - warmup))
    lengths = {int(length) for length in rng.integers(warmup, warmup + total, teacher.rows_per_function)}
    seeing, next_lesson, tried = rng.random(), warmup, set[tuple[float, ...]]()
    taught: np.ndarray | None = None
    for length in range(1, max(lengths) + 1):
        if length <= warmup or rng.random() < teacher.random_share:
            proposal = space.sample(rng)
        elif taught is not None and rng.random() < seeing:
            proposal = change(taught, space, rng)
        else:
            proposal = change(_parent(entries, rng), space, rng)
        while tuple(proposal.tolist()) in tried:
            proposal = change(proposal, space, rng)
        tried.add(tuple(proposal.tolist()))
        entries.append(Entry.of(function.measure(proposal, rng)))
        if length in lengths or length >= next_lesson:  # not at every length, for speed
            taught = teach(function, entries, tried, teacher.generations, rng)
            next_lesson = length + max(4, length // 4)
        if length in lengths:
            assert taught is not None
            integers = to_integers(taught, space)
            for parameter in rng.permutation(space.size)[: teacher.parameters_per_row].tolist():
                history = teacher.history.render(entries, space, parameter=parameter)
                prompt = integer_prompt(space, history, length - warmup + 1, total)
                yield {"prompt": prompt, "response": str(integers[parameter])}


def _parent(entries: Sequence[Entry], rng: np.random.Generator) -> np.ndarray:
    """Return the best parameters so far, or each of them from a random one of the best few."""
    best = sorted(entries, key=lambda entry: -entry.value)[:_PARENTS]
    of = rng.integers(len(best), size=len(best[0].parameters)) if rng.random() < 0.5 else 0
    return np.array([entry.parameters for entry in best])[of, np.arange(len(best[0].parameters))]


def change(parameters: np.ndarray, space: ParameterSpace, rng: np.random.Generator) -> np.ndarray:
    """Return a copy of parameters ``(parameter,)`` with normal numbers added, or with some entries sampled again."""
    if space.actions is None:
        return space.nearest(parameters + rng.choice(_STEPS) * rng.standard_normal(space.size))
    return _mutate(parameters[None], rng.choice(_CHANGES) / space.size, space, rng)[0]


def _mutate(tables: np.ndarray, rate: float, space: ParameterSpace, rng: np.random.Generator) -> np.ndarray:
    """Return copies of tables ``(row, parameter)`` with some entries sampled again, at least one in each."""
    chosen = rng.random(tables.shape) < rate
    chosen[np.arange(len(tables)), rng.integers(space.size, size=len(tables))] = True
    return np.where(chosen, rng.choice(np.asarray(space.actions, dtype=np.float64), tables.shape), tables)


def teach(
    function: SyntheticFunction,
    entries: Sequence[Entry],
    tried: Set[tuple[float, ...]],
    generations: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return what the teacher proposes after some generations on the exact function, from the best entry.

    A proposal that was made before is changed a little, because it would be rejected.

    Args:
        function: What is searched.
        entries: The history, not empty; only its best entry counts.
        tried: All parameters of the history.
        generations: At least 0; none leaves the best entry.
        rng: Of the teacher's samples.
    """
    space, best = function.space, np.array(max(entries, key=lambda entry: entry.value).parameters)
    evolved = _cma_es if space.actions is None else _one_plus_lambda
    proposal = evolved(function, best, generations, rng)
    while tuple(proposal.tolist()) in tried:
        if space.actions is None:
            moved = proposal.copy()
            moved[rng.integers(space.size)] += rng.choice([-0.1, 0.1])
            proposal = space.nearest(moved)
        else:
            proposal = _mutate(proposal[None], 1 / space.size, space, rng)[0]
    return proposal


def _cma_es(function: SyntheticFunction, best: np.ndarray, generations: int, rng: np.random.Generator) -> np.ndarray:
    """Return the mean of CMA-ES after some generations."""
    from cmaes import CMA

    cma = CMA(mean=best, sigma=1.0, seed=int(rng.integers(2**31)))  # optima lie inside the range, samples need not
    for _ in range(generations):
        points = np.stack([cma.ask() for _ in range(cma.population_size)])
        cma.tell([(point, -float(value)) for point, value in zip(points, function.values(points), strict=True)])
    return function.space.nearest(cma.mean)


def _one_plus_lambda(
    function: SyntheticFunction, best: np.ndarray, generations: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the best table after some generations of mutated copies of the best one."""
    for _ in range(generations):
        children = _mutate(np.tile(best, (_OFFSPRING, 1)), 1 / function.space.size, function.space, rng)
        values = function.values(children)
        if values.max() >= function.values(best[None])[0]:
            best = children[values.argmax()]
    return best


# Demonstrations of searching: histories of synthetic functions with the proposals of a teacher.


@register
@final
class SyntheticHistories(Demonstrations):
    """Generates the demonstrations of :mod:`lrl.search.synthetic`, about 14 for each function and 1 ms each.

    For several runs with the same ones, ``lrl synthetic_search --write`` writes them to a file for
    ``JsonlDemonstrations``.

    Args:
        num_functions: Number of functions.
        generations: How many generations the teacher is ahead of a history.
        held_out: Whether the functions are others, for the loss of validation; searchers are compared on yet others.
        seed: Of the functions and histories.
    """

    def __init__(
        self,
        num_functions: PositiveInt = 20_000,
        generations: NonNegativeInt = TeacherConfig.generations,
        held_out: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(SyntheticHistories.__init__, locals(), "demonstrations")
        self.num_functions, self.held_out, self.seed = num_functions, held_out, seed
        self.teacher = TeacherConfig(generations=generations)

    def load(self, codec: TextCodec, policy: Policy) -> Sequence[Demonstration]:
        """Generate all demonstrations."""
        functions = demonstrated(self.num_functions, self.held_out)
        rows = demonstrations(self.seed, functions, self.teacher, self.held_out)
        return [Demonstration(row["prompt"], row["response"]) for row in rows]

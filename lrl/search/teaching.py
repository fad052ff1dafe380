"""Demonstrations of searching: histories of synthetic functions, and the proposals of a teacher that sees them.

A demonstration is a prompt with the history of one parameter, as the style ``integers`` of
:class:`~lrl.search.history.HistoryConfig` writes it, and what an evolution strategy proposed for it that went on from
the best policy of the history on the exact function: CMA-ES for real parameters, a (1+λ) evolutionary algorithm for
tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np

from lrl.functional.random import seeds
from lrl.ranges import ClosedUnitInterval, NonNegativeInt, PositiveInt, check_fields
from lrl.search.history import Entry, HistoryConfig
from lrl.search.integers import to_integers
from lrl.search.prompts import integer_prompt
from lrl.search.space import ParameterSpace
from lrl.search.synthetic import FIRST_VALIDATION, SyntheticFunction, sample_function

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
        function: what is searched.
        entries: the history, not empty; only its best entry counts.
        tried: all parameters of the history.
        generations: at least 0; none leaves the best entry.
        rng: of the teacher's samples.
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

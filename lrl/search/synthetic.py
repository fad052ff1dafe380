"""Synthetic functions and demonstrations of the search for their maxima, on which language models learn to search.

A function depends on real parameters or on a table of actions. Functions of real parameters are random quadratics,
ridges, plateaus and steps. The entries of a table are independent, or they interact in pairs, or each counts only if
all entries before it are right (LeadingOnes). Values are measured with random errors. No function resembles a task of
prompted policy search (ProPS, arXiv:2511.21928).

A demonstration is a prompt in style ``integers`` (:class:`~lrl.search.prompts.HistoryConfig`) and a response. The
prompt contains the history of one parameter: its values in earlier proposals, with the ranks of these proposals. The
response is the value of this parameter in the proposal of a teacher. The teacher is an evolution strategy that starts
from the best proposal of the history and evaluates the function without errors: CMA-ES for real parameters, and a (1+λ)
evolutionary algorithm for tables.
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
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.search.prompts import Entry, HistoryConfig, integer_prompt, to_integers
from lrl.search.searchers import ParameterSpace, Trial
from lrl.types import Demonstration

REAL_KINDS = ("quadratic", "ridge", "plateau", "steps")
"""Kinds of functions of real parameters."""
TABLE_KINDS = ("independent", "pairs", "leading")
"""Kinds of functions of tables."""
KINDS = (*REAL_KINDS, *TABLE_KINDS)
"""All kinds; the function with index i has kind i modulo their number."""
REAL_SIZES, TABLE_SIZES = (2, 24), (6, 48)
"""Minimum and maximum number of parameters."""
FIRST_VALIDATION = 1_000_000
"""Index of the first held-out function in validation demonstrations. Searchers are compared on held-out functions with
smaller indices, which do not influence the selection of checkpoints."""
_FAR = 4.0
"""Maximum distance of an optimum from 0 in each coordinate; most random proposals lie in this range."""
_LEVELS = 8
"""Number of levels of a function of kind ``steps``."""
_TYPICAL = 256
"""Number of random proposals from which the scale of a function is computed, so that their mean value is about -1."""


@dataclass(frozen=True, kw_only=True)
class SyntheticFunction(ABC):
    """Abstract base class of functions whose maximum is 0."""

    kind: str
    """One of :data:`KINDS`."""
    optimum: np.ndarray
    """Parameters of the maximum, ``(parameter,)``."""
    error: float
    """Standard deviation of the error of a measurement."""

    @property
    @abstractmethod
    def space(self) -> ParameterSpace:
        """Space of the parameters: numbers from -6 to 6 with one decimal, or actions."""

    @abstractmethod
    def values(self, parameters: np.ndarray) -> np.ndarray:
        """Return the exact values ``(row,)``, at most 0 and about -1 for random parameters.

        Args:
            parameters: parameters ``(row, parameter)``.
        """

    def measure(self, parameters: np.ndarray, rng: np.random.Generator, episodes: int = 1) -> Trial:
        """Return a trial of parameters ``(parameter,)``, whose returns are the exact value plus random errors."""
        value = self.values(parameters[None])[0]
        returns = value + self.error * rng.standard_normal(episodes)
        return Trial(parameters=parameters, returns=returns, env_steps=episodes)


@final
@dataclass(frozen=True, kw_only=True)
class RealFunction(SyntheticFunction):
    """Function of the distance to the optimum in rotated and scaled coordinates."""

    shape: np.ndarray
    """Matrix from differences of parameters to rotated and scaled coordinates, ``(parameter, parameter)``."""

    @property
    def space(self) -> ParameterSpace:
        """Space of numbers from -6 to 6 with one decimal."""
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
    """Function of a table of actions: a sum over groups of entries, or the number of leading entries that are right."""

    num_actions: int
    """Number of actions."""
    first_action: int
    """Smallest action; actions are consecutive integers."""
    order: np.ndarray
    """Indices of the entries, ``(parameter,)``: group by group, or for ``leading`` in the order in which they count."""
    losses: np.ndarray
    """How much lower the value is with given actions of a group than with the best ones, ``(group, action)`` or
    ``(group, action, action)``; empty for the kind ``leading``."""

    @property
    def space(self) -> ParameterSpace:
        """Space of one action for each entry."""
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
        seed: seed of all functions.
        index: index of the function.
        held_out: whether it is a held-out function, which is not trained on.
    """
    purpose = "synthetic, held out" if held_out else "synthetic"
    rng = np.random.default_rng(int(seeds(purpose, seed, index)))
    kind = KINDS[index % len(KINDS)]
    return _sample_real(kind, rng) if kind in REAL_KINDS else _sample_table(kind, rng)


def _sample_real(kind: str, rng: np.random.Generator) -> RealFunction:
    """Sample a function of real parameters."""
    size = _log_uniform(REAL_SIZES, rng)
    rotation = np.linalg.qr(rng.standard_normal((size, size)))[0]
    spread = 1.5 if kind == "ridge" else 1.0
    scales = 10 ** rng.uniform(-spread, 0, size)
    if kind == "ridge":
        scales[0] = 1.0  # only one direction is steep
        scales[1:] *= 0.3
    shape = scales[:, None] * rotation
    optimum = rng.uniform(-_FAR, _FAR, size).round(1)
    typical = (((3 * rng.standard_normal((_TYPICAL, size)) - optimum) @ shape.T) ** 2).mean()
    error = float(rng.choice([0.0, rng.uniform(0, 0.1)]))
    return RealFunction(kind=kind, optimum=optimum, shape=shape / np.sqrt(typical), error=error)


def _sample_table(kind: str, rng: np.random.Generator) -> TableFunction:
    """Sample a function of a table; the weight of about a third of its groups is 0."""
    size, num_actions, first_action = _log_uniform(TABLE_SIZES, rng), int(rng.integers(2, 5)), int(rng.integers(2))
    error = float(rng.choice([0.0, rng.uniform(0, 0.2)]))
    if kind == "leading":
        optimum, losses = rng.integers(0, num_actions, size), np.empty(0)
        order = rng.permutation(size)
    else:
        size += size % 2  # an even size, so that all entries can be in pairs
        together = 2 if kind == "pairs" else 1
        order, optimum = rng.permutation(size), np.zeros(size, dtype=np.int64)
        gains = rng.standard_normal((size // together, *[num_actions] * together))
        weights = rng.lognormal(0, 1, len(gains)) * (rng.random(len(gains)) > 1 / 3)
        weights[0] = 1.0  # at least one group has an effect
        losses = (gains.reshape(len(gains), -1).max(1) - gains.T).T * weights.reshape(-1, *[1] * together)
        losses /= losses.reshape(len(gains), -1).mean(1).sum()  # the mean value of random proposals is -1
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


def _log_uniform(ends: tuple[int, int], rng: np.random.Generator) -> int:
    """Sample a log-uniform integer between two numbers, both included."""
    fewest, most = ends
    return int(np.exp(rng.uniform(np.log(fewest), np.log(most + 1))))


_OFFSPRING = 12
"""Number of mutated tables in each generation of the teacher."""
_PARENTS = 4
"""Number of the best policies that may be the parents of a proposal in a history."""
_STEPS = (0.2, 0.7, 2.0)
"""Possible standard deviations of changes of real parameters in a history."""
_CHANGES = (1, 2, 4)
"""Possible mean numbers of entries of a table that are sampled again in a history, besides one that always is."""


HISTORY = HistoryConfig(recent=8, top_k=12, order="value", style="integers")
"""Selection and format of the policies in a prompt."""
_GENERATIONS = 6
"""Number of generations of the teacher's evolution strategy after the history."""
_MAX_WARMUP = 10
"""Maximum number of random proposals at the beginning of a history."""
_ITERATIONS = (10, 400)
"""Minimum and maximum number of proposals after the random ones at the beginning; it is sampled log-uniformly."""
_RANDOM_SHARE = 0.2
"""Probability that a later proposal of a history is random as well."""
_ROWS = 4
"""Maximum number of demonstrated proposals per function, at random lengths of its history."""
_PARAMETERS = 4
"""Maximum number of demonstrated parameters per proposal, each in its own demonstration."""


def demonstrations(seed: int, functions: range, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Yield demonstrations, ``prompt`` and ``response``, of some functions.

    A proposal in a history is random, or a changed copy of the best proposal so far or of a mixture of the best few, or
    a changed copy of the teacher's previous proposal. The share of the last kind differs between histories, so that
    some improve slowly and some fast.

    Args:
        seed: seed of all randomness.
        functions: indices of the functions.
        held_out: whether the functions are held-out ones, which are not trained on.
    """
    for index in functions:
        yield from _of_function(sample_function(seed, index, held_out), int(seeds("history", seed, index)))


def demonstrated(num_functions: int, held_out: bool) -> range:
    """Return the indices of the functions in training demonstrations, or in validation demonstrations.

    Args:
        num_functions: number of functions.
        held_out: whether the demonstrations are for validation.
    """
    first = FIRST_VALIDATION if held_out else 0
    return range(first, first + num_functions)


def _of_function(function: SyntheticFunction, seed: int) -> Iterator[dict[str, str]]:
    """Yield the demonstrations of one function, at several lengths of one history."""
    rng, space, entries = np.random.default_rng(seed), function.space, list[Entry]()
    warmup = int(rng.integers(1, _MAX_WARMUP + 1))
    total = _log_uniform(_ITERATIONS, rng)
    if space.actions is not None:  # so that a history never contains all tables of a small space
        total = max(1, min(total, len(space.actions) ** space.size // 4 - warmup))
    lengths = {int(length) for length in rng.integers(warmup, warmup + total, _ROWS)}
    # After the warmup, a proposal that is not random is, with probability teacher_share, a changed copy of ``taught``,
    # the teacher's last proposal.
    teacher_share, next_taught, tried = rng.random(), warmup, set[tuple[float, ...]]()
    taught: np.ndarray | None = None
    for length in range(1, max(lengths) + 1):
        if length <= warmup or rng.random() < _RANDOM_SHARE:
            proposal = space.sample(rng)
        elif taught is not None and rng.random() < teacher_share:
            proposal = change(taught, space, rng)
        else:
            proposal = change(_parent(entries, rng), space, rng)
        while tuple(proposal.tolist()) in tried:
            proposal = change(proposal, space, rng)
        tried.add(tuple(proposal.tolist()))
        entries.append(Entry.of(function.measure(proposal, rng)))
        if length in lengths or length >= next_taught:  # for speed, not at every length
            taught = teach(function, entries, tried, rng)
            next_taught = length + max(4, length // 4)
        if length in lengths:
            assert taught is not None
            integers = to_integers(taught, space)
            for parameter in rng.permutation(space.size)[:_PARAMETERS].tolist():
                history = HISTORY.render(entries, space, parameter=parameter)
                prompt = integer_prompt(space, history, length - warmup + 1, total)
                yield {"prompt": prompt, "response": str(integers[parameter])}


def _parent(entries: Sequence[Entry], rng: np.random.Generator) -> np.ndarray:
    """Return the best parameters so far, or with probability 1/2 a mixture of the best few."""
    best = sorted(entries, key=lambda entry: -entry.value)[:_PARENTS]
    of = rng.integers(len(best), size=len(best[0].parameters)) if rng.random() < 0.5 else 0
    return np.array([entry.parameters for entry in best])[of, np.arange(len(best[0].parameters))]


def change(parameters: np.ndarray, space: ParameterSpace, rng: np.random.Generator) -> np.ndarray:
    """Return a copy of parameters ``(parameter,)`` with normal noise, or of a table with some entries sampled again."""
    if space.actions is None:
        return space.nearest(parameters + rng.choice(_STEPS) * rng.standard_normal(space.size))
    return _mutate(parameters[None], rng.choice(_CHANGES) / space.size, space, rng)[0]


def _mutate(tables: np.ndarray, rate: float, space: ParameterSpace, rng: np.random.Generator) -> np.ndarray:
    """Return copies of tables ``(row, parameter)``, each with at least one entry sampled again."""
    chosen = rng.random(tables.shape) < rate
    chosen[np.arange(len(tables)), rng.integers(space.size, size=len(tables))] = True
    return np.where(chosen, rng.choice(np.asarray(space.actions, dtype=np.float64), tables.shape), tables)


def teach(
    function: SyntheticFunction,
    entries: Sequence[Entry],
    tried: Set[tuple[float, ...]],
    rng: np.random.Generator,
    generations: int = _GENERATIONS,
) -> np.ndarray:
    """Return the teacher's proposal: the best entry after some generations of evolution without measurement errors.

    If the history contains the proposal, it is changed slightly, because a search rejects repeated proposals.

    Args:
        function: the function to maximise.
        entries: the history, of which only the best entry is used.
        tried: all parameters in the history.
        rng: random number generator of the teacher.
        generations: number of generations; 0 returns the best entry.
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
    """Return the mean of the distribution of CMA-ES after some generations."""
    from cmaes import CMA

    cma = CMA(mean=best, sigma=1.0, seed=int(rng.integers(2**31)))  # samples may lie outside the space
    for _ in range(generations):
        points = np.stack([cma.ask() for _ in range(cma.population_size)])
        cma.tell([(point, -float(value)) for point, value in zip(points, function.values(points), strict=True)])
    return function.space.nearest(cma.mean)


def _one_plus_lambda(
    function: SyntheticFunction, best: np.ndarray, generations: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the best table after some generations of the (1+λ) evolutionary algorithm."""
    for _ in range(generations):
        children = _mutate(np.tile(best, (_OFFSPRING, 1)), 1 / function.space.size, function.space, rng)
        values = function.values(children)
        if values.max() >= function.values(best[None])[0]:
            best = children[values.argmax()]
    return best


@register
@final
class SyntheticHistories(Demonstrations):
    """Demonstrations of searching, see :mod:`lrl.search.synthetic`: about 14 per function, each generated in 1 ms.

    If several runs use the same demonstrations, ``lrl synthetic_search --write`` can write them to a file for
    ``JsonlDemonstrations``.

    Args:
        num_functions: number of functions.
        held_out: whether to use held-out functions, for a validation loss. Searchers are compared on
            other held-out functions.
        seed: seed of the functions and histories.
    """

    def __init__(self, num_functions: PositiveInt = 20_000, held_out: bool = False, seed: int = 0) -> None:
        check_arguments(SyntheticHistories.__init__, locals(), "demonstrations")
        self.num_functions, self.held_out, self.seed = num_functions, held_out, seed

    def load(self, codec: TextCodec, policy: Policy) -> Sequence[Demonstration]:
        """Generate all demonstrations."""
        functions = demonstrated(self.num_functions, self.held_out)
        rows = demonstrations(self.seed, functions, self.held_out)
        return [Demonstration(row["prompt"], row["response"]) for row in rows]

"""Synthetic functions to learn searching from; no function resembles a task.

Those of real parameters are random quadratics, ridges, plateaus and steps. Those of tables have independent entries,
entries that count in pairs, or entries of which each counts only after all before it (LeadingOnes). All are measured
with random errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np

from lrl.functional.random import seeds
from lrl.search.searcher import Trial
from lrl.search.space import ParameterSpace

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
        seed: of all functions.
        index: of this one.
        held_out: whether it is of those that are never trained on.
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

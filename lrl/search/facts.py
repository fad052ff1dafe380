"""The facts that ProPS+ is told of an environment, and what their texts are composed of."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from lrl.codecs.quantities import Quantity, describe_quantities


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """Holds the facts of an environment, each as one or more sentences."""

    world: str
    """What there is, and what is to be done."""
    observation: str
    """What an observation is."""
    actions: str
    """What the actions are, and what they do."""
    reward: str
    """The reward of a step."""
    end: str
    """When an episode ends before its time limit."""
    start: str
    """How an episode starts, which options of the reset may change."""
    noise: str = "Nothing else is random."
    """What is random after the start."""

    def render(self, max_steps: int | None, known_start: bool = True) -> str:
        """Return the whole text, one line for each fact.

        Args:
            max_steps: number of steps after which an episode is cut; None for no limit.
            known_start: whether episodes start as in :attr:`start`.
        """
        cut = "" if max_steps is None else f"It is cut after {max_steps} steps."
        start = self.start if known_start else "options of the reset set the start."
        facts = {
            "Observation": self.observation,
            "Actions": self.actions,
            "Reward of a step": self.reward,
            "End of an episode": f"{self.end} {cut}",
            "Randomness": f"{start} {self.noise}",
        }
        return "\n".join([self.world, *(f"{name}: {_sentence(fact)}" for name, fact in facts.items())])


def _sentence(text: str) -> str:
    """Begin with a capital letter, unless the text begins with a number or the name of a variable."""
    stripped = text.strip()
    return stripped[:1].upper() + stripped[1:] if stripped[:2].isalpha() else stripped


def argument(native: Any, name: str) -> Any:
    """Return an argument that an environment was made with, or its default.

    Args:
        native: a native environment without wrappers.
        name: of the argument; it must exist.
    """
    given = {} if native.spec is None else native.spec.kwargs
    if name in given:
        return given[name]
    found = (inspect.signature(base.__init__).parameters.get(name) for base in type(native).__mro__)
    return next(parameter.default for parameter in found if parameter is not None)


def observed_numbers(native: Any, quantities: Sequence[Quantity]) -> str:
    """List the numbers of an observation, with the bounds of their space where these are finite."""
    box: spaces.Box = native.observation_space
    bounds = [(float(low), float(high)) for low, high in zip(box.low, box.high, strict=True)]
    listed = [
        one._replace(range=limits if np.isfinite(limits).all() else None)
        for one, limits in zip(quantities, bounds, strict=True)
    ]
    return f"the numbers are, in order: {describe_quantities(listed)}."


def numbered(names: Sequence[str], start: int = 0) -> str:
    """Return the number and name of each action of a discrete space."""
    return ", ".join(f"{number} is {name}" for number, name in enumerate(names, start))

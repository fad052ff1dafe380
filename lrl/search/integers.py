"""Policies and their returns as small integers, for language models that were trained to search.

Such a model is asked for each parameter by itself, and shown the values of that parameter alone: a model of a few
million weights does not find the same parameter in policies of many. An integer below 1000 is one token of many
tokenizers, and ranks in place of returns mean the same in every task.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lrl.search.parsing import ProposalError
from lrl.search.space import ParameterSpace

_LARGEST = 999
TOP_RANK = 99
"""Rank of the best policy; the worst has 0."""


def integer_space(space: ParameterSpace) -> ParameterSpace:
    """Return the space of the integers that stand for the parameters of a space.

    A real parameter is counted in its last decimal place from the lower end of its range; an action stands for itself.

    Raises:
        ValueError: parameters are not rounded, or to so many decimals that they exceed 999.
    """
    if space.actions is not None:
        return space
    steps = None if space.decimals is None else round((space.high - space.low) * 10**space.decimals)
    if steps is None or steps > _LARGEST:
        raise ValueError(
            f"searcher.history.style is integers, but decimals is {space.decimals} for parameters from {space.low:g} "
            f"to {space.high:g}; there must be at most {_LARGEST + 1} values."
        )
    return ParameterSpace(size=space.size, low=0, high=steps, decimals=0)


def to_integers(parameters: Sequence[float] | np.ndarray, space: ParameterSpace) -> list[int]:
    """Return the integers that stand for legal parameters ``(parameter,)``."""
    values = np.asarray(parameters, dtype=np.float64)
    if space.actions is None:
        values = (values - space.low) * 10 ** (space.decimals or 0)
    return np.rint(values).astype(np.int64).tolist()


def from_integers(integers: Sequence[float] | np.ndarray, space: ParameterSpace) -> np.ndarray:
    """Return the legal parameters ``(parameter,)`` that are nearest to what integers stand for."""
    values = np.asarray(integers, dtype=np.float64)
    return space.nearest(values if space.actions is not None else values / 10 ** (space.decimals or 0) + space.low)


def read_integers(replies: Sequence[str], space: ParameterSpace) -> np.ndarray:
    """Return the legal parameters ``(parameter,)`` that replies stand for, an integer for each parameter.

    Raises:
        ProposalError: a reply is something else, or a value is illegal.
    """
    for index, reply in enumerate(replies):
        if not re.fullmatch(r"\s*\d+\s*", reply, re.ASCII):  # float reads no others, such as "\x1e93"
            raise ProposalError(f"The reply for params[{index}] is {reply!r}; it must be an integer.")
    values = [float(reply) for reply in replies]
    complaint = integer_space(space).complaint(values)
    if complaint:
        raise ProposalError(complaint)
    return from_integers(values, space)


def ranks(values: Sequence[float] | np.ndarray) -> list[int]:
    """Return integers from 0, the worst value, to 99, the best; equal values have the mean of their ranks."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) < 2:
        return [TOP_RANK] * len(given)
    below = (given[:, None] > given).sum(1)
    equal = (given[:, None] == given).sum(1)
    return np.rint(TOP_RANK * (below + (equal - 1) / 2) / (len(given) - 1)).astype(np.int64).tolist()

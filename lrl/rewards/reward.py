"""Reward functions for responses to the rows of a data set: rows, the interface, and rewards by trained networks."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.faults import full_disk, out_of_memory, reason_of

TIE_TOLERANCE = 1e-6
"""Relative difference below which two values are a tie."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds a row of a data set: a state, the action of an expert, and the value of each action if it is known."""

    observation: str
    """Text of the state that the policy sees."""
    q_values: tuple[float, ...] = ()
    """The expert's value of each action, in the order of the action space; empty if the values are unknown."""
    action: int | np.ndarray
    """The expert's native action: an integer of a Discrete space, or an array. With Q-values it is a best action."""
    native_observation: Any = field(default=None, compare=False)
    """Native observation of the state: an array, an integer, or a dict of these; None if it is unknown."""
    state: int = 0
    """Index of the state in its environment."""
    desc: tuple[str, ...] = ()
    """Map of the environment; empty if it has none."""

    @property
    def best_actions(self) -> tuple[int, ...]:
        """Actions with the highest value, including ties (:data:`TIE_TOLERANCE`); empty without Q-values."""
        best = max(self.q_values, default=0.0)
        floor = best - TIE_TOLERANCE * abs(best)
        return tuple(action for action, value in enumerate(self.q_values) if value >= floor)


NativeAction = int | np.ndarray
"""Native action: an integer of a Discrete space, or an array of a Box or a MultiDiscrete space."""


class Reward(ABC):
    """Abstract base class of reward functions for batches of responses.

    The reward of an environment is the weighted sum of its reward functions.

    Args:
        weight: factor of this reward in the weighted sum; may be negative.
    """

    name: str
    """Name of the metric: ``reward/<name>``."""

    reads_responses: bool = False
    """Whether the reward depends on the text of a response, which policies with native actions do not write."""

    def __init__(self, weight: float = 1.0) -> None:
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"{type(self).__name__}.weight is {weight!r}; it must be a finite number.")
        self.weight = float(weight)

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Read what the reward needs from the environment. Called whenever an environment with this reward is created.

        Args:
            codec: codec of the environment.
            response_format: name of the format of responses; None if actions are native and responses empty.
            row: first row of the data set.

        Raises:
            ValueError: If the reward cannot be computed in this environment.
        """
        if self.reads_responses and response_format is None:
            raise ValueError(
                f"env.rewards has a {type(self).__name__}, which reads the text of responses; it must be left out for "
                "a policy with native actions."
            )

    @abstractmethod
    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the unweighted reward of each response.

        Args:
            rows: the rows shown to the policy, ``(row,)``.
            responses: the complete responses, ``(row,)``; empty texts if actions are native.
            actions: the native actions of the responses, ``(row,)``, clipped to the bounds of a Box; None for an
                invalid response.

        Returns:
            Rewards, float64 ``(row,)``.
        """


def check_rewards(rewards: Any) -> tuple[Reward, ...]:
    """Return the reward functions of an environment, after a check.

    Raises:
        ValueError: If they are not a list of rewards, one of them was not initialised, or two have the same name.
    """
    if isinstance(rewards, str) or not isinstance(rewards, Sequence):
        raise ValueError(f"env.rewards is {_shown(rewards)}; it must be a list of rewards.")
    for reward in rewards:
        name = _shown(reward)
        if not isinstance(reward, Reward):
            raise ValueError(
                f"env.rewards has {name}; it must be an object of a subclass of lrl.rewards.reward.Reward."
            )
        if not isinstance(getattr(reward, "name", None), str):
            raise ValueError(f"env.rewards has {name}, whose class has no name; it must set name, such as 'brevity'.")
        if not hasattr(reward, "weight"):
            raise ValueError(f"env.rewards has {name}, whose __init__ must call super().__init__(weight).")
    names = [reward.name for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"env.rewards is {names}; it must contain at least one reward, and names must be unique: set name in a "
            "subclass to use a class twice."
        )
    return tuple(rewards)


def compute_reward(
    reward: Reward, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
) -> np.ndarray:
    """Compute the unweighted reward of each response, float64 ``(row,)``; a list or a tensor is converted.

    Raises:
        ValueError: If the reward function raises an error, or does not return one finite number for each response.
    """
    start = f"env.rewards: {type(reward).__name__}"
    try:
        returned: Any = reward(rows, responses, actions)
    except Exception as error:
        if type(reward).__module__.startswith("lrl.") or out_of_memory(error) or full_disk(error):
            raise
        raise ValueError(f"{start} raised {reason_of(error)}.") from error
    try:
        if hasattr(returned, "detach"):  # a tensor, perhaps on another device or in 16 bits
            returned = returned.detach().float().cpu().numpy()
        values = np.asarray(returned)
    except Exception as error:
        raise ValueError(
            f"{start} returned {_shown(returned)}, which cannot be converted to an array: {reason_of(error)}."
        ) from error
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{start} returned {_shown(returned)}; it must return one number for each response.")
    if values.shape != (len(rows),):
        raise ValueError(
            f"{start} returned {_shown(returned)} of shape {values.shape}; the shape must be ({len(rows)},), one "
            "number for each response."
        )
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        answer = textwrap.shorten(responses[row], 80) or actions[row]
        raise ValueError(f"{start} is {values[row]} for the response {answer!r}; it must be finite.")
    return values.astype(np.float64)


def _shown(value: Any) -> str:
    """Return a value of a wrong type for an error message: its class, or the class or function itself."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    return f"{'an' if type(value).__name__[0] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"


class ActionReward(Reward):
    """Abstract base class of rewards of the chosen action; all invalid responses have the same reward.

    Args:
        weight: factor of this reward in the weighted sum.
        invalid: reward of an invalid response.
    """

    def __init__(self, weight: float = 1.0, invalid: float = 0.0) -> None:
        super().__init__(weight)
        self.invalid: float | None = float(invalid)

    @property
    def invalid_reward(self) -> float:
        """Reward of an invalid response."""
        assert self.invalid is not None
        return self.invalid

    @abstractmethod
    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Compute the unweighted rewards of valid native actions, float64 ``(row,)``.

        Raises:
            ValueError: If an observation or action has another type or shape than the reward function expects.
        """

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response, float64 ``(row,)``.

        Raises:
            ValueError: If an observation or action has another type or shape than the reward function expects.
        """
        rewards = np.full(len(rows), self.invalid_reward)
        valid = {index: action for index, action in enumerate(actions) if action is not None}
        if valid:
            rewards[list(valid)] = self.of_actions([rows[index] for index in valid], list(valid.values()))
        return rewards


class NetworkReward(ActionReward):
    """Abstract base class of rewards that a network computes from the native observation and the native action.

    Args:
        path: run directory or checkpoint of the network.
        weight: factor of this reward in the weighted sum.
        invalid: reward of an invalid response.
    """

    def __init__(self, path: str, weight: float, invalid: float = 0.0) -> None:
        super().__init__(weight, invalid)
        self.path = path

    @abstractmethod
    def load(self, codec: TextCodec) -> None:
        """Load the network for the environment of a codec.

        Raises:
            ValueError: If the checkpoint is damaged or has no such network, or if the environment does not fit it.
        """

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Load the network, and check that it can compute the reward of this row.

        Raises:
            ValueError: If the checkpoint is damaged or has no such network, or if the row has no native observation, or
                one that does not fit the network.
        """
        super().connect(codec, response_format, row)
        name = type(self).__name__
        if row.native_observation is None:
            raise ValueError(
                f"env.rewards has a {name}, but env.rows contain no native observations; they must be rows with "
                "native observations, such as MinariRows."
            )
        self.load(codec)
        try:
            self.of_actions([row], [row.action])
        except ValueError as error:
            raise ValueError(
                f"env.rewards has a {name} of {self.path!r}, which does not fit env.rows: {error}"
            ) from error

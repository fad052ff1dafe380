"""The policy with one action for each state, which is searched."""

from __future__ import annotations

from typing import final

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from lrl.policies.searched import Decide, SearchedPolicy
from lrl.search.space import ParameterSpace


@final
class TabularPolicy(SearchedPolicy):
    """A table of one action for each observation of a Discrete space; parameter ``i`` is the action in state ``i``."""

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, which give the table its size and its actions.

        Raises:
            ValueError: observations or actions are not Discrete, or there are too many states.
        """
        for name, space in {"observations": observation_space, "actions": action_space}.items():
            if not isinstance(space, spaces.Discrete):
                raise ValueError(f"model.policy is a TabularPolicy, but {name} are {space}; they must be Discrete.")
        self._connect(observation_space, action_space)

    @property
    def num_parameters(self) -> int:
        """Number of states."""
        return int(self._discrete[0].n)

    @property
    def _discrete(self) -> tuple[spaces.Discrete, spaces.Discrete]:
        observed, acted = self.spaces
        assert isinstance(observed, spaces.Discrete)
        assert isinstance(acted, spaces.Discrete)
        return observed, acted

    def parameter_space(self) -> ParameterSpace:
        """Return the actions that each entry of the table may be."""
        _, acted = self._discrete
        first = int(acted.start)
        return ParameterSpace(size=self.num_parameters, actions=tuple(range(first, first + int(acted.n))))

    def decider(self, parameters: np.ndarray) -> Decide:
        """Return the function from states ``(row,)`` to actions ``(row,)``."""
        table, start = np.asarray(parameters).astype(np.int64), int(self._discrete[0].start)
        return lambda observations: table[observations - start]

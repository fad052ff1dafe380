"""The base class of small policies whose parameters are searched, not trained by gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from lrl.policies.policy import Policy
from lrl.search.space import ParameterSpace
from lrl.turn_batch import Inputs, TurnBatch
from lrl.types import Decisions, Evaluation, History, NativeTurn, RandomKeys, SamplingConfig

MAX_PARAMETERS = 10_000
"""Maximum number of parameters that are searched; Humanoid-v5 has 5,933, an image of 84 x 84 x 3 pixels more."""
Decide = Callable[[np.ndarray], np.ndarray]
"""From native observations ``(row, ...)`` to native actions ``(row, ...)``."""


class SearchedPolicy(Policy):
    """A deterministic policy on native observations, a function of a vector of parameters.

    The parameters are a buffer, so that checkpoints hold them and optimizers do not see them.
    """

    parameter_values: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self._spaces: tuple[gym.Space, gym.Space] | None = None
        self.register_buffer("parameter_values", None)

    @abstractmethod
    def parameter_space(self) -> ParameterSpace:
        """Return the vectors of parameters that the policy can have, once its spaces are connected."""

    @abstractmethod
    def decider(self, parameters: np.ndarray) -> Decide:
        """Return the policy with some parameters as a function of NumPy arrays; the policy itself stays as it is.

        Each row's action depends on its own observation only, to the last bit, whatever rows are beside it.

        Args:
            parameters: ``(parameter,)``, legal in :meth:`parameter_space`.
        """

    @property
    def response_format(self) -> None:
        """None: actions are native."""
        return None

    def _connect(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set spaces that the policy can read and act in.

        Raises:
            ValueError: the policy would have more than :data:`MAX_PARAMETERS` parameters.
        """
        self._spaces = observation_space, action_space
        size = self.num_parameters
        if size > MAX_PARAMETERS:
            self._spaces = None
            raise ValueError(
                f"model.policy is a {type(self).__name__}, which has {size:,} parameters for observations "
                f"{observation_space} and actions {action_space}; a search takes at most {MAX_PARAMETERS:,}. Wrap the "
                "environment so that it observes a few numbers, or train an MLPPolicy."
            )

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters, once the spaces are connected."""

    @property
    def spaces(self) -> tuple[gym.Space, gym.Space]:
        """Observation space and action space of one environment."""
        assert self._spaces is not None, "connect_spaces() comes first"
        return self._spaces

    def configure(self) -> None:
        """Initialise the parameters with zeros, or the legal values nearest to zero; a second call does nothing."""
        if self.parameter_values is None:
            space = self.parameter_space()
            self.parameter_values = torch.from_numpy(space.nearest(np.zeros(space.size)))

    @property
    def parameters_vector(self) -> np.ndarray:
        """The current parameters, float64 ``(parameter,)``."""
        assert self.parameter_values is not None, "configure() comes first"
        return self.parameter_values.cpu().numpy().astype(np.float64)

    def load_parameters(self, values: Sequence[float] | np.ndarray) -> None:
        """Set the parameters.

        Args:
            values: ``(parameter,)``.

        Raises:
            ValueError: their number is wrong, or one of them is outside of the range or no action.
        """
        self.configure()
        complaint = self.parameter_space().complaint(list(values))
        if complaint:
            raise ValueError(f"parameters do not fit the {type(self).__name__}: {complaint}")
        assert self.parameter_values is not None
        self.parameter_values.copy_(torch.as_tensor(np.asarray(values, dtype=np.float64)))

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Decide for each row. ``sampling`` changes nothing: the policy is deterministic."""
        actions: Any = self.decider(self.parameters_vector)(np.asarray(observations))
        shape = (len(actions), 1)
        return Decisions(
            actions=actions,
            inputs={},
            response_mask=torch.ones(shape, dtype=torch.bool),
            logprobs=torch.zeros(shape),
            memory=memory,
        )

    # -- what takes a gradient -----------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Raise: the policy is searched."""
        self._raise()

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Raise: there are no log-probabilities to differentiate."""
        self._raise()

    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Raise: there is no reference policy."""
        self._raise()

    def build_reference(self, warm_started: bool) -> None:
        """Raise: there is no reference policy."""
        self._raise()

    def critic_parameters(self) -> list[nn.Parameter]:
        """Raise: there is no critic, and an algorithm that asks for one trains by gradients."""
        self._raise()

    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """Raise: there is no critic."""
        self._raise()

    def encode_turns(self, turns: Sequence[NativeTurn]) -> Inputs:
        """Raise: demonstrations train by gradients."""
        self._raise()

    def _raise(self) -> NoReturn:
        raise ValueError(
            f"model.policy is a {type(self).__name__}, which has no gradient; search its parameters, or train an "
            "MLPPolicy."
        )

"""The base class of small policies whose parameters are searched, not trained by gradients."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lrl.policies.policy import Policy
from lrl.ranges import NonNegativeInt, PositiveFloat, check_arguments
from lrl.registry import register
from lrl.search.searchers import ParameterSpace
from lrl.types import Decisions, Evaluation, History, Inputs, NativeTurn, RandomKeys, SamplingConfig, TurnBatch

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
            ValueError: If the policy would have more than :data:`MAX_PARAMETERS` parameters.
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
            ValueError: If their number is wrong, or one of them is outside of the range or no action.
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


# The linear policy whose weights are searched.


@register
@final
class LinearPolicy(SearchedPolicy):
    """Compute scores or actions ``s W + b`` of the raw observation ``s``: one weight per dimension and output.

    With Discrete actions the highest score is taken, the first of equal ones; values of a Box are clipped to it, so
    that an environment never charges for more than it can do. Flat order of the parameters: all outputs of the first
    dimension of the observation, all of the second, ..., then the biases (ProPS, arXiv:2511.21928).

    Args:
        bias: Whether there are biases.
        low: Smallest weight, with no more than ``decimals`` decimal places.
        high: Largest weight, likewise.
        decimals: Decimal places of the weights; null does not round.
        scale: Standard deviation of random weights.

    Raises:
        ValueError: If ``low`` is not below ``high``, or one of them is infinite or would be rounded.
    """

    def __init__(
        self,
        bias: bool = True,
        low: float = -6.0,
        high: float = 6.0,
        decimals: NonNegativeInt | None = 1,
        scale: PositiveFloat = 3.0,
    ) -> None:
        check_arguments(LinearPolicy.__init__, locals(), "policy")
        super().__init__()
        if not low < high:
            raise ValueError(f"policy.low is {low:g} and policy.high is {high:g}; low must be below high.")
        for name, value in {"low": low, "high": high}.items():
            if not math.isfinite(value):
                raise ValueError(f"policy.{name} is {value:g}; it must be finite.")
            if decimals is not None and round(value, decimals) != value:
                raise ValueError(
                    f"policy.{name} is {value:g}; it must have at most policy.decimals {decimals} decimals."
                )
        self.bias, self.low, self.high, self.decimals, self.scale = bias, low, high, decimals, scale

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, from which the number of weights follows.

        Raises:
            ValueError: If observations are no Box, actions neither Discrete nor a Box, or there are too many weights.
        """
        if not isinstance(observation_space, spaces.Box):
            raise ValueError(
                f"model.policy is a LinearPolicy, but observations are {observation_space}; they must be a Box (a "
                "TabularPolicy reads Discrete ones)."
            )
        if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
            raise ValueError(
                f"model.policy is a LinearPolicy, but actions are {action_space}; they must be Discrete or a Box."
            )
        self._connect(observation_space, action_space)

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases."""
        inputs, outputs = self.shape
        return (inputs + self.bias) * outputs

    @property
    def shape(self) -> tuple[int, int]:
        """Number of inputs and of outputs."""
        observed, acted = self.spaces
        return int(np.prod(observed.shape or ())), int(
            acted.n if isinstance(acted, spaces.Discrete) else np.prod(acted.shape or ())
        )

    def parameter_space(self) -> ParameterSpace:
        """Return the range of the weights and biases."""
        return ParameterSpace(
            size=self.num_parameters, low=self.low, high=self.high, decimals=self.decimals, scale=self.scale
        )

    def decider(self, parameters: np.ndarray) -> Decide:
        """Return the function from observations ``(row, ...)`` to clipped actions, or to those of the highest score."""
        inputs, outputs = self.shape
        rows = np.asarray(parameters, dtype=np.float64).reshape(inputs + self.bias, outputs)
        weights, bias = rows[:inputs], rows[inputs:].sum(0)  # no row of biases: zeros

        def scores(observations: np.ndarray) -> np.ndarray:
            # The sum of a product, not a matrix product, whose rounding depends on the number of rows.
            return (observations.reshape(len(observations), inputs, 1) * weights).sum(1) + bias

        acted = self.spaces[1]
        if isinstance(acted, spaces.Discrete):
            start = int(acted.start)
            return lambda observations: scores(observations).argmax(1) + start
        assert isinstance(acted, spaces.Box)
        low, high, shape, dtype = acted.low.ravel(), acted.high.ravel(), acted.shape, acted.dtype
        return lambda observations: (
            np.minimum(np.maximum(scores(observations), low), high).astype(dtype).reshape(-1, *shape)
        )


# The policy with one action for each state, which is searched.


@register
@final
class TabularPolicy(SearchedPolicy):
    """A table of one action for each observation of a Discrete space; parameter ``i`` is the action in state ``i``."""

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, which give the table its size and its actions.

        Raises:
            ValueError: If observations or actions are not Discrete, or there are too many states.
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

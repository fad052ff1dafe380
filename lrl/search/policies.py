"""Small policies whose parameters are searched, not trained by gradients: linear functions and tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lrl.policies.policy import Policy
from lrl.ranges import NonNegativeInt, PositiveFloat, check_arguments
from lrl.registry import register
from lrl.search.searchers import ParameterSpace
from lrl.types import Decisions, History, RandomKeys, SamplingConfig

MAX_PARAMETERS = 10_000
"""Maximum number of parameters of a searched policy; Humanoid-v5 needs 5,933, and image observations need more."""
Decide = Callable[[np.ndarray], np.ndarray]
"""Function from native observations ``(row, ...)`` to native actions ``(row, ...)``."""


class SearchedPolicy(Policy):
    """Abstract base class of deterministic policies on native observations that depend on a parameter vector.

    The parameters are a buffer: checkpoints contain it, and optimizers ignore it.
    """

    parameter_values: Tensor | None
    """The current parameters, float64 ``(parameter,)``; None before :meth:`configure`."""

    def __init__(self) -> None:
        super().__init__()
        self.spaces: tuple[Any, Any] = (None, None)
        """Observation space and action space of one environment."""
        self.register_buffer("parameter_values", None)

    @abstractmethod
    def parameter_space(self) -> ParameterSpace:
        """Return the possible parameter vectors. The spaces must be set before."""

    @abstractmethod
    def decider(self, parameters: np.ndarray) -> Decide:
        """Return the policy with given parameters as a function of NumPy arrays; this object does not change.

        The action of a row depends on the observation of that row only, to the last bit.

        Args:
            parameters: parameters ``(parameter,)``, which are legal in :meth:`parameter_space`.
        """

    @property
    def response_format(self) -> None:
        """None, because actions are native."""
        return None

    def _connect(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces of one environment.

        Raises:
            ValueError: If the policy would have more than :data:`MAX_PARAMETERS` parameters.
        """
        self.spaces = observation_space, action_space
        size = self.parameter_space().size
        if size > MAX_PARAMETERS:
            raise ValueError(
                f"model.policy is a {type(self).__name__}, which has {size:,} parameters for observations "
                f"{observation_space} and actions {action_space}; a search takes at most {MAX_PARAMETERS:,}. Wrap the "
                "environment so that it observes a few numbers, or train an MLPPolicy."
            )

    def configure(self) -> None:
        """Initialize the parameters with the legal values nearest to zero, unless they are initialized already."""
        if self.parameter_values is None:
            space = self.parameter_space()
            self.parameter_values = torch.from_numpy(space.nearest(np.zeros(space.size)))

    @property
    def parameters_vector(self) -> np.ndarray:
        """The current parameters, float64 ``(parameter,)``."""
        assert self.parameter_values is not None, "configure() must be called before"
        return self.parameter_values.cpu().numpy().astype(np.float64)

    def load_parameters(self, values: Sequence[float] | np.ndarray) -> None:
        """Set the parameters.

        Args:
            values: parameters ``(parameter,)``.

        Raises:
            ValueError: If there are too few or too many values, or one of them is not legal.
        """
        self.configure()
        complaint = self.parameter_space().complaint(list(values))
        if complaint:
            raise ValueError(f"parameters do not fit the {type(self).__name__}: {complaint}")
        assert self.parameter_values is not None
        self.parameter_values.copy_(torch.as_tensor(np.asarray(values, dtype=np.float64)))

    @torch.no_grad()
    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Return the action of each row; ``sampling`` is ignored, because the policy is deterministic."""
        actions: Any = self.decider(self.parameters_vector)(np.asarray(observations))
        shape = (len(actions), 1)
        return Decisions(
            actions=actions,
            inputs={},
            response_mask=torch.ones(shape, dtype=torch.bool),
            logprobs=torch.zeros(shape),
            memory=memory,
        )

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, because the policy has no gradient.

        Raises:
            ValueError: If an algorithm or a loss calls one of the methods below.
        """
        raise ValueError(
            f"model.policy is a {type(self).__name__}, which has no gradient; search its parameters, or train an "
            "MLPPolicy."
        )

    check_gradients = evaluate = reference_logprobs = build_reference = _raise
    critic_parameters = state_values = encode_turns = _raise


@register
@final
class LinearPolicy(SearchedPolicy):
    """Linear policy, which computes ``s W + b`` from the raw observation ``s``.

    If actions are Discrete, the outputs are scores, and the action with the highest score is selected, the first of
    equal ones. If they are a Box, the outputs are clipped to it, so that penalties on large actions apply to possible
    actions only. The parameters are in the order of ProPS (arXiv:2511.21928): all outputs of the first dimension of the
    observation, all outputs of the second, and so on, then the biases.

    Args:
        bias: whether the policy has biases.
        low: smallest weight, with at most ``decimals`` decimal places.
        high: largest weight, with at most ``decimals`` decimal places.
        decimals: number of decimal places of the weights; None does not round.
        scale: standard deviation of random weights.

    Raises:
        ValueError: If ``low`` is not below ``high``, or one of them is infinite or has too many decimal places.
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
        ends = np.array([low, high])
        rounded = ends if decimals is None else ends.round(decimals)
        if not low < high or not np.isfinite(ends).all() or (rounded != ends).any():
            raise ValueError(
                f"policy.low is {low:g} and policy.high is {high:g}; both must be finite with at most policy.decimals "
                f"{decimals} decimals, and low must be below high."
            )
        self.bias, self.low, self.high, self.decimals, self.scale = bias, low, high, decimals, scale

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, which determine the number of weights.

        Raises:
            ValueError: If observations are not a Box, if actions are neither Discrete nor a Box, or if there are too
                many weights.
        """
        if not isinstance(observation_space, spaces.Box) or not isinstance(action_space, (spaces.Discrete, spaces.Box)):
            raise ValueError(
                f"model.policy is a LinearPolicy, but observations are {observation_space} and actions are "
                f"{action_space}; it needs a Box of observations (a TabularPolicy reads Discrete ones), and actions "
                "that are Discrete or a Box."
            )
        self._connect(observation_space, action_space)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of inputs and of outputs."""
        observed, acted = self.spaces
        outputs = acted.n if isinstance(acted, spaces.Discrete) else np.prod(acted.shape)
        return int(np.prod(observed.shape)), int(outputs)

    def parameter_space(self) -> ParameterSpace:
        """Return the range of the weights and biases."""
        inputs, outputs = self.shape
        size = (inputs + self.bias) * outputs
        return ParameterSpace(size=size, low=self.low, high=self.high, decimals=self.decimals, scale=self.scale)

    def decider(self, parameters: np.ndarray) -> Decide:
        """Return the function from observations ``(row, ...)`` to actions."""
        inputs, outputs = self.shape
        rows = np.asarray(parameters, dtype=np.float64).reshape(inputs + self.bias, outputs)
        weights, bias = rows[:inputs], rows[inputs:].sum(0)  # zeros if there is no row of biases

        def scores(observations: np.ndarray) -> np.ndarray:
            """Return the outputs ``(row, output)`` of the linear policy."""
            # A matrix product would depend on the number of rows in its rounding.
            return (observations.reshape(len(observations), inputs, 1) * weights).sum(1) + bias

        acted = self.spaces[1]
        if isinstance(acted, spaces.Discrete):
            start = int(acted.start)
            return lambda observations: scores(observations).argmax(1) + start
        low, high, shape, dtype = acted.low.ravel(), acted.high.ravel(), acted.shape, acted.dtype
        return lambda observations: (
            np.minimum(np.maximum(scores(observations), low), high).astype(dtype).reshape(-1, *shape)
        )


@register
@final
class TabularPolicy(SearchedPolicy):
    """Table with one action for each observation of a Discrete space; parameter ``i`` is the action in state ``i``."""

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, which determine the size of the table and its actions.

        Raises:
            ValueError: If observations or actions are not Discrete, or there are too many states.
        """
        if not (isinstance(observation_space, spaces.Discrete) and isinstance(action_space, spaces.Discrete)):
            raise ValueError(
                f"model.policy is a TabularPolicy, but observations are {observation_space} and actions are "
                f"{action_space}; both must be Discrete."
            )
        self._connect(observation_space, action_space)

    def parameter_space(self) -> ParameterSpace:
        """Return the possible actions of each entry of the table."""
        observed, acted = self.spaces
        first = int(acted.start)
        return ParameterSpace(size=int(observed.n), actions=tuple(range(first, first + int(acted.n))))

    def decider(self, parameters: np.ndarray) -> Decide:
        """Return the function from states ``(row,)`` to actions ``(row,)``."""
        table, start = np.asarray(parameters).astype(np.int64), int(self.spaces[0].start)
        return lambda observations: table[observations - start]

"""The small network beside every language model: the same algorithm, the same budget, no text."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lrl.functional.random import token_uniforms
from lrl.policies.decoding import draw_tokens, sampling_logprobs
from lrl.policies.networks import RunningNorm, at_least_float32, drawn_from, mlp
from lrl.policies.policy import Policy
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch

_TINY = 2.0**-54
"""Half a step of the uniform numbers: the normal quantile of 0 is infinite."""


class MLPPolicy(Policy):
    """A multilayer perceptron on native observations: one token per turn.

    A softmax over a Discrete action space; for a Box a Gaussian whose standard deviation does not depend on the state,
    its samples clipped to the space before the environment sees them.

    Args:
        hidden_sizes: of actor and critic.
        activation: ``relu``, ``tanh``, ``gelu`` or ``silu``.
        normalise_observations: by running mean and standard deviation, which change between collections only.
        shared_value_network: whether the critic is one more output of the actor.
        initial_log_std: of the Gaussian.
        critic: whether there is one.
        init_seed: of the weights; null draws them from the run's seed.
    """

    def __init__(
        self,
        hidden_sizes: Sequence[int] = (64, 64, 64),
        activation: str = "relu",
        normalise_observations: bool = False,
        shared_value_network: bool = False,
        initial_log_std: float = 0.0,
        critic: bool = True,
        init_seed: int | None = None,
    ) -> None:
        super().__init__()
        if not hidden_sizes or min(hidden_sizes) < 1:
            raise ValueError(f"policy.hidden_sizes is {list(hidden_sizes)}; it must be one or more positive sizes.")
        mlp((1, 1), activation)
        self.hidden_sizes, self.activation, self.init_seed = tuple(hidden_sizes), activation, init_seed
        self.normalise_observations, self.shared_value_network = normalise_observations, shared_value_network
        self.initial_log_std, self.has_critic = initial_log_std, critic
        self.actor: nn.Sequential | None = None
        self._spaces: tuple[gym.Space, gym.Space] | None = None
        self._reference: list[MLPPolicy] = []

    @property
    def response_format(self) -> None:
        """It acts natively."""
        return None

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Take the sizes of input and output.

        Raises:
            ValueError: the observations are no numbers, or the actions neither Discrete nor a Box.
        """
        if not _is_numbers(observation_space):
            raise ValueError(
                f"model.policy is an MLPPolicy, but observations are {observation_space}; they must be numbers."
            )
        self._size = int(np.prod(spaces.flatten_space(observation_space).shape or ()))
        if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
            raise ValueError(
                f"model.policy is an MLPPolicy, but actions are {action_space}; they must be Discrete or a Box."
            )
        self._spaces = observation_space, action_space

    def configure(self) -> None:
        """Draw the weights."""
        if self.actor is not None:
            return
        assert self._spaces is not None, "connect_spaces() comes first"
        (_, acted), inputs = self._spaces, self._size
        self._box = isinstance(acted, spaces.Box)
        outputs = int(acted.n) if isinstance(acted, spaces.Discrete) else int(np.prod(acted.shape or ()))
        self._first = int(acted.start) if isinstance(acted, spaces.Discrete) else 0
        shared = self.has_critic and self.shared_value_network
        with drawn_from(self.init_seed):
            self.actor = mlp((inputs, *self.hidden_sizes, outputs + shared), self.activation, 0.01)
            separate = self.has_critic and not shared
            self.critic = mlp((inputs, *self.hidden_sizes, 1), self.activation) if separate else None
        self.log_std = nn.Parameter(torch.full((outputs,), self.initial_log_std)) if self._box else None
        self.norm = RunningNorm(inputs) if self.normalise_observations else nn.Identity()

    def build_reference(self, warm_started: bool) -> None:
        """Keep a copy."""
        self._reference = [copy.deepcopy(self).requires_grad_(False)]

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits or means ``(row, action)`` and values ``(row, 1)`` of observations ``(row, size)``."""
        assert self.actor is not None, "configure() comes first"
        with torch.autocast(observations.device.type, enabled=False):  # a probability in half precision is none
            seen = self.norm(observations)
            outputs = self.actor(seen)
            values = self.critic(seen) if self.critic is not None else None
        outputs, values = (None if tensor is None else at_least_float32(tensor) for tensor in (outputs, values))
        assert outputs is not None
        if self.has_critic and values is None:
            return outputs[:, :-1], outputs[:, -1:]
        return outputs, values

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Draw one action per row; at temperature 0 the best one, or the mean."""
        sampling = SamplingConfig() if sampling is None else sampling
        seen = self._tensor(observations)
        outputs, values = self(seen)
        if self._box:
            actions, logprobs = self._gaussian(outputs, keys, sampling.temperature)
            assert self._spaces is not None
            space: Any = self._spaces[1]
            native = np.clip(actions.cpu().numpy().reshape(-1, *space.shape), space.low, space.high)
        else:
            choices = sampling_logprobs(outputs, sampling)
            actions = draw_tokens(choices, token_uniforms(keys, 1)[:, 0].to(outputs.device))
            logprobs, native = choices.gather(-1, actions[:, None]), actions.cpu().numpy() + self._first
        return Decisions(
            actions=native,  # pyright: ignore[reportArgumentType]
            inputs={"observation": seen, "action": actions},
            response_mask=torch.ones(len(seen), 1, dtype=torch.bool, device=seen.device),
            logprobs=logprobs,
            memory=memory,
            values=values,
        )

    def _gaussian(self, means: Tensor, keys: RandomKeys, temperature: float) -> tuple[Tensor, Tensor]:
        """Samples ``(row, action)`` and their log-densities ``(row, 1)``."""
        if temperature == 0:
            return means, torch.zeros_like(means[:, :1])
        assert self.log_std is not None
        noise = torch.special.ndtri(token_uniforms(keys, means.shape[1]) + _TINY).to(means)
        actions = means + noise * self.log_std.exp() * temperature
        return actions, log_density(actions, means, self.log_std + math.log(temperature))

    def _tensor(self, observations: Sequence[Any]) -> Tensor:
        assert self.actor is not None, "configure() comes first"
        assert self._spaces is not None
        weights: Any = self.actor[0].weight
        space: Any = self._spaces[0]
        if isinstance(space, spaces.Box):
            rows = np.asarray(observations)
        else:
            rows = np.stack([np.asarray(spaces.flatten(space, observation)) for observation in observations])
        return torch.as_tensor(rows, dtype=weights.dtype, device=weights.device).reshape(len(observations), -1)

    def critic_parameters(self) -> list[nn.Parameter]:
        """Those of a separate value network."""
        return [] if self.critic is None else list(self.critic.parameters())

    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """Of states in which nothing was decided yet, ``(row,)``, no gradient."""
        with torch.no_grad():
            _, values = self(self._tensor(observations))
        assert values is not None
        return values[:, 0]

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Of turns that were taken; nothing is dropped out."""
        outputs, values = self(batch.inputs["observation"])
        actions = batch.inputs["action"]
        if self._box:
            assert self.log_std is not None
            entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(outputs), 1)
            return Evaluation(logprobs=log_density(actions, outputs, self.log_std), entropy=entropy, values=values)
        logprobs = torch.log_softmax(outputs, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1, keepdim=True)
        return Evaluation(logprobs=logprobs.gather(-1, actions[:, None]), entropy=entropy, values=values)

    @torch.no_grad()
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Under the policy as it was when this run started."""
        reference = self._reference[0].to(batch.response_mask.device)
        return reference.evaluate(batch).logprobs

    def learn_statistics(
        self, batch: TurnBatch, collection: int, reduce: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Take in the observations of a collection."""
        if isinstance(self.norm, RunningNorm):
            self.norm.learn(batch.inputs["observation"], collection, reduce)

    def settle_statistics(self, collection: int) -> None:
        """Normalise by what was learned before."""
        if isinstance(self.norm, RunningNorm):
            self.norm.settle(collection)


def log_density(actions: Tensor, means: Tensor, log_std: Tensor) -> Tensor:
    """Of a Gaussian with independent dimensions, ``(row, 1)``."""
    each = -0.5 * ((actions - means) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
    return each.sum(-1, keepdim=True)


def _is_numbers(space: gym.Space) -> bool:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return all(_is_numbers(part) for part in (space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))

"""Policy with a small network on native observations, a baseline for language models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, final

import gymnasium as gym
import torch
from torch import Tensor, nn

from lrl.lm.heads import ActionHead, RunningNorm, at_least_float32, mlp, seeded_init, vector_size, without_autocast
from lrl.policies.policy import NativePolicy, check_spaces
from lrl.ranges import PositiveFloat, Seed, check_arguments
from lrl.registry import register
from lrl.types import Decisions, Evaluation, History, Inputs, NativeTurn, RandomKeys, SamplingConfig, TurnBatch


@register
@final
class MLPPolicy(NativePolicy):
    """A multilayer perceptron on native observations; a turn is one token.

    The action distribution is a softmax for a Discrete action space, and a Gaussian for a Box. The standard deviation
    of the Gaussian does not depend on the state. Its samples are clipped to the bounds of the Box for the environment.

    Args:
        hidden_sizes: sizes of the hidden layers of actor and critic.
        activation: ``relu``, ``tanh``, ``gelu`` or ``silu``.
        normalise_observations: whether to normalise observations by their running mean and standard deviation, which
            change only between collections. Behaviour cloning uses the statistics of the demonstrations.
        observation_clip: largest absolute value of a normalised observation.
        initial_log_std: initial logarithm of the standard deviation of the Gaussian.
        critic: whether the policy has a value function.
        init_seed: seed of the initial weights; null selects the run's seed.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        hidden_sizes: Sequence[int] = (64, 64, 64),
        activation: str = "relu",
        normalise_observations: bool = False,
        observation_clip: PositiveFloat = 10.0,
        initial_log_std: float = 0.0,
        critic: bool = True,
        init_seed: Seed | None = None,
    ) -> None:
        check_arguments(MLPPolicy.__init__, locals(), "policy")
        super().__init__()
        if not hidden_sizes or min(hidden_sizes) < 1:
            raise ValueError(f"policy.hidden_sizes is {list(hidden_sizes)}; it must be one or more positive sizes.")
        mlp((1, 1), activation)  # raises if the activation is unknown
        self.observation_clip = observation_clip
        self.hidden_sizes, self.activation, self.init_seed = tuple(hidden_sizes), activation, init_seed
        self.normalise_observations, self.has_critic = normalise_observations, critic
        self.critic_config = critic  # the constructor argument, which checkpoints store
        self.initial_log_std = initial_log_std
        self.actor: nn.Sequential | None = None
        self.copied_reference: list[MLPPolicy] = []

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces, which determine the numbers of inputs and outputs.

        Raises:
            ValueError: If observations are not numeric, if the action space is neither Discrete nor a Box, or if the
                networks exist and have other sizes.
        """
        check_spaces("MLPPolicy", observation_space, action_space, numbers=True)
        if self.actor is not None and self.spaces is not None:
            new, old = (
                f"{vector_size(seen)} numbers and {type(actions).__name__} actions of size "
                f"{getattr(actions, 'n', actions.shape)}"
                for seen, actions in ((observation_space, action_space), self.spaces)
            )
            if new != old:
                raise ValueError(f"model.policy was made for {old}; the environment has {new}.")
        self.spaces = observation_space, action_space

    def configure(self) -> None:
        """Initialise the weights; further calls do nothing."""
        if self.actor is not None:
            return
        assert self.spaces is not None, "connect_spaces() comes first"
        inputs = vector_size(self.spaces[0])
        self.head = ActionHead(self.spaces[1], self.initial_log_std)
        with seeded_init(self.init_seed):
            self.actor = mlp((inputs, *self.hidden_sizes, self.head.size), self.activation, 0.01)
            self.critic = mlp((inputs, *self.hidden_sizes, 1), self.activation) if self.has_critic else None
        self.norm = RunningNorm(inputs, self.observation_clip) if self.normalise_observations else nn.Identity()

    def build_reference(self, warm_started: bool) -> None:
        """Keep a copy of the current weights as the reference."""
        self.copied_reference = [copy.deepcopy(self).requires_grad_(False)]

    def forward(self, seen: Tensor) -> Tensor:
        """Compute logits or means ``(row, action)`` from normalised observations ``(row, size)``."""
        assert self.actor is not None, "configure() comes first"
        with without_autocast(seen.device):  # 16 bits are too imprecise for log-probabilities
            return at_least_float32(self.actor(seen))

    @torch.no_grad()
    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Sample one action per row; at temperature 0 take the most probable one, or the mean.

        The values of all turns are computed together after the collection, which takes a tenth of the time.
        """
        seen = self.vectors(observations, self.actor)
        native, actions, logprobs = self.head.sample(self(self.norm(seen)), keys, sampling)
        return Decisions(
            actions=native,
            inputs={"observation": seen, "action": actions},
            response_mask=torch.ones(len(seen), 1, dtype=torch.bool, device=seen.device),
            logprobs=logprobs,
            memory=memory,
        )

    def encode_turns(self, turns: Sequence[NativeTurn]) -> Inputs:
        """Return observations ``(turn, size)`` and demonstrated actions as the inputs of :meth:`evaluate`."""
        observed = self.vectors([turn.observation for turn in turns], self.actor)
        return {"observation": observed} | self.head.encode([turn.action for turn in turns])

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Compute log-probabilities and entropy of the actions, each ``(turn, 1)``; there is no dropout."""
        seen = self.norm(batch.inputs["observation"])
        values = None if self.critic is None else self.values(seen)
        distribution = self.head.distribution(self(seen))
        logprobs = self.head.logprobs_of(distribution, batch.inputs)
        return Evaluation(logprobs=logprobs, entropy=distribution.entropy(), values=values, distribution=distribution)

    @torch.no_grad()
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Compute log-probabilities ``(turn, 1)`` under the policy at the start of this run."""
        return self.copied_reference[0].evaluate(batch).logprobs

"""The data that the packages exchange: decisions, distributions, evaluations and rollouts.

A *turn* is one decision of a policy in one environment; a turn is a short sequence of *tokens*
(one token for a network with a head). Axes are ``(time, env, token)`` while data are
collected and ``(turn, token)`` in training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from lrl.ranges import LeftOpenUnitInterval, NonNegativeFloat, PositiveInt, check_fields

# The batches of turns that training steps see.

Inputs = Mapping[str, Tensor]
"""What a policy needs to evaluate a turn again: tensors with a leading turn axis, right-padded with zeros."""


class TurnBatch:
    """Represents the turns of a training step: padded and masked.

    It is a plain class instead of a dataclass, so that Lightning moves and casts it by calling :meth:`to`.

    Attributes:
        inputs: what the policy needs to evaluate the turns, each tensor ``(turn, ...)``.
        response_mask: bool ``(turn, token)``, true for tokens that were sampled or demonstrated.
        old_logprobs: ``(turn, token)`` log-probabilities recorded while sampling.
        advantages: ``(turn, token)``.
        ref_logprobs: ``(turn, token)`` log-probabilities of the reference policy; None unless the algorithm needs them.
        returns: ``(turn, token)``, targets of the value function; None without one.
        old_values: ``(turn, token)``, values from which the advantages were estimated; None without a value function.
    """

    def __init__(
        self,
        *,
        inputs: Inputs,
        response_mask: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        ref_logprobs: Tensor | None = None,
        returns: Tensor | None = None,
        old_values: Tensor | None = None,
    ) -> None:
        self.inputs, self.response_mask = dict(inputs), response_mask
        self.old_logprobs, self.advantages, self.ref_logprobs = old_logprobs, advantages, ref_logprobs
        self.returns, self.old_values = returns, old_values

    def __len__(self) -> int:
        return len(self.response_mask)

    def fields(self) -> dict[str, Any]:
        """Return all fields by name."""
        return dict(vars(self))

    def replace(self, **changes: Any) -> TurnBatch:
        """Return a copy with some fields replaced."""
        return TurnBatch(**(self.fields() | changes))

    def map(self, function: Any) -> TurnBatch:
        """Return a copy with ``function`` applied to every tensor."""
        inputs = {name: function(tensor) for name, tensor in self.inputs.items()}
        others = {k: v if v is None else function(v) for k, v in self.fields().items() if k != "inputs"}
        return TurnBatch(inputs=inputs, **others)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: Tensor) -> TurnBatch:
        """Select turns by an index tensor ``(turn,)``."""
        return self.map(lambda tensor: tensor[index])

    def split(self, size: int | None) -> list[TurnBatch]:
        """Split into chunks of at most ``size`` turns; None returns one chunk."""
        index = torch.arange(len(self), device=self.response_mask.device)
        return [self[part] for part in index.split(size or max(len(self), 1))]

    def to(self, *args: Any, **kwargs: Any) -> TurnBatch:
        """Move every tensor to a device."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Configures how tokens are sampled from the model's distribution."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 decodes greedily."""
    top_k: PositiveInt | None = None
    """Keep only the k most probable tokens (evaluation only)."""
    top_p: LeftOpenUnitInterval | None = None
    """Keep the smallest set of tokens whose probability reaches p (evaluation only)."""
    max_new_tokens: PositiveInt = 32
    """A turn is cut after this many tokens."""

    def __post_init__(self) -> None:
        check_fields(self, "sampling")


@dataclass(frozen=True)
class PastTurn:
    """Represents a past turn of an episode: its observation and its response."""

    observation: str
    response: str


History = tuple[PastTurn, ...]
"""Past turns of an environment's current episode that the policy remembers, oldest first."""


@dataclass(frozen=True)
class NativeTurn:
    """Represents a turn as the environment saw it."""

    observation: Any
    """Native observation, as the environment returned it."""
    action: Any
    """Native action, as the environment received it: numbers of a Box are clipped to its bounds."""


Item = TypeVar("Item", covariant=True)


class LazySequence(Sequence[Item], Generic[Item]):
    """Abstract sequence whose items are not all in memory."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Return one item.

        Args:
            index: from 0 to one less than their number.
        """

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        chosen = range(len(self))[index]
        return self.item(chosen) if isinstance(chosen, int) else [self.item(position) for position in chosen]


@dataclass(frozen=True)
class Demonstration:
    """Represents an observation, the response to learn, and the past turns of the episode.

    For a policy that acts natively the observation and the action are :attr:`native`, and the texts are empty.
    """

    observation: str = ""
    response: str = ""
    history: History = ()
    native: NativeTurn | None = field(default=None, compare=False)  # == of arrays returns no single truth value

    @property
    def characters(self) -> int:
        """Number of characters, including those of the history."""
        return sum(len(turn.observation) + len(turn.response) for turn in (self, *self.history))


@dataclass(frozen=True, kw_only=True)
class RandomKeys:
    """Holds the counters that determine every random number of a decision, see :mod:`lrl.functional.random`.

    A random number depends on nothing else. So a rollout depends neither on the number of environments or ranks nor on
    which rows have finished.
    """

    seed: int
    purpose: str
    collection: int
    env: np.ndarray
    """Global environment (or episode) index, int64 ``(row,)``."""
    turn: np.ndarray
    """Index of the turn in its episode, or in its collection if episodes continue in the next one, int64 ``(row,)``."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Holds the decisions of an actor for some rows (environments)."""

    actions: Sequence[Any]
    """One per row, as ``env.step`` takes it: the text of the response, or a native action."""
    inputs: Inputs
    """Each ``(row, ...)``: what :meth:`Policy.evaluate` needs to evaluate these turns again."""
    response_mask: Tensor
    """bool ``(row, token)``: the sampled tokens, including the end token."""
    logprobs: Tensor
    """``(row, token)``: log-probabilities of the distribution that was sampled from; 0 where masked."""
    memory: list[History]
    """The history of each row, including this turn."""
    values: Tensor | None = None
    """``(row, token)``: value estimates; None if acting does not compute them. They are then computed before the
    advantages."""
    replaced: Mapping[int, Any] = field(default_factory=dict)
    """Rows whose action was replaced by a random one, with the native action that the actor had chosen; None if that
    action was illegal."""


class Distribution(ABC):
    """Represents the distributions that tokens are sampled from, one for each ``(turn, token)``."""

    @property
    @abstractmethod
    def coordinates(self) -> Tensor:
        """The outputs of the network, ``(turn, token, coordinate)``."""

    @abstractmethod
    def logprobs(self, samples: Tensor) -> Tensor:
        """Return the log-probabilities of samples, ``(turn, token)``.

        Args:
            samples: ids ``(turn, token)`` or vectors ``(turn, token, dimension)``.
        """

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the entropy in nats, ``(turn, token)``."""

    @abstractmethod
    def kl(self, other: Distribution) -> Tensor:
        """Return the exact KL(self || other) in nats, ``(turn, token)``."""

    @abstractmethod
    def metric(self, tangent: Tensor) -> Tensor:
        """Multiply a tangent with the second derivative, in the coordinates, of ``KL(self || .)`` at ``self``.

        Args:
            tangent: ``(turn, token, coordinate)``.
        """

    @abstractmethod
    def detach(self) -> Distribution:
        """Return the same distribution without a graph."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds what a policy computes for past turns, with gradient; each ``(turn, token)``."""

    logprobs: Tensor
    entropy: Tensor
    """Entropy in nats of the distribution at each token."""
    values: Tensor | None = None
    distribution: Distribution | None = None
    """The distribution of each token."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Represents the turns of one collection; environments without a turn at some time are inactive there."""

    inputs: Inputs
    """Each ``(time, env, ...)``."""
    response_mask: Tensor
    """bool ``(time, env, token)``."""
    logprobs: Tensor
    """``(time, env, token)``."""
    rewards: Tensor
    """float32 ``(time, env)``."""
    terminated: Tensor
    """bool ``(time, env)``: the episode reached a terminal state, whose value is 0."""
    truncated: Tensor
    """bool ``(time, env)``: the episode was cut at a state that is not terminal, so this state has a value."""
    active: Tensor
    """bool ``(time, env)``: a turn was taken here."""
    turn: Tensor
    """int64 ``(time, env)``: index of the turn in its episode."""
    group: Tensor
    """int64 ``(env,)``: environments of one group started from the same state."""
    observations: list[list[str]]
    """Text of each observation, ``[time][env]``; empty where inactive."""
    responses: list[list[Any]]
    """Text of each response, or a native action, ``[time][env]``; an empty text where inactive."""
    metrics: Mapping[str, Tensor]
    """Values of single turns or episodes by name (``success``, ``action_valid``, ``reward/format`` ...), 1-D."""
    values: Tensor | None = None
    """``(time, env, token)`` value of the state before each token; None before the critic is evaluated."""
    final_values: Tensor | None = None
    """``(time, env)`` value of the state after a turn that is cut (see :attr:`cut`); 0 elsewhere."""
    ref_logprobs: Tensor | None = None
    """``(time, env, token)`` of the reference policy, if the algorithm needs one."""
    state: Tensor | None = None
    """int64 ``(time, env)``: number of the observation before a turn, equal for equal observations; 0 where inactive.

    None unless the algorithm compares states.
    """

    @property
    def num_turns(self) -> int:
        """Number of turns that were taken."""
        return int(self.active.sum())

    @property
    def returns(self) -> Tensor:
        """Undiscounted sum of each environment's rewards, ``(env,)``: the return, if it played exactly one episode."""
        return (self.rewards * self.active).sum(0)

    @property
    def lengths(self) -> Tensor:
        """Number of turns of each environment, ``(env,)``."""
        return self.active.sum(0)

    @property
    def cut(self) -> Tensor:
        """True where the episode continues after this turn, but not in this rollout; bool ``(time, env)``.

        The turn was truncated, or it is the last of its environment and its episode has not ended.
        """
        next_active = torch.cat([self.active[1:], torch.zeros_like(self.active[:1])])
        return (self.truncated | (self.active & ~next_active)) & ~self.terminated

    def replace(self, **changes: Any) -> Rollout:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def to(self, device: torch.device) -> Rollout:
        """Return a copy with all tensors except the metrics on a device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, inputs={name: tensor.to(device) for name, tensor in self.inputs.items()}, **tensors)

    def flatten(self, values: Tensor) -> Tensor:
        """Return the turns that were taken, ``(turn, ...)``, of values on the grid, ``(time, env, ...)``."""
        return values[self.active]

    def unflatten(self, values: Tensor) -> Tensor:
        """Return values of turns, ``(turn, ...)``, on the grid, ``(time, env, ...)``; 0 where no turn was taken."""
        out = values.new_zeros(*self.active.shape, *values.shape[1:])
        out[self.active] = values
        return out

    def turns(self) -> TurnBatch:
        """Return the turns that were taken, with advantages of 0."""
        logprobs = self.flatten(self.logprobs)
        return TurnBatch(
            inputs={name: self.flatten(tensor) for name, tensor in self.inputs.items()},
            response_mask=self.flatten(self.response_mask),
            old_logprobs=logprobs,
            advantages=torch.zeros_like(logprobs),
        )


@dataclass(frozen=True, kw_only=True)
class Credit:
    """Advantages of a rollout's tokens, and what a value function should predict for them."""

    advantages: Tensor
    """``(time, env, token)``; 0 where masked."""
    returns: Tensor | None = None
    """``(time, env, token)``, targets of the value function; None without one."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values to log by name, of any shape; their mean is logged."""


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss of a minibatch before it is averaged over tokens."""

    loss: Tensor
    """``(turn, token)``."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values to log by name, of any shape; their mean is logged."""

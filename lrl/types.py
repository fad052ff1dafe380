"""The data that the packages exchange: decisions, distributions, evaluations and rollouts.

A *turn* is one decision of a policy in one environment. It is a short sequence of *tokens*, or a single token for a
policy that chooses an action directly. Tensors have the axes ``(time, env, token)`` while data are collected, and
``(turn, token)`` in training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from lrl.ranges import LeftOpenUnitInterval, NonNegativeFloat, PositiveInt, check_fields

Inputs = Mapping[str, Tensor]
"""What a policy needs to evaluate a turn again: tensors with a leading turn axis, right-padded with zeros."""


class TurnBatch:
    """Represents the turns of a training step, padded to the same number of tokens.

    It is not a dataclass, because Lightning would then move and cast each field instead of calling :meth:`to`.

    Attributes:
        inputs: what the policy needs to evaluate the turns, each tensor ``(turn, ...)``.
        response_mask: bool ``(turn, token)``, true for tokens that were sampled or demonstrated.
        old_logprobs: ``(turn, token)`` log-probabilities recorded while sampling.
        advantages: ``(turn, token)``.
        ref_logprobs: ``(turn, token)`` log-probabilities of the reference policy; None unless the algorithm needs them.
        returns: ``(turn, token)``, targets of the value function; None if the policy has none.
        old_values: ``(turn, token)``, values from which the advantages were estimated; None if the policy has no value
            function.
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
        """Return a copy with every tensor moved or cast; the arguments are those of :meth:`torch.Tensor.to`."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Configures how tokens are sampled from the model's distribution."""

    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; 0 decodes greedily."""
    top_k: PositiveInt | None = None
    """Keep only the k most probable tokens (evaluation only)."""
    top_p: LeftOpenUnitInterval | None = None
    """Keep the smallest set of tokens whose probability reaches p (evaluation only)."""
    max_new_tokens: PositiveInt = 32
    """Maximum number of tokens of a turn."""

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
    """Native action, as the environment received it: in a Box space, it is clipped to the bounds."""


Item = TypeVar("Item", covariant=True)


class LazySequence(Sequence[Item], Generic[Item]):
    """Abstract base class of sequences that load or compute an item when it is accessed."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Return one item.

        Args:
            index: index of the item, at least 0 and less than ``len(self)``.
        """

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        """Return one item, or a list of items for a slice; negative indices count from the end."""
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
    """Holds the counters that determine all random numbers of a decision (see :mod:`lrl.functional.random`).

    Random numbers depend only on these counters, and therefore not on the number of environments or ranks, nor on which
    rows have finished.
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
    """Tensors ``(row, ...)`` that :meth:`Policy.evaluate` needs to evaluate these turns again."""
    response_mask: Tensor
    """bool ``(row, token)``: the sampled tokens, including the end token."""
    logprobs: Tensor
    """``(row, token)``: log-probabilities of the distribution that was sampled from; 0 where masked."""
    memory: list[History]
    """The history of each row, including this turn."""
    values: Tensor | None = None
    """``(row, token)``: value estimates; None if they are computed later, after the collection."""
    behaviour_logprobs: Tensor | None = None
    """``(row, token)``: log-probabilities according to the generator that sampled, if :attr:`logprobs` are to be those
    of the trainer and tokens are weighted by the ratio; None without weights."""
    replaced: Mapping[int, Any] = field(default_factory=dict)
    """For each row whose action was replaced by a random one: the native action that the actor had chosen; None if the
    response contained no legal action."""


class Distribution(ABC):
    """Abstract base class of the distributions from which tokens are sampled, one for each ``(turn, token)``."""

    @property
    @abstractmethod
    def coordinates(self) -> Tensor:
        """The numbers that parametrise the distributions, which a network outputs, ``(turn, token, coordinate)``."""

    @abstractmethod
    def logprobs(self, samples: Tensor) -> Tensor:
        """Return the log-probabilities of samples, ``(turn, token)``.

        Args:
            samples: int64 ids ``(turn, token)``, or float vectors ``(turn, token, dimension)``.
        """

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the entropy in nats, ``(turn, token)``."""

    @abstractmethod
    def kl(self, other: Distribution) -> Tensor:
        """Return the exact KL(self || other) in nats, ``(turn, token)``."""

    @abstractmethod
    def metric(self, tangent: Tensor) -> Tensor:
        """Multiply a vector by the Hessian of ``KL(self || .)`` with respect to the coordinates, evaluated at ``self``.

        Args:
            tangent: a change of the coordinates, ``(turn, token, coordinate)``.

        Returns:
            The product, ``(turn, token, coordinate)``.
        """

    @abstractmethod
    def detach(self) -> Distribution:
        """Return the same distribution without gradient."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds what a policy computes for past turns: tensors ``(turn, token)`` with gradient."""

    logprobs: Tensor
    """Log-probabilities of the tokens of the turns."""
    entropy: Tensor
    """Entropy in nats of the distribution at each token."""
    values: Tensor | None = None
    """Value of the state before each token; None if the policy has no critic."""
    distribution: Distribution | None = None
    """The distribution of each token; None if the policy computes only the fields above."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Holds the turns of one collection on a grid ``(time, env)``; cells in which no turn was taken are inactive."""

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
    """bool ``(time, env)``: the episode ended at a state that is not terminal, whose value replaces later rewards."""
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
    """1-D tensors by name, with one value per turn or per episode (``success``, ``action_valid``, ``reward/format``
    ...)."""
    behaviour_logprobs: Tensor | None = None
    """``(time, env, token)``, see :attr:`Decisions.behaviour_logprobs`."""
    values: Tensor | None = None
    """``(time, env, token)`` value of the state before each token; None before the critic is evaluated."""
    final_values: Tensor | None = None
    """``(time, env)`` value of the state after a turn where :attr:`cut` is true; 0 elsewhere."""
    ref_logprobs: Tensor | None = None
    """``(time, env, token)`` log-probabilities of the reference policy; None unless the algorithm needs them."""
    state: Tensor | None = None
    """int64 ``(time, env)``: an integer for the observation before each turn, the same for equal observations, and 0
    where inactive; None unless the algorithm compares states."""
    origin: Tensor | None = None
    """int64 ``(time, env, 3)``: seed, number and noise seed (-1 without one) of the episode of each turn; with the same
    actions, a reset with them repeats the episode."""

    @property
    def num_turns(self) -> int:
        """Number of turns that were taken."""
        return int(self.active.sum())

    @property
    def episode_returns(self) -> Tensor:
        """Undiscounted sum of each environment's rewards, ``(env,)``; the return if it played exactly one episode."""
        return (self.rewards * self.active).sum(0)

    @property
    def lengths(self) -> Tensor:
        """Number of turns of each environment, ``(env,)``."""
        return self.active.sum(0)

    @property
    def cut(self) -> Tensor:
        """Turns after which the rollout ends although the next state is not terminal; bool ``(time, env)``.

        Either the turn was truncated, or it is the last turn of its environment and its episode has not ended.
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
        """Select the active cells: convert ``(time, env, ...)`` to ``(turn, ...)``."""
        return values[self.active]

    def unflatten(self, values: Tensor) -> Tensor:
        """Invert :meth:`flatten`: convert ``(turn, ...)`` to ``(time, env, ...)``, with 0 where no turn was taken."""
        out = values.new_zeros(*self.active.shape, *values.shape[1:])
        out[self.active] = values
        return out

    def turns(self) -> TurnBatch:
        """Return the turns that were taken as a batch; their advantages are 0 until they are estimated."""
        logprobs = self.flatten(self.logprobs)
        return TurnBatch(
            inputs={name: self.flatten(tensor) for name, tensor in self.inputs.items()},
            response_mask=self.flatten(self.response_mask),
            old_logprobs=logprobs,
            advantages=torch.zeros_like(logprobs),
        )


@dataclass(frozen=True, kw_only=True)
class Credit:
    """Holds the advantages of a rollout's tokens, and the targets of the value function."""

    advantages: Tensor
    """``(time, env, token)``; 0 where masked."""
    returns: Tensor | None = None
    """``(time, env, token)``, targets of the value function; None for algorithms without a critic."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of any shape by metric name; the mean of each is logged."""


Derive = Callable[[Tensor], Mapping[str, Tensor]]
"""Computes metrics by name, each ``(value,)``, from ``(row, value)``. The value of a metric depends only on its own
column. Means are logged, and maxima for names that end with ``_max``."""
Metrics = Mapping[str, Tensor] | Mapping[str | Derive, Tensor]
"""Values by metric name, or the argument of a function that computes metrics."""


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Holds the loss of each token of a minibatch, before it is reduced to a scalar."""

    loss: Tensor
    """``(turn, token)``."""
    metrics: Metrics = field(default_factory=dict)
    """Tensors of any shape by metric name; the mean of each is logged. Under a function, there is its argument: the
    metrics that it returns are logged, and computed for several minibatches at once."""

"""The interface that every algorithm is written against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from lrl.codecs.codec import TextCodec
from lrl.models.networks import RunningStatistics
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch


class Policy(nn.Module, ABC):
    """Observations to decisions, and decisions back to log-probabilities.

    A policy is stateless: what it remembers of an episode is handed in and handed back.
    """

    codec: TextCodec | None = None

    answers_by_text: bool = False
    """Whether the observation's text and the history alone decide what it does at temperature 0."""

    sampling: SamplingConfig | None = None
    """How tokens are sampled in training; None for a policy that acts natively."""

    has_critic: bool = False
    """Whether it says what states are worth."""

    @property
    @abstractmethod
    def response_format(self) -> str | None:
        """The format of its answers, for the environment that parses them; None for native actions."""

    def connect(self, codec: TextCodec) -> None:
        """Tell the policy what environment it acts in. Called once, before :meth:`configure`."""
        self.codec = codec

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Tell a policy that acts natively what it sees and does. Called once, before :meth:`configure`."""

    def prepare(self, envs: VectorEnv) -> None:
        """Ask the environments for what acting needs beside text; called before their first reset."""

    @abstractmethod
    def configure(self) -> None:
        """Build the networks and load their weights; a second call does nothing."""

    @abstractmethod
    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Decide, without gradient.

        Args:
            observations: one per row.
            memory: one history per row, of the running episode.
            keys: name the random numbers.
            sampling: overrides the policy's own (evaluation at another temperature); None trains.
        """

    @abstractmethod
    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Log-probabilities and entropy of turns that were taken, with gradient, each ``(turn, token)``.

        Args:
            batch: the turns.
            dropout_seed: names what is dropped out; None drops nothing, which RL needs: its first ratio is 1.
        """

    def state_values(self, observations: Sequence[Any], memory: list[History]) -> Tensor:
        """What states are worth in which nothing was decided yet, ``(row,)``, no gradient.

        Args:
            observations: one per row.
            memory: one history per row.

        Raises:
            ValueError: the policy has no critic.
        """
        raise ValueError(f"model.policy is a {type(self).__name__} without critic; it must have one.")

    def critic_parameters(self) -> list[nn.Parameter]:
        """Weights that the critic shares with nothing."""
        return []

    def critic_view(self, batch: TurnBatch, chunk_size: int | None = None) -> Callable[[Tensor], Tensor]:
        """Values as a function of the critic's own weights: what lies below them is computed once.

        Args:
            batch: turns that were taken.
            chunk_size: of them in one pass of what lies below; None takes all at once.

        Returns:
            A function from indices of turns ``(turn,)`` to values ``(turn, token)``, with gradient.
        """

        def values(index: Tensor) -> Tensor:
            out = self.evaluate(batch[index]).values
            assert out is not None
            return out

        return values

    def learn_statistics(
        self, batch: TurnBatch, collection: int, reduce: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Take in a collection, which changes nothing before :meth:`settle_statistics`; twice is as good as once.

        Args:
            batch: what was collected.
            collection: its index in the run.
            reduce: sums a tensor over ranks; None takes it as it is.
        """
        for part in self._statistics():
            part.learn(batch.inputs[part.reads], collection, reduce)

    def settle_statistics(self, collection: int) -> None:
        """Let what was learned before a collection count; called when that one begins."""
        for part in self._statistics():
            part.settle(collection)

    def _statistics(self) -> list[RunningStatistics]:
        """By which what is read is normalised."""
        return [part for part in self.children() if isinstance(part, RunningStatistics)]

    @abstractmethod
    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """``(turn, token)`` log-probabilities under the policy as it was when this run started, no gradient."""

    @abstractmethod
    def build_reference(self, warm_started: bool) -> None:
        """Keep the current weights as the reference.

        Called after :meth:`configure` and ``init_from``, and before a checkpoint is restored.

        Args:
            warm_started: the weights came from another run (``init_from``), not from the base alone.
        """

    @property
    def fingerprint(self) -> str:
        """A short name of the base weights that checkpoints rest on; empty where there is no base."""
        return ""

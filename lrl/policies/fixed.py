"""Policies that learn nothing: what every trained one is compared with."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.functional.random import token_uniforms
from lrl.policies.experts import EnvironmentExpert, Expert, expert_for
from lrl.policies.policy import Policy
from lrl.prompts.response_format import response_format as format_named
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch


class FixedPolicy(Policy):
    """Chooses among the codec's action texts and says its choice in a response format: one slot per turn.

    Args:
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, response_format: str = "think_answer") -> None:
        super().__init__()
        self._format, self._format_name = format_named(response_format), response_format

    @abstractmethod
    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[int]:
        """The index of an action text for each row."""

    @property
    @abstractmethod
    def probability(self) -> float:
        """Of an action that was chosen."""

    @property
    def response_format(self) -> str:
        """As given."""
        return self._format_name

    @property
    def action_texts(self) -> tuple[str, ...]:
        """The texts that are chosen from.

        Raises:
            ValueError: the environment's actions are not finite.
        """
        assert self.codec is not None, "connect() comes first"
        texts = self.codec.action_texts
        if texts is None:
            raise ValueError(f"policy is a {type(self).__name__}; it needs an environment with finitely many actions.")
        return texts

    def configure(self) -> None:
        """There is nothing to load."""

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Say the chosen actions. ``sampling`` changes nothing, and nothing is remembered."""
        texts = self.action_texts
        actions = [self._format.render(texts[index]) for index in self.choose(observations, keys)]
        shape = (len(actions), 1)
        return Decisions(
            actions=actions,
            inputs={},
            response_mask=torch.ones(shape, dtype=torch.bool),
            logprobs=torch.full(shape, math.log(self.probability)),
            memory=memory,
        )

    def evaluate(self, batch: TurnBatch, dropout_seed: int | None = None) -> Evaluation:
        """Always a ValueError."""
        raise self._untrainable()

    def reference_logprobs(self, batch: TurnBatch) -> Tensor:
        """Always a ValueError."""
        raise self._untrainable()

    def build_reference(self, warm_started: bool) -> None:
        """Always a ValueError."""
        raise self._untrainable()

    def _untrainable(self) -> ValueError:
        return ValueError(f"model.policy is a {type(self).__name__}, which cannot be trained; it must have weights.")


class RandomPolicy(FixedPolicy):
    """Every action with the same probability, always in perfect format."""

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[int]:
        """By one uniform number per row."""
        uniforms = token_uniforms(keys, 1)[:, 0]
        return (uniforms * len(self.action_texts)).long().tolist()

    @property
    def probability(self) -> float:
        """One over the number of actions."""
        return 1 / len(self.action_texts)


class ConstantPolicy(FixedPolicy):
    """The same action in every state.

    Args:
        action: its text; None takes the first.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, action: str | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.action = action

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[int]:
        """The index of the action.

        Raises:
            ValueError: the environment has no such action.
        """
        return [self._index()] * len(observations)

    def _index(self) -> int:
        texts = self.action_texts
        if self.action is None:
            return 0
        assert self.codec is not None
        try:
            return texts.index(self.codec.action_to_text(self.codec.text_to_action(self.action)))
        except InvalidActionError as error:
            raise ValueError(f"policy.action is {self.action!r}; it must be one of {', '.join(texts)}.") from error

    @property
    def probability(self) -> float:
        """Certain."""
        return 1.0


class ExpertPolicy(FixedPolicy):
    """The best action of an expert that reads the observation.

    Args:
        expert: text of an observation to the index of the best action; None takes the one that this package has for
            the environment's codec.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, expert: Expert | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.expert = expert

    def connect(self, codec: TextCodec) -> None:
        """Find the expert.

        Raises:
            ValueError: none is given and none is known.
        """
        super().connect(codec)
        if self.expert is None:
            self.expert = expert_for(codec)

    def prepare(self, envs: VectorEnv) -> None:
        """Have the environments advise, if it is their expert that is asked."""
        if isinstance(self.expert, EnvironmentExpert):
            vectorised: Any = envs  # Gymnasium does not type set_attr
            vectorised.set_attr("advises", True)

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[int]:
        """Ask the expert, row by row."""
        assert self.expert is not None, "connect() comes first"
        return [self.expert(text) for text in observations]

    @property
    def probability(self) -> float:
        """Certain."""
        return 1.0

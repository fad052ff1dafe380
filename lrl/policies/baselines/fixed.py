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
from lrl.policies.baselines.experts import EnvironmentExpert, Expert, expert_for
from lrl.policies.policy import Policy
from lrl.prompts.response_format import get_response_format
from lrl.types import Decisions, Evaluation, History, RandomKeys, SamplingConfig, TurnBatch


class FixedPolicy(Policy):
    """Chooses an action's text and says it in a response format: one slot per turn.

    Args:
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, response_format: str = "think_answer") -> None:
        super().__init__()
        self._format, self._format_name = get_response_format(response_format), response_format

    @abstractmethod
    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[str]:
        """The text of an action for each row."""

    @property
    @abstractmethod
    def probability(self) -> float:
        """Of an action that was chosen; nan where there are infinitely many."""

    @property
    def response_format(self) -> str:
        """As given."""
        return self._format_name

    @property
    def text(self) -> TextCodec:
        """The environment's."""
        assert self.codec is not None, "connect() comes first"
        return self.codec

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
        actions = [self._format.render(text) for text in self.choose(observations, keys)]
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

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[str]:
        """By one uniform number per row."""
        return [self.text.random_action_text(uniform) for uniform in token_uniforms(keys, 1)[:, 0].tolist()]

    @property
    def probability(self) -> float:
        """One over the number of actions."""
        texts = self.text.action_texts
        return math.nan if texts is None else 1 / len(texts)


class ConstantPolicy(FixedPolicy):
    """The same action in every state.

    Args:
        action: its text; None takes the first, or zero where actions are numbers.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, action: str | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.action = action

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[str]:
        """The action.

        Raises:
            ValueError: the environment has no such action.
        """
        return [self._constant()] * len(observations)

    def _constant(self) -> str:
        if self.action is None:
            return self.text.default_action_text
        try:
            return self.text.action_to_text(self.text.text_to_action(self.action))
        except InvalidActionError as error:
            raise ValueError(f"policy.action is {self.action!r}, which is not legal: {error}.") from error

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

    def choose(self, observations: Sequence[str], keys: RandomKeys) -> list[str]:
        """Ask the expert, row by row."""
        assert self.expert is not None, "connect() comes first"
        return [self.text.action_to_text(self.expert(text)) for text in observations]

    @property
    def probability(self) -> float:
        """Certain."""
        return 1.0

"""Actors that learn nothing, as baselines: random, constant, expert."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
from gymnasium.vector import VectorEnv

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.functional.random import token_uniforms
from lrl.policies.actor import Actor
from lrl.policies.baselines.experts import EnvironmentExpert, Expert, expert_for
from lrl.prompts.response_format import get_response_format
from lrl.types import Decisions, History, RandomKeys, SamplingConfig


class FixedActor(Actor):
    """Chooses the text of an action and writes it in a response format; its log-probabilities have one token per turn.

    Args:
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, response_format: str = "think_answer") -> None:
        super().__init__()
        self._format, self._format_name = get_response_format(response_format), response_format

    @abstractmethod
    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Return the text of an action for each row."""

    @property
    @abstractmethod
    def probability(self) -> float:
        """Probability of a chosen action; nan where there are infinitely many."""

    @property
    def response_format(self) -> str:
        """The response format, by name."""
        return self._format_name

    @property
    def text(self) -> TextCodec:
        """The codec of the environment."""
        assert self.codec is not None, "connect() comes first"
        return self.codec

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Respond with the chosen actions. ``sampling`` changes nothing, and nothing is remembered."""
        actions = [self._format.render(text) for text in self.choose(observations, keys)]
        shape = (len(actions), 1)
        return Decisions(
            actions=actions,
            inputs={},
            response_mask=torch.ones(shape, dtype=torch.bool),
            logprobs=torch.full(shape, math.log(self.probability)),
            memory=memory,
        )


@final
class RandomActor(FixedActor):
    """Takes every action with the same probability, always in a valid format."""

    def connect(self, codec: TextCodec) -> None:
        """Set the codec.

        Raises:
            ValueError: the actions cannot be sampled.
        """
        super().connect(codec)
        codec.random_action_text(0.0)

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Sample an action per row from one uniform number."""
        return [self.text.random_action_text(uniform) for uniform in token_uniforms(keys, 1)[:, 0].tolist()]

    @property
    def probability(self) -> float:
        """One over the number of actions; nan where there are infinitely many."""
        texts = self.text.action_texts
        return math.nan if texts is None else 1 / len(texts)


@final
class ConstantActor(FixedActor):
    """Takes the same action in every state.

    Args:
        action: its text; None takes the first action, or zero where actions are numbers.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    greedy_is_reproducible = True

    def __init__(self, action: str | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.action = action

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Repeat the action for each row.

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
        """Probability of the action, which is certain: 1."""
        return 1.0


@final
class ExpertActor(FixedActor):
    """Takes the best action, by an expert that reads the observation.

    Args:
        expert: from an observation to the best action; None takes the expert that this package has for the
            environment's codec.
        response_format: ``direct``, ``think_answer`` or ``final_answer``.
    """

    def __init__(self, expert: Expert | None = None, response_format: str = "think_answer") -> None:
        super().__init__(response_format)
        self.expert = expert
        self.greedy_is_reproducible = not isinstance(expert, EnvironmentExpert)

    def connect(self, codec: TextCodec) -> None:
        """Set the codec, and look up the expert for it.

        Raises:
            ValueError: no expert is given and none is known.
        """
        super().connect(codec)
        if self.expert is None:
            self.expert = expert_for(codec)
        self.greedy_is_reproducible = not isinstance(self.expert, EnvironmentExpert)  # which sees more than the text

    def prepare(self, envs: VectorEnv) -> None:
        """Make the environments add their expert's action to observations, if that expert is used."""
        if isinstance(self.expert, EnvironmentExpert):
            vectorised: Any = envs  # Gymnasium does not type set_attr
            vectorised.set_attr("advises", True)

    def choose(self, observations: Sequence[Any], keys: RandomKeys) -> list[str]:
        """Ask the expert, row by row."""
        assert self.expert is not None, "connect() comes first"
        return [self.text.action_to_text(self.expert(observation)) for observation in observations]

    @property
    def probability(self) -> float:
        """Probability of the action, which is certain: 1."""
        return 1.0

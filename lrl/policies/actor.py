"""Interface of everything that acts: it converts observations to actions and need not be trainable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.prompt_env import PromptEnv
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import Decisions, History, RandomKeys, SamplingConfig


class Actor(nn.Module, ABC):
    """Abstract base class of everything that decides on actions: baselines, served models and trainable policies.

    An actor is stateless: the history of an episode is passed in and returned. It is a torch module, with or without
    weights, so that all actors are moved to a device in the same way.
    """

    codec: TextCodec | None = None

    prompt: PromptTemplate | None = None
    """Turns an observation into a prompt; None if the actor reads no prompts."""

    sampling: SamplingConfig = SamplingConfig(max_new_tokens=1)
    """How actions are sampled in training. A response that is not text counts as one token."""

    greedy_is_reproducible: bool = False
    """Whether actions at temperature 0 depend only on the text of the observation and the history."""

    writes_text: bool = False
    """Whether a response is free text, which may contain no legal action."""

    asks_chat_model: bool = False
    """Whether responses come from a chat model, which may cost money. After a greedy first response, further responses
    to the same prompt are then reproducible as well."""

    @property
    @abstractmethod
    def response_format(self) -> str | None:
        """Name of the format of responses, which the environment parses; None if actions are native."""

    def connect(self, codec: TextCodec) -> None:
        """Set the codec of the environment. Called once, before :meth:`configure`."""
        self.codec = codec

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces of one environment, if actions are native. Called once, before :meth:`configure`."""

    def prepare(self, envs: VectorEnv) -> None:
        """Configure the environments for this actor. Called before their first reset.

        By default, rows that are steps of recorded episodes show as many past turns as the prompt contains.
        """
        if self.prompt is not None and isinstance(envs, PromptEnv):
            envs.max_past_turns = self.prompt.max_past_turns

    def configure(self) -> None:  # noqa: B027 (most actors have no weights)
        """Build the networks and load their weights; further calls do nothing."""

    def end_episodes(self) -> None:  # noqa: B027 (most actors keep nothing)
        """Free memory that is needed only while episodes are played. Called after an evaluation or a collection."""

    @abstractmethod
    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Decide for a batch of environments, without gradient.

        Args:
            observations: one per row.
            memory: the history of the current episode, one per row.
            keys: counters that determine the random numbers.
            sampling: how to sample; in training :attr:`sampling` itself.
        """

    def act_again(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig,
        attempt: int,
        greedy: bool,
    ) -> Decisions:
        """Decide again, with other random numbers, after responses without a legal action.

        Args:
            observations: one per row.
            memory: the history before this turn, one per row.
            keys: the counters of the first response.
            sampling: how to sample the further response.
            attempt: number of the further response, from 1.
            greedy: whether the first response was sampled at temperature 0.
        """
        return self.act(observations, memory, replace(keys, purpose=f"{keys.purpose} {attempt}"), sampling)

    def sampling_at(self, temperature: float) -> SamplingConfig:
        """Return :attr:`sampling` with another temperature."""
        return replace(self.sampling, temperature=temperature)

    def action_text(self, action: Any) -> str:
        """Return the text of the action in a native action or response; empty if it is not legal."""
        assert self.codec is not None, "connect() comes first"
        if self.response_format is None:
            return self.codec.action_to_text(action)
        try:
            text = get_response_format(self.response_format).extract(action)
            return self.codec.action_to_text(self.codec.text_to_action(text))
        except InvalidActionError:
            return ""

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the prompt that a language model reads; empty if there is none."""
        return ""

    def report(self) -> dict[str, Any]:
        """Return counts of prompts and requests by name, for a JSON file; empty if nothing is counted."""
        return {}


def without_tokens(actions: Sequence[Any], memory: list[History]) -> Decisions:
    """Return decisions whose tokens are unknown, and from which nothing can be learned."""
    none = torch.zeros(len(actions), 0)
    return Decisions(actions=actions, inputs={}, response_mask=none.bool(), logprobs=none, memory=memory)


class ActorWrapper(Actor, ABC):
    """Wraps another actor, as :class:`gymnasium.Wrapper` wraps an environment; a subclass defines :meth:`act`.

    Args:
        actor: the wrapped actor, connected and configured.
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor, self.codec, self.sampling = actor, actor.codec, actor.sampling

    @property
    def response_format(self) -> str | None:
        """The response format of the wrapped actor."""
        return self.actor.response_format

    def prepare(self, envs: VectorEnv) -> None:
        """Prepare the environments for the wrapped actor."""
        self.actor.prepare(envs)

    def end_episodes(self) -> None:
        """Free memory of the wrapped actor."""
        self.actor.end_episodes()

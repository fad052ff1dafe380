"""Actor: the interface of everything that chooses actions from observations, trainable or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.prompt_env import PromptEnv
from lrl.prompts import PromptTemplate, get_response_format
from lrl.types import Decisions, History, RandomKeys, SamplingConfig


class Actor(nn.Module, ABC):
    """Abstract base class of everything that chooses actions: baselines, chat models and trainable policies.

    An actor does not store the history of an episode: :meth:`act` takes it as an argument and returns the new one.
    Every actor is a torch module, even without weights, so that all can be moved to a device in the same way.
    """

    codec: TextCodec | None = None
    """Converts between native and text observations and actions; None before :meth:`connect`."""

    prompt: PromptTemplate | None = None
    """Template of the prompts; None if the actor does not use prompts."""

    sampling: SamplingConfig = SamplingConfig(max_new_tokens=1)
    """Sampling settings in training. A response that is not generated as text counts as one token."""

    greedy_is_reproducible: bool = False
    """Whether actions at temperature 0 depend only on the text of the observation and the history."""

    writes_text: bool = False
    """Whether a response is free text, which may contain no legal action."""

    asks_chat_model: bool = False
    """Whether responses are requested from a chat model, which may cost money. If the first response to a prompt was
    greedy, further responses to the same prompt are reproducible as well."""

    @property
    @abstractmethod
    def response_format(self) -> str | None:
        """Name of the response format that the environment parses; None if actions are native."""

    def connect(self, codec: TextCodec) -> None:
        """Set the codec of the environment. Called once, before :meth:`configure`."""
        self.codec = codec

    def connect_spaces(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        """Set the spaces of a single environment. Called once, before :meth:`configure`, if actions are native."""

    def prepare(self, envs: VectorEnv) -> None:
        """Configure the environments for this actor. Called before their first reset.

        By default, a data set of prompts that are steps of recorded episodes is told how many past turns the prompt
        contains.

        Args:
            envs: vectorised environments that the actor will play.
        """
        if self.prompt is not None and isinstance(envs, PromptEnv):
            envs.max_past_turns = self.prompt.max_past_turns

    def configure(self) -> None:  # noqa: B027 (most actors have no weights)
        """Build the networks and load their weights; further calls do nothing."""

    def end_episodes(self) -> None:  # noqa: B027 (most actors keep nothing)
        """Free memory that is used only while episodes are played. Called after each evaluation and each collection."""

    @abstractmethod
    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Choose one action per row, without gradient.

        Args:
            observations: current observations, one per row.
            memory: histories of the current episodes, one per row.
            keys: counters that determine the random numbers.
            sampling: sampling settings; in training, this is the object :attr:`sampling` itself.

        Returns:
            The actions, the histories including this turn, and the tokens from which a policy can be trained.
        """

    def predict(
        self, observations: Sequence[Any], memory: list[History] | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Sequence[Any], list[History]]:
        """Choose one action per row in your own loop, greedily or, if ``rng`` is given, by sampling.

        It resembles ``predict`` of Stable-Baselines3, whose ``state`` is ``memory``.

        Args:
            observations: current observations, one per row.
            memory: what the last call returned; None at the beginning of all episodes. The entry of a row whose
                environment was reset must be set to ``()``.
            rng: random generator, the same for all turns; the temperature is then 1. Without it, ``RandomActor``
                repeats its action.

        Returns:
            One action per row for the ``step`` of the environments, and the memory for their next turn.

        Raises:
            ValueError: If the actor has no environment, or an argument is not as described.
        """
        spaces = getattr(self, "spaces", None) or (None, None)
        reads_text = self.response_format is not None
        if self.codec is None and spaces[0] is None:
            call = "connect(factory.codec)" if reads_text else "connect_spaces(observation_space, action_space)"
            raise ValueError(
                "this policy has no environment; train or evaluate it first, load it from a run, or call "
                f"policy.{call}."
            )
        if rng is not None and not isinstance(rng, np.random.Generator):
            raise ValueError(f"rng is {rng!r}; it must be a generator such as numpy.random.default_rng(0).")
        self._check_rows(observations, None if reads_text or spaces[0] is None else spaces[0].shape)
        rows = len(observations)
        memory = [()] * rows if memory is None else memory
        if not isinstance(memory, list) or len(memory) != rows:
            raise ValueError(f"memory must be a list of {rows} histories, one per observation, as predict returns it.")
        if not rows:
            return [], []
        self.configure()
        seed, temperature = (0, 0.0) if rng is None else (int(rng.integers(2**63)), 1.0)
        env, turn = np.arange(rows), np.zeros(rows, np.int64)
        keys = RandomKeys(seed=seed, purpose="predict", collection=0, env=env, turn=turn)
        decisions = self.act(observations, memory, keys, self.sampling_at(temperature))
        return decisions.actions, decisions.memory

    def _check_rows(self, observations: Sequence[Any], shape: tuple[int, ...] | None) -> None:
        """Check that there is a list of observations: texts, or arrays of a shape if one is given.

        Raises:
            ValueError: If this is not so.
        """
        if isinstance(observations, str | Real):
            raise ValueError("observations is a single observation; it must be a list of them, one per row.")
        for row in observations:
            if self.response_format is not None and not isinstance(row, str):
                raise ValueError(
                    f"observations contains {type(row).__name__}; this policy reads texts, which the environments of "
                    "lrl.GymnasiumEnvs(...).make(number, policy.response_format) return."
                )
            if shape is not None and np.shape(row) != shape:
                raise ValueError(
                    f"observations must be a list of arrays of shape {shape}, one per row; one of its entries has the "
                    f"type {type(row).__name__} and the shape {np.shape(row)}."
                )

    def act_again(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig,
        attempt: int,
        greedy: bool,
    ) -> Decisions:
        """Choose again, with other random numbers, for rows whose response contained no legal action.

        Args:
            observations: current observations, one per row.
            memory: histories before this turn, one per row.
            keys: the counters of the first response.
            sampling: sampling settings of the further response.
            attempt: number of the further response, starting at 1.
            greedy: whether the first response was sampled at temperature 0.
        """
        return self.act(observations, memory, replace(keys, purpose=f"{keys.purpose} {attempt}"), sampling)

    def sampling_at(self, temperature: float) -> SamplingConfig:
        """Return :attr:`sampling` with another temperature."""
        return replace(self.sampling, temperature=temperature)

    def action_text(self, action: Any) -> str:
        """Return the action as text; empty if it is not legal.

        Args:
            action: a native action, or a response that contains an action.
        """
        assert self.codec is not None, "connect() comes first"
        if self.response_format is None:
            return self.codec.action_to_text(action)
        try:
            text = get_response_format(self.response_format).extract(action)
            return self.codec.action_to_text(self.codec.text_to_action(text))
        except InvalidActionError:
            return ""

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the prompt for an observation as text, for display; empty if the actor does not use prompts."""
        return ""

    def report(self) -> dict[str, Any]:
        """Return counts of prompts and requests by name, which a result file contains; empty if nothing is counted."""
        return {}


def without_tokens(actions: Sequence[Any], memory: list[History]) -> Decisions:
    """Return decisions without tokens, which can be played but cannot be trained on.

    Args:
        actions: one text or native action per row.
        memory: histories including this turn, one per row.
    """
    empty = torch.zeros(len(actions), 0)
    return Decisions(actions=actions, inputs={}, response_mask=empty.bool(), logprobs=empty, memory=memory)


class ActorWrapper(Actor, ABC):
    """Abstract base class of wrappers of another actor, similar to :class:`gymnasium.Wrapper`.

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

"""The actor that samples a response again where it holds no legal action, for policies that write text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from gymnasium.vector import VectorEnv

from lrl.codecs.codec import TextCodec
from lrl.policies.actor import Actor, ActorWrapper
from lrl.prompts.template import PromptTemplate
from lrl.ranges import NonNegativeFloat, NonNegativeInt, check_fields
from lrl.types import Decisions, History, RandomKeys, SamplingConfig

# The actor that remembers the greedy responses of another one.

_CACHED = 20_000
"""Greedy responses after which the cache is emptied."""


@final
class ResponseCache(ActorWrapper):
    """Acts as a greedy policy does, but asks it only once for the same observation and history.

    Args:
        actor: its actions at temperature 0 depend on nothing else (``greedy_is_reproducible``).
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self._responses: dict[tuple[Any, History], tuple[Any, History]] = {}

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Return the greedy responses; no token counts as sampled."""
        if len(self._responses) > _CACHED:
            self._responses.clear()
        states = list(zip(observations, memory, strict=True))
        new = {state: row for row, state in enumerate(states) if state not in self._responses}
        if new:
            rows = list(new.values())
            some = replace(keys, env=keys.env[rows], turn=keys.turn[rows])
            decisions = self.actor.act([seen for seen, _ in new], [history for _, history in new], some, sampling)
            self._responses.update(zip(new, zip(decisions.actions, decisions.memory, strict=True), strict=True))
        responses, histories = zip(*(self._responses[state] for state in states), strict=True)
        none = torch.zeros(len(states), 0)
        return Decisions(actions=responses, inputs={}, response_mask=none.bool(), logprobs=none, memory=list(histories))


@dataclass(frozen=True, kw_only=True)
class InvalidRetryConfig:
    """Configures how often a turn is asked again because its response holds no legal action.

    The defaults are those of rlft4rl, which raises after the last one; here the environment's rule for invalid actions
    comes then.
    """

    max_retries: NonNegativeInt = 10
    """Maximum number of further responses to one prompt; 0 takes the first, whatever it is."""
    temperature: NonNegativeFloat = 0.3
    """Temperature of the further responses."""

    def __post_init__(self) -> None:
        check_fields(self, "invalid_retries")


@dataclass(kw_only=True)
class TurnCounts:
    """Counts responses; greedy evaluation of a chat model counts equal prompts once."""

    asked: int = 0
    """Prompts that were asked."""
    asked_again: int = 0
    """Prompts whose first response held no legal action, and that were asked again."""
    further_responses: int = 0
    """Responses after the first ones."""
    still_invalid: int = 0
    """Prompts whose last response held no legal action."""


@final
class RetryingActor(ActorWrapper):
    """Plays as another actor does, and samples a response again where it holds no legal action.

    A greedy policy that once writes an invalid response often writes it again in the next turn, as the state stays the
    same. Only for playing: in training every response that was sampled counts.

    Args:
        actor: writes text.
        invalid_retries: how often a response is sampled again, and at which temperature.

    Raises:
        ValueError: the actor does not write text, or would write the same response again.

    Attributes:
        counts: what was asked so far.
    """

    writes_text = True

    def __init__(self, actor: Actor, invalid_retries: InvalidRetryConfig) -> None:
        super().__init__(actor)
        if not actor.writes_text:
            raise ValueError(
                f"invalid_retries.max_retries is {invalid_retries.max_retries}, but a {type(actor).__name__} writes no "
                "responses that could be invalid; it must be 0."
            )
        if invalid_retries.temperature == 0:
            raise ValueError(
                "invalid_retries.temperature is 0, at which a response would be the same again; it must be positive."
            )
        self.invalid_retries, self.counts = invalid_retries, TurnCounts()
        self._greedy: Actor = actor

    @property
    def prompt(self) -> PromptTemplate | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The prompt of the actor, which setting it changes."""
        return self.actor.prompt

    @prompt.setter
    def prompt(self, prompt: PromptTemplate | None) -> None:
        self.actor.prompt, self._greedy = prompt, self.actor

    def connect(self, codec: TextCodec) -> None:
        """Set the codec of the environment."""
        super().connect(codec)
        self.actor.connect(codec)
        self._greedy = self.actor

    def prepare(self, envs: VectorEnv) -> None:
        """Prepare the environments for the actor, whose greedy responses are kept until the next ones."""
        super().prepare(envs)
        self._greedy = ResponseCache(self.actor) if self.actor.greedy_is_reproducible else self.actor

    def configure(self) -> None:
        """Load the actor's weights."""
        self.actor.configure()

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Decide as the actor does, and again for rows without a legal action; no token counts as sampled."""
        sampling = self.sampling if sampling is None else sampling
        first = self._greedy if sampling.temperature == 0 else self.actor
        decisions = first.act(observations, memory, keys, sampling)
        actions, histories = list(decisions.actions), list(decisions.memory)
        again, wrong = replace(sampling, temperature=self.invalid_retries.temperature), self._invalid(actions)
        self.counts.asked += len(actions)
        self.counts.asked_again += len(wrong) if self.invalid_retries.max_retries else 0
        for attempt in range(1, self.invalid_retries.max_retries + 1):
            if not wrong:
                break
            self.counts.further_responses += len(wrong)
            own = replace(keys, purpose=f"{keys.purpose} {attempt}", env=keys.env[wrong], turn=keys.turn[wrong])
            further = self.actor.act([observations[row] for row in wrong], [memory[row] for row in wrong], own, again)
            for row, action, history in zip(wrong, further.actions, further.memory, strict=True):
                actions[row], histories[row] = action, history
            wrong = self._invalid(actions)
        self.counts.still_invalid += len(wrong)
        none = torch.zeros(len(actions), 0)
        return Decisions(actions=actions, inputs={}, response_mask=none.bool(), logprobs=none, memory=histories)

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the actor's prompt."""
        return self.actor.prompt_text(observation, history)

    def report(self) -> dict[str, Any]:
        """Return how many prompts were asked, and how often again, by name, for a JSON file."""
        return asdict(self.counts)

    def _invalid(self, actions: Sequence[Any]) -> list[int]:
        """Return the rows whose response holds no legal action."""
        return [row for row, action in enumerate(actions) if not self.action_text(action)]

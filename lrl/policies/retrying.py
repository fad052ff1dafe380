"""Wrappers of actors: a cache of greedy responses, and retries of responses without a legal action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from gymnasium.vector import VectorEnv

from lrl.codecs.codec import TextCodec
from lrl.policies.actor import Actor, ActorWrapper, without_tokens
from lrl.prompts import PromptTemplate
from lrl.ranges import NonNegativeFloat, NonNegativeInt, check_fields
from lrl.types import Decisions, History, RandomKeys, SamplingConfig

_MAX_CACHED = 20_000
"""Number of greedy responses above which the cache is emptied."""


@final
class ResponseCache(ActorWrapper):
    """Wraps a greedy actor, and computes the response to the same observation and history only once.

    Args:
        actor: an actor with ``greedy_is_reproducible``: its greedy actions depend only on observation and history.
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self._responses: dict[tuple[Any, History], tuple[Any, History]] = {}

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Return the greedy responses, from the cache where possible; the decisions have no tokens."""
        if len(self._responses) > _MAX_CACHED:
            self._responses.clear()
        states = list(zip(observations, memory, strict=True))
        new = {state: row for row, state in enumerate(states) if state not in self._responses}
        if new:
            rows = list(new.values())
            new_keys = replace(keys, env=keys.env[rows], turn=keys.turn[rows])
            new_observations, new_memory = map(list, zip(*new, strict=True))
            decisions = self.actor.act(new_observations, new_memory, new_keys, sampling)
            self._responses.update(zip(new, zip(decisions.actions, decisions.memory, strict=True), strict=True))
        responses, histories = zip(*(self._responses[state] for state in states), strict=True)
        return without_tokens(responses, list(histories))


@dataclass(frozen=True, kw_only=True)
class InvalidRetryConfig:
    """Configures how often a response without a legal action is sampled again.

    If the last response is still invalid, the environment's rule for invalid actions applies. The defaults are those of
    rlft4rl, which instead raises an error in this case.
    """

    max_retries: NonNegativeInt = 10
    """Maximum number of further responses to a prompt; 0 always uses the first response."""
    temperature: NonNegativeFloat = 0.3
    """Temperature of the further responses."""

    def __post_init__(self) -> None:
        check_fields(self, "invalid_retries")


@dataclass(kw_only=True)
class TurnCounts:
    """Counts prompts and responses. In greedy evaluation of a chat model, equal prompts count once."""

    asked: int = 0
    """Number of prompts."""
    asked_again: int = 0
    """Number of prompts whose first response contained no legal action and was sampled again."""
    further_responses: int = 0
    """Number of responses in addition to the first response to each prompt."""
    still_invalid: int = 0
    """Number of prompts whose last response contained no legal action."""


@final
class RetryingActor(ActorWrapper):
    """Wraps an actor that responds in text, and samples a response again if it contains no legal action.

    A greedy policy often repeats an invalid response in the next turn, because the state has not changed. The wrapper
    is used in evaluation only, because training needs every sampled response.

    Args:
        actor: an actor that responds in text.
        invalid_retries: how often a response is sampled again, and at which temperature.

    Raises:
        ValueError: If retries are configured and the actor does not respond in text, or the temperature of the retries
            is 0.

    Attributes:
        counts: counts since the construction of this object.
    """

    writes_text = True

    def __init__(self, actor: Actor, invalid_retries: InvalidRetryConfig = InvalidRetryConfig()) -> None:
        super().__init__(actor)
        if invalid_retries.max_retries and not actor.writes_text:
            raise ValueError(
                f"invalid_retries.max_retries is {invalid_retries.max_retries}, but a {type(actor).__name__} writes no "
                "responses that could be invalid; it must be 0."
            )
        if invalid_retries.max_retries and invalid_retries.temperature == 0:
            raise ValueError(
                "invalid_retries.temperature is 0, at which further responses would all be equal; it must be positive."
            )
        self.invalid_retries, self.counts = invalid_retries, TurnCounts()
        self.asks_chat_model = actor.asks_chat_model
        # Further responses of other actors differ between episodes, so the caller must not cache them by observation.
        self.greedy_is_reproducible = actor.greedy_is_reproducible and actor.asks_chat_model
        self._greedy: Actor = actor

    @property
    def prompt(self) -> PromptTemplate | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The prompt of the wrapped actor; setting it changes that actor."""
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
        """Prepare the environments for the wrapped actor, and empty the cache of its greedy responses."""
        super().prepare(envs)
        # If this wrapper is reproducible as well, the caller caches its responses.
        must_cache = self.actor.greedy_is_reproducible and not self.greedy_is_reproducible
        self._greedy = ResponseCache(self.actor) if must_cache else self.actor

    def configure(self) -> None:
        """Load the weights of the wrapped actor."""
        self.actor.configure()

    def act(
        self, observations: Sequence[Any], memory: list[History], keys: RandomKeys, sampling: SamplingConfig
    ) -> Decisions:
        """Return the wrapped actor's responses, sampled again where they contain no legal action; without tokens."""
        greedy = sampling.temperature == 0
        decisions = (self._greedy if greedy else self.actor).act(observations, memory, keys, sampling)
        actions, histories = list(decisions.actions), list(decisions.memory)
        retry_sampling = replace(sampling, temperature=self.invalid_retries.temperature)
        invalid = self._invalid(actions)
        self.counts.asked += len(actions)
        self.counts.asked_again += len(invalid) if self.invalid_retries.max_retries else 0
        for attempt in range(1, self.invalid_retries.max_retries + 1):
            if not invalid:
                break
            self.counts.further_responses += len(invalid)
            rows = [observations[row] for row in invalid], [memory[row] for row in invalid]
            retry_keys = replace(keys, env=keys.env[invalid], turn=keys.turn[invalid])
            further = self.actor.act_again(*rows, retry_keys, retry_sampling, attempt, greedy)
            for row, action, history in zip(invalid, further.actions, further.memory, strict=True):
                actions[row], histories[row] = action, history
            invalid = self._invalid(actions)
        self.counts.still_invalid += len(invalid)
        return without_tokens(actions, histories)

    def prompt_text(self, observation: Any, history: History) -> str:
        """Return the prompt of the wrapped actor."""
        return self.actor.prompt_text(observation, history)

    def report(self) -> dict[str, Any]:
        """Return the counts, the retry settings and the report of the wrapped actor, which a result file contains."""
        return {**asdict(self.counts), **self.actor.report(), "invalid_retries": asdict(self.invalid_retries)}

    def _invalid(self, actions: Sequence[Any]) -> list[int]:
        """Return the rows whose response contains no legal action."""
        return [row for row, action in enumerate(actions) if not self.action_text(action)]

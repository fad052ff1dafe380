"""Prompt template that turns an observation and the history of an episode into chat messages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.prompts.response_format import get_response_format
from lrl.types import History, PastTurn

Message = dict[str, str]
"""Chat message ``{"role": "system" | "user" | "assistant", "content": ...}``."""

HIDDEN_RESPONSE = "Generated invalid action"
"""Text that replaces a hidden invalid response in the history, as in RL-LLM."""


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Configures the system message, few-shot examples, history and response format of prompts."""

    response_format: str = "think_answer"
    """``direct``, ``think_answer`` or ``final_answer``."""
    stop: str | None = None
    """Text that ends a response, as ``</action>``; null takes that of the response format."""
    system: str | None = None
    """System message; null selects the codec's description and the format's instruction, ``""`` omits the message."""
    history: int = 0
    """Maximum number of past turns of the current episode in a prompt."""
    examples: Sequence[PastTurn] = field(default_factory=tuple)
    """Few-shot examples, which precede the history."""
    num_examples: int = 0
    """Number of ``examples`` to generate with the expert of the training environment, if none are given."""
    examples_from: str | None = None
    """Minari data set whose turns are the ``num_examples`` examples, in place of the expert's."""
    hide_invalid_in_context: bool = False
    """Whether the history contains :data:`HIDDEN_RESPONSE` instead of responses without a legal action."""

    def __post_init__(self) -> None:
        get_response_format(self.response_format)
        if self.history < 0:
            raise ValueError(f"prompt.history is {self.history}; it must be 0 (no history) or more.")
        if self.num_examples < 0:
            raise ValueError(f"prompt.num_examples is {self.num_examples}; it must be 0 (none) or more.")
        if self.examples_from is not None and not self.num_examples:
            raise ValueError(f"prompt.examples_from is {self.examples_from!r}, but prompt.num_examples is 0.")
        if self.examples and self.num_examples not in (0, len(self.examples)):
            raise ValueError(
                f"prompt.num_examples is {self.num_examples}, but {len(self.examples)} prompt.examples are given; "
                "it must be 0 if examples are given."
            )
        if self.hide_invalid_in_context and not self.history:
            warnings.warn("prompt.hide_invalid_in_context is ignored: prompt.history is 0.", stacklevel=2)

    def system_text(self, codec: TextCodec) -> str:
        """Return the content of the system message."""
        if self.system is not None:
            return self.system
        return f"{codec.description} {get_response_format(self.response_format).instruction}"

    def messages(self, codec: TextCodec, observation: str, history: History = ()) -> list[Message]:
        """Return the chat messages of a turn, ending with the current observation.

        Args:
            codec: The codec of the environment.
            observation: The text of the current observation.
            history: Past turns of the episode, oldest first.

        Raises:
            ValueError: If examples have to be generated first.
        """
        if len(self.examples) < self.num_examples:
            raise ValueError(f"prompt.num_examples is {self.num_examples}, but no examples have been generated yet.")
        system = self.system_text(codec)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for turn in (*self.examples, *self.truncate_history(history)):
            messages.append({"role": "user", "content": turn.observation})
            messages.append({"role": "assistant", "content": turn.response})
        return [*messages, {"role": "user", "content": observation}]

    def with_examples(self, examples: Sequence[PastTurn]) -> PromptTemplate:
        """Return a copy with the given few-shot examples."""
        return replace(self, examples=tuple(examples))

    def extend_history(self, codec: TextCodec, history: History, observation: str, response: str) -> History:
        """Append a turn to ``history`` and drop the turns that later prompts do not contain."""
        if not self.history:
            return ()
        return self.truncate_history((*history, self._past_turn(codec, observation, response)))

    def truncate_history(self, history: History) -> History:
        """Return the last turns of ``history`` that a prompt contains."""
        return history[max(0, len(history) - self.history) :]

    def _past_turn(self, codec: TextCodec, observation: str, response: str) -> PastTurn:
        if self.hide_invalid_in_context:
            try:
                codec.text_to_action(get_response_format(self.response_format).extract(response))
            except InvalidActionError:
                return PastTurn(observation, HIDDEN_RESPONSE)
        return PastTurn(observation, response)

"""From an observation and what was remembered to chat messages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.prompts.response_format import response_format
from lrl.types import History, PastTurn

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": ...}``"""

HIDDEN = "Generated invalid action"
"""What stands in the history for an answer that was no legal action, if such answers are hidden (RL-LLM's words)."""


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """System text, examples, history window and response format."""

    response_format: str = "think_answer"
    """``direct``, ``think_answer`` or ``final_answer``."""
    system: str | None = None
    """System text; null takes the codec's description and the format's instruction. ``""`` leaves it out."""
    history: int = 0
    """How many past turns of the running episode the policy sees."""
    examples: Sequence[PastTurn] = field(default_factory=tuple)
    """Few-shot turns, shown before the history."""
    num_examples: int = 0
    """How many ``examples`` to draw from the expert of the training environment, if none are given."""
    hide_invalid_in_context: bool = False
    """Whether an answer that was no legal action is remembered as :data:`HIDDEN` instead of as it was."""

    def __post_init__(self) -> None:
        response_format(self.response_format)
        if self.history < 0:
            raise ValueError(f"prompt.history is {self.history}; it must be 0 (no memory) or more.")
        if self.num_examples < 0:
            raise ValueError(f"prompt.num_examples is {self.num_examples}; it must be 0 (none) or more.")
        if self.examples and self.num_examples not in (0, len(self.examples)):
            raise ValueError(
                f"prompt.num_examples is {self.num_examples}, but {len(self.examples)} prompt.examples are given; "
                "it must be 0 with examples of your own."
            )
        if self.hide_invalid_in_context and not self.history:
            warnings.warn("prompt.hide_invalid_in_context is ignored: prompt.history is 0.", stacklevel=2)

    def system_text(self, codec: TextCodec) -> str:
        """The system message's content."""
        if self.system is not None:
            return self.system
        return f"{codec.description} {response_format(self.response_format).instruction}"

    def messages(self, codec: TextCodec, observation: str, history: History = ()) -> list[Message]:
        """Chat messages that end with the current observation.

        Raises:
            ValueError: examples are to be drawn and have not been.
        """
        if len(self.examples) < self.num_examples:
            raise ValueError(f"prompt.num_examples is {self.num_examples}, but no examples have been drawn yet.")
        system = self.system_text(codec)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for turn in (*self.examples, *self.window(history)):
            messages.append({"role": "user", "content": turn.observation})
            messages.append({"role": "assistant", "content": turn.response})
        return [*messages, {"role": "user", "content": observation}]

    def with_examples(self, examples: Sequence[PastTurn]) -> PromptTemplate:
        """A copy that shows these turns."""
        return replace(self, examples=tuple(examples))

    def remembered(self, codec: TextCodec, observation: str, response: str) -> PastTurn:
        """What the history keeps of a turn."""
        if self.hide_invalid_in_context:
            try:
                codec.text_to_action(response_format(self.response_format).extract(response))
            except InvalidActionError:
                return PastTurn(observation, HIDDEN)
        return PastTurn(observation, response)

    def remember(self, codec: TextCodec, history: History, observation: str, response: str) -> History:
        """``history`` and one more turn, as far as later prompts will show them."""
        if not self.history:
            return ()
        return self.window((*history, self.remembered(codec, observation, response)))

    def window(self, history: History) -> History:
        """The part of ``history`` that is shown: its last turns, as many as the setting says."""
        return history[max(0, len(history) - self.history) :]

"""Prompt templates, which build chat messages from observations and histories, and formats of responses."""

from __future__ import annotations

import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.types import History, PastTurn

Message = dict[str, str]
"""Chat message ``{"role": "system" | "user" | "assistant", "content": ...}``."""

HIDDEN_RESPONSE = "Generated invalid action"
"""Text that replaces a hidden invalid response in the history, as in RL-LLM."""


class ResponseFormat(ABC):
    """Abstract base class of response formats, which define where a response contains its action."""

    instruction: str
    """Sentence of the system message that asks for this format."""
    stop: str | None
    """Text that ends a response; None if only the end-of-turn token ends it."""
    opening: str = ""
    """Tag at the start of every response; empty if there is none. Some chat templates put it at the end of the
    prompt."""

    @abstractmethod
    def extract(self, response: str) -> str:
        """Return the text of the action that ``response`` contains.

        Raises:
            InvalidActionError: If ``response`` does not follow this format.
        """

    @abstractmethod
    def render(self, action_text: str, reasoning: str = "") -> str:
        """Return a response in this format. This is the inverse of :meth:`extract`."""

    def reasoning(self, response: str) -> str | None:
        """Return the reasoning that precedes the action in ``response``; None if the format has no reasoning."""
        return None


class Direct(ResponseFormat):
    """Response format without reasoning: the action and nothing else."""

    instruction = "Answer with the action only."
    stop = None

    def extract(self, response: str) -> str:
        """Return the whole response without leading and trailing whitespace."""
        return response.strip()

    def render(self, action_text: str, reasoning: str = "") -> str:
        """Return the text of the action; ``reasoning`` is ignored."""
        return action_text


class ThinkAnswer(ResponseFormat):
    """Response format ``<think>reasoning</think><answer>action</answer>``."""

    instruction = "Think inside <think></think>, then give the action inside <answer></answer>."
    stop = "</answer>"
    opening = "<think>"
    # Between the answer tags, only the tags of actions that consist of numbers are allowed.
    _pattern = re.compile(
        r"\s*<think>(.*?)</think>\s*<answer>([^<]*|\s*<action>[^<]*</action>\s*)</answer>\s*", re.DOTALL
    )

    def extract(self, response: str) -> str:
        """Return the text inside the answer tags, which must follow the think tags."""
        match = self._pattern.fullmatch(response)
        if match is None:
            raise InvalidActionError("the answer is not of the form <think>...</think><answer>...</answer>")
        return match.group(2).strip()

    def reasoning(self, response: str) -> str:
        """Return the text inside the think tags."""
        return response.partition("</think>")[0].partition("<think>")[2]

    def render(self, action_text: str, reasoning: str = "") -> str:
        """Return the reasoning and the action inside their tags."""
        return f"<think>{reasoning}</think><answer>{action_text}</answer>"


class FinalAnswer(ResponseFormat):
    """Response format ``reasoning final answer: action``."""

    instruction = 'Think step by step in at most 10 words, then end with "final answer: " and the action.'
    stop = None
    _marker = "final answer:"

    def extract(self, response: str) -> str:
        """Return the text after the last ``final answer:``."""
        _, marker, action_text = response.rpartition(self._marker)
        if not marker:
            raise InvalidActionError('the answer does not contain "final answer:"')
        return action_text.strip()

    def reasoning(self, response: str) -> str:
        """Return the text before the last ``final answer:``."""
        return response.rpartition(self._marker)[0]

    def render(self, action_text: str, reasoning: str = "") -> str:
        """Return the reasoning, ``final answer:`` and the action."""
        return f"{reasoning} {self._marker} {action_text}".lstrip()


RESPONSE_FORMATS: dict[str, ResponseFormat] = {
    "direct": Direct(),
    "think_answer": ThinkAnswer(),
    "final_answer": FinalAnswer(),
}
"""All response formats by the name that configs use."""


def get_response_format(name: str) -> ResponseFormat:
    """Return the response format with the given name.

    Raises:
        ValueError: If there is no format with that name.
    """
    if name not in RESPONSE_FORMATS:
        raise ValueError(f"response_format is {name!r}; it must be one of {', '.join(RESPONSE_FORMATS)}.")
    return RESPONSE_FORMATS[name]


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Configures the system message, few-shot examples, history and response format of prompts."""

    response_format: str = "think_answer"
    """``direct``, ``think_answer`` or ``final_answer``."""
    stop: str | None = None
    """Text that ends a response, such as ``</action>``; null uses ``stop`` of the response format."""
    system: str | None = None
    """System message; null joins the codec's description and the format's instruction, ``""`` omits the message."""
    history: int | Literal["all"] = 0
    """Maximum number of past turns of the current episode in a prompt; ``all`` includes every past turn."""
    history_block: int = 1
    """Number of turns by which a full history is shortened, oldest first. With more than 1, most prompts of an episode
    begin with the tokens of the previous prompt, which are then computed only once (:mod:`lrl.lm.layouts`)."""
    examples: Sequence[PastTurn] = field(default_factory=tuple)
    """Few-shot examples, which precede the history."""
    num_examples: int = 0
    """Number of few-shot examples to generate if ``examples`` is empty, by playing the training environment's
    expert."""
    examples_from: str | None = None
    """Minari data set from which examples are drawn instead of playing the expert; null plays the expert."""
    hide_invalid_in_context: bool = False
    """Whether the history contains :data:`HIDDEN_RESPONSE` instead of responses without a legal action."""

    def __post_init__(self) -> None:
        get_response_format(self.response_format)
        if self.history != "all" and self.history < 0:
            raise ValueError(f"prompt.history is {self.history}; it must be 0 (no history) or more, or all.")
        if not 1 <= self.history_block <= max(1, self.max_past_turns):
            raise ValueError(
                f"prompt.history_block is {self.history_block}; it must be from 1 to prompt.history, which is "
                f"{self.history}."
            )
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

    @property
    def max_past_turns(self) -> int:
        """Maximum number of past turns in a prompt."""
        return sys.maxsize if self.history == "all" else self.history

    def system_text(self, codec: TextCodec) -> str:
        """Return the content of the system message; empty if the prompt has none."""
        if self.system is not None:
            return self.system
        return f"{codec.description} {get_response_format(self.response_format).instruction}"

    def messages(self, codec: TextCodec, observation: str, history: History = ()) -> list[Message]:
        """Return the chat messages of a turn, ending with the current observation.

        Args:
            codec: the codec of the environment.
            observation: the text of the current observation.
            history: past turns of the episode, oldest first.

        Raises:
            ValueError: If ``num_examples`` is set and the examples have not been generated yet.
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
        """Return the history with one more turn, without the turns that later prompts do not contain.

        Args:
            codec: the codec of the environment.
            history: past turns of the episode, oldest first.
            observation: the text of the observation of the new turn.
            response: the response of the new turn.
        """
        if not self.history:
            return ()
        return self.truncate_history((*history, self._past_turn(codec, observation, response)))

    def truncate_history(self, history: History) -> History:
        """Return ``history`` without its oldest blocks of turns, so that at most ``prompt.history`` turns are left."""
        blocks = -(-max(0, len(history) - self.max_past_turns) // self.history_block)  # rounded up
        return history[blocks * self.history_block :]

    def _past_turn(self, codec: TextCodec, observation: str, response: str) -> PastTurn:
        """Return a turn as the history contains it, with an invalid response hidden if this is configured."""
        if self.hide_invalid_in_context:
            try:
                codec.text_to_action(get_response_format(self.response_format).extract(response))
            except InvalidActionError:
                return PastTurn(observation, HIDDEN_RESPONSE)
        return PastTurn(observation, response)

"""Response formats: where a response contains its action, and where it ends."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from lrl.codecs.codec import InvalidActionError


class ResponseFormat(ABC):
    """Abstract base class of response formats."""

    instruction: str
    """Sentence of the system message that asks for this format."""
    stop: str | None
    """Text that ends a response; None if only the end-of-turn token ends it."""
    opening: str = ""
    """Tag that every response begins with, which a chat template may write at the end of a prompt."""

    @abstractmethod
    def extract(self, response: str) -> str:
        """Return the text of the action in ``response``.

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
        """Return the whole response without surrounding whitespace."""
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

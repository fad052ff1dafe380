"""How an answer is written: where the action stands in it, and where it ends."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from lrl.codecs.codec import InvalidActionError


class ResponseFormat(ABC):
    """One way of writing an answer."""

    instruction: str
    """The sentence of the system text that asks for this format."""
    stop: str | None
    """The text at which an answer ends; None where only the end-of-turn token ends it."""

    @abstractmethod
    def extract(self, response: str) -> str:
        """The action's text inside ``response``.

        Raises:
            InvalidActionError: ``response`` is not written in this format.
        """

    @abstractmethod
    def render(self, action_text: str, reasoning: str = "") -> str:
        """An answer in this format, as :meth:`extract` reads it."""

    def reasoning(self, response: str) -> str | None:
        """What ``response`` says before its action; None where the format has no room for it."""
        return None


class Direct(ResponseFormat):
    """The action and nothing else."""

    instruction = "Answer with the action only."
    stop = None

    def extract(self, response: str) -> str:
        """The whole response, without surrounding blanks."""
        return response.strip()

    def render(self, action_text: str, reasoning: str = "") -> str:
        """The action's text."""
        return action_text


class ThinkAnswer(ResponseFormat):
    """``<think>reasoning</think><answer>action</answer>``."""

    instruction = "Think inside <think></think>, then give the action inside <answer></answer>."
    stop = "</answer>"
    # Inside an answer only the tags of several numbers may stand.
    _pattern = re.compile(
        r"\s*<think>(.*?)</think>\s*<answer>([^<]*|\s*<action>[^<]*</action>\s*)</answer>\s*", re.DOTALL
    )

    def extract(self, response: str) -> str:
        """What stands between the answer tags; the think tags must come first."""
        match = self._pattern.fullmatch(response)
        if match is None:
            raise InvalidActionError("the answer is not of the form <think>...</think><answer>...</answer>")
        return match.group(2).strip()

    def reasoning(self, response: str) -> str:
        """What stands between the think tags."""
        return response.partition("</think>")[0].partition("<think>")[2]

    def render(self, action_text: str, reasoning: str = "") -> str:
        """The reasoning and the action in their tags."""
        return f"<think>{reasoning}</think><answer>{action_text}</answer>"


class FinalAnswer(ResponseFormat):
    """Free reasoning that ends with ``final answer: action``."""

    instruction = 'Think step by step in at most 10 words, then end with "final answer: " and the action.'
    stop = None
    _marker = "final answer:"

    def extract(self, response: str) -> str:
        """What follows the last ``final answer:``."""
        _, marker, answer = response.rpartition(self._marker)
        if not marker:
            raise InvalidActionError('the answer does not contain "final answer:"')
        return answer.strip()

    def reasoning(self, response: str) -> str:
        """What precedes the last ``final answer:``."""
        return response.rpartition(self._marker)[0]

    def render(self, action_text: str, reasoning: str = "") -> str:
        """The reasoning, then the marked action."""
        return f"{reasoning} {self._marker} {action_text}".lstrip()


RESPONSE_FORMATS: dict[str, ResponseFormat] = {
    "direct": Direct(),
    "think_answer": ThinkAnswer(),
    "final_answer": FinalAnswer(),
}


def response_format(name: str) -> ResponseFormat:
    """Look a format up by the name that configs use.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in RESPONSE_FORMATS:
        raise ValueError(f"response_format is {name!r}; it must be one of {', '.join(RESPONSE_FORMATS)}.")
    return RESPONSE_FORMATS[name]

"""Interface of chat models, which respond to conversations: a server, or a language model in this process."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrl.types import SamplingConfig

_TOKENS_PER_MESSAGE = 8
"""Approximate number of tokens that a chat template adds per message."""
_PIECES = re.compile(rb"[A-Za-z]{1,4}|[^\sA-Za-z]|\n| (?=[0-9])")
"""Matches the parts of a text that :func:`estimated_tokens` counts as one token each."""

Message = dict[str, str]
"""Chat message ``{"role": "system" | "user" | "assistant", "content": ...}``."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Holds a chat model's response to one conversation, and the numbers of tokens."""

    text: str
    """The response, without special tokens."""
    finish_reason: str
    """``stop`` if the model ended its response, ``length`` if the response was truncated."""
    prompt_tokens: int
    """Number of tokens of the conversation; 0 if it is unknown."""
    completion_tokens: int
    """Number of tokens of the response; 0 if it is unknown."""
    cached: bool = False
    """Whether the response came from the cache, so that no request was sent."""


class ConversationTooLongError(ValueError):
    """Raised if a server rejects a conversation because it exceeds the context length of its model."""


class ChatModel(ABC):
    """Base class of models that respond to conversations with text.

    A custom chat model derives from this class and must define :meth:`complete`; the other methods have defaults.
    """

    name: str
    """Name of the model, for tables and logs."""

    def connect(self) -> None:  # noqa: B027 (most models have nothing to check)
        """Load the model or check its settings before a long computation starts; further calls do nothing.

        Raises:
            ValueError: If the model is not available.
        """

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether a conversation and its response fit into the model's context; True if this is unknown.

        Args:
            conversation: messages, oldest first.
            sampling: specifies the maximum number of tokens of a response.
            response: a text that must fit into a response.
        """
        return True

    def report(self) -> dict[str, Any]:
        """Return the counts of requests and tokens and the cost by name; empty if nothing is counted."""
        return {}

    @abstractmethod
    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one response to each conversation, in the same order.

        Args:
            conversations: messages, oldest first; the last one has the role ``user``.
            sampling: temperature, top-p and the maximum number of tokens of a response.
            seeds: one seed per response. A response must not depend on the other conversations.

        Raises:
            ConversationTooLongError: If a conversation is longer than the model's context.
            ValueError: If the model cannot be reached, or if the server rejects a request permanently.
        """
        ...


def estimated_tokens(conversation: Sequence[Message]) -> int:
    """Estimate the number of tokens of a conversation, for tokenizers in which every digit is a token.

    The estimate is usually too high. Each of these counts as one token: up to four ASCII letters, a digit, a space
    before a digit, a punctuation mark, a line break, and each byte of any other character. For the prompts of
    ``lrl.search``, the estimate is 1.0 to 1.5 times the number of tokens of GPT-2's and Whisper's tokenizers.
    """
    texts = [message["content"].encode("utf-8", "replace") for message in conversation]
    return sum(_TOKENS_PER_MESSAGE + len(_PIECES.findall(text)) for text in texts)

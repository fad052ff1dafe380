"""The interface between what asks a language model in words and what responds: a server, or a model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lrl.types import SamplingConfig

Message = dict[str, str]
"""Chat message ``{"role": "system" | "user" | "assistant", "content": ...}``."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A chat model's response to one conversation, and what it cost."""

    text: str
    """The response, without special tokens."""
    finish_reason: str
    """``stop`` where the model ended its response, ``length`` where it was cut."""
    prompt_tokens: int
    """Tokens of the conversation; 0 where the server does not say."""
    completion_tokens: int
    """Tokens of the response; 0 where the server does not say."""
    cached: bool = False
    """Whether the response came from the cache and cost nothing."""


class ConversationTooLongError(ValueError):
    """Raised where a server rejects a conversation because it is longer than its model reads."""


class ChatModel(Protocol):
    """Responds to conversations in words.

    A class of its own derives from this one; only :meth:`complete` has no default.
    """

    name: str
    """Name of the model, for tables and logs."""

    def connect(self) -> None:  # noqa: B027 (most models have nothing to check)
        """Check or load what responses need, before much work rests on them; a second call does nothing.

        Raises:
            ValueError: the model cannot be had.
        """

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether the model has room for a conversation and its response; True where that is not known.

        Args:
            conversation: messages, oldest first.
            sampling: has the maximum number of tokens of a response.
            response: a text for which a response must have room.
        """
        return True

    def report(self) -> dict[str, Any]:
        """Return what was asked so far and its cost, by name; empty where nothing is counted."""
        return {}

    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one response to each conversation, in the same order.

        Args:
            conversations: messages, oldest first; the last one is the user's.
            sampling: temperature, top-p and the maximum number of tokens of a response.
            seeds: of each response; the order and number of conversations change nothing.

        Raises:
            ConversationTooLongError: a conversation is longer than the model reads.
            ValueError: the model cannot be reached, or the server rejects the request for good; one sentence.
        """
        ...

"""Reward functions for the format of a response."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.prompts import ResponseFormat, get_response_format
from lrl.registry import register
from lrl.rewards.reward import NativeAction, Reward, Row

_CLOSING_TAG = re.compile(r"</\w+>$")


@register
class FormatReward(Reward):
    """Reward of 1 if a response contains ``<think>...</think>`` and ``<answer>...</answer>`` anywhere, else 0."""

    name = "format"
    reads_responses = True

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response; float64 ``(row,)``."""
        return np.array([_has(r, "think") and _has(r, "answer") for r in responses], dtype=np.float64)


def _has(response: str, tag: str) -> bool:
    """Return whether a response contains an opening tag and, anywhere after it, the closing tag."""
    return f"</{tag}>" in response.partition(f"<{tag}>")[2]


@register
class InvalidActionReward(Reward):
    """Reward of -1 if a response contains no legal action, else 0. The weight is the size of the penalty."""

    name = "invalid_action"

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response; float64 ``(row,)``."""
        return np.array([-1.0 if action is None else 0.0 for action in actions])


@register
class ClosingTagFormatReward(Reward):
    """Reward for the format of a response: the sum of three terms, as in the original experiment on control.

    The terms are -10 if the response up to its first closing tag is not a legal action, for example because the
    number of numbers is wrong; -0.1 for each character after the first closing tag; and 1 if the response ends with the
    closing tag.

    The closing tag is ``</action>`` for numbers in the format ``direct``, and ``</answer>`` in the format
    ``think_answer``. If responses end with the name of an action, the name takes the place of the tag.

    The original experiment reads the numbers at the beginning of a response and ignores the text after them.
    ``docs/extending/reward.md`` lists the responses whose reward differs for this reason.

    Args:
        weight: factor of this reward in the weighted sum.
    """

    name = "closing_tag_format"
    reads_responses = True

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(weight)
        self._format: ResponseFormat | None = None
        self._codec: TextCodec | None = None
        self._tag = ""

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Find the closing tag of responses; see :meth:`~lrl.rewards.reward.Reward.connect`.

        Raises:
            ValueError: If actions are native, or are numbers in a response format without closing tag.
        """
        super().connect(codec, response_format, row)
        assert response_format is not None
        self._codec, self._format = codec, get_response_format(response_format)
        response = self._format.render(codec.default_action_text)
        found = _CLOSING_TAG.search(response)
        self._tag = found.group() if found else ""
        if not found and codec.action_texts is None:
            raise ValueError(
                f"env.rewards has a {type(self).__name__}, but a response such as {response!r} has no closing tag; "
                "prompt.response_format must be think_answer."
            )

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response; float64 ``(row,)``."""
        return np.array([self._reward(response) for response in responses], dtype=np.float64)

    def _reward(self, response: str) -> float:
        legal, rest, closed = self._after_tag(response) if self._tag else self._after_name(response)
        return -10.0 * (not legal) - 0.1 * len(rest) + closed

    def _after_tag(self, response: str) -> tuple[bool, str, bool]:
        """Return whether the part up to the first tag is legal, the rest, and whether the response ends with a tag."""
        assert self._format is not None
        before, tag, rest = response.partition(self._tag)
        try:
            legal = bool(tag) and self._is_legal(self._format.extract(before + tag))
        except InvalidActionError:
            legal = False
        return legal, rest, response.endswith(self._tag)

    def _after_name(self, response: str) -> tuple[bool, str, bool]:
        """Return the same as :meth:`_after_tag` for responses that end with the name of an action."""
        assert self._format is not None
        assert self._codec is not None
        try:
            text = self._format.extract(response)
        except InvalidActionError:
            return False, "", False
        starts = {text[: len(name)] for name in self._codec.action_texts or ()}
        legal = [start for start in starts if start == start.strip() and self._is_legal(start)]
        if not legal:
            return False, "", False
        rest = text.removeprefix(max(legal, key=len))
        return True, rest, not rest

    def _is_legal(self, action_text: str) -> bool:
        """Return whether a text is a legal action of the environment."""
        assert self._codec is not None
        try:
            self._codec.text_to_action(action_text)
        except InvalidActionError:
            return False
        return True

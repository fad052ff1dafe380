"""Actions that are words."""

from __future__ import annotations

from collections.abc import Sequence

from lrl.codecs.codec import InvalidActionError


def word_index(text: str, words: Sequence[str]) -> int:
    """The place of ``text`` in ``words``; case and blanks count.

    Raises:
        InvalidActionError: it is none of them.
    """
    try:
        return words.index(text)
    except ValueError:
        raise InvalidActionError(f"the action must be one of {', '.join(words)}") from None

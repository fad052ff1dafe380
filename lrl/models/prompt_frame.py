"""Prompts that differ in the observation alone: what surrounds it is rendered and tokenised once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

EncodeTexts = Callable[[Sequence[str], bool], list[list[int]]]
"""Returns the token ids of texts; the flag says whether the tokenizer's special tokens are added."""

_OBSERVATION = "[the observation, lrl]"
_MAX_KNOWN = 4096


class PromptFrame:
    """Encodes observations as prompts that are equal before and after the observation.

    The text is cut at the last special token before the observation, because tokenizers encode the texts on both sides
    of a special token separately. A chat template may still treat some observations differently, so
    :class:`~lrl.models.tokenizer.ChatTokenizer` compares a prompt of each batch with the one rendered in full.

    Args:
        before: text of a prompt before the observation.
        after: text of a prompt after the observation.
        special_texts: texts of the tokenizer's special tokens.
        adds_special: whether the tokenizer adds special tokens to a prompt.
        encode: encodes texts.
    """

    def __init__(
        self, before: str, after: str, special_texts: Iterable[str], adds_special: bool, encode: EncodeTexts
    ) -> None:
        cut = max((before.rfind(text) for text in special_texts), default=-1)
        self._head = encode([before[:cut]], adds_special)[0] if cut > 0 else []
        self._before, self._after = before[max(cut, 0) :], after
        self._adds_special, self._encode = adds_special and cut <= 0, encode
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(
        cls, render: Callable[[str], str], special_texts: Iterable[str], adds_special: bool, encode: EncodeTexts
    ) -> PromptFrame | None:
        """Return the frame of the prompts that ``render`` writes for observations; None if they contain it not once."""
        before, found, after = render(_OBSERVATION).partition(_OBSERVATION)
        if not found or _OBSERVATION in after:
            return None
        return cls(before, after, special_texts, adds_special, encode)

    def prompts(self, observations: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each observation's prompt. The lists are shared: do not change them."""
        missing = [text for text in dict.fromkeys(observations) if text not in self._known]
        new = self._encode([f"{self._before}{text}{self._after}" for text in missing], self._adds_special)
        found = {text: self._head + ids for text, ids in zip(missing, new, strict=True)}
        prompts = [found[text] if text in found else self._known[text] for text in observations]
        if len(self._known) + len(found) > _MAX_KNOWN:
            self._known.clear()
        self._known |= found if len(found) <= _MAX_KNOWN else {}
        return prompts

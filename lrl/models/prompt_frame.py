"""Prompts that differ in the observation alone: what surrounds it is rendered and tokenised once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

OBSERVATION = '[the <observation>\n\n&"lrl"</think> it\'s {{here}}\\]'
"""The observation of the prompt that a frame is made of, with what a chat template may escape or cut at."""
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
        encode: returns the token ids of each text.
        begun: puts the tokens that every prompt begins with before token ids that do not have them.
    """

    def __init__(
        self,
        before: str,
        after: str,
        special_texts: Iterable[str],
        encode: Callable[[Sequence[str]], list[list[int]]],
        begun: Callable[[list[int]], list[int]],
    ) -> None:
        cut = max((before.rfind(text) for text in special_texts), default=-1)
        self._head = begun(encode([before[:cut]])[0]) if cut > 0 else []
        self._before, self._after = before[max(cut, 0) :], after
        self._encode, self._begun = encode, begun
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(
        cls,
        prompt: str,
        special_texts: Iterable[str],
        encode: Callable[[Sequence[str]], list[list[int]]],
        begun: Callable[[list[int]], list[int]],
    ) -> PromptFrame | None:
        """Return the frame of the prompts that differ from ``prompt``, which has :data:`OBSERVATION`, there only.

        None unless it contains :data:`OBSERVATION` exactly once.
        """
        before, found, after = prompt.partition(OBSERVATION)
        if not found or OBSERVATION in after:
            return None
        return cls(before, after, special_texts, encode, begun)

    def prompts(self, observations: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each observation's prompt. The lists are shared: do not change them."""
        missing = [text for text in dict.fromkeys(observations) if text not in self._known]
        new = self._encode([f"{self._before}{text}{self._after}" for text in missing])
        whole = [self._head + ids if self._head else self._begun(ids) for ids in new]
        found = dict(zip(missing, whole, strict=True))
        prompts = [found[text] if text in found else self._known[text] for text in observations]
        if len(self._known) + len(found) > _MAX_KNOWN:
            self._known.clear()
        self._known |= found if len(found) <= _MAX_KNOWN else {}
        return prompts

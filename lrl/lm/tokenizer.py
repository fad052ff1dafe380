"""From chat messages to token ids and back: a thin wrapper around a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lrl.codecs.codec import TextCodec
from lrl.files import encodable
from lrl.lm.chat_template import OBSERVATION, OTHER_TEMPLATES, ChatTemplate, ControlTokens, PromptFrame
from lrl.lm.files import configured_end_ids, first_line, sources
from lrl.prompts import Message, PromptTemplate, get_response_format
from lrl.ranges import LateSettingError
from lrl.types import History, PastTurn

_CACHED_PROMPTS = 4096
"""Largest number of cached prompts; a full cache is cleared."""


class ChatTokenizer:
    """Encodes conversations with a chat template, and caches the results.

    The template is checked when the object is made: a prompt must contain every message. It may write a tag that the
    response then continues (:attr:`opening`). Text of control tokens inside messages is encoded as ordinary text. A
    prompt begins exactly once with the tokens that the tokenizer adds before a text, such as BOS.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        chat_template: ``auto`` (the tokenizer's own, or ``plain`` if it has none), ``plain``, ``content``, ``chatml``
            or the path of a Jinja file.
        end_ids: tokens that end a response, besides those of the tokenizer and the template.

    Raises:
        ValueError: If ``chat_template`` is ``auto`` for a tokenizer with several templates and no default, is not an
            existing file, fails, leaves out a message or ends a prompt with an end token; or if the tokenizer has
            neither a padding token nor an end token.
    """

    def __init__(self, tokenizer: Any, chat_template: str = "auto", end_ids: Iterable[int] = ()) -> None:
        self.tokenizer, self._given = tokenizer, (chat_template, tuple(end_ids))
        self.template = ChatTemplate(tokenizer, chat_template)
        self._cache: dict[str, list[int]] = {}
        self._framed: tuple[PromptTemplate, TextCodec, PromptFrame | None] | None = None
        self._token_texts: dict[int, str] = {}
        self._prefix = self._added_prefix()
        self.eos_id: int | None = tokenizer.eos_token_id
        of_template = self.template.end_id
        self._end_ids = {token for token in (of_template, self.eos_id, *self._given[1]) if token is not None}
        self.pad_id: int = _pad_id(tokenizer, self._end_ids)
        if not self._end_ids:
            self._end_ids = {self.pad_id}
            logging.getLogger("lrl").warning(
                f"language_model.name is {tokenizer.name_or_path!r}, but tokenizer, chat template and "
                "generation_config.json name no end token: a response ends with the padding token, with a stop text, "
                "or after sampling.max_new_tokens."
            )
        candidates = (of_template, self.eos_id, *sorted(self._end_ids))
        self.end_id = next(token for token in candidates if token is not None)
        """The token that ends a demonstrated response; one of :meth:`stop_ids`."""
        added = tokenizer.added_tokens_decoder
        ends = [str(added[token]) for token in sorted(self._end_ids) if token in added]
        self._controls = ControlTokens(tokenizer, ends, self.template.written_tokens())
        self.template.check_end(ends)

    @classmethod
    def from_pretrained(cls, name: str, chat_template: str = "auto", trust_remote_code: bool = False) -> ChatTokenizer:
        """Load the tokenizer of a hub name, local folder or GGUF file, and the end tokens of its generation config.

        Args:
            name: hub name, local folder or GGUF file.
            chat_template: see the class.
            trust_remote_code: whether code from the model's repository may run.

        Raises:
            ValueError: If no tokenizer can be loaded, or its chat template is invalid.
        """
        from transformers import AutoTokenizer

        try:
            where, of_gguf = sources(name)
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **of_gguf)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"language_model.name is {name!r}; it must be a hub name or a local folder or GGUF file with a "
                f"tokenizer ({first_line(error)})."
            ) from error
        return cls(tokenizer, chat_template, () if of_gguf else configured_end_ids(where, tokenizer))

    @property
    def opening(self) -> str:
        """The open tag, with the whitespace after it, that the template writes at the end of a prompt; else empty."""
        return self.template.opening

    def with_added_tokens(self) -> ChatTokenizer:
        """Return a copy for a tokenizer to which tokens were added; the template may end turns with one of them."""
        return ChatTokenizer(self.tokenizer, *self._given)

    def save(self, folder: Path) -> None:
        """Write the tokenizer with the chat template of this object."""
        self.tokenizer.chat_template = self.template.text
        self.tokenizer.save_pretrained(folder)

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, the tokenisation rules, the chat template and the end tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = repr(sorted(self.tokenizer.get_vocab().items())) if backend is None else backend.to_str()
        about = self.template.text, self._prefix, sorted(self._end_ids), self.end_id
        return hashlib.sha256(f"{rules}\n{about}".encode()).hexdigest()

    # -- prompts -------------------------------------------------------------------------------------------------

    def check(self, template: PromptTemplate) -> None:
        """Check that the chat template can write the prompts of ``template``.

        Logs a warning if the tokenizer cannot encode the stop text, or if the chat template removes reasoning from past
        turns.

        Args:
            template: how an observation becomes a prompt.

        Raises:
            ValueError: If prompts have a history or examples but the chat template does not support several turns, or
                if the chat template opens a tag with which the response format does not begin.
        """
        response_format = get_response_format(template.response_format)
        written = "" if template.stop is None else self.decode(self.encode_text(f"a {template.stop} a"))
        if template.stop is not None and template.stop not in written:
            logging.getLogger("lrl").warning(
                f"prompt.stop is {template.stop!r}, which this tokenizer cannot write: it encodes "
                f"{f'a {template.stop} a'!r} as {written!r}."
            )
        several = bool(template.history or template.examples or template.num_examples)
        if several and self.template.multi_turn_error:
            raise ValueError(f"{self.template.multi_turn_error}; prompt.history and prompt.num_examples must be 0.")
        if self.opening and self.opening.strip() != response_format.opening:
            raise ValueError(
                f"language_model.chat_template ends a prompt with {self.opening.strip()!r}, with which no response of "
                f"the format {template.response_format!r} begins; it must be {OTHER_TEMPLATES}, or "
                "prompt.response_format must be a different format."
            )
        if several and response_format.opening:
            response = response_format.render("Lrl-action", "Lrl-reasoning")
            if not self.template.keeps_reasoning(response, "Lrl-reasoning"):
                logging.getLogger("lrl").warning(
                    "language_model.chat_template leaves the reasoning of past turns and examples out of a prompt."
                )

    def extends_prompts(self, template: PromptTemplate, codec: TextCodec) -> bool:
        """Return whether the prompt of each turn begins with the tokens of the previous turn's prompt.

        Args:
            template: how an observation becomes a prompt; its ``history`` is not 0.
            codec: codec of the environment.
        """
        action = (codec.action_texts or (codec.default_action_text,))[0]
        turn = PastTurn("a", get_response_format(template.response_format).render(action, "a"))
        bare = replace(template, examples=(), num_examples=0, examples_from=None)
        histories = [(turn,) * turns for turns in range(min(3, template.max_past_turns + 1))]
        prompts = [self.encode_chat(bare.messages(codec, "a", history)) for history in histories]
        return all(longer[: len(prompt)] == prompt for prompt, longer in pairwise(prompts))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, including the beginning of the assistant's turn.

        The list is cached: callers must not change it.

        Raises:
            ValueError: If the chat template fails, or if it does not support several turns but there are some.
        """
        text, is_marked = self._prompt_text(messages)
        return self._keep(text, self._encode(text, is_marked))

    def encode_prompt(
        self, template: PromptTemplate, codec: TextCodec, observation: str, history: History, max_prompt_tokens: int
    ) -> list[int]:
        """Return the token ids of a prompt; the oldest turns of the history are left out if it would be too long.

        Args:
            template: how an observation becomes a prompt.
            codec: codec of the environment.
            observation: current observation.
            history: previous turns, oldest first.
            max_prompt_tokens: maximum number of tokens of the prompt.

        Raises:
            LateSettingError: If the prompt is too long even without any history.
        """
        window = template.truncate_history(history)
        attempts: dict[int, tuple[str, list[int]]] = {}

        def fits(dropped: int) -> bool:
            """Store the prompt without the oldest ``dropped`` turns; return whether it is short enough."""
            text, is_marked = self._prompt_text(template.messages(codec, observation, window[dropped:]))
            attempts[dropped] = text, self._encode(text, is_marked)
            return len(attempts[dropped][1]) <= max_prompt_tokens

        dropped = 0 if fits(0) else bisect_left(range(len(window) + 1), True, lo=1, key=fits)
        if 0 < dropped < len(window):  # blocks: successive prompts then share tokens
            block = min(template.history_block, max(1, (len(window) - dropped) // 2))
            dropped = -(-dropped // block) * block
            fits(dropped)
        if dropped > len(window):
            raise LateSettingError(
                f"max_prompt_tokens is {max_prompt_tokens}; the system text, the examples and the current observation "
                f"alone take {len(attempts[len(window)][1])} tokens."
            )
        return self._keep(*attempts[dropped])

    def encode_prompts(
        self, template: PromptTemplate, codec: TextCodec, turns: Sequence[tuple[str, History]], max_prompt_tokens: int
    ) -> list[list[int]]:
        """Return what :meth:`encode_prompt` returns for many turns, faster for prompts without history.

        Args:
            template: how an observation becomes a prompt.
            codec: codec of the environment.
            turns: for each prompt, the current observation and the previous turns.
            max_prompt_tokens: maximum number of tokens of a prompt.

        Raises:
            ValueError: If a prompt is too long even without any history.
        """
        frame = self._frame(template, codec) if not template.history and len(turns) > 1 else None
        if frame is not None and all(self._is_ordinary(text) for text, _ in turns):
            prompts = frame.prompts([text for text, _ in turns])
            if prompts[0] != self.encode_prompt(template, codec, *turns[0], max_prompt_tokens):
                self._framed = (template, codec, None)
            elif max(map(len, prompts)) <= max_prompt_tokens:
                return prompts
        return [self.encode_prompt(template, codec, *turn, max_prompt_tokens) for turn in turns]

    def _is_ordinary(self, text: str) -> bool:
        """Return whether a text is nonempty, without control tokens or outer whitespace (which templates may strip)."""
        return text == text.strip() != "" and not self._controls.are_in(text)

    def _frame(self, template: PromptTemplate, codec: TextCodec) -> PromptFrame | None:
        """Return the encoder of prompts without history; None if every prompt must be rendered in full."""
        if self._framed is None or self._framed[0] is not template or self._framed[1] is not codec:
            special_texts = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
            text, is_marked = self._prompt_text(template.messages(codec, OBSERVATION))
            frame = None if is_marked else PromptFrame.of(text, special_texts, self.encode_texts, self._with_prefix)
            self._framed = (template, codec, frame)
        return self._framed[2]

    def encode_observation(self, text: str) -> list[int]:
        """Return the token ids of an observation without a chat template."""
        if not self._controls.are_in(text):
            return self._with_prefix(self.encode_text(text))
        return self._with_prefix(self._controls.encode(text))

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of many texts inside a conversation, encoded together: no special tokens are added."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self.encode_text(text) for text in texts]
        backend.no_truncation()
        backend.no_padding()
        return [
            encoding.ids for encoding in backend.encode_batch_fast([*map(encodable, texts)], add_special_tokens=False)
        ]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text inside a conversation: no special tokens are added."""
        return self.tokenizer.encode(encodable(text), add_special_tokens=False)

    def _prompt_text(self, messages: Sequence[Message]) -> tuple[str, bool]:
        """Return the text of a prompt, and whether its control tokens are marked.

        They are marked if a message contains the text of a control token, which is then not marked.

        Raises:
            ValueError: If the chat template fails, or if it does not support several turns but there are some.
        """
        if self.template.multi_turn_error and any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{self.template.multi_turn_error}; there must be one turn.")
        protected = self._controls.protect(messages)
        text = self.template.render(protected)
        if protected is messages:
            return text, False
        return self._controls.exchange(text), True

    def _encode(self, text: str, is_marked: bool) -> list[int]:
        """Return the token ids of a prompt, given whether its control tokens are marked."""
        ids = self._cache.get(text)
        if ids is not None:
            return ids
        return self._with_prefix(self._controls.encode(text) if is_marked else self.encode_text(text))

    def _keep(self, text: str, ids: list[int]) -> list[int]:
        """Return the cached token ids of a text; if there are none, cache ``ids`` and return them."""
        if text not in self._cache and len(self._cache) >= _CACHED_PROMPTS:
            self._cache.clear()
        return self._cache.setdefault(text, ids)

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Return ``ids`` with the tokens that the tokenizer adds before a text, such as BOS, once at the start."""
        bos = self.tokenizer.bos_token_id
        prefix, start = self._prefix or [bos], 0
        while ids[start : start + len(prefix)] == prefix:
            start += len(prefix)
        return [*(prefix if self._prefix or start else []), *ids[start:]]

    def _added_prefix(self) -> list[int]:
        """Return the tokens that the tokenizer adds before a text, such as the BOS token of Llama."""
        bare, full = (self.tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
        starts = [start for start in range(len(full)) if full[start : start + len(bare)] == bare]
        if bare and starts:
            return full[: starts[0]]
        return full[:1] if full[:1] == [self.tokenizer.bos_token_id] else []

    # -- responses -----------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of generated tokens: special tokens are kept, except for an end-of-turn token at the end."""
        kept = list(ids)
        if kept and kept[-1] in self._end_ids:
            kept.pop()
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def response_text(self, ids: Iterable[int]) -> str:
        """Return the text of a response, preceded by the :attr:`opening` with which its prompt ends."""
        return self.opening + self.decode(ids)

    def continuation(self, response: str) -> str:
        """Return the part of a response that a model samples: without the :attr:`opening`, which is in the prompt.

        Raises:
            ValueError: If the response does not begin with the :attr:`opening`.
        """
        tag = self.opening.strip()
        if not response.lstrip().startswith(tag):
            raise ValueError(
                f"a demonstrated response is {response[:60]!r}; it must begin with {tag!r}, as "
                "language_model.chat_template ends a prompt with it."
            )
        return response.lstrip()[len(tag) :].removeprefix(self.opening.lstrip()[len(tag) :]) if tag else response

    def stop_ids(self, stop_text: str | None = None) -> set[int]:
        """Return the tokens that end a response: the end-of-turn tokens, and ``stop_text`` if it is a single token."""
        token = None if stop_text is None else self._token_of(stop_text)
        return self._end_ids if token is None else self._end_ids | {token}

    def stops(self, stop_text: str | None = None) -> Callable[[Sequence[int]], bool] | None:
        """Return a function that tells whether the last token of a response completes ``stop_text``.

        Returns None if :meth:`stop_ids` are sufficient: if there is no stop text, or it is an added token. Otherwise
        the tokenizer may encode it as several tokens, merge its last character with the following text, or split a
        character into several tokens. So the function decodes the last tokens, a few more than ``stop_text`` has bytes.
        It decodes more if their text is shorter than ``stop_text`` or begins with a part of a character.
        """
        if stop_text is None or self._token_of(stop_text) in self.tokenizer.added_tokens_decoder:
            return None
        least = len(stop_text.encode()) + 4

        def ends(ids: Sequence[int]) -> bool:
            if not self._may_complete(ids[-1], stop_text):
                return False
            size = least
            while True:
                text = self.decode(ids[-size:])
                if stop_text in text or size >= len(ids):  # the whole response decides
                    return stop_text in text and (size >= len(ids) or stop_text in self.decode(ids))
                if not text.startswith("\ufffd") and len(self.decode(ids[-size:-1])) >= len(stop_text):
                    return False
                size *= 2

        return ends

    def ends(self, ids: Sequence[int], stop_text: str | None = None) -> bool:
        """Return whether a response is complete: its last token is an end token or completes ``stop_text``."""
        stops = self.stops(stop_text)
        return bool(ids) and (ids[-1] in self.stop_ids(stop_text) or (stops is not None and stops(ids)))

    def _token_of(self, text: str) -> int | None:
        """Return the token whose text is ``text``; None if there is no such token."""
        ids = self.encode_text(text)
        is_text = len(ids) == 1 and self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        return ids[0] if is_text else None

    def _may_complete(self, token: int, stop_text: str) -> bool:
        """Return whether a token may contain the last character of ``stop_text``, or a part of it."""
        if token not in self._token_texts:
            self._token_texts[token] = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        text = self._token_texts[token]
        return stop_text[-1] in text or "\ufffd" in text or stop_text[-1].isspace()


def _pad_id(tokenizer: Any, end_ids: Iterable[int]) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id, *sorted(end_ids)):
        if token_id is not None:
            return token_id
    raise ValueError(
        f"the tokenizer of language_model.name {tokenizer.name_or_path!r} has neither a pad token nor an end token; "
        "it must have one of them."
    )

"""From chat messages to token ids and back: a thin wrapper around a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lrl.codecs.codec import TextCodec
from lrl.models.model_files import sources
from lrl.models.prompt_frame import PromptFrame
from lrl.prompts.template import Message, PromptTemplate
from lrl.shipped import resolve
from lrl.types import History

PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\n\n' }}"
    "{% else %}{{ message.role + ': ' + message.content + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""For base models: the system text, then ``user: ...`` and ``assistant: ...`` lines."""

CONTENT = "{% for message in messages %}{{ message.content + '\n' }}{% endfor %}"
"""The messages alone, one per line: short, for a policy that chooses among actions and need not be told who speaks."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, as Qwen, SmolLM and the embedded model use it."""

_CACHED_PROMPTS = 4096
_MARK = "lrl"


class ChatTokenizer:
    """Encodes conversations with a chat template, and caches the results.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        chat_template: ``auto`` (the tokenizer's own), ``plain``, ``content``, ``chatml`` or the path of a Jinja file.

    Raises:
        ValueError: ``auto`` for a tokenizer without a template, a file that does not exist, or a tokenizer with
            neither padding nor end token.
    """

    def __init__(self, tokenizer: Any, chat_template: str = "auto") -> None:
        self.tokenizer = tokenizer
        self._template = _template_text(tokenizer, chat_template)
        self._begins = chat_template in ("plain", "content")
        self.eos_id: int | None = tokenizer.eos_token_id
        self.pad_id: int = _pad_id(tokenizer)
        self._cache: dict[str, list[int]] = {}
        self._framed: tuple[PromptTemplate, TextCodec, PromptFrame | None] | None = None
        self._merges_system = not self._takes_system()
        self._end_ids = self._end_of_turn_ids()

    @classmethod
    def from_pretrained(cls, name: str, chat_template: str = "auto", trust_remote_code: bool = False) -> ChatTokenizer:
        """Load the tokenizer of a hub name, local folder or GGUF file.

        Raises:
            ValueError: there is none.
        """
        from transformers import AutoTokenizer

        try:
            where, of_gguf = sources(name)
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **of_gguf)
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"language_model.name is {name!r}; it must be a hub name or a local folder or GGUF file with a "
                f"tokenizer ({reason})."
            ) from error
        return cls(tokenizer, chat_template)

    def save(self, folder: Path) -> None:
        """Write the tokenizer, with the chat template that was used."""
        self.tokenizer.chat_template = self._template
        self.tokenizer.save_pretrained(folder)

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, the way text is cut, and the chat template."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = repr(sorted(self.tokenizer.get_vocab().items())) if backend is None else backend.to_str()
        return hashlib.sha256(f"{rules}\n{self._template}\n{self._begins}".encode()).hexdigest()

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, the opening of the assistant's turn included.

        The list is cached and shared: do not change it.
        """
        return self._encode(self._render(messages, add_generation_prompt=True))

    def encode_prompt(
        self, template: PromptTemplate, codec: TextCodec, observation: str, history: History, max_prompt_tokens: int
    ) -> tuple[list[int], int]:
        """Return the token ids of a prompt that fits, and how many turns of history it lost for that, oldest first.

        Args:
            template: how an observation becomes a prompt.
            codec: of the environment.
            observation: the current one.
            history: the turns before.
            max_prompt_tokens: the length that fits.

        Raises:
            ValueError: the prompt is too long even without any history.
        """
        window = template.truncate_history(history)
        ids: list[int] = []
        for dropped in range(len(window) + 1):
            ids = self.encode_chat(template.messages(codec, observation, window[dropped:]))
            if len(ids) <= max_prompt_tokens:
                return ids, dropped
        raise ValueError(
            f"max_prompt_tokens is {max_prompt_tokens}; the system text, the examples and the current observation "
            f"alone take {len(ids)} tokens."
        )

    def encode_prompts(
        self, template: PromptTemplate, codec: TextCodec, turns: Sequence[tuple[str, History]], max_prompt_tokens: int
    ) -> list[tuple[list[int], int]]:
        """Return what :meth:`encode_prompt` returns for many turns, faster where prompts have no history.

        Args:
            template: how an observation becomes a prompt.
            codec: of the environment.
            turns: observations with the turns before.
            max_prompt_tokens: the length that fits.

        Raises:
            ValueError: a prompt is too long even without any history.
        """
        frame = self._frame(template, codec) if not template.history and len(turns) > 1 else None
        if frame is not None and all(text == text.strip() for text, _ in turns):  # some templates strip
            prompts = frame.prompts([text for text, _ in turns])
            first, _ = self.encode_prompt(template, codec, *turns[0], max_prompt_tokens)
            if prompts[0] != first:
                self._framed = (template, codec, None)
            elif max(map(len, prompts)) <= max_prompt_tokens:
                return [(ids, 0) for ids in prompts]
        return [self.encode_prompt(template, codec, *turn, max_prompt_tokens) for turn in turns]

    def _frame(self, template: PromptTemplate, codec: TextCodec) -> PromptFrame | None:
        """Return what surrounds an observation without history; None where prompts must be rendered in full."""
        if self._framed is None or self._framed[0] is not template or self._framed[1] is not codec:
            special_texts = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
            render = lambda text: self._render(template.messages(codec, text), add_generation_prompt=True)  # noqa: E731
            frame = PromptFrame.of(render, special_texts, self._begins, self.encode_texts)
            self._framed = (template, codec, frame)
        return self._framed[2]

    def encode_texts(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Return the token ids of many texts, encoded together.

        Args:
            texts: the texts.
            special: whether the tokenizer's special tokens are added.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self.tokenizer.encode(text, add_special_tokens=special) for text in texts]
        backend.no_truncation()
        backend.no_padding()
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=special)]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text inside a conversation: no special tokens are added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of generated tokens: special tokens are kept, except for an end-of-turn token at the end."""
        kept = list(ids)
        if kept and kept[-1] in self._end_ids:
            kept.pop()
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def stop_ids(self, stop_text: str | None = None) -> set[int]:
        """Return the tokens that end a response: the end of a turn, and ``stop_text`` if that is a single token."""
        ids = [] if stop_text is None else self.encode_text(stop_text)
        return self._end_ids | set(ids if len(ids) == 1 else [])

    @property
    def end_id(self) -> int:
        """The token that ends an assistant's turn."""
        return self.eos_id if self.eos_id is not None else self.pad_id

    def stops(self, stop_text: str | None = None) -> Callable[[list[int]], bool] | None:
        """Return a function of a response's token ids: whether it ends with ``stop_text``.

        None where :meth:`stop_ids` are enough. A general tokenizer writes a tag with several tokens, and may merge its
        last character with what follows.
        """
        if stop_text is None or len(self.encode_text(stop_text)) == 1:
            return None
        tail = len(stop_text) + 2
        return lambda ids: stop_text in self.decode(token for token in ids[-tail:] if token)

    def _encode(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            if len(self._cache) >= _CACHED_PROMPTS:
                self._cache.clear()
            ids = self._cache[text] = self.tokenizer.encode(text, add_special_tokens=self._begins)
        return ids

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        messages = _merge_system(messages) if self._merges_system else list(messages)
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _takes_system(self) -> bool:
        """Return whether the template accepts a system message; Gemma's raises."""
        from jinja2 import TemplateError

        self._merges_system = False
        try:
            self._render([{"role": "system", "content": _MARK}, {"role": "user", "content": _MARK}], True)
        except TemplateError:
            return False
        return True

    def _end_of_turn_ids(self) -> set[int]:
        """Return the end token, and the special token that the template puts after an assistant's turn."""
        ids = set() if self.eos_id is None else {self.eos_id}
        turns = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
        _, _, after = self._render(turns, add_generation_prompt=False).rpartition(_MARK)
        first = self.encode_text(after.strip())[:1]
        return ids | {token for token in first if token in self.tokenizer.added_tokens_decoder}


def _template_text(tokenizer: Any, chat_template: str) -> str:
    built_in = {"plain": PLAIN, "content": CONTENT, "chatml": CHATML}
    if chat_template in built_in:
        return built_in[chat_template]
    if chat_template == "auto":
        if not tokenizer.chat_template:
            raise ValueError(
                "language_model.chat_template is 'auto', but this tokenizer has no chat template; "
                "it must be plain, content, chatml or the path of a Jinja file."
            )
        return tokenizer.get_chat_template()
    file = Path(resolve(chat_template))
    if not file.is_file():
        raise ValueError(
            f"language_model.chat_template is {chat_template!r}; "
            "it must be auto, plain, content, chatml or an existing file."
        )
    return file.read_text(encoding="utf-8")


def _pad_id(tokenizer: Any) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError(
        f"the tokenizer of language_model.name {tokenizer.name_or_path!r} has neither a pad token nor an eos token; "
        "it must have one of them."
    )


def _merge_system(messages: Sequence[Message]) -> list[Message]:
    """Put the system text before the first user message."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, first, *others = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *others]

"""Chat templates: checks of a template, and control tokens whose text inside a message is encoded as ordinary text."""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

from lrl.files import encodable, resolve
from lrl.prompts import Message

PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\n\n' }}"
    "{% else %}{{ message.role + ': ' + message.content + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Template for base models: the system text, then lines that begin with ``user:`` and ``assistant:``."""

CONTENT = "{% for message in messages %}{{ message.content + '\n' }}{% endfor %}"
"""Template that writes only the messages, one per line: short prompts for policies that choose among actions."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, the template of Qwen, SmolLM and ``assets/tiny-lm``."""

_DATE = datetime.date(2024, 7, 26)
"""Date that templates write if they ask for today's: prompts must not depend on the day of a run. Llama 3's templates
write the same if they do not know the date."""
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""Call by which a template asks for today's date in a format."""
_SYSTEM, _USER, _RESPONSE, _AGAIN = _CHAT = (
    {"role": "system", "content": "Lrl-system"},
    {"role": "user", "content": "Lrl-user"},
    {"role": "assistant", "content": "Lrl-response"},
    {"role": "user", "content": "Lrl-again"},
)
"""Conversation with which a chat template is checked."""
OTHER_TEMPLATES = "plain, content, chatml or the path of a Jinja file"
_OPENING = re.compile(
    r"(?:[<\[\u25c1](?!\|?end)[\w:|]*(?:think|thought|reason)[\w:|]*[>\]\u25b7]|(?P<any><\w+>))\s*$", re.IGNORECASE
)
"""An open tag at the end of a text: ``<think>``, ``[THINK]``, Kimi's tag with triangles, or any other tag."""


class ChatTemplate:
    """A chat template, checked when the object is made: a prompt must contain every message.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: ``auto`` (the tokenizer's own, or ``plain`` if it has none), ``plain``, ``content``, ``chatml``
            or the path of a Jinja file.

    Raises:
        ValueError: If ``chat_template`` is ``auto`` for a tokenizer with several templates and no default, is not an
            existing file, fails, or leaves out the user's message.
    """

    def __init__(self, tokenizer: Any, chat_template: str) -> None:
        text = _template_text(tokenizer, chat_template)
        self._tokenizer, self.text = tokenizer, _TODAY.sub(lambda call: repr(_DATE.strftime(call[2])), text)
        self._merges_system = False
        self._merges_system = not self._takes_system()
        self.multi_turn_error = self._check_turns()
        """Error message for conversations of several turns; empty if the template supports them."""
        self.end_id = self._end_of_turn_id()
        """The special token that the template writes after a response; None if there is none."""
        self.opening = self._find_opening()
        """The open tag that the template writes at the end of a prompt, with the whitespace after it; else empty."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            messages: messages of the conversation.
            add_generation_prompt: whether the text ends with the beginning of the assistant's turn.

        Raises:
            ValueError: If the chat template fails.
        """
        messages = _merge_system(messages) if self._merges_system else list(messages)
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self.text, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template can raise any error
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"language_model.chat_template fails for messages of {roles} ({type(error).__name__}: {error}); "
                f"it must be {OTHER_TEMPLATES}."
            ) from error

    def _takes_system(self) -> bool:
        """Return whether the template writes a system message; some templates raise an error, and others omit it.

        Raises:
            ValueError: If the template does not write the user's message.
        """
        try:
            takes_system = _SYSTEM["content"] in self.render([_SYSTEM, _USER])
        except ValueError:
            takes_system = False
        if _USER["content"] not in self.render([_SYSTEM, _USER] if takes_system else [_USER]):
            raise ValueError(
                f"language_model.chat_template leaves the user's message out of a prompt; it must be {OTHER_TEMPLATES}."
            )
        return takes_system

    def _check_turns(self) -> str:
        """Return an error message for conversations of several turns; empty if the template supports them."""
        try:
            text = self.render(_CHAT)
        except ValueError as error:
            return str(error).partition("; it must")[0]
        lost = [message["role"] for message in _CHAT if message["content"] not in text]
        return f"language_model.chat_template leaves out a message ({lost[0]}) of several turns" if lost else ""

    def check_end(self, ends: Sequence[str]) -> None:
        """Check that a prompt ends with the text that the template writes before a response, if it writes any.

        Logs a warning if ``add_generation_prompt`` has no effect on the prompt although it should.

        Args:
            ends: texts of the tokens that end a response.

        Raises:
            ValueError: If the prompt ends with one of ``ends`` instead.
        """
        prompt, before = self.render([_USER]), self._before_response()
        if before is None or before.strip() == prompt.strip():
            return
        found = [end for end in ends if prompt.rstrip().endswith(end)]
        if found:
            raise ValueError(
                f"language_model.chat_template ends a prompt with the end token {found[0]!r}, where it must open the "
                f"assistant's turn (add_generation_prompt); it must be {OTHER_TEMPLATES}."
            )
        if prompt == self.render([_USER], False):
            logging.getLogger("lrl").warning(
                f"language_model.chat_template ignores add_generation_prompt: past responses follow {before[-20:]!r}, "
                f"but a prompt ends with {prompt[-20:]!r}."
            )

    def _before_response(self) -> str | None:
        """Return the text before the first response of a conversation; None if the template writes none."""
        for messages in ([_USER, _RESPONSE, _AGAIN], [_USER, _RESPONSE]):
            try:
                before, found, _ = self.render(messages, False).partition(_RESPONSE["content"])
            except ValueError:
                continue
            if found:
                return before
        return None

    def _find_opening(self) -> str:
        """Return the open tag at the end of a prompt; empty if there is none, or if it marks the assistant's role.

        A tag marks the role if the template also writes it before past responses.
        """
        found = _OPENING.search(self.render([_USER]))
        is_role = found is not None and found["any"] is not None and found["any"] in (self._before_response() or "")
        return "" if found is None or is_role else found[0]

    def _end_of_turn_id(self) -> int | None:
        """Return the special token that the template puts after an assistant's turn; None if it puts none."""
        try:
            _, _, after = self.render([_USER, _RESPONSE], False).rpartition(_RESPONSE["content"])
        except ValueError:
            return None
        first = next(iter(self._tokenizer.encode(after.strip(), add_special_tokens=False)), None)
        return first if first in self._tokenizer.added_tokens_decoder else None

    def written_tokens(self) -> list[str]:
        """Return the texts of the added tokens that the template writes around messages, such as ``<|User|>``.

        Added tokens that are words or whitespace are left out.
        """
        added = self._tokenizer.added_tokens_decoder
        text = self.render([_SYSTEM, _USER] if self.multi_turn_error else _CHAT)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        written = {str(added[token]) for token in ids if token in added}
        return [text for text in sorted(written) if re.fullmatch(r"[^\w\s].*\w.*[^\w\s]", text)]

    def keeps_reasoning(self, response: str, reasoning: str) -> bool:
        """Return whether the template writes a past response with its reasoning.

        Args:
            response: a response that contains ``reasoning``.
            reasoning: a text that occurs nowhere else in the conversation.
        """
        return reasoning in self.render([_USER, {**_RESPONSE, "content": response}, _AGAIN])


def _template_text(tokenizer: Any, chat_template: str) -> str:
    built_in = {"plain": PLAIN, "content": CONTENT, "chatml": CHATML}
    if chat_template in built_in:
        return built_in[chat_template]
    if chat_template == "auto":
        if not tokenizer.chat_template:
            logging.getLogger("lrl").warning(
                "language_model.chat_template is 'auto', but this tokenizer has no chat template; 'plain' is used, "
                "which writes roles as words."
            )
            return PLAIN
        try:
            return tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                "language_model.chat_template is 'auto', but this tokenizer has several chat templates and no default; "
                f"it must be {OTHER_TEMPLATES}."
            ) from error
    file = Path(resolve(chat_template))
    if not file.is_file():
        raise ValueError(
            f"language_model.chat_template is {chat_template!r}; "
            "it must be auto, plain, content, chatml or an existing file."
        )
    return file.read_text(encoding="utf-8")


def _merge_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the system text is part of the first other message, at its beginning."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, first, *others = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *others]


# Control tokens, such as ``<|im_end|>``.

_MARK = "\ue0ff"
"""A private-use character, inserted after the first character of a control token's text to mark it."""


@final
class ControlTokens:
    """Distinguishes the control tokens that a chat template writes from equal text in messages.

    :meth:`protect` marks the text of control tokens in messages before the template is rendered. In the rendered
    prompt, :meth:`exchange` removes these marks and marks the control tokens of the template instead. A copy of the
    tokenizer, created on first use, encodes the marked text as control tokens.

    Args:
        tokenizer: a fast Hugging Face tokenizer. Its control tokens are its special tokens and those in ``written``,
            except for pairs of tags such as ``<answer>`` and ``</answer>``, which texts contain on purpose.
        ends: texts of the tokens that end a response. Only these are marked in a response, because its other control
            tokens were sampled.
        written: texts of the added tokens that the chat template writes around messages. Some tokenizers do not declare
            them as special, such as ``<|User|>`` of DeepSeek.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[str], written: Iterable[str] = ()) -> None:
        self._tokenizer, self._copy = tokenizer, None
        ends = [text for text in ends if not _is_ordinary_token(tokenizer, text)]
        self._texts = _control_texts(tokenizer, written) | set(ends)
        self._in_observations, self._in_responses = _any_of(self._texts), _any_of(ends)
        self._both = _any_of([*self._texts, *map(_marked, self._texts)])

    def are_in(self, text: str) -> bool:
        """Return whether a text, other than a response, contains the text of a control token."""
        return self._in_observations.search(text) is not None

    def protect(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages in which the text of control tokens is marked; the same object if they contain none."""
        if not self.are_in("\n".join([message["content"] for message in messages])):
            return messages
        protected = []
        for message in messages:
            found = self._in_responses if message["role"] == "assistant" else self._in_observations
            protected.append({**message, "content": found.sub(lambda match: _marked(match[0]), message["content"])})
        return messages if protected == list(messages) else protected

    def exchange(self, text: str) -> str:
        """Return a text in which unmarked control tokens are marked, and marked ones are not marked any more."""
        return self._both.sub(
            lambda match: match[0].replace(_MARK, "") if _MARK in match[0] else _marked(match[0]), text
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, in which unmarked text of control tokens is encoded as ordinary text.

        Args:
            text: text from :meth:`exchange`, in which control tokens are marked.

        Raises:
            ValueError: If the tokenizer is not a fast tokenizer.
        """
        if self._copy is None:
            self._copy = _with_marked_controls(self._tokenizer, self._texts)
        return self._copy.encode(encodable(text), add_special_tokens=False).ids


def _marked(text: str) -> str:
    return text[:1] + _MARK + text[1:]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of several texts, preferring longer ones; without texts it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(set(texts), key=len, reverse=True))) or r"(?!)")


def _control_texts(tokenizer: Any, written: Iterable[str]) -> set[str]:
    """Return the texts of the control tokens: special tokens, and those that the chat template writes.

    Pairs of tags such as ``<answer>`` and ``</answer>`` do not count as control tokens, because messages contain them
    on purpose, unless one of the two is a named special token, such as the BOS token ``<s>``.

    Args:
        tokenizer: a Hugging Face tokenizer.
        written: texts of the added tokens that the chat template writes.
    """
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | set(written)
    kinds = "bos", "eos", "unk", "sep", "pad", "cls", "mask"
    named = {text for kind in kinds if (text := getattr(tokenizer, f"{kind}_token", None)) is not None}
    names = {text[1:-1].lstrip("/") for text in special if re.fullmatch(r"</?\w+>", text)}
    pairs = [{f"<{name}>", f"</{name}>"} for name in names]
    tags = {tag for pair in pairs if pair <= added and not pair & named for tag in pair}
    return {text for text in (special - tags) | named if not _is_ordinary_token(tokenizer, text)}


def _is_ordinary_token(tokenizer: Any, text: str) -> bool:
    """Return whether a control token is also an ordinary character, such as a padding token ``!``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return len(text) == 1 and backend is not None and backend.model.token_to_id(text) is not None


def _with_marked_controls(tokenizer: Any, texts: set[str]) -> Any:
    """Return a copy of a fast tokenizer that encodes the marked text of control tokens as these tokens.

    The copy encodes the unmarked text of control tokens as ordinary text, and other text as before: all tokens keep
    their ids.

    Args:
        tokenizer: a Hugging Face tokenizer.
        texts: texts of the control tokens.

    Raises:
        ValueError: If the tokenizer is not a fast tokenizer.
    """
    from tokenizers import Tokenizer

    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"the tokenizer of language_model.name {tokenizer.name_or_path!r} is not a fast tokenizer, so a message "
            f"must not contain the text of a control token ({', '.join(sorted(texts))})."
        )
    about = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    new = {text: _marked(text) for text in texts}
    for token in about["added_tokens"]:
        token["content"] = new.get(token["content"], token["content"])
    model = about["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new.get(text, text): index for text, index in model["vocab"].items()}
    else:
        model["vocab"] = [[new.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    if "merges" in model:  # no merge may produce a control token
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not texts & {*pair, "".join(pair)}]
    return Tokenizer.from_str(json.dumps(about))


# Prompts that differ only in the observation: the text around it is rendered and tokenised once.

OBSERVATION = '[the <observation>\n\n&"lrl"</think> it\'s {{here}}\\]'
"""Placeholder of the observation, with characters that a chat template may escape or split at."""
_MAX_KNOWN = 4096
"""Largest number of observations whose prompts are cached; a full cache is cleared."""


class PromptFrame:
    """Encodes prompts whose texts before and after the observation are always the same.

    The text is cut at the last special token before the observation, because tokenizers encode the texts on both sides
    of a special token separately. A chat template may still treat some observations differently, so
    :class:`~lrl.lm.tokenizer.ChatTokenizer` compares a prompt of each batch with the one rendered in full.

    Args:
        before: text of a prompt before the observation.
        after: text of a prompt after the observation.
        special_texts: texts of the tokenizer's special tokens.
        encode: function that returns the token ids of each text.
        add_prefix: function that adds the tokens that every prompt begins with, such as BOS, to the token ids of a text
            that does not begin with them.
    """

    def __init__(
        self,
        before: str,
        after: str,
        special_texts: Iterable[str],
        encode: Callable[[Sequence[str]], list[list[int]]],
        add_prefix: Callable[[list[int]], list[int]],
    ) -> None:
        cut = max((before.rfind(text) for text in special_texts), default=-1)
        self._head = add_prefix(encode([before[:cut]])[0]) if cut > 0 else []
        self._before, self._after = before[max(cut, 0) :], after
        self._encode, self._add_prefix = encode, add_prefix
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(
        cls,
        prompt: str,
        special_texts: Iterable[str],
        encode: Callable[[Sequence[str]], list[list[int]]],
        add_prefix: Callable[[list[int]], list[int]],
    ) -> PromptFrame | None:
        """Return an encoder of prompts that differ from ``prompt`` only in the observation.

        Args:
            prompt: text of the prompt for the observation :data:`OBSERVATION`.
            special_texts: texts of the tokenizer's special tokens.
            encode: function that returns the token ids of each text.
            add_prefix: function that adds the tokens that every prompt begins with.

        Returns:
            None unless ``prompt`` contains :data:`OBSERVATION` exactly once.
        """
        before, found, after = prompt.partition(OBSERVATION)
        if not found or OBSERVATION in after:
            return None
        return cls(before, after, special_texts, encode, add_prefix)

    def prompts(self, observations: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each observation's prompt. The lists are shared: do not change them."""
        missing = [text for text in dict.fromkeys(observations) if text not in self._known]
        new = self._encode([f"{self._before}{text}{self._after}" for text in missing])
        whole = [self._head + ids if self._head else self._add_prefix(ids) for ids in new]
        found = dict(zip(missing, whole, strict=True))
        prompts = [found[text] if text in found else self._known[text] for text in observations]
        if len(self._known) + len(found) > _MAX_KNOWN:
            self._known.clear()
        self._known |= found if len(found) <= _MAX_KNOWN else {}
        return prompts

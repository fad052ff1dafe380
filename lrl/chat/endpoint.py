"""Send one request to an OpenAI-compatible endpoint, and read what comes back."""

from __future__ import annotations

import email.utils
import json
import math
import os
import re
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from lrl.addresses import checked_url, is_loopback
from lrl.chat.model import Completion
from lrl.functional.random import counter_hash
from lrl.ranges import NonNegativeInt, PositiveFloat, check_fields

# Decide what to do about a request that failed: how long to wait, and when to stop.

_TRANSIENT = (408, 409, 425, 429)
"""Statuses of requests that may succeed later, besides those of the server's own errors (500 and above)."""

_MOST_DOUBLINGS = 1000
"""After so many retries the delay no longer doubles; a larger power of 2 would be no number."""
_TOO_LONG = re.compile(
    r"context[_ ]?(?:length|size|window)|maximum model length"
    r"|(?:prompt|input|request)[\w ]{0,40} too (?:long|large)|input token count|too many (?:input )?tokens"
    r"|max_new_tokens. must be <=",
    re.IGNORECASE,
)
"""How OpenAI, vLLM, llama.cpp, Anthropic, Gemini, Mistral, TGI and LiteLLM say that a conversation is too long."""


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """Configures how often, and after how long, a failed request is sent again.

    Before retry ``k`` (from 0) it waits ``min(max_delay, base_delay * 2**k)`` seconds, of which the second half is
    random, or what the server's ``Retry-After`` says, if that is longer.
    """

    max_retries: NonNegativeInt = 8
    """How many times a failed request is sent again; with the other defaults that takes some 3 minutes."""
    base_delay: PositiveFloat = 1.0
    """Seconds before the first retry."""
    max_delay: PositiveFloat = 60.0
    """Maximum number of seconds before a retry, unless the server asks for more."""
    max_wait: PositiveFloat = 600.0
    """A server that asks to wait for more seconds than this is not waited for."""
    timeout: PositiveFloat = 120.0
    """Seconds without any data from the server after which a request has failed."""

    def __post_init__(self) -> None:
        check_fields(self, "retries")

    def delay(self, retry: int, retry_after: float | None, request: int) -> float:
        """Return the seconds to wait before a retry, the same in every run.

        Args:
            retry: its index, from 0.
            retry_after: what the server asks for; None where it does not ask.
            request: a number that names the request, so that requests that fail together return apart.
        """
        uniform = float(counter_hash("chat retry", request, retry) >> 11) * 2.0**-53
        backoff = min(self.max_delay, self.base_delay * 2.0 ** min(retry, _MOST_DOUBLINGS)) * (0.5 + 0.5 * uniform)
        return max(backoff, retry_after or 0.0)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Describes a request that failed."""

    reason: str
    """A few words for an error message, without the API key."""
    transient: bool = True
    """Whether the same request may succeed later."""
    status: int | None = None
    """HTTP status; None where the server did not give one."""
    too_long: bool = False
    """Whether the server says that the conversation is longer than its model reads."""
    retry_after: float | None = None
    """Seconds that the server asks to wait; None where it does not ask."""


def failure_of_status(
    status: int, headers: Mapping[str, str], reason: str, code: str | None = None, body: str = ""
) -> Failure:
    """Describe a response with an HTTP status that is not a success.

    Args:
        status: HTTP status.
        headers: of the response, found by lower-case names.
        reason: what the server says.
        code: the error's name in OpenAI's API, such as ``insufficient_quota``, which no waiting mends.
        body: the whole body; a gateway may place the message of the server anywhere in it.
    """
    transient = (status in _TRANSIENT or status >= 500) and code != "insufficient_quota"
    too_long = status == 413 or (status in (400, 422) and bool(_TOO_LONG.search(f"{code} {reason} {body}")))
    return Failure(
        reason=f"{status}: {reason}" if reason else str(status),
        transient=transient,
        status=status,
        too_long=too_long,
        retry_after=retry_after(headers) if transient else None,
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``Retry-After`` asks to wait, at least 0; None where it is missing or unreadable.

    It holds a number of seconds or a date (RFC 9110, section 10.2.3).
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, LookupError, ArithmeticError, OSError):  # no date, or one that no clock shows
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


_SHOWN = 200
"""Characters of a server's message that are shown."""
_SHOWN_BODY = 60
"""Characters of a body that are shown where it is no chat completion."""
_PLACEHOLDER = "none"
"""What is sent in place of an API key where there is none."""
_SECRET = 8
"""A shorter API key is no secret, but a placeholder for a server without keys, and may be part of other words."""
_MOST_TOKENS = 10**9
"""A larger number of tokens is taken for a server's mistake and ignored; the response is used."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Legal name of an environment variable."""
_KEY_LENGTH = 16
"""Minimum length of what may be an API key in place of the name of a variable."""
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading a body raises that is no chat completion."""


@final
class ChatEndpoint:
    """An endpoint for chat completions. The API key is read from the environment for each request, and kept nowhere.

    Args:
        api_url: base URL.
        api_key_env: environment variable that holds the API key.
        timeout: seconds without any data after which a request has failed.
        accept_empty: whether an empty response is one; else it is a failure.

    Raises:
        ValueError: the URL is no HTTP address, or holds a secret; ``api_key_env`` is no name, but maybe the key itself.
    """

    def __init__(self, api_url: str, api_key_env: str, timeout: float, accept_empty: bool = False) -> None:
        example, keys_are = "http://127.0.0.1:8000/v1", "read from the environment"
        self.api_url, self.api_key_env = checked_url("api_url", api_url, example, keys_are), _checked_name(api_key_env)
        self.timeout, self.accept_empty = timeout, accept_empty

    @property
    def has_key(self) -> bool:
        """Return whether the environment variable of the API key is set."""
        return bool(self._key())

    def connect(self) -> None:
        """Make the client, which opens no connection yet.

        Raises:
            ValueError: the package is not installed, or the environment holds what cannot be an API key.
        """
        assert self._client is not None
        self._key()

    @cached_property
    def _client(self) -> Any:
        try:
            import openai
        except ImportError as error:
            raise ValueError("api_url needs the package openai; install the extra, 'lrl[serve]'.") from error
        client = openai.DefaultHttpxClient(
            trust_env=not is_loopback(self.api_url), event_hooks={"response": [_read_as_utf8]}
        )
        weakref.finalize(self, client.close)  # openai closes only what it made itself
        # Each request brings its own key, so that the client does not hold it.
        return openai.OpenAI(
            api_key=_PLACEHOLDER, base_url=self.api_url, timeout=self.timeout, max_retries=0, http_client=client
        )

    def _key(self) -> str:
        """Return the API key, "" where the environment holds none.

        Raises:
            ValueError: it cannot be sent, and the client's own error would show it.
        """
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"the environment variable {self.api_key_env} holds several lines or characters that no API key has; "
                "it must hold the key alone."
            )
        return key

    def send(self, body: Mapping[str, Any]) -> tuple[Completion | Failure, tuple[int, int]]:
        """Send a request once.

        Args:
            body: its fields, ``model`` and ``messages`` among them; those that the client does not know are sent too.

        Returns:
            The response or what failed, and the numbers of tokens of the conversation and of the response, which an
            empty response has as well.
        """
        client = self._client
        import openai

        others = {name: value for name, value in body.items() if name not in ("model", "messages")}
        key = {"Authorization": f"Bearer {self._key() or _PLACEHOLDER}"}
        try:
            raw = client.chat.completions.with_raw_response.create(
                model=body["model"], messages=body["messages"], extra_body=others, extra_headers=key
            )
            return self._read(raw.text)
        except openai.APITimeoutError:
            return Failure(reason=f"no response within {self.timeout:g} s"), (0, 0)
        except openai.APIStatusError as error:
            message, code = _message_of(error)
            shown, headers = self.redact(message)[:_SHOWN], error.response.headers
            return failure_of_status(error.status_code, headers, shown, code, error.response.text), (0, 0)
        except openai.APIConnectionError as error:
            return Failure(reason=self.redact(f"no connection, {error.__cause__ or error}")), (0, 0)

    def _read(self, text: str) -> tuple[Completion | Failure, tuple[int, int]]:
        """Read the body of a response.

        Reasoning that the server separates from the response is put back before it, inside ``<think>`` tags.
        """
        try:
            payload = json.loads(text, parse_int=float)  # of any length
            choice = payload["choices"][0]
            message, usage = choice["message"], payload.get("usage")
            tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            content, finish_reason = message.get("content") or "", str(choice.get("finish_reason") or "stop")
            if not isinstance(content, str):
                raise TypeError("the content is no text")
        except _UNREADABLE:
            return Failure(reason=f"no chat completion but {self.redact(text)[:_SHOWN_BODY]!r}"), (0, 0)
        if not (content.strip() or finish_reason == "length" or self.accept_empty):
            return Failure(reason="an empty response, which accept_empty would allow"), tokens
        content = self.redact(f"<think>{reasoning}</think>{content}" if reasoning else content)
        completion = Completion(
            text=content, finish_reason=self.redact(finish_reason), prompt_tokens=tokens[0], completion_tokens=tokens[1]
        )
        return completion, tokens

    def redact(self, text: str) -> str:
        """Return a text without the API key, which a server may repeat, and without halves of surrogate pairs."""
        key, text = self._key(), without_surrogates(text)
        return text.replace(key, "<API key>") if len(key) >= _SECRET else text


def without_surrogates(text: str) -> str:
    """Return a text with a question mark for each half of a surrogate pair, which no file and no request can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_as_utf8(response: Any) -> None:
    """Decode a response of ``httpx`` as UTF-8, like all JSON, whatever its header names: some codecs give no text."""
    response.encoding = "utf-8"


def _count(usage: Any, name: str) -> int:
    """Return a number of tokens that a server counted; 0 where it says none, or what cannot be one."""
    try:
        count = int(usage[name])
    except _UNREADABLE:
        return 0
    return count if 0 <= count <= _MOST_TOKENS else 0


def _checked_name(name: str) -> str:
    """Return the name of an environment variable.

    Raises:
        ValueError: it is none, or may be a key; the message does not repeat it.
    """
    if not _VARIABLE.fullmatch(name) or (name not in os.environ and _may_be_key(name)):
        raise ValueError(
            "api_key_env does not hold the name of an environment variable; it must be one, such as OPENAI_API_KEY, "
            "and never the key itself, which belongs in that variable."
        )
    return name


def _may_be_key(name: str) -> bool:
    """Return whether what could be a name looks like an API key: long, with digits, and lower case or in one piece."""
    digits, one_piece = any(map(str.isdigit, name)), "_" not in name
    long = len(name) >= _KEY_LENGTH
    return name.startswith("sk_") or (long and digits and (one_piece or any(map(str.islower, name))))


def _message_of(error: Any) -> tuple[str, str | None]:
    """Return the message and the code of an ``openai.APIStatusError``."""
    body = error.body if isinstance(error.body, dict) else {}
    message, code = body.get("message") or body.get("detail") or error.response.text, body.get("code")
    return " ".join(str(message).split()), None if code is None else str(code)

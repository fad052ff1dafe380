"""Send one request to an OpenAI-compatible endpoint, and read what comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, final
from urllib.parse import urlsplit

from lrl.models.chat import Completion
from lrl.models.chat_retries import Failure, failure_of_status

_SHOWN = 200
"""Characters of a server's message that are shown."""
_SECRET = 8
"""A shorter API key is no secret, but a placeholder for a server without keys, and may be part of other words."""
_NOT_OPENAI = ("top_k",)
"""Fields that some servers know and the client's signature does not have."""


@final
class ChatEndpoint:
    """An endpoint for chat completions. The API key is read from the environment for each request, and kept nowhere.

    Args:
        api_url: base URL.
        api_key_env: environment variable that holds the API key.
        timeout: seconds without any data after which a request has failed.
        accept_empty: whether an empty response is one; else it is a failure.

    Raises:
        ValueError: the URL is no HTTP address, or holds a secret.
    """

    def __init__(self, api_url: str, api_key_env: str, timeout: float, accept_empty: bool = False) -> None:
        self.api_url, self.api_key_env = _checked_url(api_url), api_key_env
        self.timeout, self.accept_empty = timeout, accept_empty

    @property
    def has_key(self) -> bool:
        """Whether the environment holds an API key."""
        return bool(self._key())

    def connect(self) -> None:
        """Make the client, which opens no connection yet.

        Raises:
            ValueError: the package is not installed.
        """
        assert self._client is not None

    @cached_property
    def _client(self) -> Any:
        try:
            import openai
        except ImportError as error:
            raise ValueError("api_url needs the package openai; install the extra, 'lrl[serve]'.") from error
        # The key is a function, so that no object holds it; a server without keys ignores the placeholder.
        return openai.OpenAI(
            api_key=lambda: self._key() or "none", base_url=self.api_url, timeout=self.timeout, max_retries=0
        )

    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "").strip()

    def send(self, body: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[Completion | Failure, tuple[int, int]]:
        """Send a request once.

        Args:
            body: its fields.
            extra: further fields, which OpenAI's own API does not have.

        Returns:
            The response or what failed, and the numbers of tokens of the conversation and of the response, which an
            empty response has as well.
        """
        client = self._client
        import openai

        extra = {name: body[name] for name in _NOT_OPENAI if name in body} | dict(extra)
        known = {name: value for name, value in body.items() if name not in extra}
        try:
            raw = client.chat.completions.with_raw_response.create(**known, extra_body=extra or None)
            return self._read(raw.text)
        except openai.APITimeoutError:
            return Failure(reason=f"no response within {self.timeout:g} s"), (0, 0)
        except openai.APIStatusError as error:
            message, code = _message_of(error)
            headers = error.response.headers
            return failure_of_status(error.status_code, headers, self.redact(message), code), (0, 0)
        except openai.APIConnectionError as error:
            return Failure(reason=self.redact(f"no connection, {error.__cause__ or error}")), (0, 0)

    def _read(self, text: str) -> tuple[Completion | Failure, tuple[int, int]]:
        """Read the body of a response.

        Reasoning that the server separates from the response is put back before it, inside ``<think>`` tags.
        """
        try:
            payload = json.loads(text)
            choice = payload["choices"][0]
            message, usage = choice["message"], payload.get("usage") or {}
            tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            content, finish_reason = str(message.get("content") or ""), str(choice.get("finish_reason") or "stop")
        except (ValueError, TypeError, LookupError, AttributeError):
            return Failure(reason=self.redact(f"no chat completion but {text[:60]!r}")), (0, 0)
        if not (content.strip() or finish_reason == "length" or self.accept_empty):
            return Failure(reason="an empty response, which accept_empty would allow"), tokens
        content = self.redact(f"<think>{reasoning}</think>{content}" if reasoning else content)
        completion = Completion(
            text=content.encode("utf-8", "replace").decode("utf-8"),  # no file takes half a surrogate pair
            finish_reason=finish_reason,
            prompt_tokens=tokens[0],
            completion_tokens=tokens[1],
        )
        return completion, tokens

    def redact(self, text: str) -> str:
        """Return a text without the API key, which a server may repeat."""
        key = self._key()
        return text.replace(key, "<API key>") if len(key) >= _SECRET else text


def _checked_url(api_url: str) -> str:
    """Return a base URL without a trailing slash.

    Raises:
        ValueError: it is no HTTP address, or holds what may be a secret, which would be written to files.
    """
    parts = urlsplit(api_url)
    if parts.username or parts.password or parts.query:
        raise ValueError(
            "api_url holds a user name, a password or a query; it must not, as files will hold it: keys are read from "
            "the environment."
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"api_url is {api_url!r}; it must be an address such as http://127.0.0.1:8000/v1.")
    return api_url.rstrip("/")


def _message_of(error: Any) -> tuple[str, str | None]:
    """Return the message and the code of an ``openai.APIStatusError``."""
    body = error.body if isinstance(error.body, dict) else {}
    message, code = body.get("message") or body.get("detail") or error.response.text, body.get("code")
    return " ".join(str(message).split())[:_SHOWN], None if code is None else str(code)

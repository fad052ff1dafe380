"""Chat models behind an OpenAI-compatible endpoint, with retries, a cache of responses, and counts of tokens."""

from __future__ import annotations

import email.utils
import json
import logging
import math
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from lrl.addresses import check_variable, checked_url, is_loopback
from lrl.chat.cache import CompletionCache, request_key
from lrl.chat.model import ChatModel, Completion, ConversationTooLongError, Message, estimated_tokens
from lrl.files import encodable
from lrl.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_fields
from lrl.registry import register

if TYPE_CHECKING:
    from tenacity import RetryCallState

    from lrl.types import SamplingConfig

_LOG = logging.getLogger("lrl")

_BASE_DELAY, _MAX_DELAY = 1.0, 60.0
"""Maximum pause before the first retry, and maximum pause before any retry, in seconds; a server may ask for more."""
_MAX_RETRY_AFTER = 600.0
"""If a server asks for a longer delay than this many seconds, the request is not sent again."""
_TRANSIENT = (408, 409, 425, 429)
"""HTTP statuses below 500 after which a request may succeed later."""
_TOO_LONG = re.compile(
    r"context[_ ]?(?:length|size|window)|maximum model length"
    r"|(?:prompt|input|request)[\w ]{0,40} too (?:long|large)|input token count|too many (?:input )?tokens"
    r"|max_new_tokens. must be <=",
    re.IGNORECASE,
)
"""Matches error messages of OpenAI, vLLM, llama.cpp, Anthropic, Gemini, Mistral, TGI and LiteLLM about conversations
that are too long."""
_MAX_MESSAGE, _MAX_BODY = 200, 60
"""Maximum number of characters that an error quotes of a server's error message, and of a body without completion."""
_NO_KEY = "none"
"""API key that is sent if the environment variable is not set."""
_MIN_KEY_LENGTH = 8
"""Minimum number of characters of an API key that is redacted; shorter keys are placeholders, often words."""
_MAX_TOKENS = 10**9
"""Largest plausible token count; a larger one is an error of the server and counts as 0."""
_READ_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that occur if a body is read that is not a chat completion."""
_TOKENS_PER_PRICE = 1_000_000
"""Number of tokens to which a price refers."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Configures the prices of a million tokens, in any currency."""

    prompt: NonNegativeFloat
    """Price of a million prompt tokens."""
    completion: NonNegativeFloat
    """Price of a million response tokens."""

    def __post_init__(self) -> None:
        check_fields(self, "prices")


@dataclass(kw_only=True)
class Usage:
    """Counts the requests of this process."""

    requests: int = 0
    """Number of requests that were sent, including retries."""
    retries: int = 0
    """Number of requests that were sent again after a failure."""
    cached: int = 0
    """Number of conversations that were not sent, because the response was in the cache or the same call sent an equal
    conversation."""
    prompt_tokens: int = 0
    """Number of prompt tokens, as reported by the server; those of failed requests are unknown."""
    completion_tokens: int = 0
    """Number of response tokens, as reported by the server."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Describes a request that failed."""

    reason: str
    """Short description for an error message, without the API key."""
    transient: bool = True
    """Whether the same request may succeed later."""
    status: int | None = None
    """HTTP status; None if the server did not respond."""
    too_long: bool = False
    """Whether the server rejected the conversation because it is longer than its model's context."""
    retry_after: float | None = None
    """Delay in seconds for which the server asks; None if it asks for none."""
    prompt_tokens: int = 0
    """Number of prompt tokens that the server reported for an empty response."""
    completion_tokens: int = 0
    """Number of response tokens that the server reported for an empty response."""


@dataclass(kw_only=True, eq=False)
class ServerSettings:
    """Settings of requests to a server, which configurations and the command line share."""

    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that contains the API key; it need not be set if the server requires no key."""
    max_concurrency: PositiveInt = 8
    """Maximum number of simultaneous requests."""
    timeout: PositiveFloat = 120.0
    """Seconds without data from the server after which a request counts as failed."""
    max_retries: NonNegativeInt = 8
    """Maximum number of times that a failed request is sent again; 8 pauses add up to 91 to 183 seconds."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request. A null value removes a field, such as ``seed`` if the server does not accept
    it."""
    max_tokens_field: str = "max_tokens"
    """Request field for the maximum number of response tokens: max_tokens or max_completion_tokens."""
    accept_empty: bool = False
    """Whether an empty response is accepted. If not, it counts as a failure, and the request is sent again."""


@register
@final
@dataclass(eq=False)
class ServedChatModel(ServerSettings, ChatModel):
    """A chat model behind an OpenAI-compatible endpoint. It needs the extra ``serve``.

    The API key is read from the environment for every request. It is never stored in an attribute, an error or a file.

    Raises:
        ValueError: If a setting is out of range, if ``api_url`` or ``api_key_env`` may contain a secret, if
            ``extra_body`` cannot be sent, or if the cache cannot be written.

    Attributes:
        usage: the counts so far.
        wait: waits until an event is set or a number of seconds has passed; tests replace it.
    """

    name: str
    """Name of the model on the server."""
    api_url: str
    """Base URL of the endpoint, such as ``http://127.0.0.1:8000/v1``."""
    cache: str | None = None
    """Path of an SQLite file in which responses are cached; null caches none."""
    prices: Prices | None = None
    """Prices from which :meth:`report` computes the cost; null computes no cost."""
    context_length: PositiveInt | None = None
    """Maximum number of tokens of a conversation and its response; null disables the check. Some servers reject
    a longer conversation, others truncate it silently."""

    def __post_init__(self) -> None:
        check_fields(self, "chat_model")
        example, keys_are = "http://127.0.0.1:8000/v1", "read from the environment"
        self.api_url = checked_url("api_url", self.api_url, example, keys_are)
        check_variable("api_key_env", self.api_key_env)
        _check_extra_body(self.extra_body)
        self.responses = None if self.cache is None else CompletionCache(self.cache)
        self.usage = Usage()
        self.wait: Callable[[threading.Event, float], Any] = threading.Event.wait
        self._slots, self._counting = threading.BoundedSemaphore(self.max_concurrency), threading.Lock()

    def connect(self) -> None:
        """Create the client, which opens a connection with the first request.

        Raises:
            ValueError: If the extra ``serve`` is not installed, or if the value of the environment variable cannot be
                an API key.
        """
        assert self._client is not None
        self._key()

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether a conversation and its response fit into ``context_length``; True if that is null.

        Args:
            conversation: messages, oldest first; the number of their tokens is estimated, usually too high.
            sampling: specifies the maximum number of tokens of a response.
            response: ignored, because only the server can tokenise it.
        """
        if self.context_length is None:
            return True
        return estimated_tokens(conversation) + sampling.max_new_tokens <= self.context_length

    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one response to each conversation, in the same order; equal requests are sent once.

        Args:
            conversations: messages, oldest first.
            sampling: temperature, top-k, top-p and the maximum number of tokens of a response.
            seeds: one seed per response; whether equal seeds give equal responses depends on the server.

        Raises:
            ConversationTooLongError: If the server rejects a conversation as too long.
            ValueError: If a request fails permanently, or still fails after ``max_retries`` retries. All responses that
                have arrived by then are in the cache.
        """
        self.connect()
        bodies = [self._body(*pair, sampling) for pair in zip(conversations, seeds, strict=True)]
        keys = [request_key(self.api_url, *pair) for pair in zip(bodies, seeds, strict=True)]
        known: dict[str, Completion] = {}
        if self.responses is not None:
            found = {key: self.responses.find(key) for key in dict.fromkeys(keys)}
            known = {key: completion for key, completion in found.items() if completion and self._accepts(completion)}
        missing = {key: body for key, body in zip(keys, bodies) if key not in known}
        with self._counting:
            self.usage.cached += len(keys) - len(missing)
        known |= self._request_all(missing)
        return [known[key] for key in keys]

    def report(self) -> dict[str, Any]:
        """Return the counts by name, and ``cost``: the price of all tokens, or None if ``prices`` is not set."""
        usage, prices = self.usage, self.prices
        price = prices and usage.prompt_tokens * prices.prompt + usage.completion_tokens * prices.completion
        return {**asdict(usage), "cost": None if price is None else price / _TOKENS_PER_PRICE}

    def _accepts(self, completion: Completion) -> bool:
        """Return whether a cached response is accepted; a run with ``accept_empty`` may have cached empty ones."""
        return self.accept_empty or completion.finish_reason == "length" or bool(completion.text.strip())

    def _body(self, messages: Sequence[Message], seed: int, sampling: SamplingConfig) -> dict[str, Any]:
        """Return the body of a request as JSON values."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{name: encodable(text) for name, text in message.items()} for message in messages],
            "temperature": sampling.temperature,
            self.max_tokens_field: sampling.max_new_tokens,
            "seed": int(seed),
        }
        body |= {"top_p": sampling.top_p, "top_k": sampling.top_k} | self.extra_body
        return {name: value for name, value in body.items() if value is not None}

    def _request_all(self, missing: Mapping[str, Mapping[str, Any]]) -> dict[str, Completion]:
        """Send requests in parallel, and return the responses by key.

        After a permanent failure no further request starts, but requests in progress are completed, so that their
        responses are kept.
        """
        if not missing:
            return {}
        stop = threading.Event()
        pool = ThreadPoolExecutor(min(self.max_concurrency, len(missing)), "lrl-chat")
        futures: dict[str, Future[Completion | None]] = {}
        try:
            futures = {key: pool.submit(self._request, key, body, stop) for key, body in missing.items()}
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        finished = {key: future.result() for key, future in futures.items() if not future.cancelled()}
        return {key: completion for key, completion in finished.items() if completion is not None}

    def _request(self, key: str, body: Mapping[str, Any], stop: threading.Event) -> Completion | None:
        """Send a request, with retries, and write the response to the cache.

        Args:
            key: hash of the request.
            body: body of the request as JSON values.
            stop: event that is set after the first permanent failure; then nothing is sent any more, retries included.

        Returns:
            The response; None if another request failed permanently before this one succeeded.

        Raises:
            ValueError: If the request fails permanently, or if the response cannot be written to the cache.
        """
        from tenacity import Retrying, retry_if_result, stop_after_attempt

        tries = 0

        def send() -> Completion | Failure | None:
            nonlocal tries
            if stop.is_set():
                return None
            tries += 1
            with self._slots:
                outcome = self._post(body)
            with self._counting:
                self.usage.requests += 1
                self.usage.retries += tries > 1
                self.usage.prompt_tokens += outcome.prompt_tokens
                self.usage.completion_tokens += outcome.completion_tokens
            return outcome

        def warn(state: RetryCallState) -> None:
            if not stop.is_set():
                sentence = "%s: %s; the request is sent again in %.1f s."
                _LOG.warning(sentence, self.name, _last_outcome(state).reason, state.upcoming_sleep)

        outcome = Retrying(
            retry=retry_if_result(_can_retry),
            stop=stop_after_attempt(self.max_retries + 1),
            wait=lambda state: retry_delay(state.attempt_number - 1, _last_outcome(state).retry_after, key),
            before_sleep=warn,
            sleep=lambda seconds: self.wait(stop, seconds),
            retry_error_callback=_last_outcome,
        )(send)
        try:
            if isinstance(outcome, Failure):
                kind = ConversationTooLongError if outcome.too_long else ValueError
                raise kind(self._error_message(outcome, tries))
            return outcome if outcome is None or self.responses is None else self.responses.add(key, self.name, outcome)
        except ValueError:
            stop.set()
            raise

    def _error_message(self, failure: Failure, tries: int) -> str:
        """Return the error message for a request that failed permanently or too often."""
        reason = " ".join(failure.reason.split()).rstrip(".")
        if failure.status in (401, 403):
            state = "contains a key that was not accepted" if self._key() else "is not set"
            return f"api_url is {self.api_url!r}, which requires a valid key; {self.api_key_env} {state} ({reason})."
        if not failure.transient:
            return f"api_url is {self.api_url!r}, which rejects the request for the model {self.name!r} ({reason})."
        times = "once" if tries == 1 else f"{tries} times"
        if self.responses is None:
            kept = "no response is kept, because there is no cache file"
        else:
            file = str(self.responses.path)
            kept = f"{len(self.responses)} responses are kept in {file!r}, and the same command requests only the rest"
        return f"api_url is {self.api_url!r}, which failed {times} for the model {self.name!r} ({reason}); {kept}."

    @cached_property
    def _client(self) -> Any:
        """The client of the package ``openai``.

        Raises:
            ValueError: If the extra ``serve`` is not installed.
        """
        try:
            import openai
            import tenacity  # noqa: F401 (_request imports it; the extra installs both)
        except ImportError as error:
            raise ValueError(f"api_url needs the package {error.name}; install the extra, 'lrl[serve]'.") from error
        client = openai.DefaultHttpxClient(
            trust_env=not is_loopback(self.api_url), event_hooks={"response": [_read_as_utf8]}
        )
        weakref.finalize(self, client.close)  # openai closes only clients that it created itself
        # Each request has the API key in a header, so that the client does not store it.
        return openai.OpenAI(
            api_key=_NO_KEY, base_url=self.api_url, timeout=self.timeout, max_retries=0, http_client=client
        )

    def _key(self) -> str:
        """Return the API key; empty if the environment variable is not set.

        Raises:
            ValueError: If the key cannot be sent in a header. The client's own error would show the key.
        """
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"the environment variable {self.api_key_env} contains several lines or characters that no API key "
                "has; it must contain only the key."
            )
        return key

    def _post(self, body: Mapping[str, Any]) -> Completion | Failure:
        """Send a request once, including fields that the client does not know."""
        client = self._client
        import openai

        other_fields = {name: value for name, value in body.items() if name not in ("model", "messages")}
        header = {"Authorization": f"Bearer {self._key() or _NO_KEY}"}
        try:
            raw = client.chat.completions.with_raw_response.create(
                model=body["model"], messages=body["messages"], extra_body=other_fields, extra_headers=header
            )
            return self._read(raw.text)
        except openai.APITimeoutError:
            return Failure(reason=f"no response within {self.timeout:g} s")
        except openai.APIStatusError as error:
            return self._failure(error)
        except openai.APIConnectionError as error:
            return Failure(reason=self._redact(f"no connection, {error.__cause__ or error}"))

    def _failure(self, error: Any) -> Failure:
        """Return the failure that an ``openai.APIStatusError`` describes."""
        status, text, body = error.status_code, error.response.text, error.body if isinstance(error.body, dict) else {}
        message, code = str(body.get("message") or body.get("detail") or text), body.get("code")
        reason = self._redact(" ".join(message.split()))[:_MAX_MESSAGE]
        transient = (status in _TRANSIENT or status >= 500) and code != "insufficient_quota"
        # The whole body is searched, because gateways put the message of the server in different fields.
        is_too_long = status in (400, 422) and _TOO_LONG.search(f"{code} {reason} {text}")
        return Failure(
            reason=f"{status}: {reason}" if reason else str(status),
            transient=transient,
            status=status,
            too_long=status == 413 or bool(is_too_long),
            retry_after=retry_after(error.response.headers) if transient else None,
        )

    def _read(self, text: str) -> Completion | Failure:
        """Return the completion in the body of a response, or a failure.

        If the server returns reasoning in a separate field, it is inserted before the response inside ``<think>`` tags.
        """
        try:
            payload = json.loads(text, parse_int=float)  # int() rejects very long numbers
            choice = payload["choices"][0]
            message, usage = choice["message"], payload.get("usage")
            counts: Any = {name: _count(usage, name) for name in ("prompt_tokens", "completion_tokens")}
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            content, finish_reason = message.get("content") or "", str(choice.get("finish_reason") or "stop")
            if not isinstance(content, str):
                raise TypeError("the content is not a string")
        except _READ_ERRORS:
            return Failure(reason=f"no chat completion but {self._redact(text)[:_MAX_BODY]!r}")
        if not (content.strip() or finish_reason == "length" or self.accept_empty):
            return Failure(reason="an empty response; accept_empty is false", **counts)
        content = self._redact(f"<think>{reasoning}</think>{content}" if reasoning else content)
        return Completion(text=content, finish_reason=self._redact(finish_reason), **counts)

    def _redact(self, text: str) -> str:
        """Return a text of the server without unpaired surrogates and without the API key, which it may contain."""
        key, text = self._key(), encodable(text)
        return text.replace(key, "<API key>") if len(key) >= _MIN_KEY_LENGTH else text


def _can_retry(outcome: Completion | Failure | None) -> bool:
    """Return whether a request failed and may be sent again, after an acceptable delay."""
    return isinstance(outcome, Failure) and outcome.transient and (outcome.retry_after or 0.0) <= _MAX_RETRY_AFTER


def _last_outcome(state: RetryCallState) -> Any:
    """Return the result of the last attempt."""
    assert state.outcome is not None
    return state.outcome.result()


def retry_delay(retry: int, requested: float | None, request: str) -> float:
    """Return the delay before a retry in seconds: exponential backoff with jitter that is the same in every run.

    Args:
        retry: index of the retry, starting at 0.
        requested: delay in seconds for which the server asks; None if it asks for none.
        request: key of the request. The jitter depends on it, so that requests that failed together are not sent again
            at the same time.
    """
    max_delay = min(_MAX_DELAY, _BASE_DELAY * 2.0 ** min(retry, 60))  # a larger power might overflow
    return max(max_delay * random.Random(f"{request} {retry}").uniform(0.5, 1.0), requested or 0.0)


def _check_extra_body(extra_body: Mapping[str, Any]) -> None:
    """Check ``extra_body``, the further fields of each request.

    Raises:
        ValueError: If it contains a field that lrl sets, or if a value cannot be represented as JSON.
    """
    for name in ("model", "messages", "stream"):
        if name in extra_body:
            raise ValueError(f"extra_body contains {name!r}, which lrl sets in each request; it must be left out.")
    try:
        json.dumps(extra_body, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra_body is {extra_body}; it must be representable as JSON ({error}).") from error


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the delay of the header ``Retry-After`` in seconds, at least 0; None if it is missing or unreadable.

    The value is a number of seconds or a date (RFC 9110, section 10.2.3).
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, LookupError, ArithmeticError, OSError):  # not a date, or one out of range
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _read_as_utf8(response: Any) -> None:
    """Decode a response of ``httpx`` as UTF-8, the encoding of JSON; the codec in its header may not yield text."""
    response.encoding = "utf-8"


def _count(usage: Any, name: str) -> int:
    """Return a token count as reported by the server; 0 if it is missing or impossible."""
    try:
        count = int(usage[name])
    except _READ_ERRORS:
        return 0
    return count if 0 <= count <= _MAX_TOKENS else 0

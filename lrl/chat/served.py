"""Chat models behind an OpenAI-compatible endpoint: retries, a limit of requests, a cache and counts."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, final

from lrl.chat.cache import CompletionCache, request_key
from lrl.chat.endpoint import ChatEndpoint, Failure, RetryConfig, without_surrogates
from lrl.chat.model import ChatModel, Completion, ConversationTooLongError, Message
from lrl.ranges import NonNegativeFloat, PositiveInt, check_arguments, check_fields
from lrl.types import SamplingConfig

_PER_PRICE = 1_000_000
"""Number of tokens that a price is for."""
_PER_MESSAGE = 8
"""Tokens that a chat template adds to a message, about."""
_PIECES = re.compile(rb"[A-Za-z]{1,4}|[^\sA-Za-z]|\n| (?=[0-9])")
_LOG = logging.getLogger("lrl")


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of a million tokens, in any currency."""

    prompt: NonNegativeFloat
    """Price of a million tokens of conversations."""
    completion: NonNegativeFloat
    """Price of a million tokens of responses."""

    def __post_init__(self) -> None:
        check_fields(self, "prices")


@dataclass(kw_only=True)
class Usage:
    """Counts what a chat model was asked in this process."""

    requests: int = 0
    """Requests that were sent, retries included."""
    retries: int = 0
    """Requests that were sent again after a failure."""
    cached: int = 0
    """Conversations whose response was known, from the cache or because one call held them twice."""
    prompt_tokens: int = 0
    """Tokens of the conversations, by the server's count; those of failed requests are unknown."""
    completion_tokens: int = 0
    """Tokens of the responses, by the server's count."""


@final
class ServedChatModel(ChatModel):
    """A chat model behind an OpenAI-compatible endpoint; needs the extra ``serve``.

    The API key is read from the environment when a request is sent. It is in no attribute, error or file.

    Args:
        name: name of the model on the server.
        api_url: base URL of the endpoint, such as ``http://127.0.0.1:8000/v1``.
        api_key_env: environment variable that holds the API key; servers without keys need none.
        max_concurrency: maximum number of requests under way at once.
        cache: SQLite file of responses; null asks again every time.
        retries: how failed requests are repeated.
        prices: for the cost; null computes none.
        extra_body: further fields of each request, as the server knows them; null leaves a field out, such as a seed
            that it does not take.
        max_tokens_field: what the server calls the maximum number of tokens of a response; OpenAI's reasoning models
            take ``max_completion_tokens`` only.
        accept_empty: whether an empty response is one; else it is a failure, and the request is sent again.
        context_length: maximum number of tokens of a conversation and its response; null leaves it to the server, some
            of which cut a longer conversation without saying so.

    Attributes:
        usage: what was asked so far.
        wait: waits for an event or some seconds; tests replace it.
    """

    def __init__(
        self,
        name: str,
        api_url: str,
        api_key_env: str = "OPENAI_API_KEY",
        max_concurrency: PositiveInt = 8,
        cache: str | None = None,
        retries: RetryConfig = RetryConfig(),
        prices: Prices | None = None,
        extra_body: Mapping[str, Any] | None = None,
        max_tokens_field: str = "max_tokens",
        accept_empty: bool = False,
        context_length: PositiveInt | None = None,
    ) -> None:
        limits = {"max_concurrency": max_concurrency, "context_length": context_length}
        check_arguments(type(self).__init__, limits, "chat_model")
        self.endpoint = ChatEndpoint(api_url, api_key_env, retries.timeout, accept_empty)
        self.name, self.retries, self.prices = name, retries, prices
        self.extra_body, self.max_tokens_field = _checked_fields(extra_body or {}), max_tokens_field
        self.max_concurrency, self.context_length = max_concurrency, context_length
        self.cache = None if cache is None else CompletionCache(cache)
        self.usage = Usage()
        self.wait: Callable[[threading.Event, float], Any] = threading.Event.wait
        self._slots, self._counting = threading.BoundedSemaphore(max_concurrency), threading.Lock()

    def connect(self) -> None:
        """Make the client, which sends nothing yet.

        Raises:
            ValueError: the package is not installed, or the environment holds what cannot be an API key.
        """
        self.endpoint.connect()

    def fits(self, conversation: Sequence[Message], sampling: SamplingConfig, response: str = "") -> bool:
        """Return whether a conversation and its response fit into ``context_length``; True where that is null.

        Args:
            conversation: messages, oldest first; their tokens are estimated, rather more than less.
            sampling: has the maximum number of tokens of a response.
            response: not read, as only the server knows its tokens.
        """
        if self.context_length is None:
            return True
        tokens = sum(_PER_MESSAGE + estimated_tokens(message["content"]) for message in conversation)
        return tokens + sampling.max_new_tokens <= self.context_length

    def complete(
        self, conversations: Sequence[Sequence[Message]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one response to each conversation, in the same order; equal requests are sent once.

        Args:
            conversations: messages, oldest first.
            sampling: temperature, top-k, top-p and the maximum number of tokens of a response.
            seeds: of each response; it is the server that makes equal seeds give equal responses, or does not.

        Raises:
            ConversationTooLongError: the server says that its model does not read so much.
            ValueError: the server cannot be reached for longer than the retries last, or rejects a request for good.
                All responses that have arrived by then are in the cache.
        """
        self.connect()
        bodies = [self._body(*pair, sampling) for pair in zip(conversations, seeds, strict=True)]
        keys = [request_key(self.endpoint.api_url, *pair) for pair in zip(bodies, seeds, strict=True)]
        known: dict[str, Completion] = {}
        if self.cache is not None:
            found = {key: self.cache.find(key) for key in dict.fromkeys(keys)}
            known = {key: completion for key, completion in found.items() if completion and self._is_one(completion)}
        missing = {key: body for key, body in zip(keys, bodies) if key not in known}
        self._count(cached=len(keys) - len(missing))
        known |= self._ask_all(missing)
        return [known[key] for key in keys]

    def _is_one(self, completion: Completion) -> bool:
        """Return whether a response from the cache, which may be empty, would be accepted from the server."""
        return self.endpoint.accept_empty or completion.finish_reason == "length" or bool(completion.text.strip())

    @property
    def cost(self) -> float | None:
        """Price of all tokens so far; None without prices."""
        if self.prices is None:
            return None
        prompt = self.usage.prompt_tokens * self.prices.prompt
        return (prompt + self.usage.completion_tokens * self.prices.completion) / _PER_PRICE

    def report(self) -> dict[str, Any]:
        """Return the counts and the cost by name, for a JSON file."""
        return {**asdict(self.usage), "cost": self.cost}

    def _body(self, messages: Sequence[Message], seed: int, sampling: SamplingConfig) -> dict[str, Any]:
        """Return everything that is sent, except the API key."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{name: without_surrogates(text) for name, text in message.items()} for message in messages],
            "temperature": sampling.temperature,
            self.max_tokens_field: sampling.max_new_tokens,
            "seed": int(seed),
        }
        body |= {"top_p": sampling.top_p, "top_k": sampling.top_k} | self.extra_body
        return {name: value for name, value in body.items() if value is not None}

    def _ask_all(self, missing: Mapping[str, Mapping[str, Any]]) -> dict[str, Completion]:
        """Send requests, several at a time, and return the responses by key.

        After a failure for good no further request begins, but those under way may end, so that they are not lost.
        """
        if not missing:
            return {}
        stop = threading.Event()
        pool = ThreadPoolExecutor(min(self.max_concurrency, len(missing)), "lrl-chat")
        futures: dict[str, Future[Completion | None]] = {}
        try:
            futures = {key: pool.submit(self._ask, key, body, stop) for key, body in missing.items()}
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        finished = {key: future.result() for key, future in futures.items() if not future.cancelled()}
        return {key: completion for key, completion in finished.items() if completion is not None}

    def _ask(self, key: str, body: Mapping[str, Any], stop: threading.Event) -> Completion | None:
        """Send a request until it succeeds, and write the response to the cache.

        Args:
            key: of the request.
            body: everything that is sent.
            stop: set by the first request that fails for good; None is returned where this request is then not sent,
                or not sent again.

        Raises:
            ValueError: the request failed for good, or the response cannot be written to the cache.
        """
        if stop.is_set():
            return None
        outcome, retry = self._send(body), 0
        while isinstance(outcome, Failure):
            too_long = (outcome.retry_after or 0.0) > self.retries.max_wait
            if not outcome.transient or too_long or retry == self.retries.max_retries:
                stop.set()
                kind = ConversationTooLongError if outcome.too_long else ValueError
                raise kind(self._sentence(outcome, retry + 1))
            if not stop.is_set():
                delay = self.retries.delay(retry, outcome.retry_after, int(key[:15], 16))
                _LOG.warning("%s: %s; the request is sent again in %.1f s.", self.name, outcome.reason, delay)
                self.wait(stop, delay)
            if stop.is_set():  # the request that failed for good says why
                return None
            retry += 1
            self._count(retries=1)
            outcome = self._send(body)
        try:
            return outcome if self.cache is None else self.cache.add(key, self.name, outcome)
        except ValueError:  # no further request is sent, because its response could not be kept
            stop.set()
            raise

    def _send(self, body: Mapping[str, Any]) -> Completion | Failure:
        with self._slots:
            outcome, (prompt_tokens, completion_tokens) = self.endpoint.send(body)
        self._count(requests=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        return outcome

    def _count(self, **counts: int) -> None:
        with self._counting:
            for name, count in counts.items():
                setattr(self.usage, name, getattr(self.usage, name) + count)

    def _sentence(self, failure: Failure, tries: int) -> str:
        """Return the error message for a request that is not sent again."""
        api_url, reason = self.endpoint.api_url, " ".join(failure.reason.split()).rstrip(".")
        if failure.status in (401, 403):
            state = "holds another key" if self.endpoint.has_key else "is not set"
            return (
                f"api_url is {api_url!r}, which needs a valid key, and {self.endpoint.api_key_env} {state} ({reason})."
            )
        if not failure.transient:
            return f"api_url is {api_url!r}, which rejects the request for the model {self.name!r} ({reason})."
        times = "once" if tries == 1 else f"{tries} times"
        if self.cache is None:
            kept = "without a cache file no response is kept"
        else:
            kept = f"{len(self.cache)} responses are kept in {str(self.cache.path)!r}, and the same command resumes"
        return f"api_url is {api_url!r}, which failed {times} for the model {self.name!r} ({reason}); {kept}."


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has in vocabularies with one token per digit, rather more than less.

    Four ASCII letters, a digit, a blank before a digit, a mark, a line break and a byte of any other character
    count as a token each. For prompts of a search that is 1.0 to 1.5 times the tokens of GPT-2's and Whisper's
    vocabularies, with numbers as they split them or digit by digit.
    """
    return len(_PIECES.findall(text.encode("utf-8", "replace")))


def _checked_fields(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """Return further fields of each request.

    Raises:
        ValueError: they cannot be sent, or not be read back.
    """
    for name in ("model", "messages", "stream"):
        if name in extra_body:
            raise ValueError(f"extra_body holds {name!r}, which each request has already; leave it out.")
    try:
        json.dumps(extra_body, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra_body is {dict(extra_body)}; it must be what JSON can hold ({error}).") from error
    return dict(extra_body)

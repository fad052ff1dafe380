"""Requests to a vLLM server: responses with tokens and log-probabilities, and the loading of weights."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from lrl.addresses import is_loopback
from lrl.chat.served import retry_after, retry_delay
from lrl.files import require

_LOG = logging.getLogger("lrl")
_T = TypeVar("_T")

_TRANSIENT = (408, 409, 425, 429)
"""HTTP statuses below 500 after which the same request may succeed later."""
_MAX_RETRY_AFTER = 600.0
"""If a server asks for a longer delay than this many seconds, the request is not sent again."""
_MAX_MESSAGE, _MAX_BODY = 200, 60
"""Maximum number of characters that an error quotes of a server's message, and of a body that is not JSON."""
_READ_ERRORS = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions that occur if JSON has another structure than expected."""
_FAILED_IN_WORKER = " method failed: Worker failed with error "
"""Part of a message of status 500 after which the same weights cannot be loaded either, such as an adapter whose rank
is too large. vLLM sends it for ``add_lora`` and ``collective_rpc``."""


class TransientError(Exception):
    """Raised if a request failed and may succeed later.

    Args:
        reason: short description for an error message.
        delay: delay in seconds for which the server asks; None if it asks for none.
        lost: whether the server may have been started again: the connection was lost, or the status was 500, which vLLM
            returns to all requests if its engine has ended.
    """

    def __init__(self, reason: str, delay: float | None = None, lost: bool = False) -> None:
        super().__init__(reason)
        self.delay, self.lost = delay, lost


class RejectedError(Exception):
    """Raised if the server rejects a request permanently.

    Args:
        status: HTTP status.
        reason: short description for an error message.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class WeightsLostError(Exception):
    """Raised if the server does not hold the current weights."""


class StoppedError(Exception):
    """Raised instead of sending a request that is not needed any more, because another one failed."""


class SampledRow(NamedTuple):
    """A sampled response."""

    ids: list[int]
    """Token ids, including the one that ended the response."""
    logprobs: list[float]
    """Log-probabilities of the tokens, in nats."""


@final
class VLLMServer:
    """Sends requests to a vLLM server, and repeats those that fail transiently.

    Args:
        url: address of the server.
        timeout: seconds without data from the server after which a request counts as failed.
        max_retries: maximum number of times that a failed request is sent again.

    Attributes:
        wait: waits until an event is set or a number of seconds has passed; tests replace it.
    """

    def __init__(self, url: str, timeout: float, max_retries: int) -> None:
        self.url, self.timeout, self.max_retries = url, timeout, max_retries
        self.wait: Callable[[threading.Event, float], Any] = threading.Event.wait

    @cached_property
    def _client(self) -> Any:
        """The HTTP client, which opens connections with the first requests.

        Raises:
            ValueError: If the extra ``serve`` is not installed.
        """
        for package in ("httpx", "tenacity"):
            require(package, "serve", "ServedGenerator")
        import httpx

        options = {"timeout": self.timeout, "trust_env": not is_loopback(self.url)}
        client = httpx.Client(base_url=self.url, limits=httpx.Limits(max_connections=None), **options)
        weakref.finalize(self, client.close)
        return client

    def connect(self) -> None:
        """Create the client; it must be called before threads send requests.

        Raises:
            ValueError: If the extra ``serve`` is not installed.
        """
        assert self._client is not None

    def send(self, path: str, body: Any = None, params: Any = None, method: str = "POST") -> Any:
        """Send a request once, and return the JSON of the response; None if its body is empty.

        Args:
            path: path of the endpoint.
            body: JSON of the request; None sends no body.
            params: query of the request by name.
            method: HTTP method.

        Raises:
            TransientError: If the request may succeed later.
            RejectedError: If it cannot.
        """
        response = self._accepted(path, body, params, method)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise TransientError(f"{path} returned no JSON but {response.text[:_MAX_BODY]!r}") from error

    def _accepted(self, path: str, body: Any, params: Any = None, method: str = "POST") -> Any:
        """Send a request once, and return the response with a status below 400; see :meth:`send`."""
        client = self._client
        import httpx

        try:
            response = client.request(method, path, json=body, params=params)
        except httpx.TransportError as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise TransientError(f"no connection, {reason}", lost=True) from error
        status = response.status_code
        if status >= 400:
            reason = f"{path} returned {status}: {' '.join(response.text.split())[:_MAX_MESSAGE]}"
            delay = retry_after(response.headers)
            is_transient = (status >= 500 and _FAILED_IN_WORKER not in response.text) or status in _TRANSIENT
            if is_transient and (delay or 0.0) <= _MAX_RETRY_AFTER:
                raise TransientError(reason, delay, lost=status == 500)
            raise RejectedError(status, reason)
        return response

    def retried(self, action: Callable[[], _T], key: str = "", stop: threading.Event | None = None) -> _T:
        """Return the result of an action, which is repeated with exponential backoff if it fails transiently.

        Args:
            action: sends one or several requests.
            key: determines the random part of the pauses.
            stop: event after which nothing is sent any more; None if there is none.

        Raises:
            ValueError: If the action still fails after ``max_retries`` retries.
            RejectedError: If the server rejects a request.
            StoppedError: If ``stop`` is set before the action succeeds.
        """
        self.connect()
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

        event = stop or threading.Event()

        def attempt() -> _T:
            if event.is_set():
                raise StoppedError
            return action()

        def warn(state: Any) -> None:
            reason, seconds = state.outcome.exception(), state.upcoming_sleep
            _LOG.warning("%s: %s; the request is sent again in %.1f s.", self.url, reason, seconds)

        retrying = Retrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_attempt(self.max_retries + 1),
            wait=lambda state: retry_delay(state.attempt_number - 1, _delay_of(state), key),
            before_sleep=warn,
            sleep=lambda seconds: self.wait(event, seconds),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except TransientError as error:
            times = "once" if self.max_retries == 0 else f"{self.max_retries + 1} times"
            raise ValueError(f"generator.url is {self.url!r}, which failed {times} ({error}).") from error

    def complete(self, body: Mapping[str, Any], stop: threading.Event, lost: threading.Event) -> SampledRow:
        """Return the response to one request, which is repeated until it is valid.

        Args:
            body: body of the request.
            stop: event after which nothing is sent any more.
            lost: event that is set if the server may have been started again.

        Raises:
            ValueError: If the request fails permanently.
            WeightsLostError: If the server does not know the model in the request.
            StoppedError: If ``stop`` is set.
        """

        def send() -> SampledRow:
            try:
                return checked_row(self.send("/v1/completions", body), body)
            except TransientError as error:
                if error.lost:
                    lost.set()
                raise

        try:
            return self.retried(send, str(body["seed"]), stop)
        except RejectedError as error:
            if error.status == 404:
                raise WeightsLostError(str(error)) from error
            raise ValueError(f"generator.url is {self.url!r}, which rejects a request ({error}).") from error

    # -- weights ----------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter under a name that the server has never had.

        Raises:
            ValueError: If the server does not respond.
            RejectedError: If it cannot load the adapter.
        """

        def load() -> None:
            try:
                self._accepted("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            except RejectedError as error:
                if error.status != 400 or name not in self._models():  # a lost response may have reported success
                    raise

        self.retried(load, name)

    def unload_adapter(self, name: str) -> bool:
        """Unload an adapter, and return whether the server certainly does not have it any more."""
        try:
            self._accepted("/v1/unload_lora_adapter", {"lora_name": name})
        except RejectedError as error:
            return error.status == 404
        except TransientError:
            return False
        return True

    def reload(self, version: str, folder: Path) -> str:
        """Load all weights from a folder, and return the name of the model in requests.

        After a failure the whole sequence is repeated, because the server may have been started again in between.

        Args:
            version: name that the server reports for the new weights.
            folder: complete folder of a model with the architecture that the server holds.

        Raises:
            ValueError: If the server does not respond.
            RejectedError: If it cannot load the weights.
        """

        def load() -> str:
            self.send("/pause", params={"mode": "wait"})
            try:
                self.send("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
                if not self._reset():
                    raise TransientError("/reset_prefix_cache failed, so the server could reuse old weights' prefixes")
                self.send("/update_weight_version", {"new_version": version})
            except (TransientError, RejectedError):
                with suppress(TransientError, RejectedError):  # the engine may have ended
                    self.send("/resume")
                raise
            self.send("/resume")
            if (found := self._version()) != version:
                raise TransientError(f"the weights have the version {found!r} instead of {version!r}")
            names = [name for name, base in self._models().items() if base is None]
            if not names:
                raise RejectedError(404, "/v1/models contains no base model")
            return names[0]

        return self.retried(load, version)

    def check_version(self, version: str) -> None:
        """Check that the server holds a version of the whole model.

        Raises:
            ValueError: If the server does not respond or does not report a version.
            WeightsLostError: If it holds another version.
        """
        try:
            found = self.retried(self._version, version)
        except RejectedError as error:
            raise ValueError(f"generator.url is {self.url!r}, which reports no version ({error}).") from error
        if found != version:
            raise WeightsLostError(f"the weights have the version {found!r} instead of {version!r}")

    def _reset(self) -> bool:
        """Empty the prefix cache, and return whether the server did; it cannot while a request uses the cache."""
        try:
            return self.send("/reset_prefix_cache")["success"] is True
        except _READ_ERRORS as error:
            raise TransientError(f"/reset_prefix_cache does not report success ({error!r})") from error

    def _version(self) -> str:
        """Return the version of the weights that the server holds."""
        try:
            return str(self.send("/weight_info", method="GET")["weight_version"])
        except _READ_ERRORS as error:
            raise TransientError(f"/weight_info contains no version ({error!r})") from error

    def _models(self) -> dict[str, str | None]:
        """Return the base of each adapter by its name, and None for the base itself."""
        try:
            return {card["id"]: card.get("parent") for card in self.send("/v1/models", method="GET")["data"]}
        except _READ_ERRORS as error:
            raise TransientError(f"/v1/models is not a list of models ({error!r})") from error


def _delay_of(state: Any) -> float | None:
    """Return the delay that the server asked for in the last attempt."""
    return state.outcome.exception().delay


def checked_row(payload: Any, body: Mapping[str, Any]) -> SampledRow:
    """Return the response in the body of a completion.

    Args:
        payload: JSON that the server returned.
        body: body of the request.

    Raises:
        TransientError: If it is not a complete response to the request.
        WeightsLostError: If it was sampled from another model.
    """
    try:
        (choice,), model = payload["choices"], payload["model"]
        ids, prompt, end = choice["token_ids"], choice["prompt_token_ids"], choice["finish_reason"]
        logprobs = [float(logprob) for logprob in choice["logprobs"]["token_logprobs"]]
        are_tokens = all(type(token) is int for token in ids)
    except _READ_ERRORS as error:
        raise TransientError(f"a completion without tokens or log-probabilities ({error!r})") from error
    if model != body["model"]:
        raise WeightsLostError(f"a response of the model {model!r} instead of {body['model']!r}")
    size, limit = len(ids), body["max_tokens"]
    if prompt != body["prompt"]:
        fault = "a response to another prompt"
    elif not (are_tokens and 1 <= size == len(logprobs) <= limit):
        fault = f"a response of {size} tokens with {len(logprobs)} log-probabilities, of {limit} tokens at most"
    elif not all(map(math.isfinite, logprobs)):
        fault = "a log-probability that is not finite"
    elif end not in ("stop", "length") or (end == "length" and size < limit):
        fault = f"a response of {size} tokens that ended for the reason {end!r}"
    else:
        return SampledRow(ids, logprobs)
    raise TransientError(fault)

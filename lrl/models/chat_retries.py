"""Decide what to do about a request that failed: how long to wait, and when to stop."""

from __future__ import annotations

import email.utils
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lrl.functional.random import counter_hash
from lrl.ranges import NonNegativeInt, PositiveFloat, check_fields

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

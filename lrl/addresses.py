"""Checks of the settings of servers: URLs, and names of environment variables that contain API keys.

These settings are written to files, so they must not contain secrets.
"""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Return whether a URL is an address of this machine. Requests to such an address must not use a proxy."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_url(key: str, url: str, example: str, keys_are: str = "") -> str:
    """Check a base URL, and return it without a trailing slash.

    Args:
        key: name of the setting.
        url: URL that begins with ``http://`` or ``https://``.
        example: a valid URL, which is shown in the error message.
        keys_are: how API keys are read, which completes "keys are ..." in the error message; empty omits this part.

    Raises:
        ValueError: If ``url`` is not an HTTP URL, or if it has a user name, password, query or fragment, which may be
            secret.
    """
    if any(mark in url for mark in "@?#"):
        where = f": keys are {keys_are}" if keys_are else ""
        raise ValueError(
            f"{key} contains a user name, a password, a query or a fragment; it must not, because it is written to "
            f"files{where}."
        )
    try:
        parts = urlsplit(url)
        host = "" if parts.port == 0 else (parts.hostname or "").encode("idna").decode()
    except ValueError:  # an invalid port, IPv6 address or host name
        parts, host = None, ""
    if parts is None or parts.scheme not in ("http", "https") or not host or " " in url:
        raise ValueError(f"{key} is {url!r}; it must be an address such as {example}.")
    return url.rstrip("/")


def check_variable(key: str, name: str) -> None:
    """Check the name of an environment variable that holds an API key.

    Args:
        key: name of the setting.
        name: name of the variable.

    Raises:
        ValueError: If ``name`` is not a valid name, or if it looks like an API key; the error does not contain it.
    """
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or (name not in os.environ and _looks_like_key(name)):
        raise ValueError(
            f"{key} is not the name of an environment variable; it must be one, such as OPENAI_API_KEY, "
            "and never the key itself, which belongs in that variable."
        )


def _looks_like_key(name: str) -> bool:
    """Return whether a name looks like an API key: long, with digits, and with lower-case letters or no underscore."""
    looks_random = any(map(str.isdigit, name)) and ("_" not in name or any(map(str.islower, name)))
    return name.startswith("sk_") or (len(name) >= 16 and looks_random)

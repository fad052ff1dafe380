"""Check settings of servers: addresses, and names of environment variables with keys, that must not hold secrets."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Return whether a URL is an address of this machine, for which no proxy may be used."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_url(key: str, url: str, example: str, keys_are: str = "") -> str:
    """Return a base URL without a trailing slash.

    Args:
        key: name of the setting.
        url: begins with ``http://`` or ``https://``.
        example: an address for the error message.
        keys_are: where API keys are read from instead, for the error message.

    Raises:
        ValueError: If it is not an HTTP address, or if it holds what may be a secret, which would be written to files.
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
        ValueError: If it is not a name or may be a key; the message does not repeat it.
    """
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or (name not in os.environ and _may_be_key(name)):
        raise ValueError(
            f"{key} is not the name of an environment variable; it must be one, such as OPENAI_API_KEY, "
            "and never the key itself, which belongs in that variable."
        )


def _may_be_key(name: str) -> bool:
    """Return whether a name looks like an API key: long, with digits, and with lower-case letters or no underscore."""
    looks_random = any(map(str.isdigit, name)) and ("_" not in name or any(map(str.islower, name)))
    return name.startswith("sk_") or (len(name) >= 16 and looks_random)

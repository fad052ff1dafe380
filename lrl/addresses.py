"""Addresses of servers: whether they can be used, and which of them are on this machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Return whether a URL leads to this machine, which no proxy does."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_url(key: str, url: str, example: str, keys_are: str = "") -> str:
    """Return a base URL without a trailing slash.

    Args:
        key: what the configuration or the command calls it.
        url: begins with ``http://`` or ``https://``.
        example: an address for the error.
        keys_are: where a key would be read from, for the error.

    Raises:
        ValueError: it is no HTTP address, or holds what may be a secret, which would be written to files.
    """
    if any(mark in url for mark in "@?#"):
        where = f": keys are {keys_are}" if keys_are else ""
        raise ValueError(
            f"{key} holds a user name, a password, a query or a fragment; it must not, as files will hold it{where}."
        )
    try:
        parts = urlsplit(url)
        host = "" if parts.port == 0 else (parts.hostname or "").encode("idna").decode()
    except ValueError:  # a port that is no number, half an IPv6 address, a name that cannot be
        parts, host = None, ""
    if parts is None or parts.scheme not in ("http", "https") or not host or " " in url:
        raise ValueError(f"{key} is {url!r}; it must be an address such as {example}.")
    return url.rstrip("/")

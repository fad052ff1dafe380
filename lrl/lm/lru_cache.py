"""A least-recently-used (LRU) cache that is bounded by bytes instead of by entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar, final

Value = TypeVar("Value")


@final
class LRUCache(Generic[Value]):
    """Caches values by key within a number of bytes; the least recently used are evicted.

    Args:
        max_bytes: most that all values together may have; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        """Size of all values that are kept."""
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Value | None:
        """Return a value, which becomes the most recently used; None if it is not kept."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Keep a value of ``size`` bytes as the most recently used one, and drop others beyond the limit."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._kept[key] = value, size
        self.bytes += size
        self.shrink()

    def shrink(self, max_bytes: int | None = None) -> None:
        """Drop values until all together have at most ``max_bytes``, by default the cache's own limit."""
        limit = self.max_bytes if max_bytes is None else max_bytes
        while self.bytes > limit:
            self.bytes -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Drop all values."""
        self._kept.clear()
        self.bytes = 0

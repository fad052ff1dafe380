"""Language models as reinforcement-learning policies.

The names of the Python interface are imported when they are first used, so that ``import lrl`` takes no time.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_PLACES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
"""Module of each name of the interface, read from the stub file that type checkers read."""

__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a name of the interface."""
    if name not in _PLACES:
        raise AttributeError(f"module 'lrl' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the names of the interface, for completion."""
    return sorted({*globals(), *_PLACES})

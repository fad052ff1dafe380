"""Language models as reinforcement-learning policies.

Each name of the Python interface is imported when it is first used. ``import lrl`` is therefore fast: it does not
import torch or Lightning.
"""

import re
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
"""Module of each public name. It is read from the stub file, which type checkers use as well."""

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        AttributeError: If the name is not public.
    """
    if name == "__version__":
        return import_module("importlib.metadata").version("lrl")
    if name not in _MODULES:
        longer = [other for other in _MODULES if name.lower() in other.lower()]
        similar = ", ".join(dict.fromkeys([*longer, *get_close_matches(name, _MODULES, 5)]))
        raise AttributeError(f"module 'lrl' has no attribute {name!r}" + (similar and f"; similar: {similar}"))
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, including those that have not been imported yet, and the special ones of a module."""
    return sorted({*_MODULES, *(name for name in globals() if name.startswith("__")), "__version__"})

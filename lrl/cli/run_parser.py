"""The parser of training commands: LightningCLI's, with two corrections."""

from __future__ import annotations

import ast
import re
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

_TEXT_OR_NONE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\bNone\b""")


class RunParser(LightningArgumentParser):
    """A parser that writes a configuration as it was parsed, without validating it again, which takes half a second."""

    def parse_args(self, args: Any = None, *more: Any, **settings: Any) -> Any:  # pyright: ignore
        """Parse arguments; the parser of a nested class reads Python's None as null.

        jsonargparse 4.53 passes parsed values on to it as the text that Python writes them in: null as None.
        """
        if getattr(self, "_inner_parser", False) and args is not None:
            args = [none_as_null(word) for word in args]
        return super().parse_args(args, *more, **settings)

    def dump(self, *args: Any, **settings: Any) -> str:
        """Return a configuration as text."""
        return super().dump(*args, **{"skip_validation": True} | settings)

    def save(self, *args: Any, **settings: Any) -> None:
        """Write a configuration to a file."""
        super().save(*args, **{"skip_validation": True} | settings)


def none_as_null(word: str) -> str:
    """Replace None by null in ``--key=value``, where the value is None or a list or mapping as Python writes it.

    Other texts stay as they are, and so does the word None within a text. A list or mapping with an infinite number or
    NaN is not recognised.
    """
    key, equals, text = word.partition("=")
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):
        return word
    if not (value is None or isinstance(value, (list, dict))) or repr(value) != text:
        return word
    return key + equals + _TEXT_OR_NONE.sub(lambda found: "null" if found[0] == "None" else found[0], text)

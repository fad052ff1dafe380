"""The parser of training commands: Lightning's, with corrections."""

from __future__ import annotations

import ast
import re
from datetime import timedelta
from enum import Enum
from typing import Any

import yaml
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser

from lrl.registry import short_name

_TEXT_OR_NONE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\bNone\b""")

_CLASS_PATH = re.compile(r"(?<=class_path: )[\w.]+")
_DURATION = re.compile(r"(?:(\d+) days?, |(\d+):)?(\d+):(\d+):(\d+(?:\.\d+)?)")


def duration(text: str) -> timedelta:
    """Return a duration that is written as Lightning or Python does: ``DD:HH:MM:SS`` or ``D days, HH:MM:SS``.

    jsonargparse 4.53 ignores everything after the third number, and so the seconds of the first form.

    Raises:
        ValueError: If the text has another form.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"a duration must be written as DD:HH:MM:SS or HH:MM:SS, not as {text!r}.")
    days, hours, minutes, seconds = found[1] or found[2] or 0, *found.groups()[2:]
    return timedelta(days=float(days), hours=float(hours), minutes=float(minutes), seconds=float(seconds))


register_type(timedelta, deserializer=duration)


def _enumeration_as_text(dumper: yaml.SafeDumper, member: Enum) -> yaml.Node:
    """Represent a member of an enumeration by the text from which it is parsed again.

    jsonargparse does so for arguments whose type is the enumeration, but not for defaults of another type: the
    ``interval`` of Lightning's ``Timer`` is a text whose default is a member.
    """
    return dumper.represent_str(str(member.value) if isinstance(member, str) else member.name)


yaml.SafeDumper.add_multi_representer(Enum, _enumeration_as_text)


class RunParser(LightningArgumentParser):
    """Lightning's parser, which writes a configuration without validating it again; that takes half a second."""

    def parse_args(self, args: Any = None, *more: Any, **settings: Any) -> Any:  # pyright: ignore
        """Parse arguments; the parser of a nested class reads Python's None as null.

        jsonargparse 4.53 passes parsed values to that parser as Python writes them, null as None.
        """
        if getattr(self, "_inner_parser", False) and args is not None:
            args = [none_as_null(word) for word in args]
        return super().parse_args(args, *more, **settings)

    def dump(self, cfg: Any, *args: Any, **settings: Any) -> str:
        """Return a configuration as text, in which components have their short names."""
        text = super().dump(cfg, *args, **{"skip_validation": True} | settings)
        return _CLASS_PATH.sub(lambda found: short_name(found[0]), text)

    def save(self, cfg: Any, *args: Any, **settings: Any) -> None:
        """Write a configuration to a file as :meth:`dump` does."""
        super().save(cfg, *args, **{"skip_validation": True} | settings)


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

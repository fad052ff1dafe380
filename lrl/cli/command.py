"""Run a function as a command: its options come from its signature, and their help from its docstring.

A parameter before ``*`` is a positional argument, every other one an option of the same name. The annotation decides
how it is given: ``bool`` is a flag, ``list[T]`` takes one or more words, ``tuple[T, T]`` takes two, and each field of
a dataclass is an option. ``*options`` collects all words that are not options of the command. jsonargparse parses the
values. Its own ``add_function_arguments`` is not used, because it reads a list from one word in brackets, which a
shell cannot expand from a pattern, and the value of a flag from a second word.

A module of a command is imported for ``--help``, so its function imports what is slow to import.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lrl.ranges import RANGES

_WORDS: ContextVar[Sequence[str]] = ContextVar("words", default=())
"""The words of the command line that is being run."""
_KINDS = {int: "an integer", float: "a number", dict: "a JSON object"}
"""What a value of each type must be, to be read after "it must be"."""


def command(function: Callable[..., None]) -> Callable[[str, Sequence[str]], None]:
    """Return the ``main`` of a command, which takes the name of the program and the words that follow it.

    A user's error is printed as one sentence, with exit status 2.
    """

    def main(prog: str, words: Sequence[str]) -> None:
        about, parameters = parse_from_object(function), list(_parameters(function))
        parser = ArgumentParser(
            prog=prog,
            description="\n\n".join(filter(None, (about.short_description, about.long_description))),
            formatter_class=_HelpFormatter,
            exit_on_error=False,
            print_config=None,
        )
        options = dict(_add_options(parser, parameters))
        _WORDS.set(words)
        with user_errors(prog, options):
            rest: list[str] = []
            if any(parameter.collects for parameter in parameters):
                words, rest = _split(words, options)
            function(*rest, **_arguments(parameters, _parsed(parser, words, options)))

    return main


def command_line(program: str) -> str:
    """Return the command that is being run, for a file of results.

    Args:
        program: what the words of the command line follow, such as ``lrl evaluate``.
    """
    return f"{program} {shlex.join(_WORDS.get())}".strip()


@contextmanager
def user_errors(prog: str, options: Sequence[str] | dict[str, Any] = ()) -> Iterator[None]:
    """Print a user's error as one sentence and exit with status 2; silence what libraries print meanwhile.

    An interruption by the user exits with status 130.

    Args:
        prog: name of the program.
        options: names of its options. An error that begins with one of them names a setting of the library, and gets
            the two hyphens of the option.
    """
    from lrl.cli.quiet import silence_libraries

    silence_libraries()
    try:
        yield
    except Exception as error:
        from lrl.cli.error_messages import sentence_of

        sentence = str(error) if isinstance(error, ValueError) else sentence_of(error)
        if sentence is None:
            raise
        hyphens = "--" if sentence.split(" ", 1)[0].rstrip(":") in options else ""
        sys.stderr.write(f"{prog}: {hyphens}{sentence}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        raise SystemExit(130) from None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Shows types and defaults of options, and the description with its line breaks."""

    def format_help(self) -> str:
        """Return the help, in which types are names: Path, not <class 'Path'>."""
        return re.sub(r"<class\s+'(\w+)'>", r"\1", super().format_help()).rstrip() + "\n"


class _Parameter(NamedTuple):
    """A parameter of a function, or a field of a dataclass."""

    name: str
    kind: Any
    """Its type without None."""
    default: Any
    """``inspect.Parameter.empty`` if it has none."""
    positional: bool
    collects: bool
    """Whether it is ``*options``."""
    text: str


def _parameters(owner: Any, defaults: Any = None) -> Iterator[_Parameter]:
    """Yield the parameters of a function or dataclass.

    Args:
        owner: a function, or a dataclass whose fields all have defaults.
        defaults: an instance of the dataclass, whose values are the defaults; None takes those of its fields.
    """
    hints, texts = get_type_hints(owner), dict[str, str]()
    for source in reversed(inspect.getmro(owner)[:-1]) if inspect.isclass(owner) else (owner,):
        texts |= {one.arg_name: " ".join((one.description or "").split()) for one in parse_from_object(source).params}
    instance = (defaults or owner()) if is_dataclass(owner) else None
    for name, parameter in inspect.signature(owner).parameters.items():
        members = [member for member in get_args(hints[name]) if member is not NoneType]
        kind = members[0] if NoneType in get_args(hints[name]) else hints[name]
        default = parameter.default if instance is None else getattr(instance, name)
        required = default is inspect.Parameter.empty
        positional = required and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        collects = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        yield _Parameter(name, kind, default, positional, collects, texts.get(name, ""))


def _add_options(container: Any, parameters: Sequence[_Parameter]) -> Iterator[tuple[str, Any]]:
    """Add the options of parameters to a parser or group, and yield their names and the types of their values."""
    for name, kind, default, positional, collects, text in parameters:
        if is_dataclass(kind):
            title = (parse_from_object(kind).short_description or "").rstrip(".")
            group = getattr(container, "parser", container).add_argument_group(title)
            given = None if default is inspect.Parameter.empty else default
            yield from _add_options(group, list(_parameters(kind, given)))
            continue
        if collects:
            continue
        # What is not given is left out, and the function has its own default.
        settings: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        if default is inspect.Parameter.empty and not positional:
            settings["required"] = True
        elif not any(default is none for none in (None, False, inspect.Parameter.empty)):
            settings["default"] = default
        if kind is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            container.add_argument(f"--{name}", action=action, **settings)
            yield name, kind
            continue
        if get_origin(kind) in (list, tuple):
            settings["nargs"] = "+" if get_origin(kind) is list else len(get_args(kind))
            kind = get_args(kind)[0]
            if settings["nargs"] == "+" and kind in (str, Path) and not positional:
                settings["action"] = "extend"  # an option that is given twice has the words of both
        container.add_argument(name if positional else f"--{name}", type=kind, **settings)
        yield name, kind


def _parsed(parser: ArgumentParser, words: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Parse the words of a command line.

    Raises:
        ValueError: If an option is unknown, missing or has a value of another type.
    """
    try:
        return vars(parser.parse_args(list(words)))
    except argparse.ArgumentError as error:
        text = " ".join(str(error).split())
    if found := re.match(r"unrecognized arguments: (\S+)", text):
        word = found[1].partition("=")[0]
        near = difflib.get_close_matches(word, [f"--{name}" for name in options], 1)
        hint = f"did you mean {near[0]}?" if near else f"`{parser.prog} --help` lists the options."
        raise ValueError(f"{word} is not an option; {hint}")
    if found := re.match(r"the following arguments are required: ([\w, ]+)", text):
        raise ValueError(f"{found[1]} must be given.")
    if found := re.match(r'Parser key "(\w+)"', text):
        raise ValueError(f"--{found[1]} is {_wrong_value(text, options[found[1]])}.")
    raise ValueError(text.removeprefix("argument "))


def _wrong_value(report: str, kind: Any) -> str:
    """Return the value in a report of jsonargparse, and what a value of its type must be."""
    found = re.search(r"Got value: (.*)|Not of type \w+: (\S+) does not|('[^']*')$", report)
    given = next(filter(None, found.groups()), "").strip("'") if found else ""
    if get_origin(kind) is Literal:
        return f"{given!r}; it must be one of {', '.join(map(str, get_args(kind)))}"
    plain = get_origin(kind) or next(base for base in (int, float, kind) if issubclass(kind, base))
    if plain in (int, float) and re.fullmatch(r"[-+]?\d+" if plain is int else r"[-+]?[.\d]+(e[-+]?\d+)?", given):
        return f"{given}; it must be {RANGES[kind.__name__]}"
    return f"{given!r}; it must be {_KINDS.get(plain, str(kind))}"


def _arguments(parameters: Sequence[_Parameter], values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function or dataclass; parsed values of dataclasses are put together."""
    found: dict[str, Any] = {}
    for parameter in parameters:
        if is_dataclass(parameter.kind):
            found[parameter.name] = parameter.kind(**_arguments(list(_parameters(parameter.kind)), values))  # pyright: ignore
        elif parameter.name in values:
            value = values[parameter.name]
            if get_origin(parameter.kind) is tuple:
                value = tuple(value)
            elif getattr(parameter.kind, "__name__", "") in RANGES:  # a subclass of a number, which checked the value
                value = int(value) if isinstance(value, int) else float(value)
            found[parameter.name] = value
    return found


def _split(words: Sequence[str], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words of a command's own options, each with one value, and all other words."""
    own, rest, remaining = list[str](), list[str](), list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, _ = word.partition("=")
        if word in ("-h", "--help"):
            own.append(word)
        elif name.startswith("--") and name[2:] in options:
            own += [word] if equals else [word, *remaining[:1]]
            remaining = remaining if equals else remaining[1:]
        else:
            rest.append(word)
    return own, rest

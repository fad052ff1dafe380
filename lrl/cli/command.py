"""Run a function as a command: its options come from its signature, and their help from its docstring.

A parameter before ``*`` is a positional argument; every other parameter is an option of the same name. The annotation
determines how many command-line arguments it takes: ``bool`` is a flag without a value, ``list[T]`` takes one or more
values, ``tuple[T, T]`` takes two, ``tuple[str, ...]`` takes one each time that the option is given, and each field of a
dataclass is an option. ``*options`` collects all arguments that are not options of the command. Such a command has no
options of the types ``list[T]`` and ``tuple[T, T]``.

jsonargparse parses the values. Its ``add_function_arguments`` is not used, because it reads a list from a single
argument in brackets, so that a shell cannot expand a pattern such as ``runs/*``, and expects a value after each flag.

``--help`` imports the module of a command, so modules that are slow to import are imported inside its function.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import DocstringStyle, parse_from_object
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lrl.cli.error_messages import user_errors
from lrl.ranges import RANGES, description

_ARGS: ContextVar[Sequence[str]] = ContextVar("args", default=())
"""Arguments of the command that is being run."""
_KINDS = {int: "an integer", float: "a number", dict: "a JSON object"}
"""Description of a value of each type, which follows "it must be" in error messages."""


def command(function: Callable[..., None]) -> Callable[[str, Sequence[str]], None]:
    """Return the ``main`` of a command, a function of the name of the program and of the command-line arguments.

    An error that a user caused is printed as one sentence, with exit status 2.

    Args:
        function: what the command does; its parameters become options.
    """

    def main(prog: str, args: Sequence[str]) -> None:
        """Parse the arguments and call the function."""
        parser = ArgumentParser(
            prog=prog,
            description=inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0],
            formatter_class=_HelpFormatter,
            exit_on_error=False,
            allow_abbrev=False,
            print_config=None,
        )
        options = _add_options(parser, function, with_help=bool({"-h", "--help"} & set(args)))
        _ARGS.set(args)
        with user_errors(prog, options, args):
            rest: Sequence[str] = ()
            if any(one.kind is one.VAR_POSITIONAL for one in inspect.signature(function).parameters.values()):
                args, rest = _split(args, options)
            function(*rest, **_arguments(function, _parsed(parser, args, options)))

    return main


def command_line(program: str) -> str:
    """Return the command that is being run, for a file of results.

    Args:
        program: the program and subcommand that precede the options, such as ``lrl evaluate``.
    """
    return f"{program} {shlex.join(_ARGS.get())}".strip()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Shows types and defaults of options, and the description with its line breaks."""

    def format_help(self) -> str:
        """Return the help, in which a type is shown by its name: ``Path`` instead of ``<class 'Path'>``."""
        return re.sub(r"<class\s+'(\w+)'>", r"\1", super().format_help()).rstrip() + "\n"


def _parameters(owner: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function or dataclass; their annotations are types without None."""
    hints, instance = get_type_hints(owner), owner() if inspect.isclass(owner) else None
    for name, parameter in inspect.signature(owner).parameters.items():
        if parameter.kind is not parameter.VAR_POSITIONAL:
            members = get_args(hints[name])
            default = parameter.default if instance is None else getattr(instance, name)
            yield parameter.replace(annotation=members[0] if NoneType in members else hints[name], default=default)


def _texts(owner: Any) -> dict[str, str]:
    """Return the descriptions of the parameters of a function or dataclass by name, from its docstrings."""
    sources = reversed(inspect.getmro(owner)[:-1]) if inspect.isclass(owner) else (owner,)
    found = (one for source in sources for one in parse_from_object(source, DocstringStyle.GOOGLE).params)
    return {one.arg_name: " ".join((one.description or "").split()) for one in found}


def _add_options(container: Any, owner: Any, with_help: bool) -> dict[str, Any]:
    """Add the parameters of a function or dataclass to a parser or group; return the types of the options by name.

    Reading the docstrings takes a tenth of a second, so it is done only if the help is printed.
    """
    options: dict[str, Any] = {}
    texts = _texts(owner) if with_help else {}
    for parameter in _parameters(owner):
        name, kind, default = parameter.name, parameter.annotation, parameter.default
        if is_dataclass(kind):
            title = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
            group = getattr(container, "parser", container).add_argument_group(title)
            options |= _add_options(group, kind, with_help)
            continue
        # An option that is not given is left out of the parsed values, so that the function's own default applies.
        unset = any(default is value for value in (None, False, parameter.empty))
        settings: dict[str, Any] = {"help": texts.get(name), "default": argparse.SUPPRESS if unset else default}
        positional = default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if not positional:
            options[name] = kind
            settings["required"] = default is parameter.empty
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction if default else "store_true"
        elif get_origin(kind) is list:
            settings |= {"nargs": "+", "type": get_args(kind)[0]}
            if settings["type"] in (str, Path) and not positional:
                settings["action"] = "extend"  # an option that is given twice has the values of both
        elif get_origin(kind) is tuple:
            size = {"action": "append"} if ... in get_args(kind) else {"nargs": len(get_args(kind))}
            settings |= size | {"type": get_args(kind)[0]}
        else:
            settings["type"] = kind
        container.add_argument(name if positional else f"--{name}", **settings)
    return options


def _parsed(parser: ArgumentParser, args: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Parse command-line arguments.

    Raises:
        ValueError: If an option is unknown, missing or has a value of another type.
    """
    try:
        return vars(parser.parse_args(list(args)))
    except argparse.ArgumentError as error:
        text = " ".join(str(error).split())
    if found := re.match(r"unrecognized arguments: (\S+)", text):
        arg = found[1].partition("=")[0]
        near = difflib.get_close_matches(arg.lstrip("-"), options, 1, cutoff=0.7)
        hint = f"did you mean --{near[0]}?" if near else f"`{parser.prog} --help` lists the options."
        raise ValueError(f"{arg} is not an option; {hint}")
    if found := re.match(r"the following arguments are required: ([\w, ]+)", text):
        names = (f"--{name}" if name in options else name for name in found[1].split(", "))
        raise ValueError(f"{' and '.join(names)} must be given.")
    if found := re.match(r'Parser key "(\w+)"', text):
        raise ValueError(f"--{found[1]} is {_wrong_value(text, options[found[1]])}.")
    raise ValueError(text)


def _wrong_value(report: str, kind: Any) -> str:
    """Return the value in a report of jsonargparse, and what a value of its type must be."""
    found = re.search(r"Got value: (.*)|Not of type \w+: (\S+) does not|('[^']*')$", report)
    given = next(filter(None, found.groups()), "").strip("'") if found else ""
    if get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return f"{given!r}; it must be one of {', '.join(map(str, get_args(kind)))}"
    plain = get_origin(kind) or next(base for base in (int, float, kind) if issubclass(kind, base))
    number = r"[-+]?\d+" if plain is int else r"[-+]?([.\d]+(e[-+]?\d+)?|inf)"
    if kind.__name__ in RANGES and re.fullmatch(number, given):
        return f"{given}; it must be {description(kind.__name__, given)}"
    return f"{given!r}; it must be {_KINDS.get(plain, str(kind))}"


def _arguments(owner: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function or dataclass from the parsed values of all options."""
    found: dict[str, Any] = {}
    for parameter in _parameters(owner):
        name, kind = parameter.name, parameter.annotation
        if is_dataclass(kind):
            found[name] = kind(**_arguments(kind, values))  # pyright: ignore[reportCallIssue]
        elif name in values:
            value: Any = tuple(values[name]) if get_origin(kind) is tuple else values[name]
            if isinstance(value, int) and abs(value) >= 2**63:  # too large for loops and arrays
                raise ValueError(f"--{name} is {value}; it must be less than {2**63}.")
            if type(value).__name__ in RANGES:  # the value of a type with a range is an instance of that type
                value = int(value) if isinstance(value, int) else float(value)
            found[name] = value
    return found


def _split(args: Sequence[str], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the arguments that are options of the command, each as ``--name=value``, and all other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, kind in options.items():
        action = "store_true" if kind is bool else "append" if get_origin(kind) is tuple else "store"
        parser.add_argument(f"--{name}", action=action, default=argparse.SUPPRESS)
    found, rest = parser.parse_known_args(args)
    if {"-h", "--help"} & set(rest):
        return ["--help"], []
    own = list[str]()
    for name, value in vars(found).items():
        values = value if isinstance(value, list) else [value]
        own += [f"--{name}" if one is True else f"--{name}={one}" for one in values]
    return own, rest

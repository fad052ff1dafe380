"""Help of the commands that train, from source files instead of imported classes."""

from __future__ import annotations

import ast
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lrl.cli.keys import OF_COMMAND, TOP, class_of, trainer_arguments
from lrl.cli.signatures import Argument, SourceClass, arguments, find_class, first_sentence
from lrl.registry import components


def help_text(args: Sequence[str], purpose: str) -> str | None:
    """Return the help text that a command line requests; None if it requests none, or if the class is unknown.

    Args:
        args: command-line arguments, beginning with the command.
        purpose: what the command does.
    """
    if {"-h", "--help"} & set(args):
        return _overview(args[0], purpose)
    for number, arg in enumerate(args):
        key, _, name = arg.partition("=")
        if key.startswith("--") and key.endswith(".help"):
            kind = class_of(name or " ".join(args[number + 1 : number + 2]))
            return kind and _class_help(f"lrl {args[0]}", key[2:].removesuffix(".help"), kind)
    return None


def _overview(command: str, purpose: str) -> str:
    """Return the classes, the keys of a run and the arguments of the trainer."""
    kinds: dict[str, list[SourceClass]] = {}
    for path in components().values():
        if kind := find_class(path):
            kinds.setdefault(_family(kind), []).append(kind)
    sections = {
        f"classes of --{key}": {kind.name: kind.summary for kind in kinds.pop(family, ())}
        for family, key in (("LightningModule", "model"), ("LightningDataModule", "data"))
    }
    top = TOP | OF_COMMAND.get(command, {})
    sections["keys of a run"] = {f"--{name} VALUE": text for name, text in top.items()}
    sections["options of a class"] = {
        "--model.help CLASS": "list the arguments of a model, such as `--model.help PPOValueHeadModule`",
        "--data.help CLASS": "list the arguments of a data module",
        "--KEY.help CLASS": "list the arguments of a class below: `--model.init_args.policy.help TextPolicy`",
        "--KEY VALUE": "set any key of the configuration, such as `--model.init_args.optimizer.lr 1e-4`",
        "--print_config": "print the whole configuration and exit",
    }
    sections["classes of arguments"] = {
        family: ", ".join(kind.name for kind in members) for family, members in kinds.items()
    }
    sections["trainer"] = _lines("trainer", trainer_arguments())
    return _formatted(f"lrl {command} --config FILE [--config OVERLAY] [--KEY VALUE ...]", purpose, sections)


def _family(kind: SourceClass) -> str:
    """Return the name of a component's base class: one of Lightning, or the most general one of its package."""
    package = kind.module.partition(".")[0]
    while kind.name not in ("LightningModule", "LightningDataModule", "Callback"):
        base = kind.base
        if base is None or base.module.partition(".")[0] not in (package, "lightning"):
            break
        kind = base
    return kind.name


def _class_help(program: str, key: str, kind: SourceClass) -> str | None:
    """Return the arguments of a class, or None if source files do not determine them."""
    known = arguments(kind)
    if known is None:
        return None
    usage = f"{program} ... --{key} {kind.name} [--{key}.init_args.KEY VALUE ...]"
    sections = {f"arguments of {kind.module}.{kind.name}": _lines(f"{key}.init_args", known)}
    return _formatted(usage, f"{kind.summary}.", sections)


def _lines(key: str, known: Iterable[Argument], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return options and their descriptions; the options in a group of settings follow the group.

    Args:
        key: prefix of the options.
        known: the arguments.
        given: default values that a class gives to a group of settings.
    """
    lines: dict[str, str] = {}
    for one in known:
        default = (given or {}).get(one.name, ast.unparse(one.default) if one.default else None)
        inner = arguments(one.group) if one.group else None
        text = first_sentence(one.text)
        if inner is not None:
            call = one.default.keywords if isinstance(one.default, ast.Call) else []
            lines[f"--{key}.{one.name} {one.group.name if one.group else ''}"] = text
            lines |= _lines(f"{key}.{one.name}", inner, {part.arg or "": ast.unparse(part.value) for part in call})
            continue
        kind = ast.unparse(one.annotation) if one.annotation else ""
        ending = "" if default is None else f" (default: {'null' if default == 'None' else default})"
        lines[f"--{key}.{one.name} {kind}"] = text + ending
    return lines


def _formatted(usage: str, description: str, sections: Mapping[str, Mapping[str, str]]) -> str:
    """Return the help of a command.

    Args:
        usage: how the command is called.
        description: what the command does.
        sections: for each title, the description of each name or of each option with its value.
    """
    parser = ArgumentParser(usage=usage, description=description, add_help=False)
    for title, lines in sections.items():
        group = parser.add_argument_group(title)
        for line, text in lines.items():
            option, _, value = line.partition(" ")
            settings: dict[str, Any] = {"metavar": value} if option.startswith("-") else {}
            group.add_argument(option, help=text.replace("%", "%%"), **settings)
    return parser.format_help()

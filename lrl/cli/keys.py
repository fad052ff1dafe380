"""Check the keys of a configuration and of options, from source files instead of imported classes."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lrl.cli.error_messages import nearest, short
from lrl.cli.signatures import Argument, SourceClass, arguments, find_class
from lrl.files import resolve_config, shipped
from lrl.ranges import RANGES, check_finite
from lrl.registry import components

_TRAINER = "lightning.pytorch.Trainer"
_STOCK = ("callbacks", "loggers", "strategies", "profilers", "plugins")
"""Folders of Lightning whose classes have short names."""
TOP = {
    "config": "configuration file, by its path or the name of one that ships with lrl; further ones are overlays",
    "model": "class of the algorithm",
    "data": "class of the data module",
    "seed_everything": "seed of all random numbers (default: 0)",
    "run_directory": "folder to which the run is written (default: runs/<env>/<algorithm>/<date>-seed<k>)",
    "ckpt_path": "checkpoint or run directory to load; without config, the configuration is that of its run",
    "weights_only": "whether a checkpoint is loaded without unpickling other objects",
    "push_to_hub": "repository of the Hugging Face hub to which the trained model is exported",
    "trainer": "arguments of the trainer as one mapping",
}
"""The keys at the top of a configuration, and what they mean."""
OF_COMMAND = {
    "fit": {"resume": "run directory or checkpoint of a run that is continued in its directory; read like ckpt_path"},
    "validate": {"verbose": "whether the figures are printed"},
    "test": {"verbose": "whether the figures are printed"},
    "predict": {"return_predictions": "whether predictions are returned to a Python program"},
}
"""Further keys of single commands."""
_OBJECT = ("class_path", "init_args", "dict_kwargs")
"""The keys of a mapping that describes an object."""
_MANY = 20
"""Number of keys above which an error does not list all of them."""


def check_keys(args: Sequence[str]) -> list[str]:
    """Check that the keys in the configurations and options of a command line exist.

    What cannot be decided without importing a class is left to the parser: classes that pass arguments on, values of a
    wrong type, and everything after a file that cannot be read.

    Args:
        args: command-line arguments, beginning with the command: ``["fit", "--config", "frozen_lake/grpo.yaml"]``.

    Returns:
        For each class that a later file or option replaces by another, a sentence that names the arguments that are
        kept and those that are left out, if the arguments of the new class are known without importing it.

    Raises:
        ValueError: If a class does not have one of the keys, or settings that cannot be null are null.
    """
    try:
        return _check(args[0], _settings(args[1:]))
    except RecursionError:
        raise ValueError("config has keys that are nested too deeply, or a mapping that contains itself.") from None


def _check(command: str, given: Iterable[Any]) -> list[str]:
    """Check the keys of several nested mappings, each of which changes the one before; see :func:`check_keys`."""
    objects = _Objects()
    top = {**TOP, **OF_COMMAND.get(command, {})}
    trainer = {one.name: f"trainer.{one.name}" for one in trainer_arguments()}
    described = set[str]()
    for settings in given:
        if settings is None:
            return objects.replaced
        _check_numbers(settings)
        described |= {"model", "data"} & set(_unfolded(settings))
        for name, value in _unfolded(settings).items():
            if name not in top:
                near = nearest(name, names := {one: one for one in top} | trainer)
                raise ValueError(f"{name or repr(name)} is not a key of a run{_hint(near and names[near], top)}")
            if name == "trainer":
                _check_mapping(value, "Trainer", (name,))
                _check_arguments(objects, "Trainer", trainer_arguments(), value, (name,))
            elif name in ("model", "data"):
                _check_described(value, (name,))
                _check_object(objects, value, (name,))
            given = _unfolded(value)
            given |= _unfolded(given.get("init_args"))
            if name == "data" and "seed" in given:
                raise ValueError(
                    f"data.init_args.seed is {short(given['seed'])}; it must be left out, because seed_everything "
                    "determines it."
                )
    for name in sorted(described):
        if (name,) not in objects.classes:
            raise ValueError(
                f"{name} has no class_path; it must be the name of a class, or a mapping with its class_path."
            )
    return objects.replaced


def trainer_arguments() -> Sequence[Argument]:
    """Return the arguments of the trainer."""
    trainer = find_class(_TRAINER)
    return (trainer and arguments(trainer)) or ()


def _settings(args: Sequence[str]) -> Iterator[Any]:
    """Yield the base configuration, then what each file and each option sets, in their order.

    Each is a nested mapping. It is followed by None if a file of an option cannot be read; a configuration in a pipe is
    None, because the parser could not read it again.
    """
    yield _config(shipped("configs/base.yaml") or "")
    for number, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if not key.startswith("--") and key != "-c":
            continue
        if arg == "--":
            raise ValueError(f"'--' follows {args[number - 1] if number else 'nothing'}; it must be a key or a value.")
        if not equals:
            value = args[number + 1] if number + 1 < len(args) else ""
        if key in ("--config", "-c"):
            yield _config(value)
        elif key != "--print_config":
            content = _value(value)
            yield {key[2:]: {} if _is_file_name(content) else content}
            if _is_file_name(content):
                yield None


def _is_file_name(value: Any) -> bool:
    """Return whether a value is the name of a YAML file."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def _value(text: str) -> Any:
    """Return the value of an option: YAML, or the content of a YAML file; the text itself if it cannot be read.

    A pipe is not read, because the parser could not read it again.
    """
    try:
        is_file = _is_file_name(text) and Path(text).is_file()
        return yaml.load(Path(text).read_text(encoding="utf-8") if is_file else text, _Loader)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return text


def _config(name: str) -> dict[str, Any] | None:
    """Return the content of a configuration: a file, or a mapping that is written on the command line; None for a pipe.

    Raises:
        ValueError: If it does not exist, cannot be read, or is not a mapping without repeated keys.
    """
    given, path = f"config is {name!r}, which", Path(resolve_config(name))
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name that no file can have
        exists = False
    if exists and not path.is_file() and not path.is_dir():
        return None
    try:
        content = yaml.load(path.read_text(encoding="utf-8") if exists else name, _Loader)
    except IsADirectoryError:
        raise ValueError(f"{given} is a folder; it must be a file.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{given} is not a text file in UTF-8; it must be a YAML file.") from None
    except OSError as error:
        raise ValueError(f"{given} cannot be read ({error.strerror}); it must be a YAML file.") from None
    except (RecursionError, ValueError, yaml.YAMLError) as error:
        if not exists:
            raise ValueError(_missing(name)) from None
        raise ValueError(f"{given} is not valid YAML: {_problem(error)}.") from None
    if isinstance(content, dict) and content:
        return content
    raise ValueError(
        f"{given} contains no mapping; it must contain keys such as model, data and trainer."
        if exists
        else _missing(name)
    )


def _missing(name: str) -> str:
    """Return the error for a configuration that does not exist."""
    known = [str(file.relative_to(folder)) for folder in _shipped_configs() for file in folder.rglob("*.yaml")]
    stems = {file.removesuffix(".yaml"): file for file in known} | {Path(file).stem: file for file in known}
    given = name.removeprefix("configs/").removesuffix(".yaml")
    near = next((stems[stem] for stem in difflib.get_close_matches(given, stems, 1)), None)
    hint = f"did you mean {near!r}?" if near else "give a YAML file, or the name of a configuration of lrl."
    return f"config is {name!r}, which does not exist; {hint}"


def _shipped_configs() -> list[Path]:
    """Return the folder of the configurations that ship with lrl, in a list that is empty if there is none."""
    folder = shipped("configs")
    return [] if folder is None else [Path(folder)]


def _problem(error: Exception) -> str:
    """Return the reason for which YAML is invalid, and the line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split()).rstrip(".")
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f" in line {mark.line + 1}"
    return f"{error.problem or error.context}{where}"


class _Loader(yaml.SafeLoader):
    """Loader that raises an error if a mapping has the same key twice, of which YAML takes the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping, after a comparison of its keys."""
        seen = set[str]()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given a second time", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Place = tuple[str, ...]
"""A key without its parts ``init_args``."""


@dataclass
class _Objects:
    """The objects that the settings read so far describe."""

    classes: dict[_Place, str] = field(default_factory=dict[_Place, str])
    """Name or import path of the class of each object."""
    arguments: dict[_Place, dict[str, set[str]]] = field(default_factory=dict[_Place, dict[str, set[str]]])
    """Names of the arguments given to each object, with the keys of those that are mappings."""
    replaced: list[str] = field(default_factory=list[str])
    """For each class that was replaced by another, a sentence on its arguments."""

    def set_class(self, place: _Place, name: str, own: Container[str]) -> None:
        """Set the class of an object; if it replaces another one, record which arguments are kept.

        Args:
            place: place of the object.
            name: name or import path of the class.
            own: names of the arguments that are given together with the class.

        Raises:
            ValueError: If a kept group of settings does not have one of the given keys in the new class.
        """
        before, given = self.classes.get(place, name), self.arguments.get(place, {})
        self.classes[place] = name
        kind = class_of(name)
        known = arguments(kind) if kind is not None and class_of(before) != kind else None
        if not given or known is None:
            return
        by_name = {one.name: one for one in known}
        kept = {one: keys for one, keys in given.items() if one in by_name}
        left = [one for one in given if one not in by_name]
        for one, keys in kept.items():
            if missing := _missing_key(by_name[one], keys):
                raise ValueError(
                    f"{'.'.join(place)} is {name} in place of {before}, but {one}.{missing} is set, which {name} does "
                    f"not have; use a configuration of {name} alone, or leave {one}.{missing} out."
                )
        self.arguments[place] = kept
        shown = [one for one in kept if one not in own]
        parts = [f"it keeps {', '.join(shown)}"] if shown else []
        if left:
            parts.append(f"it has no {', '.join(left)}, so {'this is' if len(left) == 1 else 'these are'} left out")
        if parts:
            self.replaced.append(f"{'.'.join(place)} is {name} in place of {before}; {'; '.join(parts)}.")

    def remove(self, place: _Place) -> None:
        """Forget an object and the objects in it."""
        for known in (self.classes, self.arguments):
            for one in [one for one in known if one[: len(place)] == place]:
                del known[one]


def _missing_key(one: Argument, keys: Iterable[str]) -> str:
    """Return the first of some keys that a required group of settings does not have; empty for another argument.

    If a group may be null, jsonargparse leaves out all of its settings instead of one.
    """
    known = arguments(one.group) if one.group and not one.accepts_none else None
    return "" if known is None else min(set(keys) - {part.name for part in known}, default="")


def _check_arguments(
    objects: _Objects, owner: str, known: Sequence[Argument], given: Any, key: tuple[str, ...]
) -> None:
    """Check the arguments that are given to a class or a group of settings."""
    by_name = {one.name: one for one in known}
    for name, value in _unfolded(given).items():
        inner = (*key, name)
        if f"{name}+" in given:  # appended to a list, so that it replaces nothing
            objects.remove(_place(inner))
        if name not in by_name:
            near = nearest(name, names := _names(known))
            raise ValueError(f"{'.'.join(inner)} is not an argument of {owner}{_hint(near and names[near], by_name)}")
        one = by_name[name]
        group = one.group
        _check_plain(one, value, inner)
        settings = arguments(group) if group else None
        if group is not None:
            if value is None and not one.accepts_none:
                raise ValueError(
                    f"{'.'.join(inner)} is null; it must be a mapping with the keys of {group.name}, or be left out."
                )
            if value is not None and one.is_only_group:
                _check_mapping(value, group.name, inner)
            if settings is not None and "class_path" not in _unfolded(value):
                _check_arguments(objects, group.name, settings, value, inner)
        elif not one.takes_any_keys:
            if value is not None and one.is_only_object and not isinstance(value, list):
                _check_described(value, inner)
            for number, part in enumerate(value) if isinstance(value, list) else [("", value)]:
                if isinstance(value, list):
                    objects.remove(_place(inner))  # each element is a separate object
                    if one.is_only_object and not isinstance(_unfolded(part).get("class_path", part), str):
                        raise ValueError(
                            f"{'.'.join(inner)}.{number} is {short(part)}; it must be the name of a class, or a "
                            "mapping with its class_path."
                        )
                _check_object(objects, part, inner)
            if isinstance(value, list):
                objects.arguments.pop(_place(inner), None)  # another value replaces the list, not an object


def _check_numbers(value: Any, key: str = "") -> None:
    """Check that no number is nan, and that integers fit into 64 bits, which libraries need."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        _check_numbers(part, f"{key}.{name}" if key else str(name))
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{key} is nan; it must be a number.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{key} is {short(value)}; it must be less than {2**63}.")


def _check_plain(one: Argument, value: Any, key: tuple[str, ...]) -> None:
    """Check that a value is not null where its type excludes it, and that a number fits into 64 bits or a tensor."""
    if value is None and one.rejects_none and one.annotation is not None:
        raise ValueError(f"{'.'.join(key)} is null; it must be {_kind(one)}, or be left out.")
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, float) and abs(part) >= 2**63 and one.is_only_integer:
            raise ValueError(f"{'.'.join(key)} is {short(value)}; it must be an integer less than {2**63}.")
    if one.is_only_float and one.module.startswith("lrl."):
        check_finite(".".join(key), value)


def _kind(one: Argument) -> str:
    """Return what a value of a plain type must be."""
    assert one.annotation is not None
    name = ast.unparse(one.annotation)
    limits = RANGES.get(name) or RANGES.get(name.replace("Float", "FiniteFloat"))
    plain = {"bool": "true or false", "float": "a number", "int": "an integer", "str": "a text"}
    if limits is None:
        return plain.get(name, name)
    return f"{plain['int' if one.is_only_integer else 'float']} that is {limits}"


def _check_mapping(value: Any, owner: str, key: tuple[str, ...]) -> None:
    """Check that a group of settings is a mapping, or the name of a file that contains one."""
    if not (isinstance(value, dict) or _is_file_name(value)):
        raise ValueError(f"{'.'.join(key)} is {short(value)}; it must be a mapping with the keys of {owner}.")


def _check_described(value: Any, key: tuple[str, ...]) -> None:
    """Check that an object is described by a text or a mapping."""
    if value is not None and (not isinstance(value, (str, dict)) or value == {}):
        raise ValueError(
            f"{'.'.join(key)} is {short(value)}; it must be the name of a class, or a mapping with its class_path."
        )


def _check_object(objects: _Objects, value: Any, key: tuple[str, ...]) -> None:
    """Check the arguments of an object that is described by the name of its class, or by that and ``init_args``."""
    given, place = _unfolded(value), _place(key)
    named = given.get("class_path", value)
    if "class_path" in given and not isinstance(named, str):
        raise ValueError(f"{'.'.join(key)}.class_path is {short(named)}; it must be the name of a class.")
    others = {name: part for name, part in given.items() if name not in _OBJECT}
    own = others | _unfolded(given.get("init_args"))
    if isinstance(named, str):
        objects.set_class(place, named, own)
    elif value is None:
        objects.remove(place)
    if not others and not given.get("init_args"):
        return
    so_far = objects.arguments.setdefault(place, {})
    for name, part in own.items():
        keys = _unfolded(part)
        so_far.setdefault(name, set()).update(keys.keys() - {*_OBJECT}, _unfolded(keys.get("init_args")))
    kind = class_of(objects.classes.get(place, ""))
    known = arguments(kind) if kind is not None else None
    for name in others if known is not None or place not in objects.classes else ():
        full = ".".join((*key, name))
        near = difflib.get_close_matches(name.lower(), _OBJECT, n=1, cutoff=0.8)
        if near and name not in {one.name for one in known or ()}:
            raise ValueError(f"{full} is not a key of an object; did you mean {near[0]!r}?")
        if known is not None and "class_path" in given:
            raise ValueError(f"{full} is given next to class_path; it must be {'.'.join((*key, 'init_args', name))}.")
    if kind is not None and known is not None:
        _check_arguments(objects, kind.name, known, others, key)
        _check_arguments(objects, kind.name, known, given.get("init_args"), (*key, "init_args"))


def class_of(name: str) -> SourceClass | None:
    """Return the class with a short name or an import path, or None if it is unknown."""
    paths = [components().get(name, name), *(f"lightning.pytorch.{folder}.{name}" for folder in _STOCK)]
    return next(filter(None, map(find_class, paths)), None) if name else None


def _place(key: tuple[str, ...]) -> tuple[str, ...]:
    """Return a key without its parts ``init_args``."""
    return tuple(part for part in key if part != "init_args")


def _unfolded(given: Any) -> dict[str, Any]:
    """Return a mapping in which ``{"a.b": 1}`` is ``{"a": {"b": 1}}``; empty for another value.

    The sign of ``callbacks+``, which appends to a list, is left out.
    """
    unfolded: dict[str, Any] = {}
    for name, value in given.items() if isinstance(given, dict) else ():
        first, dot, rest = str(name).removesuffix("+").partition(".")
        before = unfolded.get(first)
        inner = {rest: value} if dot else value
        unfolded[first] = {**before, **inner} if isinstance(before, dict) and isinstance(inner, dict) else inner
    return unfolded


def _names(known: Iterable[Argument]) -> dict[str, str]:
    """Return the key of each argument by its name: ``name``, or ``group.name`` for an argument in a group."""
    names = {one.name: one.name for one in known}
    for one in known:
        for inner in (arguments(one.group) or ()) if one.group else ():
            names.setdefault(inner.name, f"{one.name}.{inner.name}")
    return names


def _hint(near: str | None, known: Iterable[str]) -> str:
    """Return the end of an error: the key that was probably meant, or all known keys."""
    names = sorted(known)
    if near or not names:
        return f"; did you mean {near!r}?" if near else ", which has none."
    return f"; it must be one of {', '.join(names)}." if len(names) <= _MANY else "; `lrl fit --help` lists them."

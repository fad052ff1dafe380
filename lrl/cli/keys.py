"""The keys of a run: their help, and errors for misspelt ones, from source files instead of imported classes."""

from __future__ import annotations

import ast
import difflib
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lrl.cli.signatures import (
    Argument,
    SourceClass,
    arguments,
    classes_of,
    find_class,
    first_sentence,
    lineage,
    method_arguments,
)
from lrl.files import resolve_config, shipped
from lrl.registry import components

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("num_minibatches", "pack_tokens"),
    "beta": ("kl_coef", "coef"),
    "c1": ("vf_coef",),
    "c2": ("ent_coef",),
    "cg_damping": ("damping",),
    "cg_max_steps": ("cg_iterations",),
    "clip_eps": ("clip_range",),
    "cliprange": ("clip_range",),
    "delta": ("max_kl",),
    "entropy_coef": ("ent_coef",),
    "epochs": ("max_epochs", "num_epochs"),
    "eps_clip": ("clip_range",),
    "epsilon": ("clip_range",),
    "lam": ("gae_lambda",),
    "learning_rate": ("lr",),
    "line_search_max_iter": ("max_backtracks",),
    "lora_alpha": ("alpha",),
    "lora_dropout": ("dropout",),
    "lora_r": ("r",),
    "max_completion_length": ("max_new_tokens",),
    "max_grad_norm": ("gradient_clip_val",),
    "max_length": ("max_prompt_tokens", "max_new_tokens"),
    "max_tokens": ("max_new_tokens",),
    "model_name": ("name",),
    "model_name_or_path": ("name",),
    "n_envs": ("num_envs",),
    "n_epochs": ("num_epochs",),
    "n_steps": ("num_steps",),
    "num_generations": ("group_size",),
    "num_train_epochs": ("max_epochs",),
    "ppo_epochs": ("num_epochs",),
    "rank": ("r",),
    "seed": ("seed_everything",),
    "target_kl": ("max_kl",),
    "total_timesteps": ("max_env_steps",),
    "value_coef": ("vf_coef",),
}
"""Names in other libraries and papers to the names here."""

_TRAINER = "lightning.pytorch.Trainer"
_ROOTS = {"model": "lrl.training.module.RunModule", "data": "lightning.pytorch.LightningDataModule"}
_STOCK = ("callbacks", "loggers", "strategies", "profilers", "plugins")
"""Folders of Lightning whose classes have short names."""
_TOP = {
    "config": "configuration file, by its path or the name of one that ships with lrl; further ones are overlays",
    "model": "class of the algorithm",
    "data": "class of the data module",
    "seed_everything": "seed of all random numbers (default: 0)",
    "run_directory": "folder to which the run is written (default: runs/<env>/<algorithm>/<date>-seed<k>)",
    "ckpt_path": "checkpoint or run directory to resume from",
    "weights_only": "whether a checkpoint is loaded without unpickling other objects",
    "push_to_hub": "repository of the Hugging Face hub to which the trained model is exported",
    "trainer": "arguments of the trainer as one mapping",
}
"""The keys at the top of a configuration, and what they mean."""
_NO_KEYS = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
"""Arguments of the methods of the trainer that are not keys of a configuration."""
_OBJECT = ("class_path", "init_args", "dict_kwargs")
"""The keys of a mapping that describes an object."""
_MANY = 20
"""Number of keys above which an error does not list all of them."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that means the same as ``name`` in another library or is spelt similarly, or None."""
    names = list(known)
    synonym = next((other for other in SYNONYMS.get(name, ()) if other in names), None)
    return synonym or next(iter(difflib.get_close_matches(name, names, n=1)), None)


# Errors for misspelt keys.


def check_keys(words: Sequence[str]) -> None:
    """Check that the keys in the configurations and options of a command line exist.

    What cannot be decided without importing a class is left to the parser: classes that pass arguments on, values of a
    wrong type, and files that cannot be read.

    Args:
        words: the command and its options, such as ``["fit", "--config", "frozen_lake/grpo.yaml"]``.

    Raises:
        ValueError: If a class does not have one of the keys.
    """
    keys = _Keys({*_TOP, *(one.name for one in _of_command(words[0]))})
    for settings in _settings(words[1:]):
        keys.check(settings)


def _of_command(command: str) -> Sequence[Argument]:
    """Return the arguments of the trainer's method that a command calls, as far as they are keys."""
    trainer = find_class(_TRAINER)
    known = method_arguments(trainer, command) if trainer else ()
    return [one for one in known if one.name not in _NO_KEYS]


def _settings(words: Sequence[str]) -> Iterator[Any]:
    """Yield the base configuration, then what each file and each option sets, in their order.

    Each is a nested mapping, or a text where a file cannot be read.
    """
    yield _value(shipped("configs/base.yaml") or "")
    for number, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not key.startswith("--") and key != "-c":
            continue
        if not equals:
            value = words[number + 1] if number + 1 < len(words) else ""
        if key in ("--config", "-c"):
            yield _value(resolve_config(value), is_config=True)
        elif key != "--print_config":
            yield {key[2:]: _value(value)}


def _value(text: str, is_config: bool = False) -> Any:
    """Return the value of an option: YAML, or the content of a YAML file; the text itself if it cannot be read.

    A pipe is not read, because the parser could not read it again.
    """
    try:
        is_file = (is_config or text.endswith((".yaml", ".yml"))) and Path(text).is_file()
        return yaml.safe_load(Path(text).read_text(encoding="utf-8") if is_file else text)
    except (OSError, ValueError, yaml.YAMLError):
        return text


class _Keys:
    """Checks the settings of a run in their order, and records the class that each key currently has.

    Args:
        top: the keys at the top of a configuration.
    """

    def __init__(self, top: Iterable[str]) -> None:
        self.top = top
        self.classes: dict[tuple[str, ...], str] = {}
        """Name or import path of the class of a key, without the parts ``init_args`` of the key."""

    def check(self, settings: Any) -> None:
        """Raise for a key at any depth that a class does not have."""
        self._forget(settings, ())
        trainer = find_class(_TRAINER)
        known = (trainer and arguments(trainer)) or []
        for name, value in _unfolded(settings).items():
            if name == "trainer" and known:
                self._arguments("Trainer", known, value, (name,))
            elif name in _ROOTS:
                self._component(value, (name,))
            elif name not in self.top:
                near = nearest(
                    name, names := {one: one for one in self.top} | {one.name: f"trainer.{one.name}" for one in known}
                )
                raise ValueError(f"{name} is not a key of a run{_hint(near and names[near], self.top)}")

    def _arguments(self, owner: str, known: Sequence[Argument], given: Any, key: tuple[str, ...]) -> None:
        """Check the arguments that are given to a class or a group of settings."""
        self._forget(given, key)
        by_name = {one.name: one for one in known}
        for name, value in _unfolded(given).items():
            if name not in by_name:
                near = nearest(name, names := _names(known))
                raise ValueError(
                    f"{'.'.join((*key, name))} is not an argument of {owner}{_hint(near and names[near], by_name)}"
                )
            one = by_name[name]
            self._value(one.module, one.annotation, value, (*key, name))

    def _value(self, module: str, annotation: ast.expr | None, value: Any, key: tuple[str, ...]) -> None:
        """Check the value of an argument if its type contains classes."""
        classes = classes_of(module, annotation, elements=isinstance(value, list))
        for part in (value if isinstance(value, list) else [value]) if classes else ():
            if isinstance(value, list):
                self.classes.pop(_place(key), None)  # each element is a separate object
            group = classes[0] if len(classes) == 1 and classes[0].is_dataclass else None
            known = arguments(group) if group else None
            if group is None:
                self._component(part, key)
            elif known is not None and "class_path" not in _unfolded(part):
                self._arguments(group.name, known, part, key)

    def _component(self, value: Any, key: tuple[str, ...]) -> None:
        """Check the arguments of an object that is described by the name of its class, or by that and ``init_args``."""
        given = _unfolded(value)
        named = given.get("class_path", value)
        if isinstance(named, str):
            self.classes[_place(key)] = named
        elif value is None:
            self.classes.pop(_place(key), None)
        kind = self._class_of(key)
        known = arguments(kind) if kind is not None else None
        others = {name: part for name, part in given.items() if name not in _OBJECT}
        for name in others if known is not None or _place(key) not in self.classes else ():
            full = ".".join((*key, name))
            near = difflib.get_close_matches(name, _OBJECT, n=1, cutoff=0.8)
            if near and name not in {one.name for one in known or ()}:
                raise ValueError(f"{full} is not a key of an object; did you mean {near[0]!r}?")
            if known is not None and "class_path" in given:
                raise ValueError(
                    f"{full} is given next to class_path; it must be {'.'.join((*key, 'init_args', name))}."
                )
        if kind is None or known is None:
            return
        self._arguments(kind.name, known, others, key)
        self._arguments(kind.name, known, given.get("init_args"), (*key, "init_args"))

    def _forget(self, given: Any, key: tuple[str, ...]) -> None:
        """Drop what is known of the classes below a key, if its value is a text that stands for an unread file."""
        if isinstance(given, str):
            place = _place(key)
            self.classes = {one: name for one, name in self.classes.items() if one[: len(place)] != place}

    def _class_of(self, key: tuple[str, ...]) -> SourceClass | None:
        """Return the class that a key has now, or None if it is unknown."""
        name = self.classes.get(_place(key), "")
        paths = [components().get(name, name), *(f"lightning.pytorch.{folder}.{name}" for folder in _STOCK)]
        return next((found for path in paths if name and (found := find_class(path))), None)


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
    """Return the arguments of a class by their names, and those of its groups one level down as ``group.name``."""
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


# Help.


def help_text(words: Sequence[str], purpose: str) -> str | None:
    """Return the help text that a command line requests; None if it requests none, or if the class is unknown.

    Args:
        words: the command and its options.
        purpose: what the command does.
    """
    if {"-h", "--help"} & set(words):
        return _overview(words[0], purpose)
    for number, word in enumerate(words):
        key, _, name = word.partition("=")
        if key.startswith("--") and key.endswith(".help"):
            name = name or " ".join(words[number + 1 : number + 2])
            kind = find_class(components().get(name, name))
            return kind and _class_help(f"lrl {words[0]}", key[2:].removesuffix(".help"), kind)
    return None


def _overview(command: str, purpose: str) -> str:
    """Return the classes, the keys of a run and the arguments of the trainer."""
    parser = _HelpParser(f"lrl {command} --config FILE [--config OVERLAY] [--KEY VALUE ...]", purpose)
    kinds: dict[str, list[SourceClass]] = {}
    for path in components().values():
        if kind := find_class(path):
            kinds.setdefault(_family(kind), []).append(kind)
    for family, key in (("LightningModule", "model"), ("LightningDataModule", "data")):
        parser.section(f"classes of --{key}", {kind.name: kind.summary for kind in kinds.pop(family, ())})
    more = {one.name: first_sentence(one.text) for one in _of_command(command)}
    parser.section("keys of a run", {f"--{name} VALUE": text for name, text in (_TOP | more | _TOP).items()})
    keys = {
        "--model.help CLASS": "list the arguments of a model, such as `--model.help PPOValueHeadModule`",
        "--data.help CLASS": "list those of a data module",
        "--KEY.help CLASS": "list those of any class below, such as `--model.init_args.policy.help TextPolicy`",
        "--KEY VALUE": "set any key of the configuration, such as `--model.init_args.optimizer.lr 1e-4`",
        "--print_config": "print the whole configuration and exit",
    }
    parser.section("options of a class", keys)
    names = {family: ", ".join(kind.name for kind in members) for family, members in kinds.items()}
    parser.section("classes of arguments", names)
    trainer = find_class(_TRAINER)
    parser.section("trainer", _lines("trainer", (trainer and arguments(trainer)) or ()))
    return parser.format_help()


def _family(kind: SourceClass) -> str:
    """Return the name of a component's base class: one of Lightning, or the most general one of its package."""
    line = lineage(kind)
    names = [one.name for one in line]
    lightning = next((name for name in ("LightningModule", "LightningDataModule", "Callback") if name in names), None)
    return lightning or [one.name for one in line if one.module.partition(".")[0] == kind.module.partition(".")[0]][-1]


def _class_help(program: str, key: str, kind: SourceClass) -> str | None:
    """Return the arguments of a class, or None if source files do not determine them."""
    known = arguments(kind)
    if known is None:
        return None
    parser = _HelpParser(f"{program} ... --{key} {kind.name} [--{key}.init_args.KEY VALUE ...]", f"{kind.summary}.")
    parser.section(f"arguments of {kind.module}.{kind.name}", _lines(f"{key}.init_args", known))
    return parser.format_help()


def _lines(key: str, known: Iterable[Argument], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return options and their descriptions; those of a group of settings follow it.

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


class _HelpParser(ArgumentParser):
    """Prints sections of options that it does not parse.

    Args:
        usage: the command.
        description: what it does.
    """

    def __init__(self, usage: str, description: str) -> None:
        super().__init__(usage=usage, description=description, add_help=False)

    def section(self, title: str, lines: Mapping[str, str]) -> None:
        """Add a section of words, options with or without their values, and what each of them means."""
        group = self.add_argument_group(title)
        for line, text in lines.items():
            option, _, value = line.partition(" ")
            settings: dict[str, Any] = {"metavar": value} if option.startswith("-") else {}
            group.add_argument(option, help=text.replace("%", "%%"), **settings)

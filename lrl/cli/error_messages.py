"""A user's error as one sentence, with the key that was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import importlib
import inspect
import re
import sys
import traceback
import typing
from argparse import ArgumentError
from collections.abc import Iterable, Sequence
from pathlib import Path

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lrl.ranges import RANGES

_SYNONYMS: dict[str, tuple[str, ...]] = {
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
_OWNER = re.compile(r"Problem with given class_path '([\w.]+)'")
_PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
_REJECTED = (
    re.compile(r"Option '(?P<key>[\w.]+)' is not accepted"),
    re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'"),
    re.compile(r"Subcommand '\w+' does not accept option '(?P<key>[\w.]+)'"),
    re.compile(r"unrecognized arguments: --(?P<key>[\w.]+)"),
    re.compile(r"Subclasses are disabled for (?P<group>\w+)Config, thus '\S+' is not accepted as (?P<key>class_path)"),
)
"""How jsonargparse reports a key that it does not know."""
_FULL_DISK = re.compile(
    r"No space left on device|os error 28|Disk quota exceeded|database or disk is full"
    r"|PytorchStreamWriter failed writing|inline_container\.cc.* unexpected pos"
)
"""How safetensors, h5py, sqlite3 and torch report a full disk."""
_TOP = ("model", "data", "trainer", "config", "ckpt_path", "run_directory", "push_to_hub", "seed_everything")
"""Keys at the top of a configuration."""
_STOCK_PARTS = {"callbacks": "trainer.callbacks", "loggers": "trainer.logger", "profilers": "trainer.profiler"}
"""Keys by the folder of Lightning that holds their classes."""
_WRONG_CLASS = "Not a valid subclass of"
_NO_REASON = (
    "Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path",
    "Expected a <class 'NoneType'>", "Subclass types expect one of", "a class path (str)", "a dict with",
)  # fmt: skip
"""First words of the lines around the reason in a report of jsonargparse."""


def user_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that are printed as one sentence: a user's errors, and those of the disk and of wandb."""
    wandb = sys.modules.get("wandb")
    from_wandb = () if wandb is None else (wandb.errors.Error,)
    return (ValueError, MisconfigurationException, ArgumentError, OSError, *from_wandb)


def stock_part(error: BaseException) -> str | None:
    """Return the key of the part of Lightning that raised an error, such as ``trainer.callbacks``; None for others.

    Its callbacks, loggers and profilers raise a ``RuntimeError`` or an ``AttributeError`` where they do not fit a run.
    """
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    # An attribute of a module is looked up in torch, and some callbacks do their work in lightning.fabric.
    own = [file for file in files if not {"torch", "fabric"} & set(file.parts)]
    folder = own[-1].parent if own else Path()
    return _STOCK_PARTS.get(folder.name) if folder.parent.parts[-2:] == ("lightning", "pytorch") else None


def sentence_of(error: Exception) -> str | None:
    """Return the sentence that is printed for an error, or None for an error of the program, which has a traceback."""
    if not isinstance(error, ValueError) and (sentence := _of_full_disk(error)):
        return sentence
    part = stock_part(error)
    if not isinstance(error, user_errors()) and part is None:
        return None
    sentence = in_a_sentence(str(error))
    return sentence if part is None or part in sentence else f"{part}: {sentence}"


def _of_full_disk(error: BaseException) -> str | None:
    """Return a sentence if an error, or one that led to it, says that a disk is full; libraries have their own ways."""
    seen: BaseException | None = error
    while seen is not None:
        text, number = " ".join(str(seen).split()), getattr(seen, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or _FULL_DISK.search(text):
            file = getattr(seen, "filename", None)
            where = f" for {str(file)!r}" if file else ""
            return f"there is no space left on the disk{where} ({text[:200]}); free some, or write to another disk."
        seen = seen.__cause__ or seen.__context__
    return None


def in_a_sentence(message: str) -> str:
    """Return an error message without line breaks; of jsonargparse's long reports only the key and the reason.

    Args:
        message: of any of :func:`user_errors`.
    """
    if "Union subtypes" not in message:
        return re.sub(r"^\[Errno \d+\] ", "", " ".join(message.split())) + suggestion(message)
    lines = [line.strip(" -") for line in message.splitlines()]
    reasons = [line for line in lines if line and not line.startswith(_NO_REASON)]
    reason = next(iter(reasons), " ".join(lines))
    if reason.startswith(_WRONG_CLASS):  # said of a list of classes too, of which one raised an error of its own
        reason = next((line for line in reasons if not line.startswith((_WRONG_CLASS, "Expected a"))), reason)
    keys = ".".join(_PARSER_KEY.findall(message.split(reason)[0]))
    wrong_value = _wrong_value(keys, lines, reason)
    if wrong_value:
        return wrong_value
    reason = _choices(lines, reason) or _balanced(reason).partition(". Only the class_path")[0] + suggestion(message)
    return re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", f"{keys}: {reason}" if keys else reason)


def _wrong_value(key: str, lines: list[str], reason: str) -> str:
    """Return the sentence for a value out of its range or not among its names, as :mod:`lrl.ranges` writes it."""
    found = re.match(r"Expected a typing.Literal\[(.*)\]\. Got value: (.*)", reason)
    if found is not None:
        return f"{key} is {found[2]!r}; it must be one of {found[1].replace(chr(39), '')}."
    found = re.match(r"Not of type (\w+): (.*)", reason)
    if found is None or found[1] not in RANGES:
        return ""
    subtypes, given = _subtypes_and_value(lines, reason)
    optional = ", or null" if f".{found[1]}'" in subtypes and "NoneType" in subtypes else ""
    text, conforms, _ = found[2].partition("does not conform")
    value = (text.strip() or given) if conforms else text.rpartition(": ")[2]
    return f"{key} is {value}; it must be {RANGES[found[1]]}{optional}."


def _balanced(reason: str) -> str:
    """Return a reason without the last parenthesis, where the line that holds its opening one was left out."""
    return reason[:-1] if reason.endswith(")") and reason.count(")") > reason.count("(") else reason


def _subtypes_and_value(lines: list[str], reason: str) -> tuple[str, str]:
    """Return the types that a report names last before its reason, and the value that it names first after it."""
    place = lines.index(reason) if reason in lines else 0
    subtypes = [line for line in lines[:place] if line.startswith("Subtypes:")]
    given = (line.removeprefix("Given value: ") for line in lines[place:] if line.startswith("Given value: "))
    return (subtypes or [""])[-1], next(given, "")


def _choices(lines: list[str], reason: str) -> str:
    """Return the given value and the allowed names, where a report rejects a value that may be one of several names."""
    subtypes, given = _subtypes_and_value(lines, reason)
    names = re.findall(r"Literal\[(.*?)\]", subtypes) if reason.startswith("Expected a ") else []
    known = list(dict.fromkeys(name.strip(" '") for group in names for name in group.split(",")))
    near = nearest(given, known)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{given!r} must be one of {', '.join(known)}{hint}" if known else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of ``known`` that ``name`` is in another library, or that is spelt almost like it, or None."""
    names = list(known)
    synonym = next((other for other in _SYNONYMS.get(name, ()) if other in names), None)
    return synonym or next(iter(difflib.get_close_matches(name, names, n=1)), None)


def suggestion(report: str) -> str:
    """Return ``; did you mean 'lr'?`` for a key that jsonargparse rejects, else an empty text.

    Args:
        report: of jsonargparse, whole: it names the class that rejects a key some lines before the key.
    """
    for pattern in _REJECTED:
        found = pattern.search(report)
        if found is None:
            continue
        *path, key = [*(found.groupdict().get("group") or "").split("."), *found["key"].split(".")]
        path = [part.lower() for part in path if part and part != "init_args"]
        owners = _OWNER.findall(report[: found.start()])
        known = _keys(owners[-1] if owners else None, path)
        near = nearest(key, known)
        return f"; did you mean {known[near]!r}?" if near else ""
    return ""


def _keys(owner: str | None, path: Sequence[str]) -> dict[str, str]:
    """Return the keys that are allowed in place of a rejected one, by their last name.

    They are the arguments of a class, and those of its dataclasses one level down as ``group.name``.

    Args:
        owner: class path of the class that rejects the key; None at the top of the configuration.
        path: groups that lead from there to the key.
    """
    if owner is None and not path:
        return dict(zip(_TOP, _TOP, strict=True))
    if owner is None and path[0] != "trainer":
        return {}
    kind: type | None = L.Trainer if owner is None else _imported(owner)
    for part in path if owner is not None else path[1:]:
        kind = _groups(kind).get(part)
        if kind is None:
            return {}
    keys = {name: name for name in _arguments(kind)}
    for group, settings in _groups(kind).items():
        for name in _arguments(settings) if dataclasses.is_dataclass(settings) else ():
            keys.setdefault(name, f"{group}.{name}")
    return keys


def _arguments(kind: type) -> list[str]:
    """Return the names of a constructor's arguments."""
    return [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]


def _groups(kind: type) -> dict[str, type]:
    """Return the class of every argument of a constructor; of a union the first class that is not None."""
    try:
        hints = typing.get_type_hints(kind.__init__)
    except NameError:  # a type that is imported for type checkers only
        return {}
    classes: dict[str, type] = {}
    for name, hint in hints.items():
        members = [one for one in (*typing.get_args(hint), hint) if inspect.isclass(one) and one is not type(None)]
        if members and name != "return":
            classes[name] = members[0]
    return classes


def _imported(path: str) -> type:
    """Import a class by its path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)

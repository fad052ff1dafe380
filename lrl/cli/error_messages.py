"""A user's mistake in one sentence, with the key that was probably meant."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import typing
from argparse import ArgumentError
from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

_SYNONYMS: dict[str, tuple[str, ...]] = {
    "batch_size": ("num_minibatches", "pack_tokens"),
    "beta": ("kl_coef",),
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
"""Names in other libraries and papers, to ours."""
_OWNER = re.compile(r"Problem with given class_path '([\w.]+)'")
_REFUSED = (
    re.compile(r"Option '(?P<key>[\w.]+)' is not accepted"),
    re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'"),
    re.compile(r"Subcommand '\w+' does not accept option '(?P<key>[\w.]+)'"),
    re.compile(r"unrecognized arguments: --(?P<key>[\w.]+)"),
)
_TOP = ("model", "data", "trainer", "config", "ckpt_path", "run_directory", "push_to_hub", "seed_everything")

_NO_REASON = (
    "Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path",
    "Expected a <class 'NoneType'>",
)  # fmt: skip
"""How lines begin that frame the reason in a report of jsonargparse."""


def user_errors() -> tuple[type[BaseException], ...]:
    """What is reported in one sentence: a user's mistakes, and what the disk or Weights & Biases refused."""
    wandb = sys.modules.get("wandb")
    refused = () if wandb is None else (wandb.errors.Error,)
    return (ValueError, MisconfigurationException, ArgumentError, OSError, *refused)


def in_a_sentence(message: str) -> str:
    """Without line breaks; of a parser's report on all that a value could have been, what is wrong with it."""
    if "Union subtypes" not in message:
        return re.sub(r"^\[Errno \d+\] ", "", " ".join(message.split())) + suggestion(message)
    told = [line.strip(" -") for line in message.splitlines()]
    reason = next((line for line in told if line and not line.startswith(_NO_REASON)), " ".join(told))
    keys = ".".join(re.findall(r'Parser key "([^"]+)"', message.split(reason)[0]))
    reason = _choices(told, reason) or reason + suggestion(message)
    return re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", f"{keys}: {reason}" if keys else reason)


def _choices(told: list[str], reason: str) -> str:
    """Where names are allowed beside other types: the value, and the names."""
    place = told.index(reason) if reason in told else 0
    subtypes = [line for line in told[:place] if line.startswith("Subtypes:")]
    names = re.findall(r"Literal\[(.*?)\]", subtypes[-1]) if subtypes and reason.startswith("Expected a ") else []
    given = next((line.removeprefix("Given value: ") for line in told[place:] if line.startswith("Given value: ")), "")
    known = list(dict.fromkeys(name.strip(" '") for part in names for name in part.split(",")))
    near = nearest(given, known)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{given!r} must be one of {', '.join(known)}{hint}" if known else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that is another library's ``name``, or is spelt almost like it; None if there is none."""
    names = list(known)
    synonym = next((other for other in _SYNONYMS.get(name, ()) if other in names), None)
    return synonym or next(iter(difflib.get_close_matches(name, names, n=1)), None)


def suggestion(report: str) -> str:
    """``; did you mean 'lr'?`` for the key that a parser's report refuses, or nothing.

    Args:
        report: of jsonargparse, whole: the class that refuses a key is named some lines before the key.
    """
    for pattern in _REFUSED:
        found = pattern.search(report)
        if found is None:
            continue
        owners = _OWNER.findall(report[: found.start()])
        *path, key = [*(found.groupdict().get("group") or "").split("."), *found["key"].split(".")]
        path = [part for part in path if part and part != "init_args"]
        near = nearest(key, _keys(owners[-1] if owners else None, path))
        return f"; did you mean {near!r}?" if near else ""
    return ""


def _keys(owner: str | None, path: Sequence[str]) -> list[str]:
    """The keys that stand beside a refused one: settings of ``owner``, or of the group that ``path`` leads to."""
    if owner is None and not path:
        return list(_TOP)
    if owner is None and path[0] != "trainer":
        return []
    kind: Any = L.Trainer if owner is None else _imported(owner)
    for part in path if owner is not None else path[1:]:
        hints = typing.get_type_hints(kind.__init__)
        kind = next((option for option in _options(hints.get(part)) if inspect.isclass(option)), None)
        if kind is None:
            return []
    return [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, without None; a type that is no union alone."""
    return tuple(option for option in typing.get_args(hint) if option is not type(None)) or (hint,)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)

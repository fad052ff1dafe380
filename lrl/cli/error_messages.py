"""Prints an error that a user caused as one sentence, without traceback."""

from __future__ import annotations

import difflib
import errno
import logging
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lrl.cli.quiet import silence_libraries
from lrl.ranges import RANGES
from lrl.registry import components

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("num_minibatches", "pack_tokens"),
    "beta": ("kl_coef", "coef"),
    "c1": ("vf_coef",),
    "c2": ("ent_coef",),
    "cg_max_steps": ("cg_iterations",),
    "clip_eps": ("clip_range",),
    "delta": ("max_kl",),
    "epochs": ("max_epochs", "num_epochs"),
    "eps_clip": ("clip_range",),
    "epsilon": ("clip_range",),
    "lam": ("gae_lambda",),
    "learning_rate": ("lr",),
    "lora_r": ("r",),
    "max_completion_length": ("max_new_tokens",),
    "max_grad_norm": ("gradient_clip_val",),
    "max_length": ("max_prompt_tokens", "max_new_tokens"),
    "model_name": ("name",),
    "model_name_or_path": ("name",),
    "num_generations": ("group_size",),
    "num_train_epochs": ("max_epochs",),
    "rank": ("r",),
    "seed": ("seed_everything",),
    "target_kl": ("max_kl",),
    "total_timesteps": ("max_env_steps",),
}
"""Settings by the names that other libraries and papers use, if these are spelt too differently to be matched."""

_FULL_DISK = re.compile(
    r"No space left on device|os error 28|Disk quota exceeded|database or disk is full"
    r"|PytorchStreamWriter failed writing|inline_container\.cc.* unexpected pos"
)
"""How safetensors, h5py, sqlite3 and torch report a full disk."""
_PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
_STOCK_PARTS = {"callbacks": "trainer.callbacks", "loggers": "trainer.logger", "profilers": "trainer.profiler"}
"""Configuration keys of Lightning's own callbacks, loggers and profilers, by the folder with their classes."""
_WRONG_CLASS = "Not a valid subclass of"
_NO_REASON = (
    "Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path",
    "Expected a <class 'NoneType'>", "Subclass types expect one of", "a class path (str)", "a dict with",
)  # fmt: skip
"""First words of the lines that do not give the reason in a report of jsonargparse."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name for what another library calls ``name``, else the one most similarly spelt, or None."""
    names = list(known)
    synonym = next((other for other in SYNONYMS.get(name, ()) if other in names), None)
    return synonym or next(iter(difflib.get_close_matches(name, names, n=1)), None)


@contextmanager
def user_errors(prog: str, options: Container[str] = ()) -> Iterator[None]:
    """Print an error that a user caused as one sentence and exit with status 2; silence known messages of libraries.

    An interruption by the user exits with status 130.

    Args:
        prog: name of the program.
        options: names of its options. If an error begins with the name of an option, ``--`` is printed before it.

    Raises:
        SystemExit: If a user caused an error, or interrupted the program.
    """
    silence_libraries()
    try:
        yield
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        logging.getLogger("lrl.trace").debug("", exc_info=True)  # into run.log
        sentence = sentence.removeprefix("argument ")  # argparse begins its messages with this
        hyphens = "--" if sentence.split(" ", 1)[0].rstrip(":") in options else ""
        sys.stderr.write(f"{prog}: {hyphens}{sentence}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        raise SystemExit(130) from None


def _user_error_types() -> tuple[type[BaseException], ...]:
    """Return the exceptions that are printed as one sentence: of the user, the disk, wandb and Lightning's settings."""
    places = (("wandb.errors", "Error"), ("lightning.fabric.utilities.exceptions", "MisconfigurationException"))
    others = [getattr(sys.modules[module], name) for module, name in places if module in sys.modules]
    return (ValueError, ArgumentError, OSError, *others)


def stock_part(error: BaseException) -> str | None:
    """Return the key of the callback, logger or profiler of Lightning that raised an error; None for other errors.

    The key is for example ``trainer.callbacks``. If such an object cannot be used in a run, which is a user's error, it
    raises a ``RuntimeError`` or an ``AttributeError``.
    """
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    # Frames in torch (access to a missing attribute) and lightning.fabric (which callbacks call) do not show the cause.
    own = [file for file in files if not {"torch", "fabric"} & set(file.parts)]
    folder = own[-1].parent if own else Path()
    return _STOCK_PARTS.get(folder.name) if folder.parent.parts[-2:] == ("lightning", "pytorch") else None


def sentence_of(error: Exception) -> str | None:
    """Return the sentence that is printed for an error, or None for a bug, for which the traceback is printed."""
    if not isinstance(error, ValueError) and (sentence := _of_full_disk(error)):
        return sentence
    part = stock_part(error)
    if not isinstance(error, _user_error_types()) and part is None:
        return None
    sentence = in_a_sentence(str(error))
    return sentence if part is None or part in sentence else f"{part}: {sentence}"


def _of_full_disk(error: BaseException) -> str | None:
    """Return a sentence if an error, or one that caused it, reports a full disk; each library has its own text."""
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
        message: message of an error that a user caused.
    """
    if "Union subtypes" not in message:
        return re.sub(r"^\[Errno \d+\] ", "", " ".join(message.split()))
    lines = [line.strip(" -") for line in message.splitlines()]
    reasons = [line for line in lines if line and not line.startswith(_NO_REASON)]
    reason = next(iter(reasons), " ".join(lines))
    if reason.startswith(_WRONG_CLASS):  # also reported for a list in which one element is invalid for another reason
        reason = next((line for line in reasons if not line.startswith((_WRONG_CLASS, "Expected a"))), reason)
    keys = ".".join(_PARSER_KEY.findall(message.split(reason)[0]))
    wrong_value = _wrong_value(keys, lines, reason)
    if wrong_value:
        return wrong_value
    reason = _choices(lines, reason) or _balanced(reason).partition(". Only the class_path")[0]
    return re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", f"{keys}: {reason}" if keys else reason)


def _wrong_value(key: str, lines: list[str], reason: str) -> str:
    """Return the sentence for a value that is out of range, not an allowed name, or the misspelt name of a class."""
    found = re.match(r"Expected a typing.Literal\[(.*)\]\. Got value: (.*)", reason)
    if found is not None:
        return f"{key} is {found[2]!r}; it must be one of {found[1].replace(chr(39), '')}."
    found = re.match(r"Expected a (?:dot import path string: |path but )(\w+)\b", reason)
    near = found and nearest(found[1], components())
    if found is not None and near:
        return f"{key} is {found[1]!r}, which is no class; did you mean {near!r}?"
    found = re.match(r"Not of type (\w+): (.*)", reason)
    if found is None or found[1] not in RANGES:
        return ""
    subtypes, given = _subtypes_and_value(lines, reason)
    optional = ", or null" if f".{found[1]}'" in subtypes and "NoneType" in subtypes else ""
    text, conforms, _ = found[2].partition("does not conform")
    value = (text.strip() or given) if conforms else text.rpartition(": ")[2]
    return f"{key} is {value}; it must be {RANGES[found[1]]}{optional}."


def _balanced(reason: str) -> str:
    """Return a reason without the last parenthesis, if the line with its opening one was left out."""
    return reason[:-1] if reason.endswith(")") and reason.count(")") > reason.count("(") else reason


def _subtypes_and_value(lines: list[str], reason: str) -> tuple[str, str]:
    """Return the last line of types before the reason of a report, and the first given value after it."""
    place = lines.index(reason) if reason in lines else 0
    subtypes = [line for line in lines[:place] if line.startswith("Subtypes:")]
    given = (line.removeprefix("Given value: ") for line in lines[place:] if line.startswith("Given value: "))
    return (subtypes or [""])[-1], next(given, "")


def _choices(lines: list[str], reason: str) -> str:
    """Return the given value and the allowed names, if a report rejects a value because it is none of these names."""
    subtypes, given = _subtypes_and_value(lines, reason)
    names = re.findall(r"Literal\[(.*?)\]", subtypes) if reason.startswith("Expected a ") else []
    known = list(dict.fromkeys(name.strip(" '") for group in names for name in group.split(",")))
    near = nearest(given, known)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{given!r} must be one of {', '.join(known)}{hint}" if known else ""

"""Prints an error that a user caused as one sentence, without traceback."""

from __future__ import annotations

import difflib
import logging
import os
import re
import site
import sys
import sysconfig
import traceback
from argparse import ArgumentError
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lrl.cli.quiet import silence_libraries
from lrl.faults import DiskFullError, full_disk, out_of_memory
from lrl.ranges import RANGES, description
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

_LONG_WORD = re.compile(r"\S{300,}")
"""A text that is too long to be read in an error."""
_PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
_STOCK_PARTS = {"callbacks": "trainer.callbacks", "loggers": "trainer.logger", "profilers": "trainer.profiler"}
"""Configuration keys of Lightning's own callbacks, loggers and profilers, by the folder with their classes."""
_WRONG_CLASS = "Not a valid subclass of"
_NO_CLASS = re.compile(
    r"Expected a dot import path string: ?(.*)|Expected a path but (.*) either not|Unexpected import path format: ?(.*)"
    r"|Import path (?:(\S*) )?does not correspond"
)
"""How reports of jsonargparse begin if a text is not the name of a class of the right kind."""
_GIVEN_CLASS = re.compile(r"Problem with given class_path '(.*)':")
_NO_REASON = (
    "Does not validate", "Subtypes:", "Errors:", "Given value", "Parser key", "Problem with given class_path",
    "Expected a <class 'NoneType'>", "Subclass types expect one of", "a class path (str)", "a dict with",
)  # fmt: skip
"""First words of the lines that do not give the reason in a report of jsonargparse."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name for what another library calls ``name``, else the one most similarly spelt, or None."""
    names = list(known)
    synonym = next((other for other in SYNONYMS.get(name, ()) if other in names), None)
    if synonym or (close := difflib.get_close_matches(name, names, n=1)):
        return synonym or close[0]
    lower = {one.lower(): one for one in names}
    return next((lower[one] for one in difflib.get_close_matches(name.lower(), lower, n=1)), None)


def short(value: object) -> str:
    """Return a value as it is written in a configuration, shortened if it is long."""
    words: Mapping[object, str] = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else shortened(repr(value))


def shortened(text: str) -> str:
    """Return a text, or the first 60 characters of a long one and its length."""
    return text if len(text) < 300 else f"{text[:60]}... ({len(text)} characters)"


@contextmanager
def user_errors(prog: str, options: Container[str] = (), args: Sequence[str] = ()) -> Iterator[None]:
    """Print an error that a user caused as one sentence and exit with status 2; silence known messages of libraries.

    An interruption by the user exits with status 130.

    Args:
        prog: name of the program.
        options: names of its options. If an error begins with the name of an option, ``--`` is printed before it.
        args: command-line arguments. If an error begins with the configuration key that one of them sets, such as
            ``env.id``, the option is printed instead (``--env_id``). So is the option that names a file, if the
            operating system reports an error of this file.

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
        if isinstance(error, OSError) and (named := _with_option(error, args)):
            sentence = named
        sentence = _LONG_WORD.sub(lambda found: shortened(found[0]), sentence)
        sentence = sentence.removeprefix("argument ")  # argparse begins its messages with this
        sys.stderr.write(f"{prog}: {_with_hyphens(sentence, options, args)}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        raise SystemExit(130) from None


def _with_hyphens(sentence: str, options: Container[str], args: Sequence[str]) -> str:
    """Return an error with ``--`` before the name of an option with which it begins.

    A configuration key at the beginning, such as ``env.id``, is replaced by the option that sets it, if it was given.
    """
    first, space, rest = sentence.partition(" ")
    if first.rstrip(":") in options:
        return f"--{sentence}"
    if first == "env:":  # the factory of the environment, as in env: env.id is ...
        first, space, rest = rest.partition(" ")
    name = first.removeprefix("prompt.").replace(".", "_")  # --history is prompt.history, --env_id is env.id
    given = any(arg.partition("=")[0] == f"--{name}" for arg in args)
    return f"--{name}{space}{rest}" if name in options and given else sentence


def _with_option(error: OSError, args: Sequence[str]) -> str | None:
    """Return the error of a file with the option that names the file or a folder above it; None if there is none."""
    if not isinstance(error.filename, (str, bytes)) or full_disk(error):
        return None
    file, option = os.path.abspath(os.fsdecode(error.filename)), ""
    for arg in args:
        name, equals, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
        option = name or option
        path = os.path.abspath(value) if (equals or not name) and option else None
        if path is not None and (file == path or file.startswith(f"{path}{os.sep}")):
            return f"{option} is {value!r}, which cannot be used: {error.strerror}."
    return None


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
    if isinstance(error, DiskFullError):
        return str(error.strerror)
    if not isinstance(error, ValueError) and (reason := full_disk(error)):
        return f"there is no space left on the disk ({reason}); free some, or write to another disk."
    if reason := out_of_memory(error):
        return f"memory ran out ({reason}); smaller batches, shorter texts or a smaller model need less."
    part = stock_part(error)
    if not isinstance(error, _user_error_types()) and part is None:
        return None
    place = _place_in_user_code(error) if isinstance(error, (ValueError, ArgumentError)) else ""
    sentence = in_a_sentence(str(error))
    if place:
        sentence = f"{sentence.removesuffix('.')}{place}{'.' if sentence.endswith('.') else ''}"
    return sentence if part is None or part in sentence else f"{part}: {sentence}"


def _place_in_user_code(error: BaseException) -> str:
    """Return where code of a user, such as a class of theirs, raised an error.

    Returns:
        A space and the file and line in parentheses; empty if lrl or a library raised the error.
    """
    while (cause := error.__cause__ or error.__context__) is not None and str(cause) and str(cause) in str(error):
        error = cause  # jsonargparse repeats the message of an error in its own
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(frames[-1].filename).resolve() if frames else Path()
    package = Path(__file__).parents[1]
    installed = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    libraries = {Path(folder).resolve() for folder in (package, package.parent / "scripts", *installed)}
    if file.suffix != ".py" or not file.is_file() or libraries & {*file.parents}:
        return ""
    return f" ({file.name}, line {frames[-1].lineno})"


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
    if reason.startswith("Expected a path but"):  # the next reason is that of a class with an invalid argument
        reason = next((line for line in reasons[1:] if not line.startswith("Expected a ")), reason)
    keys = ".".join(_PARSER_KEY.findall(message.split(reason)[0]))
    wrong_value = _wrong_value(keys, lines, reason)
    if wrong_value:
        return wrong_value
    reason = _choices(lines, reason) or _balanced(reason).partition(". Only the class_path")[0]
    return re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", f"{keys}: {reason}" if keys else reason)


def _wrong_value(key: str, lines: list[str], reason: str) -> str:
    """Return the sentence for a value of a wrong type or out of range, or the wrong name of a class; else empty."""
    found = re.match(r"Expected a typing.Literal\[(.*)\]\. Got value: (.*)", reason)
    if found is not None:
        return f"{key} is {found[2]!r}; it must be one of {found[1].replace(chr(39), '')}."
    subtypes, given = _subtypes_and_value(lines, reason)
    if found := _NO_CLASS.match(reason):
        return _wrong_class(key, lines, next(filter(None, found.groups()), given))
    if re.match(r"'\w+' object has no attribute 'keys'", reason):
        return f"{key} is {_shown(given)}; it must be the name of a class, or have a class_path."
    found = re.match(r"No module named|module '.*' has no attribute|.*\(\S+\.py, line \d+\)$", reason)
    if found is not None:
        nested = re.match(r"NestedArg\(key='([\w.]+)', val='([\w.]+)'\)", given)
        paths = [nested[2] if nested else given] if nested or re.fullmatch(r"[\w.]+", given) else []
        paths += [path for line in lines[: lines.index(reason)] for path in _GIVEN_CLASS.findall(line)]
        if not paths:
            return f"{key} has a class that cannot be imported (SyntaxError: {reason})." if "line " in reason else ""
        key = f"{key}.{nested[1]}" if nested and nested[1] != "class_path" else key
        return _not_imported(key, paths[-1], reason)
    found = re.match(r"Expected an instantiatable class, but (\S+) is abstract", reason)
    if found is not None:
        module, _, name = found[1].rpartition(".")
        missing = sorted(getattr(getattr(sys.modules.get(module), name, None), "__abstractmethods__", ()))
        return (
            f"{key} is {found[1]!r}, which cannot be used; it must define {' and '.join(missing)}." if missing else ""
        )
    found = re.match(r"Not a valid subclass of (\w+)(?:\. Got value: (.*))?", reason)
    if found is not None:
        value = found[2] or given
        return f"{key} is {_shown(value)}; it must be the name of a subclass of {found[1]}, or have a class_path."
    found = re.match(r"Expected a <class '([\w.]+)'>(?:\. Got value: (.*))?", reason)
    if found is not None and "Literal[" not in subtypes:
        types = subtypes if f"<class '{found[1]}'>" in subtypes or not found[2] else f"<class '{found[1]}'>"
        kinds = _kinds(types) or _kinds(f"<class '{found[1]}'>")
        return f"{key} is {_shown(found[2] or given)}; it must be {kinds}." if kinds else ""
    found = re.match(r"Not of type (\w+): (.*)", reason)
    if found is None or found[1] not in RANGES:
        return ""
    optional = ", or null" if f".{found[1]}'" in subtypes and "NoneType" in subtypes else ""
    text, conforms, _ = found[2].partition("does not conform")
    value = (text.strip() or given) if conforms else text.rpartition(": ")[2]
    wrong = re.fullmatch(r"(.*?)\s*not (an integer|a number)", value)
    other = re.search(r"argument must be .* not '(\w+)'", value)
    if wrong is not None:
        return f"{key} is {wrong[1] or given}; it must be {wrong[2]} that is {RANGES[found[1]]}{optional}."
    if other is not None:
        kind = "an integer" if "int()" in value else "a number"
        return f"{key} is a {other[1]}; it must be {kind} that is {RANGES[found[1]]}{optional}."
    kind = "an integer" if "int()" in text else "a number" if "to float" in text else ""
    needed = f"{kind} that is " if kind else ""
    return f"{key} is {value}; it must be {needed}{description(found[1], value)}{optional}."


def _not_imported(key: str, path: str, reason: str) -> str:
    """Return the sentence for a class that cannot be imported.

    Args:
        key: key of the object.
        path: import path of the class.
        reason: what the import has raised.
    """
    module, _, name = path.rpartition(".")
    near = difflib.get_close_matches(name, dir(sys.modules.get(module)), 1) if "no attribute" in reason else []
    if near:
        return f"{key} is {path!r}, which does not exist; did you mean '{module}.{near[0]}'?"
    where = " in the current folder or among installed packages" if reason == f"No module named '{module}'" else ""
    kind = "SyntaxError: " if "line " in reason else ""
    return f"{key} is {path!r}, which cannot be imported ({kind}{reason}{where})."


def _wrong_class(key: str, lines: list[str], name: str) -> str:
    """Return the sentence for a text that is not the name of a class of the right kind.

    Args:
        key: key of the object.
        lines: the report.
        name: the text, or what the report shows of it.
    """
    kinds = [kind for line in lines for kind in re.findall(r"subclass of (\w+)$", line)]
    kind = f"a subclass of {kinds[0]}" if kinds else "a class"
    if "." in name and any(line.startswith("Import path") for line in lines):
        return f"{key} is {name!r}; it must be {kind}."
    near = nearest(name, components())
    if near is None or near == name:
        return f"{key} is {name!r}; it must be the name of {kind}, such as package.module.Class."
    return f"{key} is {name!r}, which is no class; did you mean {near!r}?"


_TYPES = {
    r"class 'float'": "a number",
    r"class 'int'": "an integer",
    r"class 'bool'": "true or false",
    r"class 'str'": "a text",
    r"\b[lL]ist\[|\b(?:Sequence|Iterable|[tT]uple|[sS]et)\b|class 'list'": "a list",
    r"\b(?:[dD]ict|Mapping)\b": "a mapping",
    r"NoneType": "null",
}
"""Descriptions of types by patterns of their names in reports of jsonargparse."""


def _kinds(types: str) -> str:
    """Return a description of the types in a report; empty if none is known."""
    found = [text for pattern, text in _TYPES.items() if re.search(pattern, types)]
    if found[:2] == ["a number", "an integer"]:  # an integer is a number
        del found[1]
    if found[0:1] in (["a number"], ["an integer"]):  # Lightning takes booleans for special values of numbers
        found = [text for text in found if text != "true or false"]
    *others, last = found or [""]
    return f"{', '.join(others)} or {last}" if others else last if last != "null" else ""


def _shown(value: str) -> str:
    """Return the text of a value, in quotation marks if it is no number, list, mapping or constant."""
    plain = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|[-+]?inf|nan|True|False|None|[\[{(].*", value)
    return value if plain else repr(value)


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

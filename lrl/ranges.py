"""Number types with a range, such as ``PositiveInt``, and the functions that check values against them.

The command line checks the ranges while parsing, and configuration objects check them in their constructors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from numbers import Integral, Real
from os import PathLike
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_FLOAT = 3.4e38
"""Largest number in a configuration, because larger ones are infinite in 32 bits."""

if TYPE_CHECKING:  # for type checkers, these types are plain numbers
    ClosedUnitInterval = HalfOpenUnitInterval = LeftOpenUnitInterval = OpenUnitInterval = float
    NonNegativeFloat = PositiveFloat = float
    NonNegativeInt = PositiveInt = Seed = int
else:
    from jsonargparse.typing import ClosedUnitInterval as ClosedUnitInterval
    from jsonargparse.typing import NonNegativeInt as NonNegativeInt
    from jsonargparse.typing import OpenUnitInterval as OpenUnitInterval
    from jsonargparse.typing import PositiveInt as PositiveInt
    from jsonargparse.typing import restricted_number_type

    HalfOpenUnitInterval = restricted_number_type("HalfOpenUnitInterval", float, [(">=", 0), ("<", 1)])
    # The types of jsonargparse with the names of these two include infinity.
    NonNegativeFloat = restricted_number_type("NonNegativeFiniteFloat", float, [(">=", 0), ("<=", MAX_FLOAT)])
    PositiveFloat = restricted_number_type("PositiveFiniteFloat", float, [(">", 0), ("<=", MAX_FLOAT)])
    LeftOpenUnitInterval = restricted_number_type("LeftOpenUnitInterval", float, [(">", 0), ("<=", 1)])
    Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**63)])

MAX_SEED = 2**63 - 1
"""Largest seed of an episode; seeds are signed 64-bit integers."""


class LateSettingError(ValueError):
    """Raised for a setting that only a collection can check; a run that has trained nothing leaves no directory."""


RANGES: Mapping[str, str] = {
    "ClosedUnitInterval": "in [0, 1]",
    "HalfOpenUnitInterval": "in [0, 1)",
    "LeftOpenUnitInterval": "in (0, 1]",
    "NonNegativeFiniteFloat": "0 or positive",
    "NonNegativeInt": "0 or positive",
    "OpenUnitInterval": "in (0, 1)",
    "PositiveFiniteFloat": "positive",
    "PositiveInt": "at least 1",
    "Seed": f"from 0 to {MAX_SEED}",
}
"""Description of each range, which completes "it must be ..." in error messages."""


def description(kind: str, value: object) -> str:
    """Return the description of a range for a value outside of it, which completes "it must be ..." in error messages.

    Args:
        kind: name of the type, a key of :data:`RANGES`.
        value: the value, or its text.
    """
    try:
        too_large = "Finite" in kind and float(str(value).strip("'")) > MAX_FLOAT
    except ValueError:
        too_large = False
    return f"{RANGES[kind]} and at most {MAX_FLOAT:g}" if too_large else RANGES[kind]


def check_finite(key: str, value: Any) -> None:
    """Check that a number fits into a tensor.

    Args:
        key: configuration key of the value, for error messages.
        value: the value; one that is no number is not checked.

    Raises:
        ValueError: If it is infinite or nan, or too large.
    """
    if isinstance(value, float) and not abs(value) <= MAX_FLOAT:
        raise ValueError(f"{key} is {value}; it must be a number from {-MAX_FLOAT:g} to {MAX_FLOAT:g}.")


def check_fields(settings: Any, key: str) -> None:
    """Check the fields of a dataclass against their annotated ranges, and convert numbers to ``int`` or ``float``.

    Args:
        settings: an instance of the dataclass, frozen or not; its fields are changed in place.
        key: configuration key of the instance, for error messages.

    Raises:
        ValueError: If a value is out of range, or is not one of the names that its field allows.
    """
    hints = get_type_hints(type(settings))
    for name, value in check_values(hints, vars(settings), key).items():
        object.__setattr__(settings, name, value)


def check_seed(key: str, seed: int, count: int = 1, maximum: int = MAX_SEED) -> None:
    """Check that a seed and those that follow it are in range.

    Args:
        key: configuration key of the seed, for error messages.
        seed: the first seed.
        count: number of consecutive seeds that are used.
        maximum: largest allowed seed.

    Raises:
        ValueError: If one of the seeds is negative or greater than ``maximum``.
    """
    last = maximum - max(count - 1, 0)
    if not 0 <= seed <= last:
        many = f" for {count} consecutive seeds" if count > 1 else ""
        raise ValueError(f"{key} is {seed}; it must be from 0 to {last}{many}.")


def check_kinds(function: Any, values: Mapping[str, Any]) -> None:
    """Check that arguments of another library are of the kind that is annotated: numbers, texts, lists and so on.

    Null, other values and arguments with other annotations are not checked, nor is whether a number is whole.

    Args:
        function: the function or class that takes the arguments.
        values: the arguments by name.

    Raises:
        ValueError: If a value is of another kind.
    """
    try:
        hints = get_type_hints(function.__init__ if isinstance(function, type) else function)
    except (AttributeError, NameError, TypeError):
        return
    for name in values.keys() & hints.keys():
        if kinds := _other_kinds(_options(hints[name]), values[name]):
            raise ValueError(f"{name} is {values[name]!r}; it must be {kinds}.")


def unknown_argument(function: Any, values: Mapping[str, Any], error: Exception) -> str:
    """Return a sentence about an argument that a function or class rejected by its name; empty for any other error.

    Args:
        function: the function or class that was called. Arguments of its base classes are suggested as well.
        values: the arguments by name.
        error: the error that the call raised.
    """
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found is None or found[1] not in values:
        return ""
    calls = [vars(base).get("__init__") for base in getattr(function, "__mro__", ())] or [function]
    names = [name for call in calls if callable(call) for name in _argument_names(call)]
    near = get_close_matches(found[1], names, 1)
    return f"there is no argument {found[1]!r}" + (f"; did you mean {near[0]!r}?" if near else ".")


def _argument_names(function: Any) -> list[str]:
    """Return the names of the arguments of a function; none if they are not known."""
    try:
        return [name for name in signature(function).parameters if name not in ("self", "args", "kwargs")]
    except (TypeError, ValueError):
        return []


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of an annotation."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _other_kinds(options: Sequence[Any], value: Any) -> str:
    """Return a description of the kinds of values that an annotation allows; empty if it allows the kind of a value."""
    plain = [type(get_args(one)[0]) if get_origin(one) is Literal else get_origin(one) or one for one in options]
    kinds = [_KINDS.get(kind) for kind in plain if kind is not type(None)]
    if type(value) not in _KINDS or None in kinds or _KINDS[type(value)] in kinds:
        return ""
    return " or ".join(dict.fromkeys(map(str, kinds)))


_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    **dict.fromkeys((int, float), "a number"),
    str: "a text",
    **dict.fromkeys((list, tuple, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a mapping"),
}
"""Kinds of values by their types."""


def check_arguments(function: Any, values: Mapping[str, Any], key: str) -> None:
    """Check the arguments of a constructor against their annotated ranges.

    Args:
        function: the constructor.
        values: its ``locals()``.
        key: configuration key of the constructed object, for error messages.

    Raises:
        ValueError: If a value is out of range, or is not one of the names that its argument allows.
    """
    check_values(get_type_hints(function), values, key)


def check_values(hints: Mapping[str, Any], values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Check values against their annotations.

    Args:
        hints: annotations by name.
        values: values by name.
        key: configuration key of the object that has these values, for error messages.

    Returns:
        The values whose annotation is a range, by name, as plain ``int`` or ``float``.

    Raises:
        ValueError: If a value is out of range, has another type, or is not one of the names that its annotation allows.
    """
    plain: dict[str, Any] = {}
    for name, hint in hints.items():
        options = _options(hint)
        kind = next((option for option in options if getattr(option, "__name__", "") in RANGES), None)
        allowed = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
        if name not in values or (values[name] is None and type(None) in options):
            continue
        value = values[name]
        optional = ", or null" if type(None) in options else ""
        if kind is not None:
            plain[name] = _number(kind, value, f"{key}.{name} is {value!r}; it must be", optional)
        elif float in options and isinstance(value, float):
            check_finite(f"{key}.{name}", value)
        elif allowed and value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ValueError(f"{key}.{name} is {value!r}; it must be one of {names}{optional}.")
        elif all(map(_is_ours, options)) and not isinstance(value, options):
            names = " or ".join(option.__name__ for option in options if option is not type(None))
            raise ValueError(f"{key}.{name} is {value!r}; it must be an instance of {names}{optional}.")
        elif {*options} <= {str, type(None)} and not isinstance(value, str | PathLike):
            raise ValueError(f"{key}.{name} is {value!r}; it must be a text{optional}.")
        elif kinds := _other_kinds(options, value):
            raise ValueError(f"{key}.{name} is {value!r}; it must be {kinds}{optional}.")
    return plain


def _is_ours(option: Any) -> bool:
    """Return whether an annotation is a class of this package, or null."""
    return option is type(None) or (
        isinstance(option, type) and option.__module__.startswith("lrl.") and not getattr(option, "_is_protocol", False)
    )


def _number(kind: Any, value: Any, start: str, end: str) -> int | float:
    """Check that ``value`` is a number in the range of ``kind``, and return it as plain ``int`` or ``float``.

    Args:
        kind: one of the types of this module.
        value: the value. A text is an error although the type would convert it, because the caller uses the text; so
            is a float in place of an integer.
        start: start of the error message, up to "it must be".
        end: end of the error message.
    """
    whole = issubclass(kind, int)
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    needed = "" if is_number else f"{'an integer' if whole else 'a number'} that is "
    try:
        number = kind(value)
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise ValueError(f"{start} {needed}{description(kind.__name__, value)}{end}.")
    # Checkpoints that are loaded with weights_only=True must not contain subclasses of int and float.
    return int(number) if whole else float(number)

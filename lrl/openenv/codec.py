"""Codec for OpenEnv environments, whose actions and observations are JSON objects with a schema."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.registry import register

_OWN_FIELDS = ("metadata", "reward", "done")
"""Fields of the protocol, which are neither part of an action nor shown to the policy."""
_MAX_NAMES = 100
"""Maximum number of integers in a range whose values are listed one by one as actions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenEnvAction:
    """Settings of the conversion from a text to the JSON object of an action."""

    field: str | None = None
    """Field that contains the text; None selects the only required field, or a JSON object if there are several."""
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Constant values of other fields."""
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Value of the field by the text of each legal action; empty uses the values of the schema."""
    type: str | None = None
    """``module:Class`` of the action of an environment in this process; None reads it from ``step``."""


@register
class OpenEnvCodec(TextCodec):
    """Codec between texts and the JSON objects of an OpenEnv environment.

    The text of an action is the value of one field of the action's schema, according to its type: a string without
    quotes, a number, ``true`` or ``false``, or a list or an object in JSON. If the schema requires several fields, the
    text is a JSON object. The text of an observation is the value of its only field, or one line ``name: value`` for
    each field that is not null.

    Args:
        description: description of the environment.
        schema: JSON schema of the action.
        action: how a text becomes an action.
        observation_field: the field of the observation that is shown; None shows all.

    Raises:
        ValueError: If ``action.field`` or a constant is not in the schema.
    """

    def __init__(
        self,
        description: str,
        schema: Mapping[str, Any],
        action: OpenEnvAction | None = None,
        observation_field: str | None = None,
    ) -> None:
        self.action, self._observation_field = action or OpenEnvAction(), observation_field
        properties = {
            name: _resolved(one, schema.get("$defs", {}))
            for name, one in schema.get("properties", {}).items()
            if name not in _OWN_FIELDS
        }
        for key, name in (("field", self.action.field), *(("constants", name) for name in self.action.constants)):
            if name is not None and name not in properties:
                raise ValueError(f"env.action.{key} is {name!r}; it must be one of {', '.join(properties) or 'none'}.")
        self._required = [name for name in schema.get("required", ()) if name in properties]
        self._properties = properties
        free = [name for name in properties if name not in self.action.constants]
        candidates = [name for name in free if name in self._required] or free
        only = candidates[0] if len(candidates) == 1 else None
        self._field = only if self.action.field is None else self.action.field
        """Field that contains the text; None if the text must be a JSON object."""
        self._value = properties.get(self._field or "", {})
        self._names = dict(self.action.names) or _values_by_name(self._value)
        self._description = description

    @property
    def description(self) -> str:
        """Description of the environment, followed by a description of its actions unless it contains one."""
        own = self._description.strip()
        if self._field is None:
            fields = ", ".join(f"{name} ({_kind(one)})" for name, one in self._properties.items())
            actions, parts = f"a JSON object with the fields {fields}", []
        elif self._names:
            actions, parts = ", ".join(self._names), list(self._names)
        else:
            actions, parts = _kind(self._value), [str(self._value.get("description", ""))]
        if any(parts) and all(part in own for part in parts):
            return own
        ended = own if own.endswith((".", "!", "?")) or not own else f"{own}."
        return f"{ended} Actions: {actions}.".strip()

    @property
    def action_space(self) -> None:
        """Always None, because the native actions are JSON objects."""
        return None

    @property
    def action_texts(self) -> tuple[str, ...] | None:
        """Texts of all legal actions; None if there are not finitely many."""
        return tuple(self._names) or None

    def random_action_text(self, uniform: float) -> str:
        """Return the text of a random legal action, or of a number between the bounds of the schema.

        Raises:
            ValueError: If actions are neither finitely many nor numbers with bounds.
        """
        if self._names:
            return super().random_action_text(uniform)
        low, high = _bounds(self._value)
        if self._value.get("type") not in ("integer", "number") or not math.isfinite(high - low):
            raise ValueError("policy is 'random', but the actions of this environment cannot be sampled.")
        if self._value["type"] == "number":
            return repr(low + uniform * (high - low))
        return str(int(low) + int(uniform * (int(high) - int(low) + 1)))

    @property
    def default_action_text(self) -> str:
        """Text of the first legal action, else of the schema's default or its first example, else an empty text."""
        if self._names:
            return super().default_action_text
        given = [self._value["default"]] if "default" in self._value else self._value.get("examples", [])
        return _text(given[0]) if given else ""

    def observation_to_text(self, observation: Mapping[str, Any], context: Any = None) -> str:
        """Convert the JSON object of an observation to text.

        Raises:
            ValueError: If the observation has no field of the configured name.
        """
        name = self._observation_field
        if name is not None and name not in observation:
            raise ValueError(
                f"env.observation_field is {name!r}; it must be one of {', '.join(observation) or 'none'}."
            )
        if name is not None:
            return _text(observation[name])
        shown = {key: one for key, one in observation.items() if key not in _OWN_FIELDS and one is not None}
        if len(shown) == 1:
            return _text(*shown.values())
        return "\n".join(f"{key}: {_text(one)}" for key, one in shown.items())

    def text_to_action(self, text: str) -> dict[str, Any]:
        """Parse the text of an action into the JSON object that is sent to the environment.

        Raises:
            InvalidActionError: If ``text`` does not fit the schema.
        """
        if self._field is None:
            return dict(self.action.constants) | self._parse_object(text)
        if self._names:
            if text not in self._names:
                raise InvalidActionError(f"the action must be one of {', '.join(self._names)}")
            value = self._names[text]
        else:
            value = _parse(text, self._value)
        return {**self.action.constants, self._field: value}

    def _parse_object(self, text: str) -> dict[str, Any]:
        """Parse a JSON object, and check the names of its fields."""
        value = _json(text)
        if not isinstance(value, dict):
            raise InvalidActionError("the action must be a JSON object")
        known = [name for name in self._properties if name not in self.action.constants]
        missing = [name for name in self._required if name in known and name not in value]
        unknown = [name for name in value if name not in known]
        if missing or unknown:
            problem = f"lacks {', '.join(missing)}" if missing else f"has no field {', '.join(unknown)}"
            raise InvalidActionError(f"the action {problem}; its fields are {', '.join(known)}")
        return value

    def action_to_text(self, action: Mapping[str, Any]) -> str:
        """Convert the JSON object of an action to text."""
        if self._field is None:
            free = {name: value for name, value in action.items() if name not in self.action.constants}
            return json.dumps(free, ensure_ascii=False)
        value = action[self._field]
        return next((name for name, one in self._names.items() if one == value), _text(value))


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a reference, and take the first alternative that is not null."""
    if "$ref" in schema:
        named = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
        return {**_resolved(named, definitions), **{key: one for key, one in schema.items() if key != "$ref"}}
    for key in ("anyOf", "oneOf"):
        options = [option for option in schema.get(key, ()) if option.get("type") != "null"]
        if options:
            return {**_resolved(options[0], definitions), **{name: one for name, one in schema.items() if name != key}}
    return schema


def _values_by_name(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a schema allows, by their texts; empty if there are not finitely many or too many."""
    low, high = _bounds(schema)
    if "enum" in schema or "const" in schema:
        values = list(schema.get("enum", (schema.get("const"),)))
    elif schema.get("type") == "boolean":
        values = [True, False]
    elif schema.get("type") == "integer" and high - low < _MAX_NAMES:
        values = list(range(int(low), int(high) + 1))
    else:
        values = []
    return {_text(value): value for value in values}


def _bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    """Return the smallest and the largest number that a schema allows; infinite if it has no such bound."""
    step = 1 if schema.get("type") == "integer" else 0
    low = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf) + step)
    return low, schema.get("maximum", schema.get("exclusiveMaximum", math.inf) - step)


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe a value of a schema in words: by the schema's own description, or else by its type."""
    described = schema.get("description")
    names = {"string": "text", "integer": "an integer", "number": "a number", "array": "a JSON list"}
    return str(described or names.get(str(schema.get("type", "")), "a JSON value"))


def _text(value: Any) -> str:
    """Return a string as it is, and anything else in JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidActionError("the action must be valid JSON") from error


def _parse(text: str, schema: Mapping[str, Any]) -> Any:
    """Parse a value by the type of its schema, and check its bounds."""
    kind = schema.get("type", "string")
    if kind == "string":
        return text
    if kind not in ("integer", "number"):
        return _json(text)
    low, high = _bounds(schema)
    try:
        value = int(text) if kind == "integer" else float(text)
    except ValueError as error:
        raise InvalidActionError(f"the action must be {_kind({'type': kind})}") from error
    if not low <= value <= high or not math.isfinite(value):
        raise InvalidActionError(f"the action must be between {low} and {high}")
    return value

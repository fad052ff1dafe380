"""Signatures of classes, read from source files because importing Lightning and torch takes seconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

_PLAIN_BASES = {"ABC", "Generic", "Protocol", "object"}
_PLAIN_DECORATORS = {"_defaults_from_env_vars", "dataclass", "final", "override", "register", "runtime_checkable"}
"""Decorators after which a class or constructor keeps the signature in its source."""
_MAPPINGS = {"Any", "Dict", "Mapping", "dict", "object"}
"""Types of values that may be mappings with any keys."""
_INTEGERS = {"NonNegativeInt", "PositiveInt", "Seed", "int"}
_PLAIN = _INTEGERS | {
    *("ClosedUnitInterval", "HalfOpenUnitInterval", "LeftOpenUnitInterval", "Literal", "NonNegativeFloat"),
    *("OpenUnitInterval", "PositiveFloat", "Sequence", "bool", "dict", "float", "list", "str", "tuple"),
}
"""Types whose values are numbers, texts, or collections of them."""
_SEQUENCES = {"Iterable", "List", "Sequence", "list", "tuple"}


@dataclass(frozen=True)
class SourceClass:
    """A class definition, and the module that contains it."""

    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.node.name

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        return first_sentence(ast.get_docstring(self.node) or "")

    @property
    def base(self) -> SourceClass | None:
        """The first base class that is found in source files."""
        bases = (_resolve(self.module, base) for base in self.node.bases if _last_name(base) not in _PLAIN_BASES)
        return next(filter(None, bases), None)

    @property
    def is_dataclass(self) -> bool:
        """True if the class is decorated as a dataclass."""
        return "dataclass" in map(_last_name, self.node.decorator_list)


@dataclass(frozen=True)
class Argument:
    """An argument of a constructor."""

    module: str
    """Module in which the names in the annotation are defined."""
    name: str
    annotation: ast.expr | None
    default: ast.expr | None
    text: str
    """Description in the docstring."""

    @property
    def takes_any_keys(self) -> bool:
        """True if the value may be a mapping with any keys."""
        return not _MAPPINGS.isdisjoint(map(_last_name, self._named))

    @property
    def group(self) -> SourceClass | None:
        """The dataclass of this argument's settings if the type is a dataclass, or a dataclass or None."""
        names = self._named
        if not (_MAPPINGS | _SEQUENCES).isdisjoint(map(_last_name, names)):
            return None
        classes = [found for name in names if (found := _resolve(self.module, name))]
        return classes[0] if len(classes) == 1 and classes[0].is_dataclass else None

    @property
    def is_only_group(self) -> bool:
        """True if the type is :attr:`group`, or that or None."""
        return self.group is not None and self._others == [self.group.name]

    @property
    def is_only_integer(self) -> bool:
        """True if the type is an integer, a sequence of integers, or one of these or None."""
        return bool(self._others) and (_INTEGERS | _SEQUENCES).issuperset(self._others)

    @property
    def is_only_float(self) -> bool:
        """True if the type is ``float``, or that or None."""
        return self._others == ["float"]

    @property
    def rejects_none(self) -> bool:
        """True if the type consists of plain types without None, and the default is not None."""
        has_default_none = isinstance(self.default, ast.Constant) and self.default.value is None
        return bool(self._others) and _PLAIN.issuperset(self._others) and not (self.accepts_none or has_default_none)

    @property
    def is_only_object(self) -> bool:
        """True if the type is a class of lrl or Lightning that is no dataclass, a list of it, or None."""
        if len(set(self._others) - _SEQUENCES) != 1:
            return False
        names = (name for name in self._named if _last_name(name) not in _SEQUENCES)
        found = next(filter(None, (_resolve(self.module, name) for name in names)), None)
        return found is not None and not found.is_dataclass and found.module.startswith(("lrl.", "lightning."))

    @property
    def _others(self) -> list[str]:
        """The names in the annotation, without those of optional types."""
        return [name for name in map(_last_name, self._named) if name not in ("None", "Optional", "Union")]

    @property
    def accepts_none(self) -> bool:
        """True if the annotation contains None."""
        nodes = list(ast.walk(self.annotation)) if self.annotation else []
        has_none = any(isinstance(node, ast.Constant) and node.value is None for node in nodes)
        return has_none or not {"Any", "Optional", "object"}.isdisjoint(map(_last_name, self._named))

    @property
    def _named(self) -> list[ast.expr]:
        """The names in the annotation."""
        nodes = ast.walk(self.annotation) if self.annotation else ()
        return [node for node in nodes if isinstance(node, (ast.Name, ast.Attribute))]


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring or of a description of an argument, on one line and without markup."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].removesuffix(".")
    return re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"\1", sentence).replace("``", "`")


@cache
def find_class(path: str) -> SourceClass | None:
    """Return the definition of a class, or None if it cannot be found in source files.

    Args:
        path: import path; modules that import the class from another one are followed.
    """
    module, _, name = path.rpartition(".")
    for node in _statements(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return SourceClass(module, node)
    origin = _imported(module, name)
    return find_class(origin) if origin else None


def arguments(owner: SourceClass) -> Sequence[Argument] | None:
    """Return the arguments of a class's constructor, or None if source files do not determine them."""
    node = owner.node
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    if {*map(_last_name, node.decorator_list)} - _PLAIN_DECORATORS or "__new__" in methods or node.keywords:
        return None
    if "__init__" in methods:
        return _of_constructor(owner, methods["__init__"])
    inherited: dict[str, Argument] = {}
    for base in node.bases:
        if _last_name(base) in _PLAIN_BASES:
            continue
        found = _resolve(owner.module, base)
        given = None if found is None else arguments(found)
        if given is None or (given and inherited and not owner.is_dataclass):
            return None  # which of two constructors is called depends on the common base classes
        inherited = {one.name: one for one in given} | inherited
    own = {one.name: one for one in _fields(owner)} if owner.is_dataclass else {}
    return [*(inherited | own).values()]


def _of_constructor(owner: SourceClass, function: ast.FunctionDef) -> Sequence[Argument] | None:
    """Return the arguments of a constructor without ``self``.

    None if it takes ``*args`` or ``**kwargs``, or has a decorator that may change its signature.
    """
    given = function.args
    if given.vararg or given.kwarg or {*map(_last_name, function.decorator_list)} - _PLAIN_DECORATORS:
        return None
    texts = _descriptions(owner.node) | _descriptions(function)
    positional = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    return [
        Argument(owner.module, one.arg, one.annotation, default, texts.get(one.arg, ""))
        for one, default in zip([*positional, *given.kwonlyargs], defaults)
    ][1:]


def _fields(owner: SourceClass) -> Iterator[Argument]:
    """Yield the fields of a dataclass that its constructor takes, with the docstrings that follow them."""
    texts, body = _descriptions(owner.node), owner.node.body
    for field, below in zip(body, [*body[1:], None]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, default = field.target.id, field.value
        if isinstance(default, ast.Call) and _last_name(default.func) == "field":
            settings = {keyword.arg: keyword.value for keyword in default.keywords}
            if "init" in settings:
                continue
            default = settings.get("default") or settings.get("default_factory")
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        if _last_name(field.annotation) != "ClassVar":
            yield Argument(owner.module, name, field.annotation, default, texts.get(name) or str(text))


def _last_name(node: ast.expr) -> str:
    """Return the name of a decorator, a base class or a type, without its module and its arguments."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node).rpartition(".")[2]


def _resolve(module: str, node: ast.expr) -> SourceClass | None:
    """Return the class that an expression such as ``Trainer``, ``L.Trainer`` or ``Base[T]`` names in a module."""
    first, *others = ast.unparse(node.value if isinstance(node, ast.Subscript) else node).split(".")
    if not others:
        return find_class(f"{module}.{first}")
    origin = _imported(module, first)
    return find_class(".".join((origin, *others))) if origin else None


def _imported(module: str, name: str) -> str | None:
    """Return the import path of the object that a module imports under a name."""
    for node in _statements(module):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        alias = next((one for one in node.names if (one.asname or one.name) == name), None)
        if alias is None:
            continue
        if isinstance(node, ast.Import):
            return alias.name
        package = module if str(_file(module)).endswith("__init__.py") else module.rpartition(".")[0]
        return f"{resolve_name('.' * node.level + (node.module or ''), package)}.{alias.name}"
    return None


@cache
def _statements(module: str) -> Sequence[ast.stmt]:
    """Return the statements of a module, including those in ``if`` and ``try`` blocks."""
    file = _file(module)
    try:
        body = ast.parse(file.read_bytes()).body if file else []
    except (OSError, SyntaxError, ValueError):
        return []
    inner = [one for node in body if isinstance(node, (ast.If, ast.Try)) for one in [*node.body, *node.orelse]]
    return [*body, *inner]


@cache
def _file(module: str) -> Path | None:
    """Return the source file of a module; only the package at its top is looked up by Python, and none is imported."""
    first, *others = module.split(".")
    try:
        spec = find_spec(first)
    except ValueError:  # an empty name, or a module without a specification, such as __main__
        return None
    if spec is None or not others:
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
    places = [Path(folder, *others) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place / "__init__.py", place.with_name(f"{place.name}.py"))]
    return next(filter(Path.is_file, files), None)


def _descriptions(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """Return the texts of the section ``Args:`` of a docstring by the names of the arguments."""
    docstring = ast.get_docstring(node) or ""
    if "Args:" not in docstring:
        return {}
    from docstring_parser.google import parse

    return {one.arg_name: one.description or "" for one in parse(docstring).params}

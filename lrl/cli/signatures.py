"""Signatures of classes, read from source files because importing Lightning and torch takes seconds."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

_PLAIN_BASES = {"ABC", "Generic", "Protocol", "object"}
_PLAIN_DECORATORS = {"final", "register", "runtime_checkable"}
_WRAPPERS = {"_defaults_from_env_vars", "override"}
"""Decorators after which a class or constructor keeps the signature in its source."""
_SEQUENCES = {"Iterable", "List", "Sequence", "list", "tuple"}
_MAPPINGS = {"Any", "Dict", "Mapping", "dict", "object"}
"""Types of values that may be mappings with any keys."""


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
    def group(self) -> SourceClass | None:
        """Return the dataclass of this argument's settings if the type is a dataclass, or a dataclass or None."""
        classes = classes_of(self.module, self.annotation)
        return classes[0] if len(classes) == 1 and classes[0].is_dataclass else None


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring or of a description of an argument, on one line and without markup."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].removesuffix(".")
    return re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"\1", sentence).replace("``", "`")


def find_class(path: str) -> SourceClass | None:
    """Return the definition of a class, or None if it cannot be found in source files.

    Args:
        path: import path; modules that import the class from another one are followed.
    """
    module, _, name = path.rpartition(".")
    return _defined(module, name) if module else None


def arguments(owner: SourceClass) -> Sequence[Argument] | None:
    """Return the arguments of a class's constructor, or None if source files do not determine them."""
    node = owner.node
    decorators = {_last_name(one) for one in node.decorator_list} - _PLAIN_DECORATORS
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    if decorators - {"dataclass"} or "__new__" in methods or any(one.arg == "metaclass" for one in node.keywords):
        return None
    init = methods.get("__init__")
    if init is not None:
        return _of_function(owner, init)
    inherited: dict[str, Argument] = {}
    for base in node.bases:
        if _last_name(base) in _PLAIN_BASES:
            continue
        found = _resolve(owner.module, base)
        given = None if found is None else arguments(found)
        if given is None or (given and inherited and not decorators):
            return None  # which of two constructors is called depends on the common base classes
        inherited = {one.name: one for one in given} | inherited
    return [*(inherited | {one.name: one for one in _fields(owner)} if decorators else inherited).values()]


def method_arguments(owner: SourceClass, name: str) -> Sequence[Argument]:
    """Return the arguments of a method that a class defines itself; empty if source files do not determine them."""
    method = next((one for one in owner.node.body if isinstance(one, ast.FunctionDef) and one.name == name), None)
    return (method and _of_function(owner, method)) or ()


def _of_function(owner: SourceClass, function: ast.FunctionDef) -> Sequence[Argument] | None:
    """Return the arguments of a method without ``self``.

    None if it takes ``*args`` or ``**kwargs``, or has a decorator that may change its signature.
    """
    given = function.args
    if given.vararg or given.kwarg or {_last_name(one) for one in function.decorator_list} - _WRAPPERS:
        return None
    texts = _descriptions(ast.get_docstring(owner.node)) | _descriptions(ast.get_docstring(function))
    positional = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    return [
        Argument(owner.module, one.arg, one.annotation, default, texts.get(one.arg, ""))
        for one, default in zip([*positional, *given.kwonlyargs], defaults)
    ][1:]


def _fields(owner: SourceClass) -> Iterator[Argument]:
    """Yield the fields of a dataclass that its constructor takes, with the docstrings that follow them."""
    texts, body = _descriptions(ast.get_docstring(owner.node)), owner.node.body
    for field, below in zip(body, [*body[1:], None]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, default = field.target.id, field.value
        if isinstance(default, ast.Call) and _last_name(default.func) == "field":
            settings = {keyword.arg: keyword.value for keyword in default.keywords}
            if isinstance(settings.get("init"), ast.Constant):
                continue
            default = settings.get("default") or settings.get("default_factory")
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        if _last_name(field.annotation) != "ClassVar":
            yield Argument(owner.module, name, field.annotation, default, texts.get(name) or str(text))


def lineage(owner: SourceClass) -> list[SourceClass]:
    """Return a class, its first base class, the first base class of that, and so on."""
    base = next((one for one in owner.node.bases if _last_name(one) not in _PLAIN_BASES), None)
    found = base and _resolve(owner.module, base)
    return [owner, *(lineage(found) if found else [])]


def classes_of(module: str, annotation: ast.expr | None, elements: bool = False) -> list[SourceClass]:
    """Return the classes of a type or of the members of a union; none if a value may be any mapping.

    Args:
        module: module in which the names in the annotation are defined.
        annotation: the type.
        elements: return the classes of the elements of lists instead.
    """
    found: list[SourceClass] = []
    for member in _members(annotation):
        if _last_name(member) in _MAPPINGS:
            return []
        if isinstance(member, ast.Subscript) and _last_name(member.value) in _SEQUENCES:
            found += classes_of(module, member.slice) if elements else []
        elif not elements and (one := _resolve(module, member)):
            found.append(one)
    return found


def _members(annotation: ast.expr | None) -> Iterator[ast.expr]:
    """Yield the members of a union, or the type itself."""
    if isinstance(annotation, ast.BinOp):
        yield from _members(annotation.left)
        yield from _members(annotation.right)
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from _members(ast.parse(annotation.value, mode="eval").body)
    elif isinstance(annotation, ast.Subscript) and _last_name(annotation.value) in ("Optional", "Union", "Annotated"):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        for member in inner[:1] if _last_name(annotation.value) == "Annotated" else inner:
            yield from _members(member)
    elif annotation is not None:
        yield annotation


def _last_name(node: ast.expr) -> str:
    """Return the name of a decorator, a base class or a type, without its module and its arguments."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _resolve(module: str, node: ast.expr) -> SourceClass | None:
    """Return the class that an expression such as ``L.Trainer`` names in a module."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        parts = ast.unparse(node).split(".")
        origin = _imported(module, parts[0])
        return find_class(".".join([origin, *parts[1:]])) if origin else None
    return _defined(module, node.id) if isinstance(node, ast.Name) else None


@cache
def _defined(module: str, name: str) -> SourceClass | None:
    """Return the class that has this name in a module, whether it is defined or imported there."""
    for node in _statements(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return SourceClass(module, node)
    origin = _imported(module, name)
    return find_class(origin) if origin else None


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
        package = module.split(".") if str(_file(module)).endswith("__init__.py") else module.split(".")[:-1]
        start = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*start, *([node.module] if node.module else []), alias.name])
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
    """Return the source file of a module without importing the packages that contain it."""
    first, *others = module.split(".")
    try:
        spec = find_spec(first)
    except ValueError:  # a module without a specification, such as __main__
        return None
    for number in range(len(others)):
        if spec is None:
            return None
        name = ".".join((first, *others[: number + 1]))
        spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _descriptions(docstring: str | None) -> dict[str, str]:
    """Return the texts of the section ``Args:`` of a docstring by the names of the arguments."""
    if not docstring or "Args:" not in docstring:
        return {}
    from docstring_parser.google import parse

    return {one.arg_name: one.description or "" for one in parse(inspect.cleandoc(docstring)).params}

"""Components: registered classes, which configurations, checkpoints and help texts refer to by a short name.

The decorator :func:`register` makes a class a component. Components are found by reading source files without importing
them, so that a run imports only the modules of the classes that its configuration names. A third-party package is
searched as well if its ``pyproject.toml`` has an entry point of the group ``lrl.components``::

    [project.entry-points."lrl.components"]
    my_package = "my_package"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

GROUP = "lrl.components"
"""Group of entry points whose values are names of packages or modules with components."""
_DECORATED = re.compile(r"^@register\n(?:@.*\n)*class (\w+)", re.MULTILINE)

_Class = TypeVar("_Class", bound=type)


def register(cls: _Class) -> _Class:
    """Register a class as a component: a decorator, after which configurations can name the class without its module.

    It must be written as ``@register``, above all other decorators of the class, because source files are searched for
    this text.
    """
    return cls


@cache
def components() -> Mapping[str, str]:
    """Return the import path of every component by its short name.

    Raises:
        ValueError: If two components have the same name.
    """
    found: dict[str, str] = {}
    for package in dict.fromkeys(("lrl", *(entry.value for entry in entry_points(group=GROUP)))):
        for module, file in _modules(package):
            for name in _DECORATED.findall(file.read_text(encoding="utf-8")):
                if name in found:
                    raise ValueError(
                        f"{found[name]} and {module}.{name} are components of the same name; rename one of them."
                    )
                found[name] = f"{module}.{name}"
    return found


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and the source file of each module of a package; a module yields itself.

    Raises:
        ValueError: If there is no package or module with this name.
    """
    spec = find_spec(package)
    if spec is None:
        raise ValueError(f"the entry point {package!r} of the group {GROUP} is not a package that can be imported.")
    if not spec.submodule_search_locations:
        yield package, Path(str(spec.origin))
    for folder in map(Path, spec.submodule_search_locations or ()):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts))), file


def short_name(class_path: str) -> str:
    """Return the short name of a component; for other classes, return ``class_path`` unchanged.

    Args:
        class_path: the import path of a class; a component may be imported from any module of its package.
    """
    name = class_path.rpartition(".")[2]
    same_package = components().get(name, "").partition(".")[0] == class_path.partition(".")[0]
    return name if same_package else class_path


@cache
def enable_short_names() -> None:
    """Let every jsonargparse parser resolve short names of components, and import their modules.

    jsonargparse 4.53 searches only subclasses that are already imported, and has no public hook for a further search.
    """
    from jsonargparse import _typehints

    resolve = _typehints.resolve_class_path_by_name

    def resolve_component(kind: Any, name: str) -> str:
        """Return the class path of a registered name, or that of a subclass of ``kind``."""
        return components().get(name) or resolve(kind, name)

    _typehints.resolve_class_path_by_name = resolve_component


def build(kind: type, config: Mapping[str, Any]) -> Any:
    """Build the object that a configuration describes.

    Args:
        kind: class of which the object must be an instance.
        config: ``class_path``, which is a short name or an import path, and ``init_args``, its constructor arguments.

    Returns:
        An instance of ``kind``.

    Raises:
        jsonargparse.ArgumentError: If the configuration has unknown keys or invalid values.
    """
    from jsonargparse import ArgumentParser

    enable_short_names()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--object", type=kind)
    return parser.instantiate(parser.parse_object({"object": config}))["object"]

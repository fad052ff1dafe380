"""The pages of the API reference: one per package of ``lrl``, listing the public modules that are there.

Nothing is typed by hand, so that a module that is added, moved or renamed needs no change here.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]


def public_modules() -> dict[str, list[str]]:
    """Return the public modules of each package directly below ``lrl``; modules beside the packages are ``lrl``."""
    packages: dict[str, list[str]] = {}
    for file in sorted((ROOT / "lrl").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts):
            package = "lrl" if len(parts) == 1 or (ROOT / "lrl" / f"{parts[1]}.py").exists() else f"lrl.{parts[1]}"
            packages.setdefault(package, []).append(".".join(parts))
    return packages


def write_pages(app: Sphinx) -> None:
    """Write ``api/index.rst`` and ``api/<package>.rst``, and remove pages of packages that are gone."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    packages = public_modules()
    pages = {f"{package}.rst": _page(package, modules) for package, modules in packages.items()}
    entries = "\n".join(f"   {package}" for package in packages)
    title = "API reference"
    pages["index.rst"] = f"{title}\n{'=' * len(title)}\n\n.. toctree::\n   :maxdepth: 2\n\n{entries}\n"
    for old in folder.glob("*.rst"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _page(package: str, modules: list[str]) -> str:
    lines = [package, "=" * len(package), ""]
    for module in modules:
        if module != package:
            lines += [module, "-" * len(module), ""]
        lines += [f".. automodule:: {module}", ""]
    return "\n".join(lines)


def show_objectives_as_written(
    app: Sphinx, what: str, name: str, object: object, options: object, lines: list[str]
) -> None:
    """Turn indented paragraphs of docstrings into literal blocks: equations in ASCII keep their line breaks.

    A paragraph counts if it follows an empty line, is indented by four spaces or more, and the text before it is not.
    """
    text: list[str] = []
    for index, line in enumerate(lines):
        before = next((old for old in reversed(lines[:index]) if old.strip()), "")
        starts = re.match(r" {4,}\S", line) and index and not lines[index - 1].strip() and not before.startswith(" ")
        if starts and not before.rstrip().endswith("::") and not before.lstrip().startswith(".. "):
            text += ["::", ""]
        text.append(line)
    lines[:] = text


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before they are read."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", show_objectives_as_written, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

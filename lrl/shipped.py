"""Models and configurations that ship with lrl, found from any folder."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_FOLDERS = ("assets", "configs")


def checkout() -> Path | None:
    """Return the repository that this package is imported from; None if it is installed from a wheel."""
    return _PACKAGE.parent if (_PACKAGE.parent / "pyproject.toml").is_file() else None


def shipped(name: str) -> str | None:
    """Return the file or folder that ships with lrl as ``assets/...`` or ``configs/...``; None if there is none."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or path.parts[:1] not in [(folder,) for folder in _FOLDERS]:
        return None
    roots = [root for root in (_PACKAGE / "files", checkout()) if root is not None]
    return next((str(root / path) for root in roots if (root / path).exists()), None)


def resolve(name: str) -> str:
    """Return ``name`` if it is a file or folder here, else the path of what ships with lrl, else ``name`` unchanged."""
    return name if Path(name).exists() else shipped(name) or name


def resolve_config(name: str) -> str:
    """Resolve a configuration: ``frozen_lake/grpo.yaml`` is ``configs/frozen_lake/grpo.yaml``; see :func:`resolve`."""
    if not name.endswith((".yaml", ".yml")) or Path(name).exists():
        return name
    return shipped(name) or shipped(str(Path("configs") / name)) or name

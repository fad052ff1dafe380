"""Redirection of MuJoCo's warnings to Python's."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any


def redirect_mujoco_warnings() -> None:
    """Turn MuJoCo's warnings into Python warnings, without a log file and without deprecation notes about models."""
    if importlib.util.find_spec("mujoco") is None:
        return
    import mujoco

    bindings: Any = mujoco
    bindings.set_mju_user_warning(_warn)


def _warn(text: str) -> None:
    if "deprecated" not in text:
        warnings.warn(f"MuJoCo: {text}", RuntimeWarning, stacklevel=2)

"""What MuJoCo says while it simulates."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any


def redirect_mujoco_warnings() -> None:
    """Make MuJoCo's warnings Python's: no log file in the working directory, no notes about its own models' syntax."""
    if importlib.util.find_spec("mujoco") is None:
        return
    import mujoco

    bindings: Any = mujoco
    bindings.set_mju_user_warning(_warn)


def _warn(text: str) -> None:
    if "deprecated" not in text:
        warnings.warn(f"MuJoCo: {text}", RuntimeWarning, stacklevel=2)

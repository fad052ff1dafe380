"""MuJoCo environments with modified physics."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import gymnasium as gym


def half_cheetah(gravity: float = 1.0, friction: float = 1.0, **kwargs: Any) -> gym.Env:
    """Create Gymnasium's HalfCheetah, version 5, with modified gravity and friction.

    Args:
        gravity: Factor of the gravity; positive.
        friction: Factor of all friction coefficients of the ground and the body; positive.
        kwargs: Arguments of HalfCheetah, such as ``reset_noise_scale``.

    Raises:
        ValueError: If a factor is not positive.
    """
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

    for name, factor in (("gravity", gravity), ("friction", friction)):
        if factor <= 0:
            raise ValueError(f"{name} is {factor}; it must be positive.")
    env = HalfCheetahEnv(**kwargs)
    env.model.opt.gravity[:] *= gravity
    env.model.geom_friction[:] *= friction
    return env


# Redirection of MuJoCo's warnings to Python's.


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

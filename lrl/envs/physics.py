"""MuJoCo bodies in a world that differs from the one they were trained in."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


def half_cheetah(gravity: float = 1.0, friction: float = 1.0, **kwargs: Any) -> gym.Env:
    """Gymnasium's HalfCheetah, version 5, with other physics.

    Args:
        gravity: factor.
        friction: factor of all of the ground's and the body's coefficients.
        kwargs: HalfCheetah's own, such as ``reset_noise_scale`` (0.1).

    Raises:
        ValueError: a factor is not positive.
    """
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

    for name, factor in (("gravity", gravity), ("friction", friction)):
        if factor <= 0:
            raise ValueError(f"{name} is {factor}; it must be positive.")
    env = HalfCheetahEnv(**kwargs)
    env.model.opt.gravity[:] *= gravity
    env.model.geom_friction[:] *= friction
    return env

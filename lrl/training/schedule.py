"""Learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

Schedule = Literal["constant", "linear", "cosine"]


def check_training(lr: float, weight_decay: float, schedule: str, warmup: float) -> None:
    """Refuse what no optimiser can do.

    Raises:
        ValueError: names the setting.
    """
    if lr <= 0:
        raise ValueError(f"model.lr is {lr}; it must be positive.")
    if weight_decay < 0:
        raise ValueError(f"model.weight_decay is {weight_decay}; it must be 0 or positive.")
    if schedule not in get_args(Schedule):
        raise ValueError(f"model.schedule is {schedule!r}; it must be one of {', '.join(get_args(Schedule))}.")
    if not 0 <= warmup < 1:
        raise ValueError(f"model.warmup is {warmup}; it must be a share of the run in [0, 1).")


def learning_rate_factor(schedule: Schedule, total_steps: int, warmup: float) -> Callable[[int], float]:
    """Factor on the learning rate at each optimiser step.

    Args:
        schedule: after the warm-up, ``constant``, or ``linear`` or half-``cosine`` decay to zero.
        total_steps: optimiser steps of the whole run.
        warmup: share of them over which the factor rises linearly from zero.
    """
    warmup_steps = math.ceil(warmup * total_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        if schedule == "linear":
            return 1 - progress
        return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0

    return factor

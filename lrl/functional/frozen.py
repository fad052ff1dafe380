"""What is not trained, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def frozen_names(module: nn.Module) -> set[str]:
    """Names of the parameters that are not trained; weights that are tied have several."""
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


def without(state: Mapping[str, Any], frozen: set[str]) -> dict[str, Any]:
    """``state`` without what is frozen and what hangs on it, as quantisation constants do (``weight.absmax``)."""
    return {name: value for name, value in state.items() if not _hangs_on(name, frozen)}


def _hangs_on(name: str, frozen: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in frozen for count in range(1, len(parts) + 1))

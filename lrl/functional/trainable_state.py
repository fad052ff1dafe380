"""State dictionaries without frozen parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

_Value = TypeVar("_Value")


def frozen_parameter_names(module: nn.Module) -> set[str]:
    """Return the names of all parameters that do not require gradients, including every name of tied weights."""
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


def drop_frozen(state_dict: Mapping[str, _Value], frozen: set[str]) -> dict[str, _Value]:
    """Return ``state_dict`` without frozen parameters and the quantization constants stored below their names.

    Args:
        state_dict: any state dictionary of the module.
        frozen: what :func:`frozen_parameter_names` returned; ``a.weight`` also drops ``a.weight.absmax``.
    """
    return {name: value for name, value in state_dict.items() if not _is_or_belongs_to(name, frozen)}


def _is_or_belongs_to(name: str, frozen: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in frozen for count in range(1, len(parts) + 1))

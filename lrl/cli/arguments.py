"""What the scripts' command lines have in common."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def add_env_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """``--env_id`` and what belongs to it; :func:`envs_of` reads them."""
    where = "registered name" if required else "default: where the checkpoint was validated, or FrozenLake-v1"
    parser.add_argument("--env_id", required=required, help=where)
    parser.add_argument("--env_kwargs", default="{}", help="JSON object for --env_id")
    parser.add_argument("--reset_options", default="{}", help="JSON object for every reset of --env_id")
    parser.add_argument("--numbers", choices=("decimals", "integers"), help="default: what the checkpoint saved")


def envs_of(arguments: argparse.Namespace, numbers: NumberFormat | None = None, **settings: Any) -> GymnasiumEnvs:
    """The environment that is asked for.

    Args:
        arguments: parsed.
        numbers: what the policy was trained on; None takes ``--numbers``.
        settings: of :class:`~lrl.envs.factory.GymnasiumEnvs`.

    Raises:
        ValueError: one is no JSON object.
    """
    if numbers is None and arguments.numbers is not None:
        numbers = NumberFormat(kind=arguments.numbers)
    kwargs, options = (json_object(name, getattr(arguments, name)) for name in ("env_kwargs", "reset_options"))
    return GymnasiumEnvs(
        arguments.env_id or "FrozenLake-v1", kwargs, numbers=numbers, reset_options=options, **settings
    )


def add_fabric_arguments(parser: argparse.ArgumentParser) -> None:
    """``--accelerator``, ``--devices``, ``--strategy`` and ``--precision``; :func:`fabric_of` reads them."""
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="1", help="episodes are split over them")
    parser.add_argument("--strategy", default="auto", help="how Fabric starts the devices: ddp, ddp_spawn, dp")
    parser.add_argument("--precision", help="of Fabric, for example bf16-mixed; default: that of the weights")


def fabric_of(arguments: argparse.Namespace) -> Fabric:
    """The devices that are asked for.

    Raises:
        ValueError: Fabric knows no such setting, or the strategy would shard the policy.
    """
    from lightning.fabric import Fabric

    from lrl.functional.distributed import shards_parameters

    names = ("accelerator", "devices", "strategy", "precision")
    try:
        fabric = Fabric(**{name: getattr(arguments, name) for name in names})
    except RuntimeError as error:  # "No supported gpu backend found!"
        raise ValueError(
            f"--accelerator is {arguments.accelerator!r}, which this machine does not have ({error}); give auto or cpu."
        ) from error
    if shards_parameters(fabric.strategy):
        raise ValueError(
            f"--strategy is {arguments.strategy!r}, which shards the weights; devices play episodes of different "
            "lengths, so each needs the whole policy: give ddp."
        )
    return fabric


def json_object(name: str, text: str) -> dict[str, Any]:
    """What the user wrote under ``--name``.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{name} is {text!r}; it must be a JSON object.") from error
    if not isinstance(value, dict):
        raise ValueError(f"--{name} is {text!r}; it must be a JSON object.")
    return value

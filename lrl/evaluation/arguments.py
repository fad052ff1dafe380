"""What the scripts' command lines have in common."""

from __future__ import annotations

import argparse
import json
from typing import Any

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs


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

"""Options that several subcommands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs
from lrl.ranges import check_seed

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lrl.envs.factory import EnvFactory


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows ``description`` with its line breaks."""
    return argparse.ArgumentParser(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextmanager
def exit_on_user_error(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Print a user's error as one sentence and exit with status 2; silence what libraries print meanwhile.

    An interruption by the user exits with status 130.
    """
    from lrl.cli.quiet import silence_libraries

    silence_libraries()
    try:
        yield
    except Exception as error:
        from lrl.cli.error_messages import sentence_of

        sentence = str(error) if isinstance(error, ValueError) else sentence_of(error)
        if sentence is None:
            raise
        parser.exit(2, f"{parser.prog}: {sentence}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")


def subcommand(
    make_parser: Callable[[str], argparse.ArgumentParser], run: Callable[[argparse.Namespace], None]
) -> Callable[[str, Sequence[str]], None]:
    """Return the ``main`` of a subcommand, which takes the name of the program and the words that follow it.

    It parses the words and runs; a user's error is printed as one sentence, with exit status 2.

    Args:
        make_parser: returns the parser for the name of the program, as its help and its errors show it.
        run: does what the parsed options ask for; they also hold that name as ``prog`` and the words as ``words``.
    """

    def main(prog: str, words: Sequence[str]) -> None:
        parser = make_parser(prog)
        arguments = parser.parse_args(words, argparse.Namespace(prog=prog, words=words))
        with exit_on_user_error(parser):
            if isinstance(getattr(arguments, "seed", None), int):
                check_seed("--seed", arguments.seed)
            run(arguments)

    return main


def add_env_arguments(
    parser: argparse.ArgumentParser, default: str = "the checkpoint's validation environment, or FrozenLake-v1"
) -> None:
    """Add ``--env_id``, whose ``default`` its help names, and the options that belong to it, for :func:`envs_of`."""
    parser.add_argument("--env_id", help=f"default: {default}")
    parser.add_argument("--env_kwargs", default="{}", help="JSON object for --env_id")
    parser.add_argument("--reset_options", default="{}", help="JSON object for every reset of --env_id")
    parser.add_argument(
        "--numbers", help="decimals, integers or a mapping of env.numbers; default: as saved in the checkpoint"
    )


def envs_of(arguments: argparse.Namespace, numbers: NumberFormat | None = None, **settings: Any) -> GymnasiumEnvs:
    """Return the factory of the environment that the options name.

    Args:
        arguments: the parsed command line.
        numbers: the number format that the policy was trained with; None takes ``--numbers``.
        settings: further arguments of :class:`~lrl.envs.factory.GymnasiumEnvs`.

    Raises:
        ValueError: ``--env_kwargs`` or ``--reset_options`` is not a JSON object, or ``--numbers`` no number format.
    """
    if numbers is None and arguments.numbers is not None:
        numbers = NumberFormat.parse(arguments.numbers)
    kwargs, options = (json_object(name, getattr(arguments, name)) for name in ("env_kwargs", "reset_options"))
    return GymnasiumEnvs(
        arguments.env_id or "FrozenLake-v1", kwargs, numbers=numbers, reset_options=options, **settings
    )


def add_env_url_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--env_url``, for :func:`envs_at`."""
    parser.add_argument(
        "--env_url", help="an OpenEnv server in place of --env_id; --env_kwargs are then settings of OpenEnvEnvs"
    )


def envs_at(arguments: argparse.Namespace, numbers: NumberFormat | None = None) -> EnvFactory:
    """Return the factory of the environment that ``--env_url`` or ``--env_id`` names.

    Args:
        arguments: the parsed command line.
        numbers: the number format that the policy was trained with, for ``--env_id``; None takes ``--numbers``.

    Raises:
        ValueError: both are given, a setting does not exist, or ``--numbers`` is given for a server, which writes them.
    """
    if arguments.env_url is None:
        return envs_of(arguments, numbers)
    for name in ("env_id", "numbers"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is given with --env_url, whose server determines it; leave --{name} out.")
    from lrl.envs.openenv.factory import OpenEnvEnvs

    settings = json_object("env_kwargs", arguments.env_kwargs)
    options = json_object("reset_options", arguments.reset_options)
    return OpenEnvEnvs.of({**settings, "url": arguments.env_url, "reset_options": options})


def check_env_arguments(arguments: argparse.Namespace) -> None:
    """Raise if ``--env_kwargs`` or ``--reset_options`` would be ignored.

    Raises:
        ValueError: one of them is given and ``--env_id`` is not.
    """
    for name in ("env_kwargs", "reset_options"):
        named = arguments.env_id or getattr(arguments, "env_url", None)
        if not named and json_object(name, getattr(arguments, name)):
            raise ValueError(f"--{name} is given without --env_id; name the environment that it is for.")


def add_fabric_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--accelerator``, ``--devices``, ``--strategy`` and ``--precision``; :func:`fabric_of` reads them."""
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="1", help="number of devices; they share the episodes")
    parser.add_argument("--strategy", default="auto", help="how Fabric starts the devices: ddp, ddp_spawn, dp")
    parser.add_argument("--precision", help="of Fabric, for example bf16-mixed; default: that of the weights")


def fabric_of(arguments: argparse.Namespace) -> Fabric:
    """Return Lightning Fabric with the devices that the options name.

    Raises:
        ValueError: Fabric does not know a setting, or the strategy would shard the policy.
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
    """Parse the JSON object that was given as ``--name``.

    Raises:
        ValueError: ``text`` is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{name} is {text!r}; it must be a JSON object.") from error
    if not isinstance(value, dict):
        raise ValueError(f"--{name} is {text!r}; it must be a JSON object.")
    return value


def labelled_number(name: str, text: str) -> tuple[str, float]:
    """Split ``LABEL=NUMBER``, which was given as ``--name``; a number alone is its own label.

    Raises:
        ValueError: what follows the last ``=`` is not a number.
    """
    label, _, value = text.rpartition("=")
    try:
        return label or value, float(value)
    except ValueError as error:
        raise ValueError(f"--{name} is {text!r}; it must be LABEL=VALUE with a number as value.") from error

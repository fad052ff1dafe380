"""Serve an environment by OpenEnv's protocol, or write a folder that OpenEnv can deploy.

lrl serve_env --env_id FrozenLake-v1 --port 8000
lrl serve_env --env_id lrl/BabyAI-GoToLocal-v0 --package openenv/babyai --reward_range -0.1 1
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.cli.arguments import add_env_arguments, command_parser, envs_of, subcommand

if TYPE_CHECKING:
    from lrl.envs.factory import GymnasiumEnvs


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(prog, __doc__)
    add_env_arguments(parser, "FrozenLake-v1")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines connect")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--max_sessions", type=int, default=64, help="environments that may be played at a time")
    parser.add_argument(
        "--origins", nargs="+", default=[], metavar="URL", help="web pages that may play; others may not"
    )
    parser.add_argument("--invalid_penalty", type=float, default=-0.1, help="reward of an invalid action")
    parser.add_argument("--max_invalid", type=int, default=5, help="invalid actions in a row that end an episode")
    package = parser.add_argument_group("a folder for openenv build, push and validate")
    package.add_argument("--package", type=Path, metavar="FOLDER", help="write it, and serve nothing")
    package.add_argument(
        "--reward_range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="default: --invalid_penalty and 1"
    )
    package.add_argument("--requirement", default="lrl[openenv]", help="what pip installs in the image to have lrl")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Serve until interrupted, or write a folder."""
    envs = envs_of(arguments, invalid_penalty=arguments.invalid_penalty, max_invalid=arguments.max_invalid)
    if arguments.package is not None:
        package(envs, arguments)
    else:
        serve(envs, arguments)


def package(envs: GymnasiumEnvs, arguments: argparse.Namespace) -> None:
    """Write the folder and print what can be done with it."""
    from lrl.openenv.package import write_package

    low, high = arguments.reward_range or (min(arguments.invalid_penalty, 0.0), 1.0)
    write_package(arguments.package, envs, (low, high), arguments.requirement)
    print(f"{arguments.package}: check it with `openenv validate {arguments.package}`")


def serve(envs: GymnasiumEnvs, arguments: argparse.Namespace) -> None:
    """Serve on the socket that the options name until interrupted."""
    from lrl.openenv.server import announce, listen, make_app, make_server

    if arguments.max_sessions < 1:
        raise ValueError(f"--max_sessions is {arguments.max_sessions}; it must be at least 1.")
    app = make_app(envs, arguments.max_sessions, arguments.origins)
    with listen(arguments.host, arguments.port) as socket, suppress(KeyboardInterrupt):
        announce(envs.id, arguments.host, socket.getsockname()[1])
        make_server(app).run(sockets=[socket])


main = subcommand(make_parser, run)

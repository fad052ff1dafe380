"""The command ``lrl serve_env``, and the folders that it writes, which OpenEnv validates, builds and deploys."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lrl.cli.command import command
from lrl.cli.options import EnvOptions
from lrl.ranges import PositiveInt

if TYPE_CHECKING:
    from lrl.envs.factory import GymnasiumEnvs


def serve_env(
    *,
    env: EnvOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_sessions: PositiveInt = 64,
    origins: list[str] | None = None,
    invalid_penalty: float = -0.1,
    max_invalid: int = 5,
    package: Path | None = None,
    reward_range: tuple[float, float] | None = None,
    requirement: str = "lrl[openenv]",
) -> None:
    """Serve an environment by OpenEnv's protocol, or write a folder that OpenEnv can deploy.

    lrl serve_env --env_id FrozenLake-v1 --port 8000
    lrl serve_env --env_id lrl/BabyAI-GoToLocal-v0 --package openenv/babyai --reward_range -0.1 1

    Args:
        env: environment that is served.
        host: address to listen on; 0.0.0.0 lets other machines connect.
        port: port to listen on; 0 takes a free one.
        max_sessions: maximum number of environments that are played at the same time.
        origins: origins of web pages that may connect, such as https://example.org; default: none.
        invalid_penalty: reward of a response without a legal action.
        max_invalid: number of consecutive invalid responses that ends an episode.
        package: write a folder for openenv build, push and validate, instead of serving the environment.
        reward_range: lowest and highest reward of a step, for --package; default: --invalid_penalty and 1.
        requirement: requirement with which pip installs lrl in the image of --package.
    """
    defaults, served = signature(serve_env).parameters, package is None
    given = {"host": host, "port": port, "max_sessions": max_sessions, "origins": origins}
    if served:
        given = {"reward_range": reward_range, "requirement": requirement}
    for name, value in given.items():
        if value != defaults[name].default:
            how = "without --package; it is for the folder" if served else "with --package; it is for serving"
            raise ValueError(f"--{name} is given {how}, so leave it out.")
    envs = env.gymnasium(invalid_penalty=invalid_penalty, max_invalid=max_invalid)
    if package is not None:
        write_package(package, envs, reward_range or (min(invalid_penalty, 0.0), 1.0), requirement)
        print(f"{package}: check it with `openenv validate {package}`")
        return
    from lrl.openenv.server import announce, listen, make_app, make_server

    app = make_app(envs, max_sessions, origins or [])
    with listen(host, port) as socket, suppress(KeyboardInterrupt):
        announce(envs.id, host, socket.getsockname()[1])
        make_server(app).run(sockets=[socket])


_SETTINGS = (
    *("id", "kwargs", "invalid_penalty", "max_invalid", "max_episode_steps", "success_return", "success_at"),
    "reset_options",
)
"""Attributes of the factory that the server of the folder passes to a factory of its own."""


def write_package(folder: Path, envs: GymnasiumEnvs, reward_range: tuple[float, float], requirement: str) -> None:
    """Write a folder with the layout of OpenEnv's environments, from the templates in ``package.yaml``.

    Args:
        folder: folder to write, which must not exist or must be empty.
        envs: factory of the environment, with settings that can be written as JSON.
        reward_range: lowest and highest reward of a step, which ``openenv.yaml`` declares.
        requirement: requirement with which pip installs lrl and its extra ``openenv``.

    Raises:
        ValueError: If the folder is not empty, the lowest reward is not below the highest, or the environment cannot
            be created.
    """
    low, high = reward_range
    if not low < high:
        raise ValueError(f"reward_range is {low:g} {high:g}; it must be two numbers, the smaller one first.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"package is {str(folder)!r}, which is not empty; it must be a new folder.")
    envs.check("env", "direct")
    name = re.sub(r"\W+", "_", envs.id.lower()).strip("_")
    numbers = None if envs.numbers is None else vars(envs.numbers)
    values = {
        "id": envs.id,
        "name": name,
        "dashed": name.replace("_", "-"),
        "title": re.sub(r"\W|_", "", name.title()),
        "summary": json.dumps(f"{envs.id} of lrl as a text environment"),
        "description": envs.codec.description,
        "requirement": json.dumps(requirement),
        "settings": json.dumps({key: getattr(envs, key) for key in _SETTINGS} | {"numbers": numbers}),
        "action": envs.codec.default_action_text,
        "low": float(low),
        "high": float(high),
    }
    templates = yaml.safe_load(Path(__file__).with_name("package.yaml").read_text(encoding="utf-8"))
    for path, template in templates.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(template.format(**values), encoding="utf-8")


main = command(serve_env)

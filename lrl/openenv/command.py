"""The command ``lrl serve_env``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lrl.cli.command import command
from lrl.cli.options import EnvOptions
from lrl.ranges import PositiveInt


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
    envs = env.gymnasium(invalid_penalty=invalid_penalty, max_invalid=max_invalid)
    if package is not None:
        from lrl.openenv.package import write_package

        write_package(package, envs, reward_range or (min(invalid_penalty, 0.0), 1.0), requirement)
        print(f"{package}: check it with `openenv validate {package}`")
        return
    from lrl.openenv.server import announce, listen, make_app, make_server

    app = make_app(envs, max_sessions, origins or [])
    with listen(host, port) as socket, suppress(KeyboardInterrupt):
        announce(envs.id, host, socket.getsockname()[1])
        make_server(app).run(sockets=[socket])


main = command(serve_env)

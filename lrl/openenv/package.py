"""Folders that OpenEnv validates, builds and deploys, for an environment of lrl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from lrl.envs.factory import GymnasiumEnvs

_APP = '''"""Serves {id} by OpenEnv's protocol."""

import argparse
import json

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs
from lrl.openenv.server import announce, listen, make_app, make_server

SETTINGS = json.loads({settings!r})
if SETTINGS["numbers"] is not None:
    SETTINGS["numbers"] = NumberFormat(**SETTINGS["numbers"])
app = make_app(GymnasiumEnvs(**SETTINGS))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines connect")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    with listen(arguments.host, arguments.port) as socket:
        announce(SETTINGS["id"], arguments.host, socket.getsockname()[1])
        make_server(app).run(sockets=[socket])


if __name__ == "__main__":
    main()
'''
_CLIENT = '''"""Reads and writes the messages of {id}; OpenEnv's own generic client does all that it needs."""

from openenv.core import GenericEnvClient as {title}Env

__all__ = ["{title}Env"]
'''
_PROJECT = """[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "openenv-{dashed}"
version = "0.1.0"
description = {description}
requires-python = ">=3.11"
dependencies = [{requirement}]

[project.optional-dependencies]
client = ["openenv>=0.10"]

[project.scripts]
server = "{name}.server.app:main"

[tool.setuptools]
packages = ["{name}", "{name}.server"]
package-dir = {{ "{name}" = ".", "{name}.server" = "server" }}
"""
_DOCKERFILE = """FROM python:3.11-slim
WORKDIR /app/env
COPY . /app/env
RUN pip install --no-cache-dir .
EXPOSE 8000
CMD ["python", "-m", "{name}.server.app", "--host", "0.0.0.0", "--port", "8000"]
"""
_README = """---
title: {title}
sdk: docker
app_port: 8000
tags: [openenv]
---

# {id}

{description}

An action is `{{"text": "{action}"}}`. An observation has a `text`; its metadata say `terminated`, `truncated`,
`success` and `action_valid`. Equal seeds are equal episodes.

```bash
python server/app.py --port 8000
```

It listens on this machine only. `--host 0.0.0.0`, as in `server/Dockerfile`, lets other machines connect; there is no
password.
"""


def write_package(folder: Path, envs: GymnasiumEnvs, reward_range: tuple[float, float], requirement: str) -> None:
    """Write a folder with the layout of OpenEnv's environments, which serves an environment of lrl.

    Args:
        folder: Where to write; it must not exist or be empty.
        envs: Factory of the environment, with settings that can be written as JSON.
        reward_range: Smallest and largest reward of a step, which the folder declares.
        requirement: What pip installs to have lrl with its extra ``openenv``.

    Raises:
        ValueError: If the folder is not empty, the range is none, or the environment cannot be created.
    """
    low, high = reward_range
    if not low < high:
        raise ValueError(f"reward_range is {low:g} {high:g}; it must be two numbers, the smaller one first.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"package is {str(folder)!r}, which is not empty; it must be a new folder.")
    envs.check("env", "direct")
    name = re.sub(r"\W+", "_", envs.id.lower()).strip("_")
    words: dict[str, Any] = {
        "id": envs.id,
        "name": name,
        "dashed": name.replace("_", "-"),
        "title": re.sub(r"\W|_", "", name.title()),
        "description": json.dumps(f"{envs.id} of lrl as a text environment"),
        "requirement": json.dumps(requirement),
        "settings": json.dumps(_settings(envs)),
        "action": envs.codec.default_action_text,
    }
    about = words | {"description": envs.codec.description}
    files = {
        "openenv.yaml": yaml.safe_dump(_manifest(name, (float(low), float(high))), sort_keys=False),
        "pyproject.toml": _PROJECT.format(**words),
        "README.md": _README.format(**about),
        "client.py": _CLIENT.format(**words),
        "__init__.py": f'"""{envs.id} as an OpenEnv environment."""\n',
        "server/__init__.py": f'"""Server of {envs.id}."""\n',
        "server/app.py": _APP.format(**words),
        "server/Dockerfile": _DOCKERFILE.format(**words),
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def _manifest(name: str, reward_range: tuple[float, float]) -> dict[str, Any]:
    """Return what ``openenv.yaml`` declares."""
    return {
        "spec_version": 1,
        "name": name,
        "version": "0.1.0",
        "type": "space",
        "runtime": "fastapi",
        "app": "server.app:app",
        "port": 8000,
        "validation": {
            "reward": {"range": list(reward_range), "oracle_tolerance": 0.0, "floor_margin": 0.1},
            "resources": {"cpu": 1.0, "memory_mb": 2048, "disk_mb": 8192, "episode_timeout_s": 300.0},
            "capabilities": {"verifier": {"kind": "reward_channel"}},
            "types": {"tags": ["text", "gymnasium"]},
        },
    }


def _settings(envs: GymnasiumEnvs) -> dict[str, Any]:
    """Return the settings of a factory as JSON values."""
    numbers = envs.numbers
    return {
        "id": envs.id,
        "kwargs": envs.kwargs,
        "invalid_penalty": envs.invalid_penalty,
        "max_invalid": envs.max_invalid,
        "max_episode_steps": envs.max_episode_steps,
        "success_return": envs.success_return,
        "success_at": envs.success_at,
        "numbers": None if numbers is None else dict(vars(numbers)),
        "reset_options": envs.reset_options,
    }

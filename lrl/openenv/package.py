"""Folders that OpenEnv validates, builds and deploys, which serve an environment of lrl."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from lrl.envs.factory import GymnasiumEnvs

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
    words = {
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
    templates = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for path, template in templates.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(template.format(**words), encoding="utf-8")

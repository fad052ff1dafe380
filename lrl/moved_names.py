"""Names of classes and configuration keys that have moved, so that old configurations get a helpful error.

Configurations that a user writes must be changed; the error names the new place. Configurations inside checkpoints are
translated when they are read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

MOVED_CLASSES: dict[str, str] = {
    "lrl.callbacks.evaluation.ExactSuccess": "lrl.callbacks.exact_success.ExactSuccess",
    "lrl.callbacks.rollouts.VectorEnvRollouts": "lrl.callbacks.collect.VectorEnvRollouts",
    "lrl.data.demonstrations.DemonstrationsDataModule": "lrl.data.demonstrations.data_module.DemonstrationsDataModule",
    "lrl.data.minari.MinariDemonstrations": "lrl.data.demonstrations.minari.MinariDemonstrations",
    "lrl.data.rollouts.RolloutDataModule": "lrl.data.rollout_buffer.RolloutDataModule",
    "lrl.data.sources.ExpertDemonstrations": "lrl.data.demonstrations.sources.ExpertDemonstrations",
    "lrl.data.sources.JsonlDemonstrations": "lrl.data.demonstrations.sources.JsonlDemonstrations",
    "lrl.data.symmetry.BabyAISymmetry": "lrl.data.demonstrations.augmentation.BabyAISymmetry",
    "lrl.envs.demonstrations.CsvRows": "lrl.envs.frozen_lake.csv_file.CsvRows",
    "lrl.envs.frozen_lake_rows.ExpertQRows": "lrl.envs.frozen_lake.expert_rows.ExpertQRows",
    "lrl.envs.frozen_lake_rows.RandomMapRows": "lrl.envs.frozen_lake.expert_rows.RandomMapRows",
    "lrl.policies.experts.EnvironmentExpert": "lrl.policies.baselines.experts.EnvironmentExpert",
    "lrl.policies.experts.FrozenLakeExpert": "lrl.policies.baselines.experts.FrozenLakeExpert",
    "lrl.policies.fixed.ConstantPolicy": "lrl.policies.baselines.fixed.ConstantPolicy",
    "lrl.policies.fixed.ExpertPolicy": "lrl.policies.baselines.fixed.ExpertPolicy",
    "lrl.policies.fixed.RandomPolicy": "lrl.policies.baselines.fixed.RandomPolicy",
}
"""Old class path to new class path, of classes that a configuration can name."""

MOVED_KEYS: dict[str, str] = {}
"""Old key to new key, written as on the command line, for example ``model.init_args.lr``."""


def moved_key(key: str) -> str | None:
    """Return the new place of a key, or None if it has not moved.

    Args:
        key: with or without its ``init_args``, which error messages leave out.
    """
    return next((new for old, new in MOVED_KEYS.items() if _short(old) == _short(key)), None)


def current_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with the current class paths and keys."""
    current = copy.deepcopy(dict(config))
    for old, new in MOVED_KEYS.items():
        *path, name = old.split(".")
        group = _group(current, path)
        if group is not None and name in group:
            *new_path, new_name = new.split(".")
            _made_group(current, new_path)[new_name] = group.pop(name)
    return _with_current_classes(current)


def _short(key: str) -> str:
    """Return a key without ``init_args``."""
    return ".".join(part for part in key.split(".") if part != "init_args")


def _group(config: Any, path: list[str]) -> dict[str, Any] | None:
    """Return the group of keys that a path leads to, or None if there is none."""
    for part in path:
        config = config.get(part) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else None


def _made_group(config: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """Return the group of keys that a path leads to; missing groups are made."""
    for part in path:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    return config


def _with_current_classes(value: Any) -> Any:
    """Return a part of a configuration with old class paths replaced, at any depth."""
    if isinstance(value, dict):
        current = {key: _with_current_classes(own) for key, own in value.items()}
        if "class_path" in value:
            current["class_path"] = MOVED_CLASSES.get(value["class_path"], value["class_path"])
        return current
    return [_with_current_classes(own) for own in value] if isinstance(value, list) else value

"""Names of classes and configuration keys that have moved, so that old configurations get a helpful error.

Configurations that a user writes must be changed; the error names the new place. What is read of the configurations
inside checkpoints is translated: class paths, and the keys of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED_CLASSES: dict[str, str] = {
    "lrl.callbacks.evaluation.ExactSuccess": "lrl.callbacks.exact_success.ExactSuccess",
    "lrl.callbacks.rollouts.VectorEnvRollouts": "lrl.callbacks.collect.VectorEnvRollouts",
    "lrl.data.demonstrations.DemonstrationsDataModule": "lrl.data.demonstrations.data_module.DemonstrationsDataModule",
    "lrl.data.minari.MinariDemonstrations": "lrl.data.demonstrations.minari.MinariDemonstrations",
    "lrl.data.rollouts.RolloutDataModule": "lrl.data.rollout_buffer.RolloutDataModule",
    "lrl.data.sources.ExpertDemonstrations": "lrl.data.demonstrations.sources.ExpertDemonstrations",
    "lrl.data.sources.JsonlDemonstrations": "lrl.data.demonstrations.jsonl.JsonlDemonstrations",
    "lrl.data.symmetry.BabyAISymmetry": "lrl.data.demonstrations.augmentation.BabyAISymmetry",
    "lrl.envs.demonstrations.CsvRows": "lrl.envs.frozen_lake.csv_file.CsvRows",
    "lrl.envs.frozen_lake_rows.ExpertQRows": "lrl.envs.frozen_lake.expert_rows.ExpertQRows",
    "lrl.envs.frozen_lake_rows.RandomMapRows": "lrl.envs.frozen_lake.expert_rows.RandomMapRows",
    "lrl.policies.experts.EnvironmentExpert": "lrl.policies.baselines.experts.EnvironmentExpert",
    "lrl.policies.experts.FrozenLakeExpert": "lrl.policies.baselines.experts.FrozenLakeExpert",
    "lrl.policies.fixed.ConstantPolicy": "lrl.policies.baselines.fixed.ConstantActor",
    "lrl.policies.fixed.ExpertPolicy": "lrl.policies.baselines.fixed.ExpertActor",
    "lrl.policies.fixed.RandomPolicy": "lrl.policies.baselines.fixed.RandomActor",
}
"""Old class path to new class path, of classes that a configuration can name."""

_POLICY = "model.init_args.policy.init_args"
_MOVED: dict[str, dict[str, str]] = {
    "data.init_args": {
        "validation": "validation_env:env validation_episodes:episodes validation_num_envs:num_envs "
        "validation_seed:seed validation_temperature:temperature"
    },
    "model.init_args": {
        "credit": "bootstrap_last credit:kind gae_lambda gamma local_penalties normalise_advantages:normalise "
        "token_gamma token_lambda",
        "critic": "critic_lr:lr value_fit:fit",
        "kl": "kl_coef:coef kl_estimator:estimator kl_horizon:horizon kl_target:target old_kl_coef:old_coef",
        "line_search": "accept_ratio backtrack_coeff max_backtracks",
        "natural_gradient": "cg_iterations damping fisher:product fisher_fraction",
        "optimizer": "lr max_skipped_steps optimizer.class_path:factory schedule warmup weight_decay",
    },
    _POLICY: {"critic": "critic_hidden_sizes:hidden_sizes normalise_observations observation_clip"},
}
"""Where a key was, the group that it is in now, and its old name, with ``:new`` where that changed."""

MOVED_KEYS: dict[str, str] = {
    f"{place}.{old}": f"{place}.{group}.{new or old}"
    for place, groups in _MOVED.items()
    for group, names in groups.items()
    for old, _, new in (name.partition(":") for name in names.split())
} | {
    f"data.init_args.{source}.init_args.symmetry": f"data.init_args.{source}.init_args.augmentation"
    for source in ("demonstrations", "validation_demonstrations")
}
"""Old key to new key, as on the command line. Some classes still have a key at its old place."""


def moved_key(key: str) -> str | None:
    """Return the new place of a key, or None if it has not moved.

    Args:
        key: with or without its ``init_args``, which error messages leave out.
    """
    return next((new for old, new in MOVED_KEYS.items() if _short(old) == _short(key)), None)


def current_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a checkpoint's configuration with the current class paths and the current keys of a policy."""
    return {key: _with_current_classes(value) for key, value in config.items()}


def _short(key: str) -> str:
    """Return a key without ``init_args``."""
    return ".".join(part for part in key.split(".") if part != "init_args")


def _with_current_classes(value: Any) -> Any:
    """Return a part of a configuration with old class paths replaced, at any depth."""
    if isinstance(value, dict):
        current = {key: _with_current_classes(own) for key, own in value.items()}
        if "class_path" in value:
            current["class_path"] = MOVED_CLASSES.get(value["class_path"], value["class_path"])
        if current.get("class_path") == "lrl.policies.head.HeadPolicy":
            current["init_args"] = _with_critic_group(current["init_args"])
        return current
    return [_with_current_classes(own) for own in value] if isinstance(value, list) else value


def _with_critic_group(init_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ``HeadPolicy`` with those of its critic in a group; a null size meant no critic."""
    names = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in MOVED_KEYS.items() if ".critic." in new}
    given = {new: init_args[old] for old, new in names.items() if old in init_args}
    others = {name: value for name, value in init_args.items() if name not in names}
    if not given:
        return others
    return others | {"critic": None if given.get("hidden_sizes", ()) is None else given}

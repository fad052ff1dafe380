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
MOVED_KEYS: dict[str, str] = {
    "data.init_args.validation_env": "data.init_args.validation.env",
    "data.init_args.validation_episodes": "data.init_args.validation.episodes",
    "data.init_args.validation_num_envs": "data.init_args.validation.num_envs",
    "data.init_args.validation_seed": "data.init_args.validation.seed",
    "data.init_args.validation_temperature": "data.init_args.validation.temperature",
    "model.init_args.accept_ratio": "model.init_args.line_search.accept_ratio",
    "model.init_args.backtrack_coeff": "model.init_args.line_search.backtrack_coeff",
    "model.init_args.bootstrap_last": "model.init_args.credit.bootstrap_last",
    "model.init_args.cg_iterations": "model.init_args.natural_gradient.cg_iterations",
    "model.init_args.credit": "model.init_args.credit.kind",
    "model.init_args.critic_lr": "model.init_args.critic.lr",
    "model.init_args.damping": "model.init_args.natural_gradient.damping",
    "model.init_args.fisher": "model.init_args.natural_gradient.product",
    "model.init_args.fisher_fraction": "model.init_args.natural_gradient.fisher_fraction",
    "model.init_args.gae_lambda": "model.init_args.credit.gae_lambda",
    "model.init_args.gamma": "model.init_args.credit.gamma",
    "model.init_args.kl_coef": "model.init_args.kl.coef",
    "model.init_args.kl_estimator": "model.init_args.kl.estimator",
    "model.init_args.kl_horizon": "model.init_args.kl.horizon",
    "model.init_args.kl_target": "model.init_args.kl.target",
    "model.init_args.local_penalties": "model.init_args.credit.local_penalties",
    "model.init_args.lr": "model.init_args.optimizer.lr",
    "model.init_args.max_backtracks": "model.init_args.line_search.max_backtracks",
    "model.init_args.max_skipped_steps": "model.init_args.optimizer.max_skipped_steps",
    "model.init_args.normalise_advantages": "model.init_args.credit.normalise",
    "model.init_args.old_kl_coef": "model.init_args.kl.old_coef",
    "model.init_args.optimizer.class_path": "model.init_args.optimizer.factory",
    f"{_POLICY}.critic_hidden_sizes": f"{_POLICY}.critic.hidden_sizes",
    f"{_POLICY}.normalise_observations": f"{_POLICY}.critic.normalise_observations",
    f"{_POLICY}.observation_clip": f"{_POLICY}.critic.observation_clip",
    "model.init_args.schedule": "model.init_args.optimizer.schedule",
    "model.init_args.token_gamma": "model.init_args.credit.token_gamma",
    "model.init_args.token_lambda": "model.init_args.credit.token_lambda",
    "model.init_args.value_fit": "model.init_args.critic.fit",
    "model.init_args.warmup": "model.init_args.optimizer.warmup",
    "model.init_args.weight_decay": "model.init_args.optimizer.weight_decay",
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

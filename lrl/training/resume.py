"""Checks before a run is resumed, and corrections of state that Lightning 2.6.6 does not restore."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.optim.lr_scheduler import LambdaLR

from lrl.functional.distributed import consolidated_checkpoint, is_sharded_checkpoint, shards_parameters

FREE_SETTINGS = {
    "language_model.name": "the weights may have moved, and their fingerprint is compared",
    "language_model.attention": "how attention is computed",
    "language_model.trust_remote_code": "the fingerprint of the weights is compared",
    "language_model.share_prompts": "speed",
    "language_model.recompute_logprobs": "rounding",
    "language_model.state_cache_mb": "memory",
    "language_model.prompt_cache_mb": "memory",
    "language_model.gradient_checkpointing": "memory",
    "language_model.liger_kernels": "speed",
    "policy.generator": "the sampler; the distribution is the same",
    "policy.pack_tokens": "speed",
    "env.vectorization": "speed",
    "env.num_processes": "speed",
    "env.success_return": "a metric",
    "env.url": "where the environment is served",
    "env.timeout": "when a server counts as lost",
    "data.validation": "held-out episodes",
    "data.validation_demonstrations": "held-out demonstrations",
    "data.token_cache": "speed",
    "data.max_env_steps": "when the run ends",
    "data.num_iterations": "when the run ends",
    "data.seed": "compared as seed_everything",
}
"""Settings of policy and data that a resumed run may change, by the last parts of their keys, with the reason. All
others affect what the run samples and trains on, and must be the same in the resumed run."""

_KERNELS = ("foreach", "fused", "capturable")
"""Settings of an optimiser on which the device of its state depends; those of the checkpoint are kept."""
_LONG = 64
"""Lists with at least this many values are compared by a checksum."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Reads checkpoints that several ranks wrote in shards (FSDP2) like single files."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a checkpoint, whether ``path`` is a file or a folder."""
        if is_sharded_checkpoint(Path(path)):
            return consolidated_checkpoint(Path(path))
        return super().load_checkpoint(path, *args, **kwargs)


def read_whole(trainer: L.Trainer) -> None:
    """Let a strategy that does not shard read sharded checkpoints, unless the user configured another reader."""
    strategy = trainer.strategy
    if not shards_parameters(strategy) and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = WholeCheckpointIO()


def settings_of(module: Any, data: Any) -> dict[str, Any]:
    """Return the settings that a resumed run may not change, nested by their configuration keys.

    These are the constructor arguments that the objects store under the same names, except those in
    :data:`FREE_SETTINGS`. Settings of the algorithm and the optimiser are not included.

    Args:
        module: module that is trained.
        data: its data module.
    """
    settings = {"model": {"class": type(module).__name__}, "data": described("data", data)}
    policy = getattr(module, "policy", None)
    if policy is not None:
        settings["model"]["policy"] = described("policy", policy)
    if policy is not None and policy.trunk is not None:
        settings["model"]["policy"]["tokenizer"] = policy.trunk.language_model.tokenizer.fingerprint[:16]
    return settings


def described(key: str, value: Any) -> Any:
    """Return a setting as numbers, strings, lists and mappings; paths become file names."""
    if isinstance(value, Path) or (key.endswith(".path") and isinstance(value, str)):
        return Path(value).name
    for plain in (bool, int, float, str):  # configurations contain subclasses, which weights_only=True rejects
        if isinstance(value, plain):
            return plain(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(name): described(f"{key}.{name}", entry) for name, entry in value.items()}
    if hasattr(value, "tolist"):
        return described(key, value.tolist())
    if isinstance(value, Sequence):
        entries = [described(key, entry) for entry in value]
        if len(entries) < _LONG:
            return entries
        return f"{len(entries)} values, checksum {zlib.crc32(repr(entries).encode())}"
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if dataclasses.is_dataclass(getattr(value, "config", None)):  # a language model
        return described(key, value.config)
    last = key.rpartition(".")[2]
    settings = {
        name: described(f"{last}.{name}", entry)
        for name, entry in arguments_of(value).items()
        if f"{last}.{name}" not in FREE_SETTINGS
    }
    return settings if dataclasses.is_dataclass(value) else {"class": type(value).__name__} | settings


def arguments_of(value: Any) -> dict[str, Any]:
    """Return the constructor arguments that an object stores, by name."""
    kept: dict[str, Any] = {}
    for part in (value, getattr(value, "trunk", None)):
        kept = getattr(part, "_modules", {}) | getattr(part, "__dict__", {}) | kept
    found: dict[str, Any] = {}
    for name in inspect.signature(type(value)).parameters:
        for place in (f"{name}_config", f"{name}_source", name, f"_{name}"):
            if place in kept:
                found[name] = kept[place]
                break
    if "num_groups" in found and hasattr(value, "counted_as"):
        found[value.counted_as] = found.pop("num_groups")
    return found


def check_settings(saved: Mapping[str, Any], settings: Mapping[str, Any], resumes: bool = True) -> None:
    """Check that the settings that determine what a run samples and trains on have not changed.

    Args:
        saved: entry ``lrl`` of the checkpoint.
        settings: settings of this run, from :func:`settings_of`.
        resumes: whether training continues; otherwise different settings of the model are only logged as a warning.

    Raises:
        ValueError: If ``resumes`` is true and a setting differs.
    """
    for key, now, before in _differences("", settings, saved.get("settings", settings)):
        said = f"{key} is {now!r}, in the checkpoint it was {before!r}"
        if resumes:
            raise ValueError(
                f"{said}; resume with the same, or start another run from its weights alone with model.init_from."
            )
        if key.startswith("model."):
            logging.getLogger("lrl").warning("%s: the policy is not the one that was trained", said)


def _differences(key: str, now: Any, before: Any) -> list[tuple[str, Any, Any]]:
    """Return key, current value and saved value of each setting that differs."""
    if not (isinstance(now, Mapping) and isinstance(before, Mapping)):
        same = now == before or (now != now and before != before)  # NaN
        return [] if same else [(key.removeprefix(".").removesuffix(".class"), now, before)]
    names = dict.fromkeys([*now, *before])
    return [found for name in names for found in _differences(f"{key}.{name}", now.get(name), before.get(name))]


def correct_loop_counters(loops: dict[str, Any], validated: int) -> None:
    """Rewrite the saved counters of Lightning's loops so that a resumed run neither repeats nor skips a minibatch.

    Lightning 2.6.6 infers from differences between its counters at which hook a checkpoint was written, but does not
    restore all counters when it resumes. After a second resume the inference is wrong, and whole collections are
    skipped. This function sets the counters to one of two states, whatever the hook and the number of earlier resumes:
    between two passes, where an unfinished collection starts again, or within a pass, after the last trained minibatch.
    A pass that a limit ended before its last minibatch counts as unfinished.

    Args:
        loops: saved progress, changed in place.
        validated: number of minibatches of the whole run that were trained before the last completed validation.
    """
    fit = loops["fit_loop"]
    epochs, minibatches = fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]
    finished, trained, last = epochs["processed"], minibatches["current"]["processed"], minibatches["is_last_batch"]
    last = last and trained == minibatches["current"]["ready"]
    # Within a pass: it has started but is not counted as finished, or a limit ended it before its last minibatch.
    within = epochs["started"] > finished
    if not within and epochs["ready"] == finished and trained and not last:  # the pass was ended early
        within, finished = True, finished - 1
    if not within:
        trained, last = 0, False
    for count in fit["epoch_progress"].values():
        count.update(ready=finished + within, started=finished + within, processed=finished, completed=finished)
    total = minibatches["total"]["processed"]
    minibatches.update(total=_all_equal(total), current=_all_equal(trained), is_last_batch=last)
    done = int(trained == 0 or validated == total)
    progress = _all_equal(1) | {"processed": done, "completed": done}  # if not done, Lightning validates first
    fit["epoch_loop.val_loop.batch_progress"].update(total=progress, current=dict(progress), is_last_batch=bool(done))


def optimizer_settings(trainer: L.Trainer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group of all optimisers, such as the learning rate, as plain values."""
    plain = bool, int, float, str, tuple, type(None)
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [{name: value for name, value in group.items() if isinstance(value, plain)} for group in groups]


def restore_optimizer_settings(
    trainer: L.Trainer,
    saved: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    limits: tuple[float, float] | None,
    adapted: bool,
) -> None:
    """Give the optimisers the settings in which this run differs from the one that it continues.

    Lightning has loaded the settings of the checkpoint. The state of the optimisers, and the position in the
    learning-rate schedule, stay those of the checkpoint. If it has no schedule, the position is the number of optimiser
    steps.

    Args:
        trainer: trainer whose optimisers have been restored.
        saved: settings with which the earlier run started, from :func:`optimizer_settings`.
        settings: settings with which this run starts.
        limits: smallest and largest learning rate if it is adapted; None if it is not.
        adapted: whether the earlier run adapted its learning rate, which is then kept within ``limits``.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, before, now in zip(groups, saved, settings, strict=True):
        rate = group["lr"]
        if limits is not None and adapted:
            rate = min(max(rate, limits[0]), limits[1])
        elif limits is not None or adapted or "initial_lr" in before or before.get("lr") != now.get("lr"):
            rate = now.get("lr", rate)
        group.update({name: value for name, value in now.items() if name not in _KERNELS and before.get(name) != value})
        group["lr"] = rate
    for scheduler in (entry.scheduler for entry in trainer.lr_scheduler_configs):
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = scheduler.last_epoch or trainer.global_step
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            for group, factor in zip(scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)


def _all_equal(count: int) -> dict[str, int]:
    """Return Lightning's four counters for a number of completed items with none in progress."""
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)

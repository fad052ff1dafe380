"""Checks before a run is resumed, and what Lightning 2.6.6 does not restore."""

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

from lrl.functional.distributed import consolidated_checkpoint, is_sharded_checkpoint, shards_parameters

FREE_SETTINGS = {
    "language_model.name": "the fingerprint of the weights is compared, which may have moved",
    "language_model.attention": "how attention is computed",
    "language_model.trust_remote_code": "the fingerprint of the weights is compared",
    "language_model.share_prompts": "speed",
    "language_model.recompute_logprobs": "rounding",
    "language_model.state_cache_mb": "memory",
    "language_model.gradient_checkpointing": "memory",
    "language_model.liger_kernels": "speed",
    "policy.generator": "what samples, from the same distribution",
    "policy.pack_tokens": "speed",
    "policy.length_groups": "speed",
    "env.vectorization": "speed",
    "env.on_death": "what happens when a process dies",
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
"""The settings of a policy and of data that a resumed run may change, by the last parts of their keys, and what each
is about. All others decide what the run samples and trains on: they must be those of the run that is resumed."""

_LONG = 64
"""Number of values from which on a list is compared by its checksum."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Reads a checkpoint that several ranks wrote in parts (FSDP2) as a whole one."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a checkpoint, whether ``path`` is a file or a folder."""
        if is_sharded_checkpoint(Path(path)):
            return consolidated_checkpoint(Path(path))
        return super().load_checkpoint(path, *args, **kwargs)


def read_whole(trainer: L.Trainer) -> None:
    """Let a strategy that does not shard read sharded checkpoints, unless the user chose how to read."""
    strategy = trainer.strategy
    if not shards_parameters(strategy) and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = WholeCheckpointIO()


def check_fingerprint(saved: Mapping[str, Any], fingerprint: str) -> None:
    """Raise if a checkpoint was trained on another base model.

    Args:
        saved: the entry ``lrl`` of the checkpoint.
        fingerprint: of the configured base model.

    Raises:
        ValueError: the base models differ.
    """
    if saved.get("fingerprint", "") != fingerprint:
        raise ValueError(
            f"ckpt_path was trained on base weights {saved.get('fingerprint', '')!r}, the configured ones are "
            f"{fingerprint!r}; load the same base model."
        )


def check_start(saved: Mapping[str, Any], start: str, init_from: str | None) -> None:
    """Raise if a run would be resumed with another reference policy than it started with.

    Args:
        saved: the entry ``lrl`` of the checkpoint.
        start: fingerprint of the weights that ``init_from`` gave, empty without it.
        init_from: as configured.

    Raises:
        ValueError: the initial weights differ.
    """
    if saved.get("start", "") != start:
        raise ValueError(
            f"model.init_from is {init_from!r}, whose weights are not those that the run of ckpt_path started "
            "from; resume with the same, the reference policy rests on it."
        )


def check_seed(saved: Mapping[str, Any], seed: int) -> None:
    """Raise if a run would be resumed with another seed: episodes are replayed and networks initialised from it.

    Args:
        saved: the entry ``lrl`` of the checkpoint.
        seed: as configured.

    Raises:
        ValueError: the seeds differ.
    """
    before = saved.get("seed", seed)
    if before != seed:
        raise ValueError(f"seed_everything is {seed}, in the run of ckpt_path it was {before}; resume with the same.")


def settings_of(module: Any, data: Any) -> dict[str, Any]:
    """Return the settings that a resumed run may not change, nested by their configuration keys.

    They are the arguments of constructors, as far as the objects keep them under the same names, without those in
    :data:`FREE_SETTINGS`. Those of the algorithm and the optimiser are not among them.

    Args:
        module: what is trained.
        data: its data module.
    """
    settings = {"model": {"class": type(module).__name__}, "data": _described("data", data)}
    policy = getattr(module, "policy", None)
    if policy is not None:
        settings["model"]["policy"] = _described("policy", policy)
    if policy is not None and policy.trunk is not None:
        settings["model"]["policy"]["tokenizer"] = policy.trunk.language_model.tokenizer.fingerprint[:16]
    return settings


def _described(key: str, value: Any) -> Any:
    """Return a setting as numbers, texts, lists and mappings; of files only the names."""
    if isinstance(value, Path) or (key.endswith(".path") and isinstance(value, str)):
        return Path(value).name
    for plain in (bool, int, float, str):  # a configuration holds subclasses, which no checkpoint may hold
        if isinstance(value, plain):
            return plain(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(name): _described(f"{key}.{name}", entry) for name, entry in value.items()}
    if hasattr(value, "tolist"):
        return _described(key, value.tolist())
    if isinstance(value, Sequence):
        entries = [_described(key, entry) for entry in value]
        if len(entries) < _LONG:
            return entries
        return f"{len(entries)} values, checksum {zlib.crc32(repr(entries).encode())}"
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if dataclasses.is_dataclass(getattr(value, "config", None)):  # a language model
        return _described(key, value.config)
    last = key.rpartition(".")[2]
    described = {
        name: _described(f"{last}.{name}", entry)
        for name, entry in _arguments(value).items()
        if f"{last}.{name}" not in FREE_SETTINGS
    }
    return described if dataclasses.is_dataclass(value) else {"class": type(value).__name__} | described


def _arguments(value: Any) -> dict[str, Any]:
    """Return the arguments that an object was constructed with, as far as it keeps them, by their names."""
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
    """Raise if a run would be resumed with settings that change what it samples or trains on.

    Args:
        saved: the entry ``lrl`` of the checkpoint.
        settings: those of this run, from :func:`settings_of`.
        resumes: whether the run goes on training; else a warning names the settings of the model that differ.

    Raises:
        ValueError: one differs.
    """
    for key, now, before in _differences("", settings, saved.get("settings", settings)):
        said = f"{key} is {now!r}, in the run of ckpt_path it was {before!r}"
        if resumes:
            raise ValueError(
                f"{said}; resume with the same, or start another run from its weights alone with model.init_from."
            )
        if key.startswith("model."):
            logging.getLogger("lrl").warning("%s: the policy is not the one that was trained", said)


def _differences(key: str, now: Any, before: Any) -> list[tuple[str, Any, Any]]:
    """Return key, value and earlier value of each setting that differs."""
    if not (isinstance(now, Mapping) and isinstance(before, Mapping)):
        same = now == before or (now != now and before != before)  # NaN
        return [] if same else [(key.removeprefix(".").removesuffix(".class"), now, before)]
    names = dict.fromkeys([*now, *before])
    return [found for name in names for found in _differences(f"{key}.{name}", now.get(name), before.get(name))]


def mend_loops(loops: dict[str, Any], validated: int) -> None:
    """Rewrite the saved counters of Lightning's loops so that a resumed run repeats nothing and leaves nothing out.

    Lightning 2.6.6 deduces from differences between its counters at which hook a checkpoint was written, and
    does not restore all counters when it resumes: after a second resume the deductions are wrong, and it skips
    whole collections. Here the counters become those of one of two states, whatever the hook and the number of
    resumes before: between two passes (a collection that is under way starts again), or within a pass, after the
    last minibatch that was trained. A pass that a limit ended before its last minibatch counts as not finished.

    Args:
        loops: saved progress, changed in place.
        validated: number of minibatches, over the whole run, that were trained before the last finished validation.
    """
    fit = loops["fit_loop"]
    epochs, minibatches = fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]
    finished, trained, last = epochs["processed"], minibatches["current"]["processed"], minibatches["is_last_batch"]
    last = last and trained == minibatches["current"]["ready"]
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


def _all_equal(count: int) -> dict[str, int]:
    """Return Lightning's counters where nothing is under way."""
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)

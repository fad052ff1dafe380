"""Settings of the trainer: checks that Lightning does not make or that name no setting, and FSDP2 in place of FSDP1."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.strategies import ModelParallelStrategy

from lrl.files import require, shipped
from lrl.training.checkpoint import CollectionCheckpoint

_LIMITS = {
    "fit": ("limit_train_batches", "max_epochs", "max_steps"),
    "validate": ("limit_val_batches",),
    "test": ("limit_test_batches",),
    "predict": ("limit_predict_batches",),
}
"""Settings of the trainer that must not be 0, because the subcommand would do nothing."""


def check_settings(trainer: Namespace, subcommand: str | None) -> list[str]:
    """Check the settings of the trainer, and remove callbacks that another setting replaces or disables.

    A later callback replaces an earlier one of the same class, if lrl uses one of this class by default. The checkpoint
    callback is removed if ``enable_checkpointing`` is false.

    Args:
        trainer: the configuration of the trainer; its ``callbacks`` are changed in place.
        subcommand: the subcommand; None is the same as ``fit``.

    Returns:
        A sentence for each callback that was replaced.

    Raises:
        ValueError: If a setting would be ignored.
    """
    if trainer.default_root_dir is not None:
        raise ValueError(
            f"trainer.default_root_dir is {str(trainer.default_root_dir)!r}; it must be null, because "
            "run_directory determines where a run is written."
        )
    if trainer.barebones:
        raise ValueError("trainer.barebones is true; it must be false, because runs of lrl log and keep checkpoints.")
    if not _names_devices(trainer.devices):
        raise ValueError(
            f"trainer.devices is {trainer.devices!r}; it must be auto, -1, a positive number, or a list of indices."
        )
    for name, least in _LEAST.items():
        if trainer[name] is not None and not least <= trainer[name] < math.inf:
            least_text = "0 or positive" if least == 0 else f"at least {least}"
            raise ValueError(f"trainer.{name} is {trainer[name]}; it must be {least_text}, or null.")
    for name in _LIMITS[subcommand or "fit"]:
        if trainer[name] == 0:
            done = "trained" if subcommand in (None, "fit") else "evaluated"
            raise ValueError(f"trainer.{name} is 0; it must not be 0, because nothing would be {done}.")
    given = trainer.callbacks
    callbacks = given if isinstance(given, list) else [] if given is None else [given]
    if trainer.enable_checkpointing is False:
        name = CollectionCheckpoint.__name__
        callbacks = [part for part in callbacks if part.class_path.rpartition(".")[2] != name]
    trainer.callbacks, notes = _last_of_each(callbacks)
    return notes


def _last_of_each(callbacks: list[Namespace]) -> tuple[list[Namespace], list[str]]:
    """Return callbacks in which a later one takes the place of an earlier default one, and sentences that say so."""
    last: dict[Any, Namespace] = {}
    notes = list[str]()
    for number, part in enumerate(callbacks):
        name = part.class_path.rpartition(".")[2]
        key = part.class_path if name in _DEFAULT_CALLBACKS else number
        before = last.get(key)
        if before is not None:
            given, former = (vars(one.get("init_args") or Namespace()) for one in (part, before))
            changed = [one for one in given if given[one] != former.get(one)]
            details = [f"{one} is {_written(given[one])} instead of {_written(former.get(one))}" for one in changed]
            details = details or ["nothing changes"]
            notes.append(f"trainer.callbacks: {name} replaces an earlier one; {', '.join(details)}.")
        last[key] = part
    return list(last.values()), notes


def _written(value: Any) -> str:
    """Return a value as it is written in a configuration."""
    return "null" if value is None else str(value)


_DEFAULT_CALLBACKS = ("ConsoleProgress", "Transcripts", "CollectionCheckpoint")
"""The callbacks of ``configs/base.yaml``, of which a run has one each."""
_LEAST = {"gradient_clip_val": 0, "check_val_every_n_epoch": 1, "log_every_n_steps": 0}
"""Smallest values of settings for which Lightning takes any number."""
_MAX_DEVICES = 2**16
"""Number above which a number of devices is a mistake."""


def _names_devices(devices: Any) -> bool:
    """Return whether a value is a number of devices, a list of their indices, or such a number or list as text."""
    if isinstance(devices, str) and re.fullmatch(r"-?\d+", devices):
        devices = int(devices)
    if isinstance(devices, str):
        return devices == "auto" or re.fullmatch(r"\d+(\s*,\s*\d+)*,?", devices) is not None
    if isinstance(devices, list):
        return bool(devices) and all(type(index) is int and index >= 0 for index in devices)
    return type(devices) is int and (devices == -1 or 0 < devices <= _MAX_DEVICES)


def fsdp2() -> Namespace:
    """Return the settings of FSDP2, which are those of ``configs/overlays/fsdp.yaml``.

    Lightning's strategy ``fsdp`` is FSDP1, under which each rank sees only a part of the norm of the gradient.
    """
    overlay = yaml.safe_load(Path(str(shipped("configs/overlays/fsdp.yaml"))).read_text())["trainer"]["strategy"]
    overlay["class_path"] = f"lightning.pytorch.strategies.{overlay['class_path']}"
    return Namespace(overlay | {"init_args": Namespace(overlay["init_args"])})


def set_data_parallel_size(trainer: L.Trainer) -> None:
    """Replace FSDP2's ``data_parallel_size: auto`` by the number of devices.

    Lightning 2.6.6 takes ``auto`` for the number of nodes, which fits tensor parallelism only.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy) or strategy._tensor_parallel_size != 1:
        return
    if strategy._data_parallel_size == "auto":
        strategy._data_parallel_size = trainer.num_devices * trainer.num_nodes


def check_wandb(offline: bool) -> None:
    """Check that wandb is installed, and that it has an API key if it needs one and no terminal can ask for it.

    Raises:
        ValueError: If wandb is not installed, or there is no API key.
    """
    require("wandb", "wandb", "trainer.logger WandbLogger")
    if offline or os.environ.get("WANDB_MODE", "online") not in ("online", "run", "shared") or sys.stdin.isatty():
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ValueError(
            "trainer.logger has a WandbLogger, but there is no API key; call `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline."
        )

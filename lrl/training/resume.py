"""Checks before a run is resumed, and what Lightning 2.6.6 does not restore."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins import TorchCheckpointIO

from lrl.functional.distributed import consolidated_checkpoint, is_sharded_checkpoint, shards_parameters


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


def mend_loops(loops: dict[str, Any], validated: int) -> None:
    """Let a resumed run validate and call the hooks at the end of an epoch whose minibatches are all trained.

    From a checkpoint that a callback wrote after the last minibatch, Lightning would count the epoch as finished and do
    neither; from one that was written a moment later, or while validating, it would skip the validation.

    Args:
        loops: saved progress, changed in place.
        validated: the last epoch whose validation was finished.
    """
    fit = loops["fit_loop"]
    epochs, minibatches = fit["epoch_progress"]["total"], fit["epoch_loop.batch_progress"]
    inside = epochs["started"] == epochs["ready"] and epochs["processed"] == epochs["started"] - 1
    trained = minibatches["is_last_batch"] and minibatches["current"]["processed"] == minibatches["current"]["ready"]
    if not (inside and trained):
        return
    for count in (minibatches["total"], minibatches["current"]):
        count["completed"] = count["processed"]
    if validated != fit["epoch_progress"]["current"]["processed"]:
        begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}  # what Lightning goes back to and finishes
        fit["epoch_loop.val_loop.batch_progress"].update(total=begun, current=dict(begun), is_last_batch=False)

"""What a resume has to check, and what Lightning 2.6.6 leaves out of it."""

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


def check_start(saved: Mapping[str, Any], fingerprint: str, start: str, init_from: str | None) -> None:
    """Refuse to go on from other weights than those that the run started from.

    Args:
        saved: what the checkpoint says under ``lrl``.
        fingerprint: of the configured base.
        start: of what ``init_from`` gave, empty without it.
        init_from: as configured.

    Raises:
        ValueError: the base or the initial weights are others.
    """
    if saved.get("fingerprint", "") != fingerprint:
        raise ValueError(
            f"ckpt_path was trained on base weights {saved.get('fingerprint', '')!r}, the configured ones are "
            f"{fingerprint!r}; load the same base model."
        )
    if saved.get("start", "") != start:
        raise ValueError(
            f"model.init_from is {init_from!r}, whose weights are not those that the run of ckpt_path started "
            "from; resume with the same, the reference policy rests on it."
        )


def run_seed(trainer: Any) -> int | None:
    """Of everything random in a run; None where its data has none."""
    seed = getattr(getattr(trainer, "datamodule", None), "seed", None)
    return None if seed is None else int(seed)


def check_seed(saved: Mapping[str, Any], seed: int | None) -> None:
    """Refuse to go on with other random numbers: running episodes are played again, initial networks drawn again.

    Args:
        saved: what the checkpoint says under ``lrl``.
        seed: as configured.

    Raises:
        ValueError: it is another.
    """
    before = saved.get("seed", seed)
    if before != seed:
        raise ValueError(f"seed_everything is {seed}, in the run of ckpt_path it was {before}; resume with the same.")


def mend_loops(loops: dict[str, Any], validated: int) -> None:
    """Let a resumed run do the rest of an epoch whose parts are all trained: validation, then the hooks at its end.

    From a checkpoint that a callback wrote behind the last part, Lightning would count the epoch as over and call
    neither; from one that was written a moment later, or while validating, it would skip the validation.

    Args:
        loops: progress as it was saved, changed in place.
        validated: the epoch whose validation was over last.
    """
    fit = loops["fit_loop"]
    epochs, parts = fit["epoch_progress"]["total"], fit["epoch_loop.batch_progress"]
    inside = epochs["started"] == epochs["ready"] and epochs["processed"] == epochs["started"] - 1
    trained = parts["is_last_batch"] and parts["current"]["processed"] == parts["current"]["ready"]
    if not (inside and trained):
        return
    for count in (parts["total"], parts["current"]):
        count["completed"] = count["processed"]
    if validated != fit["epoch_progress"]["current"]["processed"]:
        begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}  # what Lightning goes back to and finishes
        fit["epoch_loop.val_loop.batch_progress"].update(total=begun, current=dict(begun), is_last_batch=False)

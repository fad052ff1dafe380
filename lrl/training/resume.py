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

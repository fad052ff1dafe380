"""The command ``lrl consolidate``."""

from __future__ import annotations

import os
from pathlib import Path

from lrl.cli.command import command


def consolidate(*, checkpoint: str, output: Path) -> None:
    """Write a sharded checkpoint (FSDP2), to which each rank wrote a part, as one file.

    lrl consolidate --checkpoint RUN --output whole.ckpt

    The file has the weights, the state of the optimiser and the position of the run, as a checkpoint of one device.
    lrl fit --ckpt_path resumes from it on any number of devices, if it was written between two collections.

    Args:
        checkpoint: the folder of a checkpoint, or a run directory.
        output: the file to write; must not exist.

    Raises:
        ValueError: If the checkpoint is not sharded, or the file exists.
    """
    import torch

    from lrl.evaluation.load import checkpoint_file
    from lrl.functional.distributed import consolidated_checkpoint, is_sharded_checkpoint

    source = checkpoint_file(Path(checkpoint), "--checkpoint")
    if not is_sharded_checkpoint(source):
        raise ValueError(f"--checkpoint is {checkpoint!r}, which is one file already; every command reads it as it is.")
    if output.exists():
        raise ValueError(f"--output is {str(output)!r}, which exists; it must be a new file.")
    whole, draft = consolidated_checkpoint(source), output.with_name(f".{output.name}.draft")
    output.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole, draft)
    os.replace(draft, output)
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB, {len(whole['state_dict'])} tensors of weights")


main = command(consolidate)

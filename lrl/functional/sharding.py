"""Parameters that are sharded over ranks (FSDP2), gathered for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Gather the parameters once, so that ranks may make different numbers of forward passes inside.

    Ranks decode different numbers of tokens; a gather in every forward pass would leave one waiting for the other.
    Does nothing where nothing is sharded.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()

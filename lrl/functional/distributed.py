"""What ranks hold apart: parameters that are sharded (FSDP2), and objects that each rank has its own of."""

from __future__ import annotations

import errno
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

_UNREADABLE = (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError, OSError, ValueError)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters over the ranks of ``mesh`` (FSDP2): each transformer block by itself, then the rest.

    Blocks are what Hugging Face says must not be split. All parameters of a block must have one data type, so adapters
    keep that of the base.
    """
    kinds = {kind for part in model.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
    for part in list(model.modules()):
        if type(part).__name__ in kinds:
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def spreads_weights(strategy: object) -> bool:
    """Whether a strategy of Lightning's leaves each rank a part of the weights only."""
    return any(kind in type(strategy).__name__ for kind in ("ModelParallel", "FSDP"))


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


def whole_tensors(state: Mapping[str, Any], keep: bool = True) -> dict[str, Any]:
    """``state`` on the CPU with sharded tensors gathered, one after the other; empty where ``keep`` is false.

    All ranks must call it.
    """
    whole: dict[str, Any] = {}
    for name, value in state.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            whole[name] = value.cpu() if isinstance(value, Tensor) else value
    return whole


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder to which each rank wrote its part."""
    return (path / ".metadata").exists()


def read_checkpoint(path: Path, weights: bool = True) -> dict[str, Any]:
    """A checkpoint on the CPU, as one dictionary, whether it is a file or a folder with the parts of several ranks.

    Args:
        path: the file or folder.
        weights: whether tensors are wanted; without them nothing large is read.

    Raises:
        ValueError: it is neither, or damaged.
    """
    try:
        sharded = is_sharded_checkpoint(path)
        if not sharded or not weights:
            file = path / "meta.pt" if sharded else path
            return torch.load(file, map_location="cpu", weights_only=True, mmap=not weights)
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, Path(folder) / "whole.ckpt")
            parts = torch.load(Path(folder) / "whole.ckpt", map_location="cpu", weights_only=True)
        return parts | torch.load(path / "meta.pt", map_location="cpu", weights_only=True)  # what has no shards
    except (*_UNREADABLE, CheckpointException) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EPERM):
            raise  # the disk's fault, not the file's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ValueError(f"{str(path)!r} is no checkpoint, or a damaged one ({reason}).") from error


def whole_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint with the parts of several ranks as a trainer without shards would have written it.

    Raises:
        ValueError: it is damaged.
    """
    checkpoint, states = read_checkpoint(path), []
    while f"optimizer_{len(states)}" in checkpoint:
        states.append(_by_position(checkpoint.pop(f"optimizer_{len(states)}")))
    return checkpoint | {"optimizer_states": states}


def _by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's state, which shards keep by the names of weights, by their positions as torch does."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    place = {name: position for position, name in enumerate(names)}
    groups = [{**group, "params": [place[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {place[name]: kept for name, kept in state.get("state", {}).items()}, "param_groups": groups}


def gather_ranks(value: Any) -> list[Any]:
    """``value`` of every rank, by rank. All ranks must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_part(values: Sequence[Any]) -> Any:
    """This rank's element of what :func:`gather_ranks` returned, in this run or in the one that is resumed.

    Raises:
        ValueError: another number of ranks took part.
    """
    rank, world_size = _place()
    if len(values) != world_size:
        raise ValueError(
            f"ckpt_path was written inside a collection and holds what each of {len(values)} ranks was doing; resume "
            f"it with as many, not {world_size}, or from a checkpoint between collections."
        )
    return values[rank]


def own_share(values: Sequence[dict[str, list[Any]] | None]) -> dict[str, list[Any]] | None:
    """This rank's share of lists that :func:`gather_ranks` returned, whatever the number of ranks then and now.

    Args:
        values: lists by name, of each rank; the lists of all ranks, one after the other, are cut into equal parts.
    """
    rank, world_size = _place()
    if len(values) == world_size:
        return values[rank]
    given = [value for value in values if value is not None]
    if len(given) < len(values):
        return None
    share = {}
    for name in given[0]:
        everything = [item for value in given for item in value[name]]
        size = len(everything) // world_size
        share[name] = everything[rank * size : (rank + 1) * size]
    return share


def _place() -> tuple[int, int]:
    """This rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

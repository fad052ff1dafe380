"""Functions for distributed training: sharded parameters (FSDP2), checkpoints, and communication between ranks."""

from __future__ import annotations

import errno
import pickle
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

_Value = TypeVar("_Value")
_READ_ERRORS = (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError, OSError, ValueError)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters over the ranks of ``mesh`` (FSDP2), each transformer block separately, then the rest.

    Transformer blocks are the modules that Hugging Face names in ``_no_split_modules``. All parameters of a block must
    have the same data type; adapters therefore have the data type of the base model.
    """
    blocks = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shards_parameters(strategy: object) -> bool:
    """Return whether a Lightning or Fabric strategy shards the parameters over the ranks."""
    return any(name in type(strategy).__name__ for name in ("ModelParallel", "FSDP"))


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Gather all parameters once, so that ranks may make different numbers of forward passes inside the context.

    Otherwise every forward pass gathers parameters from all ranks, and ranks that decode different numbers of tokens
    deadlock. Without sharded parameters, the context does nothing.
    """
    sharded = [child for child in module.modules() if isinstance(child, FSDPModule)]
    for child in sharded:
        child.set_reshard_after_forward(False, recurse=False)
        child.unshard()
    try:
        yield
    finally:
        for child in sharded:
            child.set_reshard_after_forward(True, recurse=False)
            child.reshard()


def full_state_dict(state_dict: Mapping[str, _Value], keep: bool = True) -> dict[str, _Value]:
    """Return ``state_dict`` on the CPU, gathering sharded tensors one at a time; all ranks must call it.

    Args:
        state_dict: tensors of any shape; other values are returned unchanged.
        keep: whether this rank needs the result; if not, an empty dictionary is returned.
    """
    full: dict[str, Any] = {}
    for name, value in state_dict.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            full[name] = whole.cpu() if isinstance(whole, Tensor) else whole
    return full


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is the folder of a sharded checkpoint, to which each rank has written a part."""
    return (path / ".metadata").exists()


def find_checkpoint(path: str | Path, names: Sequence[str], key: str, advice: str = "") -> Path:
    """Return the path of a checkpoint, or of the preferred checkpoint of a run directory.

    Args:
        path: a checkpoint, as one file or in shards, or a run directory.
        names: file names in the folder ``checkpoints`` of a run directory, in order of preference.
        key: configuration key of the path, for the error message.
        advice: how to create such a checkpoint, for the error message; empty if nothing is to be added.

    Raises:
        ValueError: If ``path`` is neither a checkpoint nor a run directory with one of these names.
    """
    path = Path(path)
    for file in (path, *(path / "checkpoints" / name for name in names)):
        if file.is_file() or is_sharded_checkpoint(file):
            return file
    found = ""
    if not path.exists():
        there = sorted(one.name for one in path.parent.glob("*.ckpt"))
        found = ", but it does not exist" + (f"; its folder has {', '.join(there)}" if there else "")
    advice = f"{found}{advice and f'; {advice}'}"
    raise ValueError(f"{key} is {str(path)!r}; it must be a checkpoint, or a run directory that contains one{advice}.")


def read_checkpoint(path: Path, weights: bool = True) -> dict[str, Any]:
    """Load a checkpoint on the CPU as one dictionary, from a file or from the folder of a sharded checkpoint.

    Args:
        path: the file or folder.
        weights: whether tensors are needed; if not, only a small part of the file is read.

    Raises:
        ValueError: If ``path`` is not a checkpoint, or is damaged.
    """
    try:
        sharded = is_sharded_checkpoint(path)
        if not sharded or not weights:
            file = path / "meta.pt" if sharded else path
            return torch.load(file, map_location="cpu", weights_only=True, mmap=not weights)
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, Path(folder) / "whole.ckpt")
            shards = torch.load(Path(folder) / "whole.ckpt", map_location="cpu", weights_only=True)
        # meta.pt contains the entries that are not sharded.
        return shards | torch.load(path / "meta.pt", map_location="cpu", weights_only=True)
    except (*_READ_ERRORS, CheckpointException) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EPERM):
            raise  # a problem of the disk or of permissions, not of this file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
        if path.is_file() and not zipfile.is_zipfile(path):
            reason = "torch.save did not write it, or not completely"
        raise ValueError(f"{str(path)!r} is not a checkpoint or is damaged ({reason}).") from error


def consolidated_checkpoint(path: Path) -> dict[str, Any]:
    """Load a sharded checkpoint, and return it in the format of an unsharded one.

    Raises:
        ValueError: If ``path`` is not a checkpoint, or is damaged.
    """
    checkpoint, states = read_checkpoint(path), []
    while f"optimizer_{len(states)}" in checkpoint:
        states.append(_indexed_by_position(checkpoint.pop(f"optimizer_{len(states)}")))
    return checkpoint | {"optimizer_states": states}


def _indexed_by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an optimiser state whose keys are parameter names (sharded) to one whose keys are positions (torch)."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    position = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [position[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {position[name]: kept for name, kept in state.get("state", {}).items()}, "param_groups": groups}


def all_gather_objects(value: _Value) -> list[_Value]:
    """Return the ``value`` of every rank, ordered by rank. All ranks must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_value(values: Sequence[_Value]) -> _Value:
    """Return this rank's element of a list with one value per rank, which was saved in a checkpoint.

    Args:
        values: a saved result of :func:`all_gather_objects`.

    Raises:
        ValueError: If the checkpoint was written by a different number of ranks.
    """
    rank, world_size = rank_and_world_size()
    if len(values) != world_size:
        raise ValueError(
            f"the checkpoint was written during a collection by {len(values)} ranks, and this run has {world_size}; "
            f"resume it with {len(values)} ranks, or from a checkpoint written between collections."
        )
    return values[rank]


def redistribute_lists(values: Sequence[dict[str, list[_Value]] | None]) -> dict[str, list[_Value]] | None:
    """Return this rank's part of saved lists, which a different number of ranks may have written.

    Args:
        values: for each rank that wrote the checkpoint, a dictionary of lists by name. If the number of ranks has
            changed, the lists of all ranks are concatenated and divided into equal parts, one per current rank.

    Returns:
        Lists by name; None if the number of ranks has changed and a rank saved None.
    """
    rank, world_size = rank_and_world_size()
    if len(values) == world_size:
        return values[rank]
    saved = [value for value in values if value is not None]
    if len(saved) < len(values):
        return None
    own = {}
    for name in saved[0]:
        items = [item for value in saved for item in value[name]]
        size = len(items) // world_size
        own[name] = items[rank * size : (rank + 1) * size]
    return own


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def frozen_parameter_names(module: nn.Module) -> set[str]:
    """Return the names of all parameters that do not require gradients, including every name of tied weights."""
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


def drop_frozen(state_dict: Mapping[str, _Value], frozen: set[str]) -> dict[str, _Value]:
    """Return ``state_dict`` without frozen parameters and without their quantization constants.

    Args:
        state_dict: state dictionary of the module.
        frozen: result of :func:`frozen_parameter_names`. Names that extend one of these names are quantization
            constants, for example ``a.weight.absmax`` for ``a.weight``.
    """
    return {name: _alone(value) for name, value in state_dict.items() if not _is_or_extends(name, frozen)}


def _alone(value: _Value) -> _Value:
    """Return a copy of a tensor that is a part of a larger one, which ``torch.save`` would write as a whole."""
    if type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes:
        return cast(_Value, value.clone())
    return value


def _is_or_extends(name: str, frozen: set[str]) -> bool:
    """Return whether a name, or one of its prefixes that end before a dot, is in ``frozen``."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in frozen for count in range(1, len(parts) + 1))

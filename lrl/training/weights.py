"""Initial weights of a run (``init_from``, which is not a resume), and sharded weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lrl.evaluation.checkpoint import last_checkpoint
from lrl.functional.distributed import is_sharded_checkpoint, read_checkpoint, shard
from lrl.models.sharding import shard_language_model
from lrl.models.value_head import VALUE_HEAD_FILE, VALUE_HEAD_FOLDER
from lrl.policies.policy import Policy
from lrl.shipped import resolve

_PREFIX = "policy."


def initial_weights(source: str) -> dict[str, Tensor]:
    """Tensors by name from a checkpoint of ours, a run directory, a folder of safetensors, or the hub.

    A value head that ``lrl merge`` wrote may also be named alone, by its file.

    Raises:
        ValueError: there is nothing of that kind.
    """
    path = locate(source)
    if path.name == VALUE_HEAD_FILE and path.is_file():
        return _of_file(path)
    if path.is_file() or is_sharded_checkpoint(path):
        return _checkpoint(path, source)
    return _safetensors(path, source)


def locate(source: str) -> Path:
    """Return the checkpoint, or the folder of safetensors, that ``init_from`` names.

    Raises:
        ValueError: there is nothing of that kind.
    """
    path = last_checkpoint(Path(resolve(source)))
    return path if path.exists() else _snapshot(source)


def _checkpoint(path: Path, source: str) -> dict[str, Tensor]:
    try:
        state = read_checkpoint(path)["state_dict"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model.init_from is {source!r}, which is no checkpoint of lrl.") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}


def _snapshot(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub's own, the network's, and that it is no hub name
        raise ValueError(
            f"model.init_from is {source!r}; there is no such file or folder, and the hub did not give it either."
        ) from error


def _safetensors(folder: Path, source: str) -> dict[str, Tensor]:
    files = [*sorted(folder.glob("*.safetensors")), *folder.glob(f"{VALUE_HEAD_FOLDER}/{VALUE_HEAD_FILE}")]
    if not files:
        raise ValueError(f"model.init_from is {source!r}; the folder holds no *.safetensors and no checkpoint.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _of_file(file)
    return tensors


def _of_file(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by their names in a policy."""
    from safetensors.torch import load_file

    prefix = "value_head." if file.name == VALUE_HEAD_FILE else "language_model.model."
    return {f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}


def canonical(name: str) -> str:
    """Return a name without the marks that adapters leave on it."""
    for mark in ("base_model.model.", "base_layer.", "modules_to_save.", "default."):
        name = name.replace(mark, "")
    return name


def own_weights(policy: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return name and tensor of what ``init_from`` may replace, by canonical name.

    Of a layer that is trained whole beside adapters that is the trained copy, not the original.
    """
    return {
        canonical(name): (name, tensor)
        for name, tensor in policy.state_dict(keep_vars=True).items()
        if ".reference." not in name and ".original_module." not in name
    }


def take_weights(policy: nn.Module, weights: dict[str, Tensor], source: str, partial: bool = False) -> set[str]:
    """Copy ``weights`` into ``policy`` by name, adapters or not.

    Args:
        policy: configured.
        weights: what ``init_from`` gave.
        source: its name.
        partial: whether some of the base and no adapters may be given, as after merging.

    Returns:
        The names of frozen weights that were overwritten: they can no longer be had by the name of the base.

    Raises:
        ValueError: a tensor fits nothing or has another shape, or only some of the adapters or of the base are given.
    """
    own = own_weights(policy)
    unknown = [name for name in weights if canonical(name) not in own]
    if unknown or not weights:
        held = unknown[:3] or "no weights"
        raise ValueError(f"model.init_from is {source!r}; it holds {held}, which this policy lacks.")
    taken = {own[canonical(name)][0]: tensor for name, tensor in weights.items()}
    targets = dict(own.values())
    if not partial:
        _check_complete(policy, {name: targets[name] for name in taken}, source)
    with torch.no_grad():
        for name, tensor in taken.items():
            if targets[name].shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(targets[name].shape)}"
                raise ValueError(f"model.init_from is {source!r}; its {name} is {shapes}.")
            targets[name].copy_(tensor)
    return {name for name in taken if isinstance(targets[name], nn.Parameter) and not targets[name].requires_grad}


def _check_complete(policy: nn.Module, given: Mapping[str, Tensor], source: str) -> None:
    """Raise if only some of the trained weights, or only some of the frozen ones, are given.

    With adapters, some weights of the base may be given: those that an earlier ``init_from`` replaced. A critic or head
    that the earlier run did not have starts from its initial weights, and so does all else where a value head is given
    alone.
    """
    covered = {id(tensor) for tensor in given.values()}
    kinds = {tensor.requires_grad for tensor in given.values() if isinstance(tensor, nn.Parameter)}
    if any(".lora_" in name for name in given):
        kinds.discard(False)
    parts = {name.split(".")[0] for name in given}
    afresh = {"value_head", "critic", "layers", "head"} - parts
    if parts == {"value_head"}:
        afresh.add("language_model")
    missing = [
        name
        for name, parameter in policy.named_parameters()
        if id(parameter) not in covered
        and parameter.requires_grad in kinds
        and ".reference." not in name
        and ".original_module." not in name
        and name.split(".")[0] not in afresh
        and ".critic." not in name  # the critic's adapter
    ]
    if any(name.startswith("layers.") for name in given):  # a head rests on the statistics of what it reads
        missing += [name for name, _ in policy.named_buffers() if name.startswith("whitening.") and name not in given]
    if missing:
        raise ValueError(f"model.init_from is {source!r}; it lacks {missing[:3]}, which this policy has.")


def shard_weights(policy: Policy, mesh: DeviceMesh) -> None:
    """Spread language models and value heads over ranks, under ``ModelParallelStrategy``.

    Raises:
        ValueError: tensors should be cut as well, or something that is trained would stay whole.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size is {mesh['tensor_parallel'].size()}; it must be 1, and "
            "data_parallel_size the number of devices."
        )
    if policy.trunk is not None:
        shard_language_model(policy.trunk.language_model, mesh["data_parallel"])
        if policy.trunk.value_head is not None:
            shard(policy.trunk.value_head, mesh["data_parallel"])
    if any(weight.requires_grad and not isinstance(weight, DTensor) for weight in policy.parameters()):
        raise ValueError(f"trainer.strategy shards, which {type(policy).__name__} cannot be; it must be ddp.")

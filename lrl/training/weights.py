"""Initial weights of a run (``init_from``, which is not a resume), and sharded weights."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lrl.evaluation.load import last_checkpoint
from lrl.files import resolve
from lrl.functional.distributed import is_sharded_checkpoint, read_checkpoint, shard
from lrl.lm.heads import VALUE_HEAD_FILE, VALUE_HEAD_FOLDER
from lrl.lm.model import LanguageModel
from lrl.policies.policy import Policy

# Shard a language model over ranks.


def shard_language_model(language_model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard the weights, and those of a copied reference, over the ranks of ``mesh`` (FSDP2).

    Raises:
        ValueError: the weights are quantised, whose 4-bit blocks cannot be split, or the critic has an adapter: the
            gradients of a block are reduced once, and actor and critic both pass through it.
    """
    if language_model.has_critic_adapter:
        raise ValueError("value_head.adapter is true, which FSDP2 cannot shard; it must be false, or the strategy ddp.")
    if language_model.config.quantization is not None:
        raise ValueError(
            f"language_model.quantization is {language_model.config.quantization!r}, which FSDP2 cannot shard; "
            "it must be null, or trainer.strategy ddp."
        )
    if language_model.lower is not None:  # ranks would gather the weights of the lower layers at different times
        logging.getLogger("lrl").warning(
            "lora.last_layers is set and the weights are sharded (FSDP2); the layers below are computed in every pass, "
            "their states are not kept."
        )
        language_model.lower = None
    language_model.chunks = False  # the head's weights are gathered in the model's own passes only
    for model in (language_model.model, *language_model.copied_reference):
        shard(model, mesh)


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


# Start from adapters of another shape (``init_from``): they are merged into the weights that they were trained on.

_A, _B = ".lora_A.weight", ".lora_B.weight"


class Notes(NamedTuple):
    """Holds what is known about adapters besides their weights."""

    alpha: float | None = None
    """``B A`` is scaled by alpha / rank, where ranks may differ (``lora.rank_pattern``)."""
    scale: float | None = None
    """Factor of all ``B A``, from checkpoints that do not have alpha."""
    fingerprint: str | None = None
    """Fingerprint of the base that they were trained on."""
    root: bool = False
    """Whether alpha is divided by the square root of the rank instead (rsLoRA)."""

    def scale_of(self, rank: int) -> float | None:
        """Return the factor of ``B A`` for an adapter of this rank; None if it was not saved."""
        if self.alpha is None:
            return self.scale
        return self.alpha / (math.sqrt(rank) if self.root else rank)


def start_from(policy: Policy, source: str) -> set[str]:
    """Copy the weights that ``init_from`` names into a policy, merging adapters of another shape into the base.

    Returns:
        The names of frozen weights that were overwritten: they can no longer be had by the name of the base.

    Raises:
        ValueError: there are none, or they do not fit.
    """
    weights, merged = merge_adapters(policy, initial_weights(source), source)
    taken = take_weights(policy, weights, source, partial=merged)
    logging.getLogger("lrl").info("started from %d tensors of %s", len(weights), source)
    return taken


def lora_alpha(policy: Policy) -> float | None:
    """Return alpha of a policy's adapters; None without."""
    lora = policy.trunk and policy.trunk.language_model.config.lora
    return lora and float(lora.alpha)


def merge_adapters(policy: Policy, weights: dict[str, Tensor], source: str) -> tuple[dict[str, Tensor], bool]:
    """Merge adapters that do not fit the policy's into the base.

    Args:
        policy: configured.
        weights: what ``init_from`` gave.
        source: its name.

    Returns:
        The weights with the policy's own base in place of adapters, plus what they add, and true; or ``weights`` and
        false where there are none, or none but such as the policy has.

    Raises:
        ValueError: they cannot be merged.
    """
    given = {canonical(name): tensor for name, tensor in weights.items()}
    layers = [name.removesuffix(_A) for name in given if name.endswith(_A)]
    own = own_weights(policy)
    if not layers:
        return weights, False
    notes = _notes(source)
    same_shape = {_shape(name, tensor) for name, tensor in given.items() if _is_adapter(name)} == {
        _shape(name, tensor) for name, (_, tensor) in own.items() if _is_adapter(name)
    }
    ranks = {given[layer + _A].shape[0] for layer in layers}
    alpha = lora_alpha(policy)
    if same_shape and all(notes.scale_of(rank) in (None, alpha and alpha / rank) for rank in ranks):
        return weights, False
    _check_mergeable(policy, notes, source)
    kept = {name: tensor for name, tensor in weights.items() if not _is_adapter(canonical(name))}
    by_name = {canonical(name): name for name in kept}
    for layer in layers:
        name, base = own.get(f"{layer}.weight", (None, None))
        if name is None or base is None or sum(tensor is base for _, tensor in own.values()) > 1:
            reason = "which this policy lacks" if name is None else "whose weights are tied in this policy"
            raise ValueError(f"model.init_from is {source!r}; it has an adapter on {layer!r}, {reason}.")
        start = kept.pop(by_name[f"{layer}.weight"]) if f"{layer}.weight" in by_name else base.detach()
        scale = notes.scale_of(given[layer + _A].shape[0])
        assert scale is not None
        added = scale * (given[layer + _B].double().cpu() @ given[layer + _A].double().cpu())
        if type(policy.get_submodule(name.removesuffix(".weight"))).__name__ == "Conv1D":  # keeps its weight transposed
            added = added.T
        kept[name] = (start.double().cpu() + added).to(base.dtype)
    rank = " and ".join(str(rank) for rank in sorted(ranks))
    message = "merged the adapter of rank %s in %s into %d layers of the base, beneath the one that is trained now"
    logging.getLogger("lrl").info(message, rank, source, len(layers))
    if notes.fingerprint not in (None, policy.fingerprint):
        logging.getLogger("lrl").warning("%s was trained on another base, or on one of another data type", source)
    return kept, True


def _is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def _shape(name: str, tensor: Tensor) -> tuple[str, torch.Size]:
    return name, tensor.shape


def _check_mergeable(policy: Policy, notes: Notes, source: str) -> None:
    """Raise if adapters cannot be merged."""
    quantization = policy.trunk and policy.trunk.language_model.config.quantization
    if quantization is not None:
        raise ValueError(
            f"model.init_from is {source!r}, whose adapter has another shape and would be merged into the base; "
            f"language_model.quantization is {quantization!r}, it must be null, or lora the same."
        )
    if notes.alpha is None and notes.scale is None:
        raise ValueError(
            f"model.init_from is {source!r}, whose adapter has another shape; it does not say its alpha, give the run "
            "directory or the exported folder."
        )


def _notes(source: str) -> Notes:
    """Read the notes on adapters from a checkpoint, or from the configuration next to exported weights."""
    path = locate(source)
    if (path / "adapter_config.json").is_file():
        return _exported_notes(path, source)
    if path.is_dir() and not (path / ".metadata").exists():
        return Notes()
    saved = read_checkpoint(path, weights=False).get("lrl", {})
    alpha, scale = saved.get("lora_alpha"), saved.get("lora_scale")
    if alpha is None and scale is None and saved.get("config"):  # written before both were
        config: Any = yaml.safe_load(saved["config"])
        policy = config["model"]["init_args"]["policy"]["init_args"]
        lora = (policy.get("language_model") or {}).get("lora")
        alpha = lora["alpha"] if lora else None
    return Notes(alpha, scale, saved.get("fingerprint"))


def _exported_notes(folder: Path, source: str) -> Notes:
    config: Mapping[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    for key in ("use_dora", "alpha_pattern"):
        if config.get(key):
            raise ValueError(
                f"model.init_from is {source!r}, whose adapter_config.json has {key}: {config[key]}; only plain LoRA "
                "can be merged."
            )
    return Notes(config["lora_alpha"], root=bool(config.get("use_rslora")))

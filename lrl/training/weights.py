"""Initial weights of a run (``init_from``), adapters that are merged into them, and sharding (FSDP2).

``init_from`` starts a new run from the weights alone; it does not resume the run that wrote them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lrl.evaluation.load import last_checkpoint
from lrl.files import resolve
from lrl.functional.distributed import is_sharded_checkpoint, read_checkpoint, shard
from lrl.lm.heads import VALUE_HEAD_FILE, VALUE_HEAD_FOLDER
from lrl.policies.policy import Policy


def initial_weights(source: str) -> dict[str, Tensor]:
    """Read tensors by name from a checkpoint of lrl, a run directory, a folder of safetensors, or the hub.

    ``source`` may also be the file of a value head that ``lrl merge`` wrote.

    Raises:
        ValueError: If ``source`` is none of these.
    """
    from safetensors.torch import load_file

    path = locate(source)
    if path.name != VALUE_HEAD_FILE and (path.is_file() or is_sharded_checkpoint(path)):
        try:
            state = read_checkpoint(path)["state_dict"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"model.init_from is {source!r}, which is not a checkpoint of lrl.") from error
        return {name.removeprefix("policy."): tensor for name, tensor in state.items()}
    value_heads = [path] if path.is_file() else [*path.glob(f"{VALUE_HEAD_FOLDER}/{VALUE_HEAD_FILE}")]
    files = [*sorted(path.glob("*.safetensors")), *value_heads]
    if not files:
        raise ValueError(f"model.init_from is {source!r}; the folder contains no *.safetensors and no checkpoint.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        prefix = "value_head." if file.name == VALUE_HEAD_FILE else "language_model.model."
        tensors |= {f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}
    return tensors


def locate(source: str) -> Path:
    """Return the checkpoint or the folder of safetensors that ``init_from`` names.

    Raises:
        ValueError: If there is neither, and the hub has no such repository.
    """
    from huggingface_hub import snapshot_download

    path = last_checkpoint(Path(resolve(source)))
    if path.exists():
        return path
    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # errors of the hub, of the network, and for malformed names
        raise ValueError(
            f"model.init_from is {source!r}, which is no file or folder and could not be downloaded from the hub; it "
            "must be a run directory, a checkpoint, the folder of a model, or its name on the hub."
        ) from error


def canonical(name: str) -> str:
    """Return the name of a weight without the parts that peft adds."""
    for mark in ("base_model.model.", "base_layer.", "modules_to_save.", "default."):
        name = name.replace(mark, "")
    return name


def own_weights(policy: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return name and tensor of each weight that ``init_from`` may replace, by canonical name.

    For a layer that is trained in full beside adapters, this is the trained copy, not the original.
    """
    return {
        canonical(name): (name, tensor)
        for name, tensor in policy.state_dict(keep_vars=True).items()
        if ".reference." not in name and ".original_module." not in name
    }


def take_weights(policy: nn.Module, weights: dict[str, Tensor], source: str, partial: bool = False) -> set[str]:
    """Copy ``weights`` into ``policy`` by name; the parts of names that peft adds are ignored.

    Args:
        policy: configured policy.
        weights: tensors of ``init_from``, by name.
        source: value of ``init_from``, for error messages.
        partial: whether ``weights`` may contain some weights of the base and no adapters, as after merging.

    Returns:
        The names of frozen weights that were overwritten, and so differ from the base model.

    Raises:
        ValueError: If a tensor has an unknown name or another shape, or some adapters or some weights of the base are
            missing.
    """
    own = own_weights(policy)
    unknown = [name for name in weights if canonical(name) not in own]
    if unknown or not weights:
        reason = f"contains {unknown[:3]}, which this policy lacks" if unknown else "contains no weights"
        raise ValueError(f"model.init_from is {source!r}; it {reason}.")
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

    If adapters are given, some weights of the base may be given as well: those that an earlier ``init_from`` replaced.
    A critic or head of which no weight is given keeps its initial weights. If only a value head is given, all other
    weights are kept.
    """
    covered = {id(tensor) for tensor in given.values()}
    kinds = {tensor.requires_grad for tensor in given.values() if isinstance(tensor, nn.Parameter)}
    if any(".lora_" in name for name in given):
        kinds.discard(False)
    parts = {name.split(".")[0] for name in given}
    optional = {"value_head", "critic", "layers", "head"} - parts
    if parts == {"value_head"}:
        optional.add("language_model")
    missing = [
        name
        for name, parameter in policy.named_parameters()
        if id(parameter) not in covered
        and parameter.requires_grad in kinds
        and ".reference." not in name
        and ".original_module." not in name
        and name.split(".")[0] not in optional
        and ".critic." not in name  # the critic's adapter
    ]
    if any(name.startswith("layers.") for name in given):  # a head needs the statistics of its inputs
        missing += [name for name, _ in policy.named_buffers() if name.startswith("whitening.") and name not in given]
    if missing:
        raise ValueError(f"model.init_from is {source!r}; it lacks {missing[:3]}, which this policy has.")


def shard_weights(policy: Policy, mesh: Mapping[str, Any]) -> None:
    """Shard the weights of a policy, and those of a copied reference, over ranks (FSDP2).

    Args:
        policy: configured policy.
        mesh: device meshes ``data_parallel`` and ``tensor_parallel`` of ``ModelParallelStrategy``.

    Raises:
        ValueError: If tensor parallelism is configured, or a weight cannot be sharded, such as a quantised one.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size is {mesh['tensor_parallel'].size()}; it must be 1, and "
            "data_parallel_size the number of devices."
        )
    if policy.trunk is not None:
        language_model = policy.trunk.language_model
        if language_model.has_critic_adapter:
            raise ValueError(
                "value_head.adapter is true, which makes two forward passes before each backward pass; FSDP2 frees the "
                "weights between them, so it must be false, or trainer.strategy must be ddp."
            )
        if language_model.config.quantization is not None:
            raise ValueError(
                f"language_model.quantization is {language_model.config.quantization}, whose packed weights FSDP2 "
                "cannot divide among ranks; it must be null, or trainer.strategy must be ddp."
            )
        if language_model.lower is not None:  # otherwise ranks gather the lower layers' weights at different times
            logging.getLogger("lrl").warning(
                "lora.last_layers is set and the weights are sharded (FSDP2); the states of the layers below are "
                "computed in every pass and not cached."
            )
            language_model.lower = None
        language_model.chunks = False  # FSDP2 gathers the head's weights only in passes of the whole model
        for model in (language_model.model, *language_model.copied_reference, policy.trunk.value_head):
            if model is not None:
                shard(model, mesh["data_parallel"])
    if any(weight.requires_grad and not isinstance(weight, DTensor) for weight in policy.parameters()):
        raise ValueError(
            f"trainer.strategy shards the weights (FSDP2), but a {type(policy).__name__} has weights that cannot be "
            "sharded; it must be ddp."
        )


# Adapters of another shape than the policy's, which are merged into the base weights.

_A, _B = ".lora_A.weight", ".lora_B.weight"


def start_from(policy: Policy, source: str) -> set[str]:
    """Copy the weights that ``init_from`` names into a policy, merging adapters of another shape into the base.

    Returns:
        The names of frozen weights that were overwritten, and so differ from the base model.

    Raises:
        ValueError: If there are no such weights, or they do not fit the policy.
    """
    weights, merged = merge_adapters(policy, initial_weights(source), source)
    taken = take_weights(policy, weights, source, partial=merged)
    logging.getLogger("lrl").info("started from %d tensors of %s", len(weights), source)
    return taken


def lora_alpha(policy: Policy) -> float | None:
    """Return alpha of a policy's adapters; None if it has none."""
    lora = policy.trunk and policy.trunk.language_model.config.lora
    return lora and float(lora.alpha)


def merge_adapters(policy: Policy, weights: dict[str, Tensor], source: str) -> tuple[dict[str, Tensor], bool]:
    """Merge adapters into the base if the policy's own adapters have another shape or scale.

    Args:
        policy: configured policy.
        weights: tensors of ``init_from``, by name.
        source: value of ``init_from``.

    Returns:
        The weights with merged base weights in place of adapters, and true; or ``weights`` unchanged and false, if
        there are no adapters or they fit those of the policy.

    Raises:
        ValueError: If the adapters cannot be merged.
    """
    given = {canonical(name): tensor for name, tensor in weights.items()}
    layers = [name.removesuffix(_A) for name in given if name.endswith(_A)]
    own = own_weights(policy)
    if not layers:
        return weights, False
    alpha, fingerprint = _adapter_settings(source)
    given_shapes = {name: tensor.shape for name, tensor in given.items() if name.endswith((_A, _B))}
    own_shapes = {name: tensor.shape for name, (_, tensor) in own.items() if name.endswith((_A, _B))}
    if given_shapes == own_shapes and alpha in (None, lora_alpha(policy)):
        return weights, False
    quantization = policy.trunk and policy.trunk.language_model.config.quantization
    if quantization is not None:
        raise ValueError(
            f"model.init_from is {source!r}, whose adapter has another shape and must be merged into the base; "
            f"language_model.quantization is {quantization!r}, it must be null, or lora must be the same."
        )
    if alpha is None:
        raise ValueError(
            f"model.init_from is {source!r}, whose adapter has another shape and an unknown alpha; it must be a run "
            "directory or an exported folder."
        )
    kept = {name: tensor for name, tensor in weights.items() if not canonical(name).endswith((_A, _B))}
    by_name = {canonical(name): name for name in kept}
    # W + alpha / rank * B A, computed in double precision; W is the given base weight if there is one.
    for layer in layers:
        name, base = own.get(f"{layer}.weight", (None, None))
        if name is None or base is None or sum(tensor is base for _, tensor in own.values()) > 1:
            reason = "which this policy lacks" if name is None else "whose weights are tied in this policy"
            raise ValueError(f"model.init_from is {source!r}; it has an adapter on {layer!r}, {reason}.")
        start = kept.pop(by_name[f"{layer}.weight"]) if f"{layer}.weight" in by_name else base.detach()
        scale = alpha / len(given[layer + _A])  # ranks may differ between layers
        added = scale * (given[layer + _B].double().cpu() @ given[layer + _A].double().cpu())
        if type(policy.get_submodule(name.removesuffix(".weight"))).__name__ == "Conv1D":  # keeps its weight transposed
            added = added.T
        kept[name] = (start.double().cpu() + added).to(base.dtype)
    rank = " and ".join(map(str, sorted({len(given[layer + _A]) for layer in layers})))
    message = "merged the adapter of rank %s in %s into %d layers of the base model; the policy's own adapter is new"
    logging.getLogger("lrl").info(message, rank, source, len(layers))
    if fingerprint not in (None, policy.fingerprint):
        logging.getLogger("lrl").warning("%s was trained on another base model, or with another data type", source)
    return kept, True


def _adapter_settings(source: str) -> tuple[float | None, str | None]:
    """Read alpha of adapters, which scales ``B A`` by alpha / rank, and the fingerprint of their base model, if known.

    They are read from a checkpoint, or from the configuration next to exported weights.
    """
    path = locate(source)
    if (path / "adapter_config.json").is_file():
        config: Mapping[str, Any] = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        for key in ("use_dora", "use_rslora", "alpha_pattern"):
            if config.get(key):
                raise ValueError(
                    f"model.init_from is {source!r}, whose adapter_config.json has {key}: {config[key]}; only plain "
                    "LoRA can be merged."
                )
        return float(config["lora_alpha"]), None
    if path.is_dir() and not is_sharded_checkpoint(path):
        return None, None
    saved = read_checkpoint(path, weights=False).get("lrl", {})
    return saved.get("lora_alpha"), saved.get("fingerprint")

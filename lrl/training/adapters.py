"""Start from adapters of another shape (``init_from``): they are merged into the weights that they were trained on."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from lrl.functional.distributed import read_checkpoint
from lrl.policies.policy import Policy
from lrl.training.weights import canonical, initial_weights, locate, own_weights, take_weights

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

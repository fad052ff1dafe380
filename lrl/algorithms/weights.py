"""Starting a run from the weights of another: ``init_from``, which is not a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_PREFIX = "policy."


def initial_weights(source: str) -> dict[str, Tensor]:
    """Tensors by name from a checkpoint of ours, a run directory, a folder of safetensors, or the hub.

    Raises:
        ValueError: there is nothing of that kind.
    """
    path = Path(source)
    if (path / "checkpoints" / "last.ckpt").exists():
        path = path / "checkpoints" / "last.ckpt"
    if path.is_file():
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state = checkpoint.get("state_dict", {})
        return {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
    folder = path if path.is_dir() else _snapshot(source)
    return _safetensors(folder, source)


def _snapshot(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        raise ValueError(
            f"model.init_from is {source!r}; there is no such file or folder, and the hub did not give it either."
        ) from error


def _safetensors(folder: Path, source: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.init_from is {source!r}; the folder holds no *.safetensors and no checkpoint.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return {f"language_model.model.{name}": tensor for name, tensor in tensors.items()}


def _canonical(name: str) -> str:
    """A name without the marks that adapters leave on it."""
    for mark in ("base_model.model.", "base_layer.", "default."):
        name = name.replace(mark, "")
    return name


def match_trainable(policy: nn.Module, weights: dict[str, Tensor], source: str) -> int:
    """Copy ``weights`` into ``policy`` by name, adapters or not; returns how many tensors fitted.

    Raises:
        ValueError: a tensor fits nothing, has another shape, or none is given.
    """
    own: dict[str, Any] = {_canonical(name): p for name, p in policy.state_dict(keep_vars=True).items()
                           if ".reference." not in name}
    unknown = [name for name in weights if _canonical(name) not in own]
    if unknown or not weights:
        held = unknown[:3] or "no weights"
        raise ValueError(f"model.init_from is {source!r}; it holds {held}, which this policy lacks.")
    with torch.no_grad():
        for name, tensor in weights.items():
            target = own[_canonical(name)]
            if target.shape != tensor.shape:
                raise ValueError(
                    f"model.init_from is {source!r}; its {name} is {tuple(tensor.shape)}, not {tuple(target.shape)}."
                )
            target.copy_(tensor)
    return len(weights)

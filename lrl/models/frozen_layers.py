"""Which layers are trained, and what the layers below them depend on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lrl.models.attention import bare
from lrl.models.lora import decoder_layers


def lower_parameters(model: Any, depth: int) -> Iterator[nn.Parameter]:
    """Yield the weights that the states depend on: all but those of later layers and of what follows the layers."""
    name, layers = decoder_layers(model)
    words = bare(model).get_input_embeddings()
    yield from words.parameters()
    after = {id(weight) for layer in layers[depth:] for weight in layer.parameters()}
    after |= {id(weight) for weight in words.parameters()}
    parent = bare(model).get_submodule(name.rpartition(".")[0])
    siblings = dict(parent.named_children())
    last = list(siblings).index(name.rpartition(".")[2])
    for part in list(siblings.values())[: last + 1]:
        yield from (weight for weight in part.parameters() if id(weight) not in after)


def has_dropout(model: Any, depth: int) -> bool:
    """Return whether anything below, or around the layers, applies dropout in training mode."""
    _, layers = decoder_layers(model)
    above = {id(part) for layer in layers[depth:] for part in layer.modules()}
    for part in bare(model).base_model.modules():
        rates = {value for name, value in vars(part).items() if "dropout" in name and isinstance(value, float)}
        rates |= {part.p} if isinstance(part, nn.Dropout) else set()
        if id(part) not in above and any(rate > 0 for rate in rates):
            return True
    return False


def frozen_depth(model: Any) -> int:
    """Return the number of layers below the lowest one that is trained; 0 if what they read is trained as well."""
    depth = min(trained_layers(model), default=0)
    return 0 if any(weight.requires_grad for weight in lower_parameters(model, depth)) else depth


def trained_layers(model: Any) -> list[int]:
    """Return the indices of the layers that are trained."""
    _, layers = decoder_layers(model)
    return [index for index, layer in enumerate(layers) if any(part.requires_grad for part in layer.parameters())]

"""Fewer and larger kernels for a causal LM: joined matrix products, and parts that PyTorch compiles."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lrl.lm.attention import bare
from lrl.lm.forward import replaced_forward

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers of a module that have the same input."""


@contextmanager
def fused_parts(model: nn.Module, compiled: bool) -> Iterator[None]:
    """Inside a ``with`` block, let fewer and larger kernels compute a model.

    Linear layers with the same input are computed by one matrix product, see :func:`join_weights`. Norms and rotary
    embeddings, which otherwise take up to ten kernels each, are compiled.

    Args:
        model: a causal LM, which peft may have wrapped.
        compiled: whether to compile.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # deprecations inside of PyTorch's compiler
        warnings.filterwarnings("always", message=".*CUDA Graph is empty")
        for layers in layers_with_equal_input(model):
            for layer, forward in zip(layers, joined_forwards(layers), strict=True):
                stack.enter_context(replaced_forward(layer, forward))
        for part in bare(model).modules() if compiled else ():
            if type(part).__name__.endswith("RMSNorm"):
                stack.enter_context(replaced_forward(part, torch.compile(part.forward)))
        names = vars(sys.modules[type(bare(model)).__module__])
        if compiled and (rotate := names.get("apply_rotary_pos_emb")) is not None:
            names["apply_rotary_pos_emb"] = torch.compile(rotate)
            stack.callback(names.__setitem__, "apply_rotary_pos_emb", rotate)
        yield


def layers_with_equal_input(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield groups of linear layers with the same input, as :func:`join_weights` expects them."""
    for part in bare(model).modules():
        for names in _TOGETHER:
            layers = [getattr(part, name, None) for name in names]
            layers = [getattr(layer, "base_layer", layer) for layer in layers]  # inside peft's layer
            if all(type(layer) is nn.Linear for layer in layers):
                found: list[Any] = layers
                if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in found}) == 1:
                    yield found


@torch.inference_mode(False)  # weights that are replaced inside inference mode could not be trained afterwards
@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Make the weights of linear layers with the same input parts of one tensor, so that one matrix product is enough.

    The weights stay parameters with the same values, and an optimiser that changes them changes the tensor. Nothing
    happens to weights that are joined already.

    Args:
        model: a causal LM, which peft may have wrapped.
    """
    for layers in layers_with_equal_input(model):
        weights: list[Any] = [layer.weight for layer in layers]
        biases: list[Any] = [layer.bias for layer in layers]
        for parts in (weights, biases):
            if parts[0] is not None and not _are_joined(parts):
                whole = torch.cat([part.data for part in parts])
                for part, data in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                    part.data = data


def _are_joined(parts: list[Tensor]) -> bool:
    """Return whether tensors follow each other in the same memory."""
    if len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return False
    return all(after.data_ptr() == part.data_ptr() + part.nbytes for part, after in itertools.pairwise(parts))


def joined_forwards(layers: list[nn.Linear]) -> list[Callable[[Tensor], Tensor]]:
    """Return forward passes of layers with joined weights: the first one that is called computes the outputs of all."""
    sizes = [layer.out_features for layer in layers]
    weight, bias = layers[0].weight.detach(), layers[0].bias
    weight = weight.as_strided((sum(sizes), weight.shape[1]), weight.stride())
    bias = None if bias is None else bias.detach().as_strided((sum(sizes),), (1,))
    computed: list[tuple[Tensor, Sequence[Tensor]]] = []
    """The last input and its outputs; another input is computed anew."""

    def forward(states: Tensor, number: int) -> Tensor:
        """Return the output of layer ``number``."""
        if not computed or computed[0][0] is not states:
            computed[:] = [(states, functional.linear(states, weight, bias).split(sizes, dim=-1))]
        return computed[0][1][number]

    return [partial(forward, number=number) for number in range(len(layers))]

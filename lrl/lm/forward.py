"""Forward passes of a causal LM over a layout, the estimate of their memory, and checks at the start of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from lrl.lm.adapters import decoder_layers
from lrl.lm.attention import agrees, bare, compute_dtype, in_float32, is_exact, is_halved, is_sound, kernel_of
from lrl.lm.layouts import Layout, Lower, Turns, lay_out, pack, sorted_paths, widest_row


@contextmanager
def skipped(layers: Any, output: Tensor | None = None) -> Iterator[None]:
    """Inside a ``with`` block, make layers return their input without computing anything.

    Args:
        layers: decoder layers.
        output: tensor ``(row, column, hidden)`` that the last of them returns instead; None returns its input.
    """
    chosen: Sequence[Any] = list(layers)
    with ExitStack() as stack:
        for number, layer in enumerate(chosen):
            given = output if number == len(chosen) - 1 else None
            kept = lambda states, *_, given=given, **__: states if given is None else given  # noqa: E731
            stack.enter_context(replaced_forward(layer, kept))
        yield


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the ``forward`` of a module inside a ``with`` block."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def logits_of(model: Any, layout: Layout, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the logits ``(turn, token, vocabulary)`` that predict each response token; see :func:`run_layout`."""
    return run_layout(model, layout, dtype=dtype)[0]


def run_layout(
    model: Any, layout: Layout, *, logits: bool = True, dtype: torch.dtype | None = None, of_cells: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the logits that predict each response token, and the hidden states from which they are computed.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        layout: the position of each turn's tokens.
        logits: False computes no logits, but returns placeholders of size 1.
        dtype: dtype of the attention mask; None takes that of the computation.
        of_cells: whether to return the logits of ``layout.cells``, ``(cell, vocabulary)``, without repeating those that
            several tokens have in common.

    Returns:
        Logits ``(turn, token, vocabulary)`` and hidden states ``(turn, token, hidden)``.
    """
    given = {
        "input_ids": layout.input_ids,
        "attention_mask": layout.attention_mask(compute_dtype(model) if dtype is None else dtype),
        "position_ids": layout.position_ids,
        "use_cache": False,
    }
    with ExitStack() as stack:
        stack.enter_context(started_above(model, layout.lower))
        states = stack.enter_context(head_inputs(model, layout.cells))
        if not logits:
            stack.enter_context(replaced_forward(model.get_output_embeddings(), lambda states: states[..., :1]))
        found = model(**accepted(model, given)).logits
    return found[0] if of_cells else found[0, layout.kept], states[0][0, layout.kept]


@contextmanager
def head_inputs(model: Any, cells: Tensor | None = None, last_only: bool = False) -> Iterator[list[Tensor]]:
    """Collect the inputs of the output embeddings in each forward pass: hidden states ``(row, column, hidden)``.

    The states are made contiguous before logits are computed from them. For a view, such as the last columns of several
    rows, PyTorch would compute the product row by row, with a copy of the weights for each row.

    Args:
        model: a Hugging Face causal LM.
        cells: flat indices of the positions whose states and logits are computed, int64 ``(cell,)``; the result then
            has a single row. None selects all positions.
        last_only: whether only the logits of the last column are computed, for callers that need states only.
    """
    collected: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Store the inputs of the head, and return those that it computes logits from."""
        states = args[0] if cells is None else args[0].flatten(0, 1)[cells][None]
        collected.append(states)
        return ((states[:, -1:] if last_only else states).contiguous(),)

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield collected
    finally:
        handle.remove()


@contextmanager
def without_gradient(module: nn.Module) -> Iterator[None]:
    """Disable gradients and dropout inside a ``with`` block, and restore the mode of each submodule afterwards.

    It is used for every forward pass whose result is training data: samples, old or reference log-probabilities, values
    and statistics.

    Args:
        module: a policy or a model.
    """
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def started_above(model: Any, lower: Lower | None) -> Iterator[None]:
    """Inside a ``with`` block, make forward passes start from given hidden states instead of computing lower layers.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        lower: the hidden states, for a forward pass with their shape; None changes nothing.
    """
    if lower is None:
        yield
        return
    with skipped(decoder_layers(model)[1][: lower.depth], lower.states):
        yield


_PACKED_BYTES = 2**30
"""Largest size of the weights of a model that are packed; further layers use theirs as they are."""
_packed: WeakKeyDictionary[nn.Module, tuple[tuple[int, int, bool], Tensor]] = WeakKeyDictionary()
"""Address and version of the weights of a layer, whether they have an adapter, and their packed copy."""


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Inside a ``with`` block without gradients, let linear layers use packed copies of their weights.

    Packed weights have the memory layout of the kernel. In bfloat16 on a CPU, PyTorch otherwise converts weights to it
    in every call, which takes a quarter of the time of a decoding step. Results are the same up to rounding. Other data
    types, other devices and autocast are not affected, nor are trained weights and those into which peft has merged an
    adapter: fused optimisers and peft change them without a new version, so that a copy would be outdated.

    Args:
        model: the model; the copies are kept until its weights change.
    """
    size = 0
    merged: dict[Any, bool] = {}
    """Layers with an adapter, and whether it is merged."""
    with ExitStack() as stack:
        for layer in model.modules():
            if "base_layer" in layer._modules:  # peft's layer, which comes before the layer inside it
                merged[layer.base_layer] = bool(getattr(layer, "merged", False))
            if type(layer) is not nn.Linear:
                continue
            if layer.weight.requires_grad or merged.get(layer):
                if _packed:  # looking up a weak key takes longer than the rest of the loop
                    _packed.pop(layer, None)
            elif _can_pack(layer.weight):
                size += layer.weight.nbytes
                if size > _PACKED_BYTES:
                    break
                stack.enter_context(replaced_forward(layer, _packed_forward(layer, layer in merged)))
        yield


def _can_pack(weight: Tensor) -> bool:
    """Return whether products with a weight are computed in bfloat16 on a CPU, by a single process.

    With several processes weights may be sharded, and a gathered weight has the version and address of others.
    """
    if torch.distributed.is_initialized():
        return False
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return not torch.is_autocast_enabled("cpu") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _packed_forward(layer: nn.Linear, has_adapter: bool) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of a layer with packed weights; they are packed again if the weights have changed.

    An adapter that was removed may have been merged, which changes the weights but not their version.
    """
    version = layer.weight.data_ptr(), layer.weight._version, has_adapter
    if layer not in _packed or _packed[layer][0] != version:
        _packed[layer] = version, torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
    weight, bias = _packed[layer][1], layer.bias
    return lambda states: torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def accepted(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the model's ``forward`` accepts; models with ALiBi accept no positions."""
    names = _names(type(bare(model)))
    return {name: value for name, value in given.items() if name in names}


@lru_cache
def _names(kind: type) -> frozenset[str]:
    """Return the names of the arguments of ``forward`` of a class."""
    return frozenset(inspect.signature(kind.forward).parameters)  # pyright: ignore[reportAttributeAccessIssue]


def lower_parameters(model: Any, depth: int) -> Iterator[nn.Parameter]:
    """Yield the weights from which the output of the first ``depth`` layers is computed."""
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
    """Return whether the first ``depth`` layers, or modules outside of layers, apply dropout in training mode."""
    _, layers = decoder_layers(model)
    above = {id(part) for layer in layers[depth:] for part in layer.modules()}
    for part in bare(model).base_model.modules():
        rates = {value for name, value in vars(part).items() if "dropout" in name and isinstance(value, float)}
        rates |= {part.p} if isinstance(part, nn.Dropout) else set()
        if id(part) not in above and any(rate > 0 for rate in rates):
            return True
    return False


def frozen_depth(model: Any) -> int:
    """Return the number of layers below the lowest trained one; 0 if the embeddings are trained as well."""
    depth = min(trained_layers(model), default=0)
    return 0 if any(weight.requires_grad for weight in lower_parameters(model, depth)) else depth


def trained_layers(model: Any) -> list[int]:
    """Return the indices of the layers with trainable weights."""
    _, layers = decoder_layers(model)
    return [index for index, layer in enumerate(layers) if any(part.requires_grad for part in layer.parameters())]


# The estimate of the memory of a forward pass counts the activations of one decoder layer, the activations of all
# layers if a backward pass needs them, and logits. It is accurate within a factor of about two.

_LIMIT = 2**28
"""Limit of the memory of a forward pass on a CPU in bytes. Larger passes of a small model are slower, because the
operating system provides the memory of large tensors anew for each of them."""
_BYTES_PER_WEIGHT = 8
"""Models with more weights may use this memory per weight, because small passes read the weights too often."""


class PassMemory(NamedTuple):
    """Limit and estimate of the memory of a forward pass, in bytes."""

    limit: int
    """Maximum memory of a forward pass."""
    per_token: int
    """Memory per position, including padding."""
    per_logit_column: int
    """Additional memory per position with logits."""

    def of(self, tokens: int, columns: int) -> int:
        """Return the estimated memory of a pass with ``tokens`` positions, of which ``columns`` have logits."""
        return tokens * self.per_token + columns * self.per_logit_column


def pass_memory(model: Any, width: int, logits: bool, gradient: bool, recomputed: bool) -> PassMemory:
    """Estimate the memory of passes of a causal LM.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        width: number of tokens of the longest turn.
        logits: whether all logits of a pass are in memory at once.
        gradient: whether a backward pass follows.
        recomputed: whether layers recompute their activations in the backward pass.
    """
    config, words = bare(model).config.get_text_config(), bare(model).get_input_embeddings().weight
    hidden, vocabulary = config.hidden_size, bare(model).get_output_embeddings().weight.shape[0]
    names = "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"
    sizes = [size for name in names if (size := getattr(config, name, None))]
    inner = [
        max(size) if isinstance(size, Sequence) else size for size in sizes
    ]  # Gemma 3n has a list with one size per layer
    experts = getattr(config, "num_experts_per_tok", None) or 1
    layer = 10 * hidden + 4 * max((experts * size for size in inner), default=4 * hidden)
    if kernel_of(model) == "eager":
        layer += 3 * getattr(config, "num_attention_heads", 1) * width
    numbers = layer + 2 * width  # attention masks, some of which are boolean
    if gradient and any(weight.requires_grad for weight in model.parameters()):
        layers = config.num_hidden_layers - (frozen_depth(model) if hasattr(model, "peft_config") else 0)
        numbers += layers * (hidden if recomputed else layer)
    per_logit_column = (4 * vocabulary if logits else 3 * hidden) * 4  # log-probabilities are float32
    weights = sum(weight.numel() for weight in model.parameters())
    return PassMemory(pass_limit(words.device, weights), numbers * words.element_size(), per_logit_column)


def pass_limit(device: torch.device, weights: int = 0) -> int:
    """Return the limit of the memory of a forward pass in bytes.

    Args:
        device: the device of the pass. On a GPU, a pass may use at least a quarter of its memory.
        weights: number of weights of the model.
    """
    limit = max(_LIMIT, _BYTES_PER_WEIGHT * weights)
    return limit if device.type != "cuda" else max(limit, torch.cuda.get_device_properties(device).total_memory // 4)


def divide_turns(inputs: Mapping[str, Tensor], sizes: Tensor, memory: PassMemory, shared: bool) -> list[Tensor]:
    """Divide turns among forward passes that need at most ``memory.limit`` bytes, unless a single turn needs more.

    If all turns fit into one pass, their order is kept. Otherwise, if common prefixes are computed once per pass, turns
    are sorted lexicographically, so that turns with a common prefix are in the same pass. If they are not, turns are
    sorted from short to long.

    Args:
        inputs: ``prompt_ids`` and ``prompt_mask`` ``(turn, prompt)``, and optionally ``response_ids``
            ``(turn, token)``.
        sizes: number of tokens after the prompt of each turn, int64 ``(turn,)``.
        memory: limit and estimate of the memory of a pass.
        shared: whether a pass computes the common prefix of turns once.

    Returns:
        Indices of the turns of each pass, int64 ``(turn,)``; every turn is in exactly one pass.
    """
    whole, everything = inputs["prompt_mask"].sum(1) + sizes, torch.arange(len(sizes), device=sizes.device)
    if len(sizes) < 2 or memory.of(len(sizes) * int(whole.max()), int(sizes.sum()) + len(sizes)) <= memory.limit:
        return [everything]
    order, common = torch.argsort(whole, stable=True), torch.zeros_like(whole)
    if shared:
        response = inputs.get("response_ids", torch.zeros_like(inputs["prompt_ids"][:, :1]))
        token = torch.arange(response.shape[1], device=sizes.device)
        mask = token < sizes[:, None] if "response_ids" in inputs else torch.zeros_like(response, dtype=torch.bool)
        turns = Turns(inputs["prompt_ids"], inputs["prompt_mask"], response, mask)
        _, path_of, of_paths = sorted_paths(turns.predicting())
        order = torch.argsort(path_of, stable=True)
        path = path_of[order]
        new = functional.pad(path[1:] != path[:-1], (1, 0), value=1)
        common = torch.where(new, of_paths[path], whole[order])
    starts, tokens, columns, widest, filled, row_width = [0], 0, 0, 0, 0, widest_row(int(whole.max()))
    parts = zip(whole[order].tolist(), sizes[order].tolist(), common.tolist(), strict=True)
    for place, (length, size, known) in enumerate(parts):
        if shared and filled + length - known > row_width:  # a new row computes its prefix again
            known, filled = 0, 0
        filled += length - known
        tokens, columns, widest = tokens + length - known, columns + size + 1, max(widest, length)
        used = memory.of(tokens if shared else widest * (place - starts[-1] + 1), columns)
        if place > starts[-1] and used > memory.limit:
            starts.append(place)
            tokens, columns, widest, filled = length, size + 1, length, length
    return [everything] if len(starts) == 1 else list(order.tensor_split(starts[1:]))


_PROMPT, _RESPONSE = 4, 4
"""Numbers of tokens of the prompt and of each response in the checks below."""

Verdict = Literal["exact", "inexact", "imprecise"]
"""Result of :func:`check_sharing`. ``exact``: turns may share rows. ``inexact``: sharing rows changes the logits.
``imprecise``: sharing rows only increases the rounding errors of 16-bit weights."""


def arbitrary_ids(rows: int, width: int, vocabulary: int, device: torch.device) -> Tensor:
    """Return fixed token ids without meaning, int64 ``(row, column)``, which differ between rows."""
    return (torch.arange(rows * width, device=device) * 7919 + 11).view(rows, width) % vocabulary


@torch.no_grad()
def check_sharing(model: Any, device: torch.device) -> Verdict:
    """Compare the logits of two turns that share a row with those of the same turns in separate rows.

    Both must agree in float32. With 16-bit weights, the 16-bit logits of the shared row must also be about as close to
    the float32 logits as those of separate rows. Two 16-bit passes cannot be compared directly, because rounding alone
    makes them differ.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped, in evaluation mode.
        device: device of its weights.
    """
    size = 2 * _RESPONSE + _PROMPT
    ids = arbitrary_ids(1, size, model.config.get_text_config().vocab_size, device)[0]
    seen = torch.ones(2, _PROMPT, dtype=torch.bool, device=device)
    turns = Turns(ids[:_PROMPT].repeat(2, 1), seen, ids[_PROMPT:].view(2, _RESPONSE), seen.new_ones(2, _RESPONSE))
    layouts = [pack(turns), lay_out(turns)]
    with torch.autocast(device.type, enabled=False):
        if not is_halved(model):
            shared, plain = (logits_of(model, layout) for layout in layouts)
            return "exact" if is_exact(shared, plain) else "inexact"
        with in_float32(model):
            shared, exact = (logits_of(model, layout, torch.float32) for layout in layouts)
        if not is_exact(shared, exact):
            return "inexact"
        shared, plain = (logits_of(model, layout) for layout in layouts)
    return "exact" if is_sound(shared, plain, exact) else "imprecise"


@torch.no_grad()
def numbers_positions_from_zero(model: Any, device: torch.device) -> bool:
    """Return whether the positions that a model assigns by default are 0, 1, ..., which all layouts assume.

    In RoBERTa and related models, the first position is the id of the padding token plus one.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped, in evaluation mode.
        device: device of its weights.
    """
    ids = arbitrary_ids(1, _PROMPT + _RESPONSE, model.config.get_text_config().vocab_size, device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    given = [{"input_ids": ids, "use_cache": False}, {"input_ids": ids, "use_cache": False, "position_ids": positions}]
    with torch.autocast(device.type, enabled=False):
        own, ours = (model(**accepted(model, some)).logits for some in given)
    return agrees(ours, own, is_halved(model))

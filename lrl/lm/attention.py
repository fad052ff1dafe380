"""Properties of a model's attention: which tokens each token attends to, the kernel, and the precision."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask

Attention = Literal["full", "window", "other"]
"""``full``: in every layer, a token attends to all earlier tokens. ``window``: in some layers, a token attends only to
a fixed number of preceding columns of its row (sliding-window attention), and in the others to all earlier tokens.
``other``: ALiBi, recurrent layers, or an unknown kind of attention."""

_FULL, _WINDOWED = {"full_attention"}, {"full_attention", "sliding_attention"}
_HARMLESS = {"chunk_size_feed_forward", "max_window_layers", "sliding_window", "use_sliding_window"}
"""Configuration keys that match :data:`_SUSPECT` but do not exclude full attention."""
_SUSPECT = re.compile(
    r"window|chunk_size|alibi|local_att|block_type|layers_attn|attn_layer_|attention_pattern|global_attn"
    r"|mamba|ssm|recurrent|conv|^linear_|lru|index_topk|sliding"
)
"""Pattern of configuration keys that no model with full attention has, except :data:`_HARMLESS`."""
HALVED = (torch.bfloat16, torch.float16)
"""Data types of 16 bits."""
SOUND = 1.5
"""Largest accepted ratio between the error of a 16-bit pass and that of the plain 16-bit pass, which computes every
turn in its own row. Both errors are measured against float32, see :func:`is_sound`."""
_EXACT = 1e-4
"""Largest difference between the logits of two float32 passes that is attributed to rounding, relative to the largest
deviation of a logit from the mean. :func:`is_sound` uses it as a difference of log-probabilities, in nats."""


def bare(model: Any) -> Any:
    """Return the Hugging Face model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def attention_of(model: Any) -> Attention:
    """Return the kind of attention of a causal LM, as determined from its configuration.

    A model whose ``forward`` does not accept ``position_ids`` is of the kind ``other``, because it derives positions
    from the columns or the mask, as models with ALiBi do.
    """
    model = bare(model)
    config = model.config.get_text_config()
    settings = {key: value for key, value in config.to_dict().items() if value}
    takes = inspect.signature(model.forward).parameters
    if not {"position_ids", "past_key_values", "logits_to_keep"} <= set(takes) or getattr(model, "_is_stateful", False):
        return "other"
    layers = getattr(config, "layer_types", None)
    if layers is None:
        layers = [_layer_type(str(kind)) for kind in settings.get("attention_layers", ())]
        if settings.get("sliding_window") is not None and settings.get("use_sliding_window", True):
            layers.append("sliding_attention")
        harmless = _HARMLESS | ({"window_size"} if "attention_layers" in settings else set())
        if any(_SUSPECT.search(key) for key in settings.keys() - harmless) or _names_alibi(settings):
            return "other"
    kinds = set(layers)
    if settings.get("attention_chunk_size") or settings.get("alibi") or not kinds <= _WINDOWED:
        return "other"
    return "full" if kinds <= _FULL else "window"


def _layer_type(kind: str) -> str:
    """Return the name in transformers of a layer type of GPT-Neo; other names are returned unchanged."""
    return {"global": "full_attention", "local": "sliding_attention"}.get(kind, kind)


def _names_alibi(settings: Mapping[str, Any]) -> bool:
    inner = [value for value in settings.values() if isinstance(value, Mapping)]
    return settings.get("position_embedding_type") == "alibi" or any(part.get("alibi") for part in inner)


def max_positions(model: Any) -> int | None:
    """Return the largest number of tokens that a text may have.

    This is the size of the table of position embeddings or :func:`rope_limit`, whichever is smaller.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.

    Returns:
        None if the model has no such table, and its rotary embeddings do not depend on the length of the text.
    """
    model = bare(model)
    tables = "wpe", "embed_positions", "position_embeddings", "position_embedding"
    names = [name for name, _ in (*model.named_modules(), *model.named_buffers())]
    limits = [rope_limit(model.config)]
    if any(name.rsplit(".", 1)[-1] in tables for name in names):
        limits.append(getattr(model.config.get_text_config(), "max_position_embeddings", None))
    return min((limit for limit in limits if limit is not None), default=None)


def context_length(config: Any) -> int | None:
    """Return the context length in the configuration of a model, in tokens; None if the configuration has none.

    Rotary embeddings and ALiBi are defined for any position, but the quality drops beyond the positions of the training
    data. If the rotary embeddings depend on the length of the text, the context length is at most :func:`rope_limit`.

    Args:
        config: configuration of transformers.
    """
    text = config.get_text_config()
    names = "max_position_embeddings", "seq_length", "max_seq_len"  # the last two are BLOOM's and MPT's
    lengths = [getattr(text, name, None) for name in names]
    lengths.append(rope_limit(config))
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def rope_limit(config: Any) -> int | None:
    """Return the length in tokens up to which the rotary embeddings of a text do not depend on its length.

    Beyond it, the embeddings of all positions depend on the longest text in the batch for dynamic and long RoPE
    (``longrope``), so a log-probability would depend on the other texts and on the length of the response so far.

    Args:
        config: configuration of transformers.

    Returns:
        None if the embeddings never depend on the length.
    """
    text = config.get_text_config()
    settings = getattr(text, "rope_parameters", None) or {}
    limits = []
    for kind in (settings, *(one for one in settings.values() if isinstance(one, Mapping))):
        if kind.get("rope_type") == "longrope":
            limits.append(kind["original_max_position_embeddings"])
        elif "dynamic" in kind.get("rope_type", ""):
            limits.append(text.max_position_embeddings)
    return min(limits, default=None)


def compute_dtype(model: Any) -> torch.dtype:
    """Return the dtype that attention is computed in: that of autocast if it is enabled, else that of the weights."""
    weight = bare(model).get_input_embeddings().weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


# Kernels.


def kernel_of(model: Any) -> str:
    """Return the attention implementation in use: ``sdpa``, ``eager``, ..."""
    return bare(model).config._attn_implementation


def is_halved(model: Any) -> bool:
    """Return whether attention is computed in 16 bits."""
    return compute_dtype(model) in HALVED


def use_kernel(model: Any, name: str) -> None:
    """Switch a model to another attention implementation, if the model supports it."""
    if kernel_of(model) != name and bare(model)._can_set_attn_implementation():
        bare(model).set_attn_implementation(name)


def set_kernel(model: Any, setting: str, loaded: str) -> bool:
    """Choose an attention kernel with which sampled and teacher-forced log-probabilities agree.

    In 16 bits on a CPU, the rounding of SDPA depends on the shapes of the batch and the mask; that of eager attention
    does not. This is called before each pass, because the dtype of weights or autocast may have changed since loading.

    Args:
        model: a Hugging Face causal LM.
        setting: ``language_model.attention``.
        loaded: the kernel that the model was loaded with.

    Returns:
        True if they may not agree, because ``setting`` is ``sdpa`` and the model computes in 16 bits on a CPU.
    """
    halved_on_cpu = bare(model).get_input_embeddings().weight.device.type == "cpu" and is_halved(model)
    if setting == "auto":
        use_kernel(model, "eager" if halved_on_cpu else loaded)
    return setting == "sdpa" and halved_on_cpu


def _finite_eager_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """Return the mask of transformers for eager attention, ``(row, 1, query, key)``, with values finite in float32.

    For a float64 model, the mask of transformers contains the lowest float64. It becomes -inf in the softmax, which is
    computed in float32, so the attention of a padding token, which attends to nothing, would be NaN.
    """
    return eager_mask(*args, dtype=torch.float32 if dtype == torch.float64 else dtype, **kwargs)


AttentionMaskInterface.register("eager", _finite_eager_mask)


# Precision.


def is_exact(shared: Tensor, plain: Tensor) -> bool:
    """Return whether the logits of two float32 passes differ by no more than rounding.

    Args:
        shared: logits ``(turn, token, vocabulary)`` of the pass to check.
        plain: logits of the same shape, of the pass that computes every turn in its own row.
    """
    spread = (plain - plain.mean(-1, keepdim=True)).abs().max()
    return bool((shared - plain).abs().max() <= _EXACT * spread)


def agrees(one: Tensor, other: Tensor, halved: bool) -> bool:
    """Return whether logits ``(turn, token, vocabulary)`` of two passes differ only by rounding.

    Args:
        one: logits of one pass.
        other: logits of the other pass.
        halved: whether the passes were computed in 16 bits; the tolerance is then larger.
    """
    if not halved:
        return is_exact(one, other)
    return bool((one - other).abs().max() <= 2e-2 * (other - other.mean()).abs().max())


def is_sound(shared: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """Return whether the error of a 16-bit pass is at most :data:`SOUND` times that of the plain 16-bit pass.

    The error is the mean absolute difference of log-probabilities from float32; :data:`_EXACT` nats are added to the
    bound.

    Args:
        shared: logits ``(turn, token, vocabulary)`` of the pass to check.
        plain: logits of the same shape, of the 16-bit pass that computes every turn in its own row.
        exact: logits of the same shape, in float32.
    """
    logprobs = [torch.log_softmax(logits.float(), dim=-1) for logits in (shared, plain, exact)]
    far, usual = ((part - logprobs[2]).abs().mean() for part in logprobs[:2])
    return bool(far <= SOUND * usual + _EXACT)


def in_float32(model: nn.Module) -> AbstractContextManager[None]:
    """Compute a model's passes in float32; see :func:`in_dtype`."""
    return in_dtype(model, torch.float32)


@contextmanager
def in_dtype(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute a model's passes in another data type, converting the weights of one block at a time.

    Converting one block at a time needs additional memory for one layer instead of the whole model. Weights in 4 bits
    stay packed, and their matrix products are computed in ``dtype``. Buffers are converted to float32 but not to 16
    bits, because they may hold positions, which 16 bits cannot represent.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        dtype: data type of the passes inside the ``with`` block.
    """
    others = {torch.float32, *HALVED} - {dtype}
    handles: list[Any] = []
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def convert(recurse: bool, part: nn.Module, *_: Any) -> None:
        """Convert the tensors of a module before its forward pass."""
        for tensor in (*part.parameters(recurse), *(() if dtype in HALVED else part.buffers(recurse))):
            if tensor.dtype in others and not hasattr(tensor, "quant_state"):  # 16-bit storage of packed 4-bit weights
                kept[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.to(dtype)

    def restore(recurse: bool, part: nn.Module, *_: Any) -> None:
        """Restore the tensors of a module after its forward pass."""
        for tensor in (*part.parameters(recurse), *part.buffers(recurse)):
            if id(tensor) in kept:
                tensor.data = kept.pop(id(tensor))[1]

    quantised: list[Any] = [part for part in model.modules() if getattr(part, "compute_dtype", None) in others]
    types = [part.compute_dtype for part in quantised]
    for part, recurse in _blocks(model):
        handles.append(part.register_forward_pre_hook(partial(convert, recurse)))
        handles.append(part.register_forward_hook(partial(restore, recurse)))
    for part in quantised:
        part.compute_dtype = dtype
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for tensor, data in kept.values():
            tensor.data = data
        for part, dtype in zip(quantised, types, strict=True):
            part.compute_dtype = dtype


def _blocks(part: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules to convert, each with a flag: whether to convert its submodules together with it.

    Decoder layers are converted together with their submodules. So are layers with an adapter, because they convert
    their input to the data type of the adapter before they call it.
    """
    if hasattr(part, "base_layer") or hasattr(part, "original_module"):
        yield part, True
        return
    yield part, False
    for child in part.children():
        if isinstance(child, nn.ModuleList):
            for layer in child:
                yield layer, True
        else:
            yield from _blocks(child)

"""Load a causal LM: from the hub or a folder, with random weights, in 4 bits."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn

from lrl.lm.adapters import decoder_layers
from lrl.lm.attention import bare
from lrl.lm.config import DTYPES, LanguageModelConfig
from lrl.lm.files import missing_model_message, sources


def load_base(config: LanguageModelConfig) -> Any:
    """Load the causal LM without adapters.

    Raises:
        ValueError: there is no such model, or it cannot be loaded as configured.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    dtype, remote, quantization = DTYPES[config.dtype], config.trust_remote_code, _quantization(config)
    attention = None if config.attention == "auto" else config.attention
    options = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": remote}
    architecture = _architecture(config) if config.random_init else None
    try:
        if architecture is None:
            model = _pretrained(config, options, quantization)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.init_seed)
                model = AutoModelForCausalLM.from_config(architecture, **options)
    except (OSError, ValueError, ImportError) as error:
        if any(mark in str(error) for mark in ("attn_implementation", "attention implementation", "FlashAttention")):
            raise ValueError(
                f"language_model.attention is {config.attention!r}, which {config.name} cannot be loaded with; "
                f"it must be {_other_attention(config.attention)}."
            ) from error
        raise ValueError(missing_model_message(config.name, error)) from error
    if config.first_layers is not None:
        _drop_layers(model, config)
    return model.eval()


def _drop_layers(model: Any, config: LanguageModelConfig) -> None:
    """Keep the first layers of a model only, in place; what follows the layers stays."""
    layers, count = decoder_layers(model, "language_model.first_layers")[1], config.first_layers
    assert count is not None
    if count > len(layers):
        raise ValueError(f"language_model.first_layers is {count}; {config.name} has {len(layers)} layers.")
    text = model.config.get_text_config()
    del layers[count:]
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = text.layer_types[:count]


def _pretrained(config: LanguageModelConfig, options: dict[str, Any], quantization: Any) -> Any:
    """Load a causal LM with its weights; those of a GGUF file become ordinary ones."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    where, of_gguf = sources(config.name)
    if not of_gguf:
        return _keep_gradients(load(where, use_safetensors=True, quantization_config=quantization, **options))
    packed = getattr(transformers, "GgufConfig", None)  # versions without it unpack all weights anyway
    dense = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    with redirect_stderr(io.StringIO()):  # a progress bar
        model: Any = load(where, **of_gguf, **dense, **options)
    return forget_quantisation(model)


def forget_quantisation(model: Any) -> Any:
    """Let transformers take a model whose weights were unpacked for an ordinary one, which it trains, moves and saves.

    Args:
        model: a Hugging Face causal LM, changed in place and returned.
    """
    model.hf_quantizer = None
    for attribute in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(attribute, None)
    for attribute in ("is_quantized", "is_loaded_in_4bit", "quantization_method"):
        model.__dict__.pop(attribute, None)
    return model


def _other_attention(unsupported: str) -> str:
    """Return the settings left for a model that does not support ``unsupported``: without sdpa there is only eager."""
    return "auto or eager" if unsupported == "sdpa" else "auto, sdpa or eager"


def _architecture(config: LanguageModelConfig) -> Any:
    from transformers import AutoConfig

    try:
        where, of_gguf = sources(config.name)
        architecture = AutoConfig.from_pretrained(where, trust_remote_code=config.trust_remote_code, **of_gguf)
    except (OSError, ValueError) as error:
        raise ValueError(missing_model_message(config.name, error)) from error
    unknown = [key for key in config.config_overrides if not hasattr(architecture, key)]
    if unknown:
        known = ", ".join(sorted(architecture.to_dict()))
        raise ValueError(f"config_overrides names {unknown[0]!r}, which {config.name} does not have; it has {known}.")
    architecture.update(dict(config.config_overrides))
    return architecture


def _quantization(config: LanguageModelConfig) -> Any:
    if config.quantization is None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"language_model.quantization is {config.quantization!r}, which needs the package bitsandbytes; install "
            "it, or set quantization null."
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advises optional kernels on import
    from transformers import BitsAndBytesConfig

    dtype = DTYPES[config.dtype]
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=dtype
    )


def _keep_gradients(model: Any) -> Any:
    """Keep bitsandbytes from packing 4-bit weights for CPU inference, which has no gradient."""
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    return model


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the weights: 16 hex digits over names, shapes, the sum of all bits and some values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        some = values[:: values.numel() // 256 + 1].float().cpu().numpy().tobytes()
        total = int(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64))  # exact, in any order
        digest.update(f"{name}{tuple(parameter.shape)}{total}".encode() + some)
    return digest.hexdigest()[:16]


def recompute_activations(model: Any) -> None:
    """Switch gradient checkpointing on, for forward passes inside :func:`recomputed`.

    Raises:
        ValueError: the model does not support it.
    """
    if not getattr(bare(model), "supports_gradient_checkpointing", False):
        raise ValueError(
            f"language_model.gradient_checkpointing is true, which a {type(bare(model)).__name__} does not support; it "
            "must be false."
        )
    enable = getattr(model, "activation_checkpointing_enable", None)  # the name since transformers 5.14
    if enable is not None:
        enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def recomputed(model: nn.Module, checkpointing: bool) -> Iterator[None]:
    """Let layers recompute their activations in the backward pass although dropout is off.

    Transformers recomputes in training mode only, which would switch dropout on. Only the layers' own flag is set, not
    that of their submodules with dropout; a layer that applies dropout itself is skipped.

    Args:
        model: a Hugging Face causal LM.
        checkpointing: False changes nothing.
    """
    layers = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    layers = [layer for layer in layers if not any(_is_rate(*item) for item in vars(layer).items())]
    modes = [layer.training for layer in layers]
    for layer in layers if checkpointing else ():
        layer.training = torch.is_grad_enabled()
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def _is_rate(name: str, value: Any) -> bool:
    return "dropout" in name and isinstance(value, float) and value > 0

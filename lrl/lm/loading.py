"""Load a causal LM, extend its vocabulary, and apply gradient checkpointing and fused kernels."""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lrl.files import require
from lrl.lm.adapters import decoder_layers
from lrl.lm.attention import bare
from lrl.lm.config import DTYPES, LanguageModelConfig
from lrl.lm.files import missing_model_message, sources

if TYPE_CHECKING:
    from lrl.lm.model import LanguageModel


def load_base(config: LanguageModelConfig) -> Any:
    """Load the causal LM without adapters, in evaluation mode.

    Args:
        config: which causal LM, and how it is loaded.

    Raises:
        ValueError: If the model does not exist, or cannot be loaded as configured.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    dtype, remote, quantization = DTYPES[config.dtype], config.trust_remote_code, _quantization(config)
    attention = None if config.attention == "auto" else config.attention
    options = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": remote}
    try:
        if config.random_init:
            where, of_gguf = sources(config.name)
            architecture = AutoConfig.from_pretrained(where, trust_remote_code=remote, **of_gguf)
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # a GPU would draw other numbers
                torch.manual_seed(config.init_seed)
                model = AutoModelForCausalLM.from_config(architecture, **options)
            model = model.to(torch.get_default_device())
        else:
            model = _pretrained(config, options, quantization)
    except (OSError, ValueError, ImportError) as error:
        if any(mark in str(error) for mark in ("attn_implementation", "attention implementation", "FlashAttention")):
            others = "auto or eager" if config.attention == "sdpa" else "auto, sdpa or eager"
            raise ValueError(
                f"language_model.attention is {config.attention!r}, which {config.name} cannot be loaded with; "
                f"it must be {others}."
            ) from error
        raise ValueError(missing_model_message(config.name, error)) from error
    if config.first_layers is not None:
        _drop_layers(model, config)
    return model.eval()


def _drop_layers(model: Any, config: LanguageModelConfig) -> None:
    """Remove all but the first decoder layers of a model, in place; the final norm and the head are kept."""
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
    """Load a causal LM with its weights; the weights of a GGUF file are dequantised."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    where, of_gguf = sources(config.name)
    if not of_gguf:
        model = load(where, use_safetensors=True, quantization_config=quantization, **options)
        for part in model.modules():
            if hasattr(part, "support_avx512bf16_for_cpu"):  # its kernel has no gradient
                part.support_avx512bf16_for_cpu = False
        return model
    with redirect_stderr(io.StringIO()):  # hides a progress bar
        model: Any = load(where, **of_gguf, quantization_config=transformers.GgufConfig(dequantize=True), **options)
    return forget_quantisation(model)


def forget_quantisation(model: Any) -> Any:
    """Remove the attributes that mark a model as quantised, so that transformers trains, moves and saves it normally.

    Args:
        model: a Hugging Face causal LM with unpacked weights; it is changed in place and returned.
    """
    model.hf_quantizer = None
    for attribute in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(attribute, None)
    for attribute in ("is_quantized", "is_loaded_in_4bit", "quantization_method"):
        model.__dict__.pop(attribute, None)
    return model


def _quantization(config: LanguageModelConfig) -> Any:
    if config.quantization is None:
        return None
    require("bitsandbytes", "qlora", f"language_model.quantization {config.quantization}")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advises optional kernels on import
    from transformers import BitsAndBytesConfig

    dtype = DTYPES[config.dtype]
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=dtype
    )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type with as many bits as a weight, by the size of the weight in bytes."""


def fingerprint(model: nn.Module, trained: bool = False) -> str:
    """Return a hash of the weights, as 16 hex digits.

    It covers the name and shape of each parameter, the sum of its weights read as integers, and some of its values.

    Args:
        model: a causal LM.
        trained: whether to cover only the weights of the actor that are trained, without a critic's adapter.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if trained and (not parameter.requires_grad or "critic" in name.split(".")):
            continue
        values = parameter.detach().flatten()
        some = values[:: values.numel() // 256 + 1].float().cpu().numpy().tobytes()
        total = int(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64))  # independent of the order
        digest.update(f"{name}{tuple(parameter.shape)}{total}".encode() + some)
    return digest.hexdigest()[:16]


def recompute_activations(model: Any) -> None:
    """Switch gradient checkpointing on; it has an effect in forward passes inside :func:`recomputed`.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.

    Raises:
        ValueError: If the model does not support gradient checkpointing.
    """
    if not getattr(bare(model), "supports_gradient_checkpointing", False):
        raise ValueError(
            f"language_model.gradient_checkpointing is true, which a {type(bare(model)).__name__} does not support; it "
            "must be false."
        )
    model.activation_checkpointing_enable({"use_reentrant": False})


@contextmanager
def recomputed(model: nn.Module, checkpointing: bool) -> Iterator[None]:
    """Let layers recompute their activations in the backward pass although the model is in evaluation mode.

    The layers of transformers recompute only in training mode, in which their submodules would apply dropout. So the
    flag ``training`` is set for the layers only and not for their submodules; layers that apply dropout themselves are
    skipped.

    Args:
        model: a Hugging Face causal LM.
        checkpointing: whether to recompute; False has no effect.
    """
    layers = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    layers = [layer for layer in layers if not any(_is_dropout_rate(*item) for item in vars(layer).items())]
    modes = [layer.training for layer in layers]
    for layer in layers if checkpointing else ():
        layer.training = torch.is_grad_enabled()
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def _is_dropout_rate(name: str, value: Any) -> bool:
    return "dropout" in name and isinstance(value, float) and value > 0


# Additional tokens, such as numbers and tags, and ordered embeddings of numbers.


def add_tokens(model: Any, tokenizer: Any, texts: Sequence[str], seed: int | None = None) -> None:
    """Add a token for every text that the tokenizer does not encode as a single token yet.

    The initial embedding is the mean over the tokens that encoded the text before. The new tokens are not special
    tokens, because a server would omit special tokens from its responses.

    Args:
        model: a causal LM, without adapters.
        tokenizer: a Hugging Face tokenizer, which is changed.
        texts: texts of the tokens.
        seed: seed of random initial embeddings, for models with random weights; None uses the mean.
    """
    from tokenizers import AddedToken

    pieces = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    added = [text for text in texts if len(pieces[text]) != 1 or pieces[text] == [tokenizer.unk_token_id]]
    if added:
        tokens = [AddedToken(text, normalized=False, special=False) for text in added]
        weights = [[1.0] * len(pieces[text]) for text in added]
        extend_vocabulary(model, tokenizer, tokens, [pieces[text] for text in added], weights, seed)


@torch.no_grad()
def extend_vocabulary(
    model: Any,
    tokenizer: Any,
    added: Sequence[Any],
    pieces: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    seed: int | None = None,
) -> None:
    """Add tokens whose initial embeddings are weighted means of other embeddings.

    Args:
        model: a causal LM, whose embeddings get more rows if necessary; tied embeddings stay tied.
        tokenizer: a Hugging Face tokenizer, which is changed.
        added: the new tokens.
        pieces: for each new token, the ids of the tokens in its mean.
        weights: for each new token, the weights of its mean, not normalised.
        seed: seed of random initial embeddings with the mean and standard deviation of the others; None uses the
            weighted means.
    """
    tokenizer.add_tokens(list(added))
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(
            max(len(tokenizer), len(model.get_input_embeddings().weight)), mean_resizing=False
        )
    index = torch.tensor([tokenizer.convert_tokens_to_ids(str(text)) for text in added])
    ids, shares = _padded(pieces, torch.long), _padded(weights, torch.float64)
    shares = shares / shares.sum(1, keepdim=True)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    parts = model.get_input_embeddings(), model.get_output_embeddings()
    for table in {id(part.weight): part.weight for part in parts}.values():  # a single table if they are tied
        if generator is None:
            start = (table[ids.to(table.device)].double() * shares.to(table.device)[..., None]).sum(1)
        else:
            old = table[: int(index.min())].double().cpu()
            start = old.mean() + old.std() * torch.randn(len(index), table.shape[1], generator=generator).double()
        table[index.to(table.device)] = start.to(table)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return rows of different lengths as one tensor ``(row, column)``, with zeros at their ends."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


_HALF_PERIODS = 6
"""Number of waves in :func:`order_number_embeddings`; wave k has k half periods over the numbers from 0 to 999."""

_DIGIT_WEIGHTS = (4.0, 2.0, 1.0)
"""Weights of the first, second and third digit in the initial embedding of a number."""


def prepare_vocabulary(model: Any, tokenizer: Any, config: LanguageModelConfig) -> None:
    """Add tokens and order the embeddings of numbers, as configured.

    Args:
        model: a causal LM, without adapters.
        tokenizer: its Hugging Face tokenizer.
        config: configuration of the model.
    """
    seed = config.init_seed if config.random_init else None
    with torch.device("cpu"):  # so that random embeddings do not depend on the default device
        if config.number_tokens:
            add_number_tokens(model, tokenizer, seed)
        if config.added_tokens:  # with another seed, so that they differ from the numbers
            add_tokens(model, tokenizer, config.added_tokens, None if seed is None else seed + 1)
        if config.ordered_numbers:
            order_number_embeddings(model, tokenizer.get_vocab(), config.init_seed)


def number_tokens(vocabulary: dict[str, int]) -> dict[int, int]:
    """Map the ids of tokens of one to three digits, with or without a space before them (``Ġ``, ``▁``), to numbers."""
    bare = ((token.lstrip("Ġ▁ "), index) for token, index in vocabulary.items())
    return {index: int(text) for text, index in bare if len(text) <= 3 and text.isascii() and text.isdigit()}


def add_number_tokens(model: Any, tokenizer: Any, seed: int | None = None) -> None:
    """Add a token for every number from 10 to 999 that the tokenizer splits, so that an integer is one token.

    The initial embedding is the mean of the embeddings of the digits with weights 4, 2 and 1, so that 502 differs from
    205 and is close to 503. In a model with random weights the initial embedding is random.

    Args:
        model: a causal LM.
        tokenizer: a Hugging Face tokenizer, which is changed.
        seed: seed of random initial embeddings, for models with random weights; None uses the mean.

    Raises:
        ValueError: If one of the ten digits is not a token.
    """
    vocabulary = tokenizer.get_vocab()
    if missing := [digit for digit in "0123456789" if digit not in vocabulary]:
        raise ValueError(
            f"language_model.number_tokens is true, but {missing[0]!r} is no token of the tokenizer; it must be false."
        )
    added = [str(number) for number in range(10, 1000) if str(number) not in vocabulary]
    if added:
        digits = [[vocabulary[digit] for digit in text] for text in added]
        extend_vocabulary(model, tokenizer, added, digits, [_DIGIT_WEIGHTS[: len(text)] for text in added], seed)


@torch.no_grad()
def order_number_embeddings(model: Any, vocabulary: dict[str, int], seed: int) -> None:
    """Give every token that is a number an input embedding close to those of the neighbouring numbers.

    In pretrained models, the embeddings of numbers lie in order along a line and around circles (arXiv:2502.00873).
    With random weights, or after little pretraining, the embedding of 490 is as far from that of 491 as from that of 7,
    so that RL must learn every number separately. The embedding of n is
    ``e(n) = sum_k (cos(pi k n / 1000) u_k + sin(pi k n / 1000) v_k) / k``, k from 1 to 6, with random directions u_k
    and v_k, scaled to the mean norm of the former embeddings.

    Args:
        model: a causal LM.
        vocabulary: mapping from token to id.
        seed: seed of the random directions.

    Raises:
        ValueError: If fewer than 100 tokens are numbers, because the tokenizer splits numbers into digits.
    """
    found = number_tokens(vocabulary)
    if len(found) < 100:
        raise ValueError(
            f"language_model.ordered_numbers is true, but the vocabulary has {len(found)} numerals of up to three "
            "digits; number_tokens must be true for a model that reads digit by digit, or ordered_numbers false."
        )
    table: Tensor = model.get_input_embeddings().weight
    index = torch.tensor(list(found), device=table.device)
    number = torch.tensor(list(found.values()), dtype=torch.float64)  # float32 sums depend on their order
    wave = torch.arange(1, _HALF_PERIODS + 1)
    phase = math.pi * wave * number[:, None] / 1000
    code = torch.cat([phase.cos() / wave, phase.sin() / wave], dim=1)
    directions = torch.randn(code.shape[1], table.shape[1], generator=torch.Generator().manual_seed(seed))
    ordered = code @ directions.double()
    length = table[index].double().norm(dim=1).mean().cpu()
    table[index] = (ordered * length / ordered.norm(dim=1).mean()).to(table)


# Liger's fused Triton kernels (arXiv:2410.10989) for the layers of a causal LM on a GPU.

_KERNELS = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "layer_norm": True}
"""Kernels of layers; those that an architecture does not have are ignored."""
_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Kernels of the loss that Hugging Face models compute from labels, which lrl does not use."""


def fuse_kernels(language_model: LanguageModel) -> None:
    """Use fused kernels for rotary embeddings, norms and gated MLP layers if ``language_model.liger_kernels`` is set.

    Liger also patches the architecture's module in transformers, so models of this architecture that are loaded later
    in the same process need a GPU as well.

    Args:
        language_model: the configured model, whose weights were moved to their device.

    Raises:
        ValueError: If the weights are not on a GPU, the package liger-kernel is not installed, or the package does not
            support the architecture.
    """
    if not language_model.config.liger_kernels:
        return
    if language_model.device.type != "cuda":
        raise ValueError(
            f"language_model.liger_kernels is true, but the weights are on {language_model.device.type!r}; it must be "
            "false, or trainer.accelerator gpu."
        )
    require("liger_kernel", "liger", "language_model.liger_kernels")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # pyright: ignore[reportMissingImports]

    for model in map(bare, (language_model.model, *language_model.copied_reference)):
        kind = model.config.model_type
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ValueError(
                f"language_model.liger_kernels is true, but liger-kernel has no kernels for the architecture {kind!r}; "
                "it must be false."
            )
        _apply_liger_kernel_to_instance(model=model, **_KERNELS, **_LOSSES)

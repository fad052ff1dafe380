"""Load exported adapters, merge adapters into the weights of their base, and write a plain Hugging Face folder.

The written model is loaded and compared with the adapter model before the folder gets its final name.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lrl.faults import writing
from lrl.lm.adapters import BASE_FILE
from lrl.lm.attention import (
    HALVED,
    bare,
    compute_dtype,
    in_dtype,
    in_float32,
    is_halved,
    kernel_of,
    max_positions,
    use_kernel,
)
from lrl.lm.config import DTYPES, LanguageModelConfig, LoRAConfig
from lrl.lm.files import check_available, first_line, is_gguf, locate, sources, written_whole
from lrl.lm.loading import forget_quantisation, load_base

# The difference between a merged model and its adapter model.

_TEXTS, _TOKENS = 2, 32
"""Number of texts for the comparison, and of tokens in each."""
_SOUND = 4.0
"""Largest accepted ratio of two differences from the adapter model in float32: that of the merged model, and that of
the adapter model in the data type of the result. The merged model also rounds the sums of weights."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-2, 1e-4
"""Tolerances in nats that are added to the accepted difference, see :class:`Distance`: for the largest difference, and
for the mean difference in 16 bits."""


class Distance(NamedTuple):
    """Differences of log-probabilities from the adapter model in float32, in nats.

    Each is the mean of the absolute differences if the result has 16 bits, else the largest of them.
    """

    merged: float
    """Difference of the merged model."""
    adapter: float
    """Difference of the adapter model in the data type of the result."""


def comparison_texts(model: Any) -> Tensor:
    """Return int64 token ids ``(text, token)`` for the comparison: random ones, and the last ones of the vocabulary."""
    size = bare(model).get_output_embeddings().weight.shape[0]
    tokens = min(_TOKENS, max_positions(model) or _TOKENS)
    ids = torch.randint(size, (_TEXTS, tokens), generator=torch.Generator().manual_seed(0), device="cpu")
    last = torch.arange(size - min(size, tokens // 2), size, device="cpu")
    ids[0, : len(last)] = last  # includes added tokens
    return ids.to(next(model.parameters()).device)


@torch.no_grad()
def logprobs_of(model: Any, ids: Tensor) -> Tensor:
    """Compute the log-probabilities of the token after each of ``ids`` ``(text, token)``.

    Returns:
        float64 ``(text, token, vocabulary)``.
    """
    return torch.log_softmax(model(input_ids=ids, use_cache=False).logits.double(), dim=-1)


def adapter_logprobs(model: Any, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of the adapter model in 32 or 64 bits, and in the data type of the merged model.

    Args:
        model: a causal LM with adapters, in evaluation mode.
        ids: token ids from :func:`comparison_texts`.
        dtype: data type of the merged model.

    Returns:
        Two tensors, each float64 ``(text, token, vocabulary)``.
    """
    with in_float32(model) if is_halved(model) else nullcontext():
        exact = logprobs_of(model, ids)
    if dtype not in HALVED:
        return exact, exact
    with in_dtype(model, dtype):
        return exact, logprobs_of(model, ids)


def distance_of(merged: Tensor, exact: Tensor, rounded: Tensor, dtype: torch.dtype) -> Distance:
    """Return the distance of a merged model from its adapter model.

    Args:
        merged: log-probabilities of the merged model, ``(text, token, vocabulary)``.
        exact: log-probabilities of the adapter model in 32 or 64 bits, of the same shape.
        rounded: log-probabilities of the adapter model in ``dtype``, of the same shape.
        dtype: data type of the merged model.

    Raises:
        ValueError: If the difference is too large to be caused by rounding.
    """
    halved = dtype in HALVED
    differences = [(logprobs - exact).abs() for logprobs in (merged, rounded)]
    distance = Distance(*(float(each.mean() if halved else each.max()) for each in differences))
    most = _SOUND * distance.adapter + (_TOLERANCE_16_BITS if halved else _TOLERANCE)
    if not distance.merged <= most:
        raise ValueError(
            f"the merged model differs from the adapter model by {distance.merged:.3g} nats in its log-probabilities, "
            f"which is more than rounding ({most:.2g} at most); nothing was written."
        )
    return distance


# Merge weights.


@torch.no_grad()
def merge(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Merge the adapter ``default`` of a causal LM, if it has one, and return the Hugging Face model.

    The sums of base and adapter weights are computed in float32 and rounded once. Weights in 4 bits are unpacked. Tied
    embeddings are untied first if one of them has an adapter, which would otherwise change the other one as well.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped; it is modified and must not be used afterwards.
        dtype: data type of the result; None keeps it.

    Raises:
        ValueError: If an adapter of this kind cannot be merged into the weights, for example prompt tuning.
    """
    if hasattr(model, "peft_config"):
        if not hasattr(model.base_model, "merge_and_unload"):
            kind = model.peft_config["default"].peft_type
            raise ValueError(f"the adapter is of the kind {kind}, which cannot be merged; it must be LoRA.")
        was_tied = bare(model).config.get_text_config().tie_word_embeddings
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`")  # _untie does this
            warnings.filterwarnings("ignore", "All adapters are already merged")  # by _add_adapters
            warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")  # by _untie
            _unpack(model, dtype)
            if dtype is not None:
                model.to(torch.promote_types(dtype, torch.float32))
            _untie(model)
            _add_adapters(model)
            model = model.merge_and_unload(adapter_names=["default"])
        _tie_equal(model, was_tied)
    return model if dtype is None else model.to(dtype)


def merge_adapters_of(policy: Any, name: str) -> None:
    """Merge the adapters of a policy's language model in place, for a policy that only acts.

    Args:
        policy: the configured policy.
        name: name of the policy on the command line, for error messages.

    Raises:
        ValueError: If the policy has no adapters, or its critic has its own adapter.
    """
    language_model = getattr(policy, "language_model", None)
    if language_model is None or language_model.config.lora is None:
        raise ValueError(
            f"merge_adapters is true, but {name!r} is a {type(policy).__name__} without adapters; leave it out."
        )
    if language_model.has_critic_adapter:
        raise ValueError(
            f"merge_adapters is true, but the critic of {name!r} has an adapter of its own, which cannot be merged "
            "into the same weights; leave it out."
        )
    language_model.model, language_model.lower = merge(language_model.model).eval(), None


def _add_adapters(model: Any) -> None:
    """Merge the LoRA layers one by one, each in float32."""
    from peft.tuners.lora import LoraLayer

    for layer in [part for part in model.modules() if isinstance(part, LoraLayer)]:
        base: Any = layer.get_base_layer()
        dtype = next(base.parameters()).dtype  # experts have several weights, none called weight
        if dtype in HALVED:
            cast_layer: Any = layer
            cast_layer.float()
        layer.merge(adapter_names=["default"])
        base.to(dtype)


def _untie(model: Any) -> None:
    """Give input and output embeddings separate weights if they are tied and one of them has an adapter."""
    from peft.tuners.lora import LoraLayer

    ends = bare(model).get_input_embeddings(), bare(model).get_output_embeddings()
    if ends[1] is None or not any(isinstance(end, LoraLayer) for end in ends):
        return
    inside: list[Any] = [end.get_base_layer() if isinstance(end, LoraLayer) else end for end in ends]
    if inside[0].weight is inside[1].weight:
        inside[1].weight = nn.Parameter(inside[1].weight.detach().clone(), requires_grad=False)


def _tie_equal(model: Any, was_tied: bool) -> None:
    """Tie the embeddings again if they were tied and are still equal; if they differ, configure them as untied."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if not was_tied or outputs is None:
        return
    equal = torch.equal(inputs.weight, outputs.weight)
    if equal:
        outputs.weight = inputs.weight
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = equal


def _unpack(model: Any, dtype: torch.dtype | None) -> None:
    """Replace layers in 4 bits by ordinary layers with merged adapters, in place.

    Args:
        model: a causal LM with adapters.
        dtype: data type of the new layers; None keeps the one that the old layers compute in.
    """
    for name, part in list(model.named_modules()):
        if hasattr(getattr(part, "weight", None), "quant_state") and not name.endswith(".base_layer"):
            model.set_submodule(name, _dense(part, dtype))
    forget_quantisation(bare(model))


def _dense(part: Any, dtype: torch.dtype | None) -> nn.Linear:
    """Return an ordinary layer with the weights of a layer in 4 bits plus its adapter, added in float32."""
    from bitsandbytes.functional import dequantize_4bit

    adapted = hasattr(part, "lora_A")
    base = part.get_base_layer() if adapted else part
    state = copy.copy(base.weight.quant_state)
    dtype, state.dtype = dtype or state.dtype, torch.float32
    weight: Any = dequantize_4bit(base.weight.data, state)
    added = part.get_delta_weight("default").float() if adapted else 0.0
    layer = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    layer.weight = nn.Parameter((weight + added).to(dtype), requires_grad=False)
    if base.bias is not None:
        layer.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
    return layer


# Write the folder.


def check_new_folder(folder: Path, key: str) -> None:
    """Check that a folder is empty or does not exist.

    Args:
        folder: the destination.
        key: name of the option that is set to the folder, for the error message.

    Raises:
        ValueError: If the destination is a file, or a folder that is not empty.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{key} is {str(folder)!r}, which is not empty; name a new folder.")


def save_merged(
    model: Any, folder: Path, save_others: Callable[[Path], None], config: LanguageModelConfig, dtype: str | None = None
) -> Distance:
    """Merge the adapter of a model and write the result; after an error, no file remains.

    Args:
        model: a Hugging Face causal LM in evaluation mode, which peft may have wrapped; it must not be used afterwards.
        folder: destination, which does not exist or is empty.
        save_others: function that writes the tokenizer and other parts of the model into the given folder.
        config: configuration that the model was loaded with.
        dtype: data type of the result; None keeps it.

    Returns:
        The distance between the written model and the adapter model.

    Raises:
        ValueError: If the adapter cannot be merged, or the written model differs from the adapter model by more than
            rounding.
    """
    if kernel_of(model) not in ("eager", "sdpa"):
        use_kernel(model, "sdpa")
    if is_halved(model):
        use_kernel(model, "eager")  # its rounding does not depend on the batch
    kernel, ids = kernel_of(model), comparison_texts(model)
    target = None if dtype is None else DTYPES[dtype]
    name = dtype or str(compute_dtype(model)).removeprefix("torch.")
    exact, rounded = adapter_logprobs(model, ids, DTYPES[name])
    with written_whole(folder) as draft:
        merged = merge(model, target)
        size = sum(weight.numel() * weight.element_size() for weight in merged.parameters())
        with writing("the merged model", folder, size):
            merged.save_pretrained(draft)
            save_others(draft)
        del model, merged
        loaded = load_base(LanguageModelConfig(name=str(draft), dtype=name, trust_remote_code=config.trust_remote_code))
        use_kernel(loaded, kernel)
        return distance_of(logprobs_of(loaded, ids), exact, rounded, DTYPES[name])


# Load adapters.

_CONFIG, _TOKENIZER = "adapter_config.json", "tokenizer_config.json"


class AdapterModel(NamedTuple):
    """A base model with an adapter from a folder."""

    model: Any
    """The Hugging Face model that peft has wrapped, in evaluation mode."""
    tokenizer: Any
    """The Hugging Face tokenizer in the folder; that of the base if the folder has none."""
    config: LanguageModelConfig
    """Configuration that the base was loaded with."""


def load_adapter(name: str) -> AdapterModel:
    """Load an adapter that peft saved, together with its base.

    If the tokenizer of the adapter has more tokens than the base has embeddings, embeddings are added. The base of an
    adapter that lrl exported is loaded as in training, in 4 bits if it was trained in 4 bits. Other adapters do not
    contain this information; their base is loaded in the data type that it was saved in.

    Args:
        name: folder or hub name of the adapter.

    Raises:
        ValueError: If the adapter does not exist or does not fit its base, or if the base cannot be loaded, or only in
            another revision than the adapter was trained on.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoTokenizer

    if Path(name).is_dir() and not Path(name, _CONFIG).is_file():
        raise ValueError(f"peft_model_id is {name!r}, a folder without {_CONFIG}; it must hold an adapter of peft.")
    try:
        adapter = PeftConfig.from_pretrained(name)
    except Exception as error:  # from the hub, the network or the file
        raise ValueError(f"peft_model_id is {name!r}, which peft cannot read ({first_line(error)}).") from error
    base = adapter.base_model_name_or_path
    if not base:
        raise ValueError(f"peft_model_id is {name!r}, which does not name its base (base_model_name_or_path).")
    if adapter.revision not in (None, "main") and not Path(locate(base)).exists():
        raise ValueError(
            f"peft_model_id is {name!r}, whose base is {base!r} in the revision {adapter.revision!r}, and the newest "
            f"would be loaded; download that revision, and let base_model_name_or_path in {_CONFIG} name its folder."
        )
    check_available(base)
    config = LanguageModelConfig(**{"name": base, "dtype": _dtype_of(base)} | _base_settings(name))
    model = load_base(config)
    where, of_gguf = (name, {}) if Path(name, _TOKENIZER).is_file() else sources(base)
    tokenizer = AutoTokenizer.from_pretrained(where, **of_gguf)
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # merge unties them
        # This warning is wrong for adapters of experts, see lrl.lm.adapters.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft reads it
        try:
            adapted = PeftModel.from_pretrained(model, name)
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"peft_model_id is {name!r}, which does not fit its base {base!r} ({reason}).") from error
    return AdapterModel(adapted.eval(), tokenizer, config)


def _base_settings(name: str) -> dict[str, Any]:
    """Return ``dtype`` and ``quantization`` of the base in training; empty if lrl did not export the adapter.

    Args:
        name: folder or hub name of the adapter.

    Raises:
        ValueError: If the file :data:`~lrl.lm.adapters.BASE_FILE` exists but is invalid.
    """
    from transformers.utils.hub import cached_file

    file = cached_file(
        name, BASE_FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    if file is None:
        return {}
    try:
        loaded = json.loads(Path(file).read_text(encoding="utf-8"))
        found = {key: loaded[key] for key in ("dtype", "quantization")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"peft_model_id is {name!r}, whose {BASE_FILE} is damaged ({error!r}); export the adapter again."
        ) from error
    # The configuration of a base in 4 bits is valid only with adapters.
    return found | ({"lora": LoRAConfig()} if found["quantization"] else {})


def _dtype_of(name: str) -> str:
    """Return the data type that a model was saved in; float32 if it is unknown."""
    from transformers import AutoConfig

    where, of_gguf = sources(name)
    if is_gguf(where) or of_gguf:
        return "float32"
    saved = AutoConfig.from_pretrained(where).get_text_config()
    dtype = str(getattr(saved, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in DTYPES else "float32"

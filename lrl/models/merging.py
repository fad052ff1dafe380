"""Merge adapters into the weights that they were trained on, and write a plain Hugging Face folder.

The folder is loaded again and compared with the adapter model before it takes its name.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lrl.models.attention import bare, compute_dtype, is_halved, kernel_of, use_kernel
from lrl.models.loading import forget_quantisation, load_base
from lrl.models.merge_distance import Distance, adapter_logits, check_rounding, comparison_texts, distance_of, logits_of
from lrl.models.model_config import DTYPES, LanguageModelConfig

# -- weights ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merge(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Merge the adapter ``default`` of a causal LM, if it has one, and return the Hugging Face model.

    Sums are computed in float32 and rounded once. Weights in 4 bits are unpacked. Tied embeddings of which one end has
    an adapter of its own are untied first, for the adapter would change the other end as well.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped; it is changed, and must not be used again.
        dtype: data type of the result; None keeps it.

    Raises:
        ValueError: the adapter is of a kind that has no weights to add (prompt tuning).
    """
    if hasattr(model, "peft_config"):
        if not hasattr(model.base_model, "merge_and_unload"):
            kind = model.peft_config["default"].peft_type
            raise ValueError(f"the adapter is of the kind {kind}, which cannot be merged; it must be LoRA.")
        was_tied = bare(model).config.get_text_config().tie_word_embeddings
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`")  # untied here
            warnings.filterwarnings("ignore", "All adapters are already merged")  # in float32, here
            warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")  # on purpose
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
        policy: configured.
        name: what the command line calls it, for errors.

    Raises:
        ValueError: the policy has no adapters, or one for its critic.
    """
    language_model = getattr(policy, "language_model", None)
    if language_model is None or language_model.config.lora is None:
        raise ValueError(
            f"--merge_adapters is given, but {name!r} is a {type(policy).__name__} without adapters; leave it out."
        )
    if language_model.has_critic_adapter:
        raise ValueError(
            f"--merge_adapters is given, but the critic of {name!r} has an adapter of its own, which cannot be merged "
            "into the same weights; leave it out."
        )
    language_model.model, language_model.lower = merge(language_model.model).eval(), None


def _add_adapters(model: Any) -> None:
    """Merge the LoRA layers one by one, each in float32."""
    from peft.tuners.lora import LoraLayer

    for layer in [part for part in model.modules() if isinstance(part, LoraLayer)]:
        base: Any = layer.get_base_layer()
        dtype = next(base.parameters()).dtype  # those of a model with experts have no one weight
        if dtype in (torch.bfloat16, torch.float16):
            cast_layer: Any = layer
            cast_layer.float()
        layer.merge(adapter_names=["default"])
        base.to(dtype)


def _untie(model: Any) -> None:
    """Give input and output embeddings a weight each, if they share one and one of them has an adapter."""
    from peft.tuners.lora import LoraLayer

    ends = bare(model).get_input_embeddings(), bare(model).get_output_embeddings()
    if ends[1] is None or not any(isinstance(end, LoraLayer) for end in ends):
        return
    inside: list[Any] = [end.get_base_layer() if isinstance(end, LoraLayer) else end for end in ends]
    if inside[0].weight is inside[1].weight:
        inside[1].weight = nn.Parameter(inside[1].weight.detach().clone(), requires_grad=False)


def _tie_equal(model: Any, was_tied: bool) -> None:
    """Tie embeddings that were tied and are equal still; note in the configuration where they are not."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if not was_tied or outputs is None:
        return
    equal = torch.equal(inputs.weight, outputs.weight)
    if equal:
        outputs.weight = inputs.weight
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = equal


def _unpack(model: Any, dtype: torch.dtype | None) -> None:
    """Replace layers in 4 bits by ordinary ones with their adapters merged, in place.

    Args:
        model: with adapters.
        dtype: data type of the result; None takes that in which the layers were computed.
    """
    packed = {
        name: part for name, part in model.named_modules() if hasattr(getattr(part, "weight", None), "quant_state")
    }
    for name, part in packed.items():
        if not name.endswith(".base_layer"):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, _dense(part, dtype))
    if packed:
        forget_quantisation(bare(model))


def _dense(part: Any, dtype: torch.dtype | None) -> nn.Linear:
    """Return an ordinary layer with the weights of one in 4 bits, its adapter added in float32 and rounded once.

    The weights are unpacked to float32, as a pass in float32 does.
    """
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


# -- folder ----------------------------------------------------------------------------------------------------------


def check_new_folder(folder: Path, key: str) -> None:
    """Raise if a folder holds something already.

    Args:
        folder: to be written.
        key: the option that names it.

    Raises:
        ValueError: it is a file, or not empty.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{key} is {str(folder)!r}, which is not empty; name a new folder.")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Provide a temporary folder that takes the name ``folder`` at the end of the block; after an error it is removed.

    Args:
        folder: does not exist, or is empty.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        draft = Path(name, folder.name)
        draft.mkdir()
        yield draft
        os.replace(draft, folder)


def save_merged(
    model: Any, folder: Path, save_others: Callable[[Path], None], config: LanguageModelConfig, dtype: str | None = None
) -> Distance:
    """Merge the adapter of a model and write the result, whole or not at all.

    Args:
        model: a Hugging Face causal LM in evaluation mode, which peft may have wrapped; it must not be used again.
        folder: does not exist, or is empty.
        save_others: writes the tokenizer, and what else belongs to the model, into the folder that it is given.
        config: what the model was loaded with.
        dtype: data type of the result; None keeps it.

    Returns:
        The distance of the model that the folder gives from the adapter model.

    Raises:
        ValueError: the adapter cannot be merged, or the models differ by more than rounding.
    """
    if kernel_of(model) not in ("eager", "sdpa"):
        use_kernel(model, "sdpa")
    if is_halved(model):
        use_kernel(model, "eager")  # rounds alike in passes of any shape
    kernel, ids = kernel_of(model), comparison_texts(model)
    before = adapter_logits(model, ids, compute_dtype(model) if dtype is None else DTYPES[dtype])
    with written_whole(folder) as draft:
        merged = merge(model, None if dtype is None else DTYPES[dtype])
        name = str(compute_dtype(merged)).removeprefix("torch.")
        merged.save_pretrained(draft)
        save_others(draft)
        del model, merged
        loaded = load_base(LanguageModelConfig(name=str(draft), dtype=name, trust_remote_code=config.trust_remote_code))
        use_kernel(loaded, kernel)
        after = logits_of(loaded, ids)
        check_rounding(after, before, folder)
    return distance_of(after, before)

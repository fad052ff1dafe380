"""Low-rank adapters of a causal LM: attach them, switch between them, and export a trained model."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lrl.functional.distributed import drop_frozen, frozen_parameter_names, full_state_dict
from lrl.lm.attention import bare
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.files import is_gguf

if TYPE_CHECKING:
    from lrl.lm.model import LanguageModel

_UNMATCHED = r"The following (rank|alpha)_pattern keys did not match"
"""Beginning of a warning of peft, as a regular expression. It is wrong for the experts of a mixture-of-experts model:
peft looks for modules that match their patterns, which match parameters."""


def attach_lora(model: Any, config: LanguageModelConfig) -> Any:
    """Wrap ``model`` with trainable LoRA adapters, and freeze its other weights except those of ``modules_to_save``.

    Args:
        model: a Hugging Face causal LM without adapters.
        config: its configuration, with ``lora`` set.

    Raises:
        ValueError: If ``target_modules`` matches no layer or an embedding whose weight is tied, if ``last_layers``
            exceeds the number of layers, if the embeddings of added tokens would not be trained, or if peft does not
            support the options together, such as dropout for experts.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import peft

    lora = config.lora
    assert lora is not None
    wanted, saved = _layers(model, lora)
    tied, linear = _tied_layers(model), _linear(model)
    if tied & set(wanted):
        raise ValueError(
            f"lora.target_modules names {sorted(tied & set(wanted))}, whose weights are tied: merging would add the "
            "adapter twice; put them into lora.modules_to_save."
        )
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        **_layer_selection(model, lora, wanted),
        modules_to_save=_paths(model, saved) or None,
        ensure_weight_tying=bool(tied & set(saved)),
        fan_in_fan_out=any(type(part).__name__ == "Conv1D" for part in model.modules()),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft reads it
        warnings.filterwarnings("ignore", _UNMATCHED)
        torch.manual_seed(config.init_seed)
        try:
            wrapped = peft.get_peft_model(model, adapters)  # adapters of 16-bit weights are float32
        except ValueError as error:
            key = "dropout" if "lora_dropout" in str(error) else "target_modules"
            others = f" It must name other layers; there are {', '.join(linear)}." if key == "target_modules" else ""
            raise ValueError(
                f"lora.{key} is {getattr(lora, key)!r}, which is not possible for {config.name!r}: {error}{others}"
            ) from error
    if config.added_tokens and (frozen := frozen_embeddings(wrapped)):
        raise ValueError(
            f"language_model.added_tokens is set and lora.modules_to_save does not name {frozen[0]!r}, so that the new "
            f"rows would never be trained; it must be [{', '.join(frozen)}]."
        )
    return wrapped


def frozen_embeddings(model: Any) -> list[str]:
    """Return the names of the input and output embeddings whose weights are frozen; they may have an adapter.

    Args:
        model: a causal LM with adapters.
    """
    base = bare(model)
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    names = {part: name.removesuffix(".base_layer").rsplit(".", 1)[-1] for name, part in base.named_modules()}
    return [names[end] for end in ends if not end.weight.requires_grad]


def decoder_layers(model: Any, key: str = "lora.last_layers") -> tuple[str, nn.ModuleList]:
    """Return the path of the list of decoder layers in a causal LM, and the list itself, in the order of computation.

    Args:
        model: a causal LM, with or without adapters.
        key: the option that needs the layers, for the error message.

    Raises:
        ValueError: If no list of modules is as long as the number of layers in the model's configuration.
    """
    model = bare(model)
    count = model.config.get_text_config().num_hidden_layers
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return name, part
    raise ValueError(f"{key} is set; it must be null: a {type(model).__name__} has no list of decoder layers.")


def _layer_selection(model: Any, lora: LoRAConfig, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ``peft.LoraConfig`` that select the layers with an adapter.

    peft does not support ``all-linear`` for some of the decoder layers only, so with ``last_layers`` the names of
    their linear layers are listed.

    Args:
        model: a causal LM without adapters.
        lora: configuration of the adapters.
        wanted: names of the layers to adapt, without the path to them, or ``all-linear`` alone.

    Raises:
        ValueError: If the model has fewer than ``last_layers`` layers, or ``wanted`` names a layer that is not in them.
    """
    everything = list(wanted) == ["all-linear"]
    if lora.last_layers is None:
        routers = _not_linear(model) if everything else []
        return {"target_modules": "all-linear" if everything else list(wanted), "exclude_modules": routers or None}
    name, layers = decoder_layers(model)
    first = len(layers) - lora.last_layers
    if first < 0:
        raise ValueError(
            f"lora.last_layers is {lora.last_layers}; it must be at most {len(layers)}, the number of layers."
        )
    inside = {
        path.rsplit(".", 1)[-1]
        for layer in layers[first:]
        for path, part in layer.named_modules()
        if "Linear" in type(part).__name__ or "Conv1D" in type(part).__name__
    }
    outside = [] if everything else sorted(set(wanted) - inside)
    if outside:
        raise ValueError(
            f"lora.target_modules names {outside[0]!r}, which is not in the last {lora.last_layers} layers; with "
            f"lora.last_layers it must be among {', '.join(sorted(inside))}."
        )
    return {
        "target_modules": sorted(inside) if everything else list(wanted),
        "layers_to_transform": list(range(first, len(layers))),
        "layers_pattern": name.rsplit(".", 1)[-1],
    }


@torch.no_grad()
def _not_linear(model: nn.Module) -> list[str]:
    """Return the paths of subclasses of ``nn.Linear`` whose output is not that of a linear layer, such as routers.

    They cannot have an adapter, because LoRA adds the output of two small linear layers to that of a linear layer.
    """
    names = []
    parts: list[tuple[str, Any]] = list(model.named_modules())
    for name, part in parts:
        own = isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward
        if not own or type(part).__module__.startswith("bitsandbytes"):
            continue
        try:
            out = part(part.weight.new_zeros(1, part.in_features))
        except (RuntimeError, TypeError, ValueError, IndexError):  # its input is not (row, feature)
            out = None
        if not isinstance(out, torch.Tensor) or out.shape != (1, part.out_features):
            names.append(name)
    return names


def _layers(model: nn.Module, lora: LoRAConfig) -> tuple[list[str], list[str]]:
    """Return the names of the layers that get an adapter, and the names of those that are trained in full.

    Args:
        model: a causal LM without adapters.
        lora: configuration of the adapters.

    Raises:
        ValueError: If the configuration names a layer that does not exist, or an adapter for a layer that cannot have
            one.
    """
    wanted = [lora.target_modules] if isinstance(lora.target_modules, str) else list(lora.target_modules)
    saved = list(lora.modules_to_save or [])
    every = {name.rsplit(".", 1)[-1]: type(part).__name__ for name, part in model.named_modules()}
    for name in [*wanted, *saved]:
        if name != "all-linear" and name not in every:
            key = "modules_to_save" if name in saved else "target_modules"
            names = ", ".join(_linear(model))
            raise ValueError(f"lora.{key} names {name!r}, but no layer has this name; linear layers are {names}.")
    for path in _not_linear(model):
        name = path.rsplit(".", 1)[-1]
        if name in wanted:
            raise ValueError(
                f"lora.target_modules names {name!r}, a {every[name]}, whose output is not that of a linear layer, "
                "so it cannot have an adapter; lora.modules_to_save may name it."
            )
    return wanted, saved


def _paths(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return names of layers; where peft would match the end of another name, the paths to the layers instead."""
    paths = [path for path, _ in model.named_modules()]
    found = list[str]()
    for name in names:
        own = [path for path in paths if path.rsplit(".", 1)[-1] == name]
        found += [name] if all(path in own for path in paths if path.endswith(name)) else own
    return found


def _linear(model: nn.Module) -> list[str]:
    """Return the sorted names of the linear layers, without the paths to them."""
    kinds = {name.rsplit(".", 1)[-1]: type(part).__name__ for name, part in model.named_modules()}
    return sorted(name for name, kind in kinds.items() if "Linear" in kind or "Conv1D" in kind)


def _tied_layers(model: Any) -> set[str]:
    """Return the names of input and output embeddings if they share one weight, else an empty set."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if ends[1] is None or ends[0].weight is not ends[1].weight:
        return set()
    return {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if part in ends}


def freeze_second_adapter(model: Any) -> None:
    """Copy the adapter ``default`` to a frozen adapter ``reference``, which is created if it does not exist.

    Args:
        model: a causal LM with adapters.
    """
    if "reference" not in model.peft_config:
        with warnings.catch_warnings():  # the copy is never trained, so it need not be tied
            warnings.filterwarnings("ignore", "You have requested `ensure_weight_tying`")
            warnings.filterwarnings("ignore", _UNMATCHED)
            model.add_adapter("reference", copy.deepcopy(model.peft_config["default"]))
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in state.items():
            parts = name.split(".")
            if "reference" in parts:
                parameter.copy_(state[".".join("default" if part == "reference" else part for part in parts)])
    use_adapter(model, "default")


def add_critic_adapter(model: Any, config: LanguageModelConfig) -> None:
    """Add an adapter ``critic`` with the configuration of ``default``; at first, it does not change any output.

    Args:
        model: a causal LM with adapters.
        config: configuration of the model.

    Raises:
        ValueError: If the actor has no adapter, or gradient checkpointing is on: the backward pass would recompute the
            critic's layers with the actor's adapter.
    """
    if config.lora is None:
        raise ValueError(
            "value_head.adapter is true and language_model.lora null; set lora, or value_head.adapter false."
        )
    if config.gradient_checkpointing:
        raise ValueError(
            "value_head.adapter and language_model.gradient_checkpointing are both true; one of them must be false."
        )
    if "critic" in model.peft_config:
        return
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _UNMATCHED)
        torch.manual_seed(config.init_seed + 1)
        model.add_adapter("critic", copy.deepcopy(model.peft_config["default"]))
    use_adapter(model, "default")


def use_adapter(model: Any, name: str) -> None:
    """Activate one adapter, and keep all adapters except ``reference`` trainable.

    Activating an adapter by peft freezes the others, so they are made trainable again.

    Args:
        model: a causal LM with adapters.
        name: the adapter to activate.
    """
    model.set_adapter(name)
    for parameter_name, parameter in model.named_parameters():
        adapters = set(parameter_name.split(".")) & set(model.peft_config)
        if adapters:
            parameter.requires_grad_("reference" not in adapters)


# Export a trained model as a Hugging Face folder, which loads without this package.

BASE_FILE = "lrl_base.json"
"""Name of the file in an adapter's folder that contains the ``dtype`` and ``quantization`` of its base in training."""
_OF_EMBEDDINGS = ("ordered_numbers", "number_tokens", "added_tokens")
"""Options that change embeddings. An exported adapter contains the changed embeddings only if
``lora.modules_to_save`` names them."""


def save_pretrained(language_model: LanguageModel, folder: Path, writes: bool = True) -> None:
    """Write the model, or only its adapter, and the tokenizer with the chat template used in training.

    Args:
        language_model: the configured model; its weights may be sharded.
        folder: destination, created if it does not exist.
        writes: whether this rank writes the files; all ranks must call the function.
    """
    model, lora = language_model.model, language_model.config.lora
    state = model.state_dict()
    if lora is not None:
        state = drop_frozen(state, frozen_parameter_names(model))
    state = full_state_dict(state, keep=writes)
    if not writes:
        return
    if lora is None:
        model.save_pretrained(folder, state_dict=state)
    else:  # modules_to_save names the embeddings to save
        model.save_pretrained(folder, state_dict=state, selected_adapters=["default"], save_embedding_layers=False)
        loaded = {name: getattr(language_model.config, name) for name in ("dtype", "quantization")}
        Path(folder, BASE_FILE).write_text(json.dumps(loaded) + "\n", encoding="utf-8")
    language_model.tokenizer.save(folder)


def check_exportable(language_model: LanguageModel) -> None:
    """Check that the base of an adapter can be loaded again by its name.

    Args:
        language_model: the model, which need not be configured yet.

    Raises:
        ValueError: If an option changes weights of the base that the adapter does not contain, or the base is a GGUF
            file.
    """
    config = language_model.config
    if config.lora is None:
        return
    embeddings = () if config.lora.modules_to_save else _OF_EMBEDDINGS
    for key in ("random_init", "first_layers", *embeddings):
        if getattr(config, key):
            raise ValueError(_export_error(config, key))
    if is_gguf(config.name):
        raise ValueError(
            f"language_model.name is {config.name!r}, a GGUF file, which an exported adapter cannot name as its base; "
            "it must be a folder or hub name, or lora null."
        )


def check_embeddings(language_model: LanguageModel) -> None:
    """Check that an exported adapter contains all embeddings that differ from those of the base.

    Args:
        language_model: the configured model.

    Raises:
        ValueError: If embeddings were added or ordered, and ``lora.modules_to_save`` does not name them.
    """
    config = language_model.config
    for key in _OF_EMBEDDINGS:
        if config.lora is not None and getattr(config, key) and frozen_embeddings(language_model.model):
            raise ValueError(_export_error(config, key))


def _export_error(config: LanguageModelConfig, key: str) -> str:
    """Return the error message for an adapter that cannot be exported because the option ``key`` is set."""
    value = getattr(config, key)
    unset, given = ("false", "true") if value is True else ("null" if isinstance(value, int) else "[]", value)
    more = ", or lora.modules_to_save name the embeddings" if key in _OF_EMBEDDINGS else ""
    return (
        f"language_model.{key} is {given}, which changes the base, but an exported adapter names the unchanged base; "
        f"it must be {unset}, or lora null{more}; `lrl merge` writes the whole model."
    )

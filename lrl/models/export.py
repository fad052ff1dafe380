"""Export a trained language model as a plain Hugging Face folder, which loads without this package."""

from __future__ import annotations

import json
from pathlib import Path

from lrl.functional.distributed import full_state_dict
from lrl.functional.trainable_state import drop_frozen, frozen_parameter_names
from lrl.models.language_model import LanguageModel, LanguageModelConfig
from lrl.models.lora import frozen_embeddings
from lrl.models.model_files import is_gguf

BASE_FILE = "lrl_base.json"
"""Name of the file beside an adapter that says how its base was loaded: ``dtype`` and ``quantization``."""
_OF_EMBEDDINGS = ("ordered_numbers", "number_tokens", "added_tokens")
"""Options that change embeddings, which an adapter can hold whole."""


def save_pretrained(language_model: LanguageModel, folder: Path, writes: bool = True) -> None:
    """Write the model, or its adapter, and the tokenizer with the chat template of the training.

    Args:
        language_model: configured; its weights may be sharded.
        folder: created if it does not exist.
        writes: whether this rank writes; all ranks must call the function.
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
    else:  # embeddings that are trained whole are among modules_to_save already
        model.save_pretrained(folder, state_dict=state, selected_adapters=["default"], save_embedding_layers=False)
        loaded = {name: getattr(language_model.config, name) for name in ("dtype", "quantization")}
        Path(folder, BASE_FILE).write_text(json.dumps(loaded) + "\n", encoding="utf-8")
    language_model.tokenizer.save(folder)


def check_exportable(language_model: LanguageModel) -> None:
    """Raise if the model is an adapter whose base could not be loaded again by its name.

    Args:
        language_model: need not be configured.

    Raises:
        ValueError: the weights of the base are not those of the model that the adapter names.
    """
    config = language_model.config
    if config.lora is None:
        return
    embeddings = () if config.lora.modules_to_save else _OF_EMBEDDINGS
    for key in ("random_init", "first_layers", *embeddings):
        if getattr(config, key):
            raise ValueError(_sentence(config, key))
    if is_gguf(config.name):
        raise ValueError(
            f"language_model.name is {config.name!r}, a GGUF file, which an exported adapter cannot name as its base; "
            "it must be a folder or hub name, or lora null."
        )


def check_embeddings(language_model: LanguageModel) -> None:
    """Raise if embeddings that differ from those of the base would be missing from an exported adapter.

    Args:
        language_model: configured.

    Raises:
        ValueError: tokens were added, or embeddings ordered, and ``lora.modules_to_save`` does not name them.
    """
    config = language_model.config
    for key in _OF_EMBEDDINGS:
        if config.lora is not None and getattr(config, key) and frozen_embeddings(language_model.model):
            raise ValueError(_sentence(config, key))


def _sentence(config: LanguageModelConfig, key: str) -> str:
    """Return why an adapter cannot be exported where ``key`` is set."""
    value = getattr(config, key)
    unset, given = ("false", "true") if value is True else ("null" if isinstance(value, int) else "[]", value)
    more = ", or lora.modules_to_save name the embeddings" if key in _OF_EMBEDDINGS else ""
    return (
        f"language_model.{key} is {given}, so that an exported adapter would name a base that it was not trained on; "
        f"it must be {unset}, or lora null{more}; `lrl merge` writes the whole model."
    )

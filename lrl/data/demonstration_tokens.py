"""Encodes demonstrations for a policy: texts as padded token ids (on demand or from files), native turns as tensors."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch

from lrl.data.sources import fingerprint_of
from lrl.lm.layouts import pad_prompts
from lrl.policies.policy import Policy
from lrl.types import Demonstration, Inputs, TurnBatch

LossOn = Literal["completion", "all"]
"""Whether only the tokens of the response contribute to the loss, or the tokens of the prompt as well."""

_MAX_CACHED_RESPONSES = 50_000
"""Maximum number of cached tokenised responses; a full cache is emptied."""


class DemonstrationTokens(ABC):
    """Abstract sequence of encoded demonstrations; indices are int64 ``(turn,)``.

    The *target tokens* of a demonstration are those that contribute to the loss.
    """

    @abstractmethod
    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of characters of each demonstration, including its history, int64 ``(turn,)``."""

    @abstractmethod
    def num_targets(self, indices: np.ndarray) -> int:
        """Return the total number of target tokens of demonstrations."""

    @abstractmethod
    def batch(self, indices: np.ndarray, weight: float | None = None) -> TurnBatch:
        """Return demonstrations as a batch.

        Args:
            indices: indices of the demonstrations, int64 ``(turn,)``.
            weight: weight of each target token in the loss; see :func:`demonstrations_batch`.
        """


class EncodedTokens(DemonstrationTokens):
    """Encodes demonstrations as token ids on demand.

    Args:
        demonstrations: demonstrations to encode.
        policy: policy that encodes prompts and responses.
        loss_on: which tokens are targets of the loss.
    """

    def __init__(self, demonstrations: Sequence[Demonstration], policy: Policy, loss_on: LossOn) -> None:
        self._demonstrations, self._policy = demonstrations, policy
        self.loss_on: LossOn = loss_on
        self._response_ids: dict[str, list[int]] = {}

    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of characters of each demonstration, int64 ``(turn,)``."""
        return np.array([demonstration.characters for demonstration in self._select(indices)], dtype=np.int64)

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the total number of target tokens of demonstrations."""
        demonstrations = self._select(indices)
        targets = self._responses(demonstrations) if self.loss_on == "completion" else self.encode(demonstrations)[1]
        return sum(map(len, targets))

    def batch(self, indices: np.ndarray, weight: float | None = None) -> TurnBatch:
        """Encode demonstrations as a padded batch."""
        return collate_demonstrations(*self.encode(self._select(indices)), weight)

    def encode(self, demonstrations: Sequence[Demonstration]) -> tuple[list[list[int]], list[list[int]]]:
        """Return two lists of token ids per demonstration: the tokens without loss, and the target tokens after them.

        With ``loss_on="completion"`` these are prompt and response. With ``loss_on="all"`` the first list contains only
        the first token of the prompt, because no earlier token predicts it.
        """
        prompts = self._policy.encode_all([(one.observation, one.history) for one in demonstrations])
        responses = self._responses(demonstrations)
        if self.loss_on == "completion":
            return prompts, responses
        targets = [prompt[1:] + response for prompt, response in zip(prompts, responses, strict=True)]
        return [prompt[:1] for prompt in prompts], targets

    def _select(self, indices: np.ndarray) -> list[Demonstration]:
        return [self._demonstrations[index] for index in indices.tolist()]

    def _responses(self, demonstrations: Sequence[Demonstration]) -> list[list[int]]:
        """Return the token ids of each response, from a cache."""
        known = self._response_ids
        missing = list({one.response: None for one in demonstrations if one.response not in known})
        if len(known) + len(missing) > _MAX_CACHED_RESPONSES:
            known.clear()
            missing = list(dict.fromkeys(one.response for one in demonstrations))
        if missing:
            known |= zip(missing, self._policy.encode_responses(missing), strict=True)
        return [known[one.response] for one in demonstrations]


class EncodedNativeTurns(DemonstrationTokens):
    """Encodes native observations and actions on demand; an action counts as one token.

    Args:
        demonstrations: demonstrations with native turns.
        policy: policy that encodes them.
    """

    def __init__(self, demonstrations: Sequence[Demonstration], policy: Policy) -> None:
        self._demonstrations, self._policy = demonstrations, policy

    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return zeros, int64 ``(turn,)``, because there are no texts."""
        return np.zeros(len(indices), dtype=np.int64)

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the number of demonstrations, which have one token each."""
        return len(indices)

    def batch(self, indices: np.ndarray, weight: float | None = None) -> TurnBatch:
        """Encode demonstrations as a batch."""
        read = (self._demonstrations[index].native for index in indices.tolist())
        turns = [turn for turn in read if turn is not None]
        assert len(turns) == len(indices), "DemonstrationsDataModule checks has_native_turns before"
        mask = torch.ones(len(turns), 1, dtype=torch.bool)
        return demonstrations_batch(self._policy.encode_turns(turns), mask, weight)


def encoded(demonstrations: Sequence[Demonstration], policy: Policy, loss_on: LossOn) -> DemonstrationTokens:
    """Return demonstrations encoded as native turns if the policy acts natively, otherwise as token ids."""
    if policy.response_format is None:
        return EncodedNativeTurns(demonstrations, policy)
    return EncodedTokens(demonstrations, policy, loss_on)


def collate_demonstrations(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], weight: float | None = None
) -> TurnBatch:
    """Pad tokenised demonstrations to a batch whose tensors are ``(turn, token)``.

    Args:
        prompts: token ids of each prompt.
        responses: token ids of each response, which are targets of the loss.
        weight: see :func:`demonstrations_batch`.
    """
    device = torch.device("cpu")
    padded = pad_prompts(responses, device)
    inputs = pad_prompts(prompts, device) | {"response_ids": padded["prompt_ids"]}
    return demonstrations_batch(inputs, padded["prompt_mask"], weight)


def demonstrations_batch(inputs: Inputs, mask: torch.Tensor, weight: float | None = None) -> TurnBatch:
    """Return encoded demonstrations as a batch.

    Args:
        inputs: inputs of the policy, each ``(turn, ...)``; for texts ``prompt_ids``, ``prompt_mask`` and
            ``response_ids``.
        mask: target tokens, bool ``(turn, token)``.
        weight: weight of each target token in the loss; None uses 1 / number of target tokens. It is stored in
            ``advantages``, because supervised and reinforcement learning share :class:`~lrl.types.TurnBatch`.
    """
    advantages = mask * (1 / int(mask.sum()) if weight is None else weight)
    return TurnBatch(
        inputs=inputs, response_mask=mask, old_logprobs=torch.zeros_like(advantages), advantages=advantages
    )


# Token ids in memory-mapped files. The name of their folder is a hash of everything that the ids depend on: the data
# set, the codec, the prompt and the tokenizer. Files are written atomically, and processes that need the same files
# wait for the first one to write them.

_FORMAT = 1
"""Version of the file format."""
_CHUNK = 2048
"""Number of demonstrations that are encoded together."""
_NUM_PROBES = 8
"""Number of demonstrations whose token ids are part of the hash, so that it changes if other code encodes them."""


class CachedTokens(DemonstrationTokens):
    """Reads token ids from memory-mapped files; batches equal those of :class:`EncodedTokens`.

    Args:
        folder: folder written by :func:`write_tokens`.
        loss_on: which tokens are targets of the loss.
    """

    def __init__(self, folder: Path, loss_on: LossOn) -> None:
        dtype, starts = json.loads((folder / "about.json").read_text())["dtype"], np.load(folder / "starts.npy")
        self._ids = np.asarray(np.memmap(folder / "ids.bin", dtype=dtype, mode="r"))  # a plain array indexes faster
        self._characters = np.load(folder / "characters.npy")
        first_target = starts[:-1] + (1 if loss_on == "all" else np.load(folder / "prompts.npy"))
        self._bounds = np.stack([starts[:-1], first_target, starts[1:]])

    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of characters of each demonstration, int64 ``(turn,)``."""
        return self._characters[indices]

    def num_targets(self, indices: np.ndarray) -> int:
        """Return the total number of target tokens of demonstrations."""
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
    """Return the token ids of demonstrations from files, which are written first if they do not exist.

    Args:
        folder: folder of the files of all data sets.
        demonstrations: demonstrations to encode.
        policy: policy with a language model, which encodes prompts and responses.
        loss_on: which tokens are targets of the loss; the files do not depend on it.

    Raises:
        ValueError: If the folder cannot be created, read or written.
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
    """Encode all demonstrations in their order, and write their ids to a new folder, which appears when it is complete.

    Args:
        path: path of the new folder.
        demonstrations: demonstrations to encode.
        encoder: encodes prompts and responses separately.
        dtype: integer type of the ids.
    """
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=path.parent))
    try:
        # Rows: tokens of each prompt, tokens of each response, characters of each demonstration.
        sizes = np.zeros((3, len(demonstrations)), dtype=np.int64)
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
    """Return a hash of everything that the token ids depend on."""
    probes = np.unique(np.linspace(0, len(demonstrations) - 1, _NUM_PROBES).astype(np.int64))
    ids = encoder.encode([demonstrations[index] for index in probes.tolist()])
    assert policy.trunk is not None
    tokenizer, codec = policy.trunk.language_model.tokenizer, policy.codec
    about: list[Any] = [_settings(codec), getattr(codec, "description", "")]
    about += [repr(policy.prompt), policy.response_format, policy.trunk.max_prompt_tokens]
    key = json.dumps([_FORMAT, fingerprint_of(demonstrations), ids, tokenizer.fingerprint, *about])
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _settings(value: Any) -> str:
    """Return the class and the attributes of an object as a text that is the same in every process.

    Settings are hashed in addition to the ids of probes, because a small change of a range or a mean may leave these
    ids unchanged.
    """
    if isinstance(value, np.ndarray):
        return repr((value.dtype.str, value.shape, value.tolist()))
    if isinstance(value, Mapping):
        return repr([(_settings(key), _settings(part)) for key, part in value.items()])
    if isinstance(value, (list, tuple)):
        return repr([*map(_settings, value)])
    name = getattr(value, "__qualname__", None)  # functions and classes, whose repr contains an address
    if name is not None or isinstance(value, gym.Space) or not hasattr(value, "__dict__"):
        return repr(value) if name is None else name
    kind, own = type(value), vars(value)
    kept = [key for key in own if not isinstance(getattr(kind, key, None), cached_property)]
    return f"{kind.__qualname__}({', '.join(f'{key}={_settings(own[key])}' for key in kept)})"


def _dtype(policy: Policy) -> np.dtype:
    """Return the smallest integer type for all token ids."""
    assert policy.trunk is not None
    return np.min_scalar_type(max(2**8, len(policy.trunk.language_model.tokenizer.tokenizer)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; other processes that call this function wait for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

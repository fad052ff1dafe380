"""Demonstrations as a policy encodes them, when they are needed: token ids padded to batches, or native turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from lrl.models.padding import pad_prompts
from lrl.policies.policy import Policy
from lrl.turn_batch import Inputs, TurnBatch
from lrl.types import Demonstration

LossOn = Literal["completion", "all"]
"""Whether the response alone is trained on, or the prompt as well."""

_MAX_CACHED_RESPONSES = 50_000
"""Number of tokenised responses after which the cache is emptied: a data set need not fit in memory."""


class DemonstrationTokens(ABC):
    """Abstract sequence of demonstrations as a policy encodes them. Indices are int64 ``(turn,)``."""

    @abstractmethod
    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of characters of demonstrations, histories included, int64 ``(turn,)``."""

    @abstractmethod
    def num_trained(self, indices: np.ndarray) -> int:
        """Return the number of tokens of demonstrations that are trained on."""

    @abstractmethod
    def batch(self, indices: np.ndarray, weight: float | None = None) -> TurnBatch:
        """Return demonstrations as a batch; see :func:`demonstrations_batch`."""


class EncodedTokens(DemonstrationTokens):
    """Encodes demonstrations as token ids when they are needed.

    Args:
        demonstrations: what is encoded.
        policy: encodes prompts and responses.
        loss_on: which tokens are trained on.
    """

    def __init__(self, demonstrations: Sequence[Demonstration], policy: Policy, loss_on: LossOn) -> None:
        self._demonstrations, self._policy = demonstrations, policy
        self.loss_on: LossOn = loss_on
        self._response_ids: dict[str, list[int]] = {}

    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of characters of demonstrations, int64 ``(turn,)``."""
        return np.array([demonstration.characters for demonstration in self._select(indices)], dtype=np.int64)

    def num_trained(self, indices: np.ndarray) -> int:
        """Return the number of tokens of demonstrations that are trained on."""
        demonstrations = self._select(indices)
        trained = self._responses(demonstrations) if self.loss_on == "completion" else self.encode(demonstrations)[1]
        return sum(map(len, trained))

    def batch(self, indices: np.ndarray, weight: float | None = None) -> TurnBatch:
        """Encode demonstrations as a padded batch."""
        return collate_demonstrations(*self.encode(self._select(indices)), weight)

    def encode(self, demonstrations: Sequence[Demonstration]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the token ids of each prompt, and those that are trained on.

        With ``loss_on="all"`` the first part is only the first token and the second all others.
        """
        prompts = self._policy.encode_all([(one.observation, one.history) for one in demonstrations])
        responses = self._responses(demonstrations)
        if self.loss_on == "completion":
            return prompts, responses
        trained = [prompt[1:] + response for prompt, response in zip(prompts, responses, strict=True)]
        return [prompt[:1] for prompt in prompts], trained

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
    """Encodes native observations and actions when they are needed; an action is one token.

    Args:
        demonstrations: what is encoded; all have native turns.
        policy: encodes them.
    """

    def __init__(self, demonstrations: Sequence[Demonstration], policy: Policy) -> None:
        self._demonstrations, self._policy = demonstrations, policy

    def characters(self, indices: np.ndarray) -> np.ndarray:
        """Return zeros, int64 ``(turn,)``: there are no texts."""
        return np.zeros(len(indices), dtype=np.int64)

    def num_trained(self, indices: np.ndarray) -> int:
        """Return the number of demonstrations: each is one token."""
        return len(indices)

    def batch(self, indices: np.ndarray, weight: float | None = None) -> TurnBatch:
        """Encode demonstrations as a batch."""
        read = (self._demonstrations[index].native for index in indices.tolist())
        turns = [turn for turn in read if turn is not None]
        assert len(turns) == len(indices), "the data module asks a source first whether it has native turns"
        mask = torch.ones(len(turns), 1, dtype=torch.bool)
        return demonstrations_batch(self._policy.encode_turns(turns), mask, weight)


def encoded(demonstrations: Sequence[Demonstration], policy: Policy, loss_on: LossOn) -> DemonstrationTokens:
    """Return demonstrations as a policy encodes them: native turns if it acts natively, else token ids."""
    if policy.response_format is None:
        return EncodedNativeTurns(demonstrations, policy)
    return EncodedTokens(demonstrations, policy, loss_on)


def collate_demonstrations(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], weight: float | None = None
) -> TurnBatch:
    """Pad tokenised demonstrations to a batch whose tensors are ``(turn, token)``.

    Args:
        prompts: token ids of each prompt.
        responses: token ids of each response, which are trained on.
        weight: see :func:`demonstrations_batch`.
    """
    device = torch.device("cpu")
    padded = pad_prompts(responses, device)
    inputs = pad_prompts(prompts, device) | {"response_ids": padded["prompt_ids"]}
    return demonstrations_batch(inputs, padded["prompt_mask"], weight)


def demonstrations_batch(inputs: Inputs, mask: torch.Tensor, weight: float | None = None) -> TurnBatch:
    """Return encoded demonstrations as a batch.

    Args:
        inputs: what the policy evaluates, each ``(turn, ...)``; of texts ``prompt_ids``, ``prompt_mask`` and
            ``response_ids``.
        mask: which tokens are trained on, bool ``(turn, token)``.
        weight: weight of each trained token, stored as its advantage; None uses 1 / number of trained tokens.
    """
    advantages = mask * (1 / int(mask.sum()) if weight is None else weight)
    return TurnBatch(
        inputs=inputs, response_mask=mask, old_logprobs=torch.zeros_like(advantages), advantages=advantages
    )

"""Decoding without a KV cache, for models whose state or positions cannot be padded: each token reads its whole row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from lrl.models.forward import logits_of
from lrl.models.prompt_sharing import lay_out_alone


@final
class UncachedDecoding:
    """Responses that continue prompts, in rows that are padded on the right only.

    Args:
        model: any causal LM.
        prompts: token ids, one sequence per response.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.turn = torch.arange(len(prompts), device=self.device)
        """Which responses are unfinished, int64 ``(response,)``."""
        self.rows = [list(prompt) for prompt in prompts]
        self.logits = self._next_logits()
        """``(response, vocabulary)`` of each response's first token."""

    @property
    def text(self) -> Tensor:
        """Which row of logits each unfinished response has, int64 ``(response,)``: its own."""
        return torch.arange(len(self.rows), device=self.device)

    def append(self, token: Tensor, unfinished: Tensor) -> Tensor:
        """Append a token to each unfinished response and return the logits of the next, ``(response, vocabulary)``.

        Args:
            token: int64 ``(response,)``.
            unfinished: bool ``(response,)``; the others leave.
        """
        responses = zip(self.rows, token.tolist(), unfinished.tolist(), strict=True)
        self.rows = [[*row, last] for row, last, goes_on in responses if goes_on]
        self.turn = self.turn[unfinished]
        return self._next_logits()

    def _next_logits(self) -> Tensor:
        lengths = torch.tensor([len(row) for row in self.rows], device=self.device)
        mask = torch.arange(int(lengths.max()), device=self.device)[None] < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long, device=self.device)
        ids[mask] = torch.tensor([token for row in self.rows for token in row], device=self.device)
        next_ids = ids.new_zeros(len(ids), 1)  # the id of the next token does not matter: nothing is predicted from it
        layout = lay_out_alone(ids, mask, next_ids, torch.ones_like(next_ids, dtype=torch.bool))
        return logits_of(self.model, layout)[:, 0]

"""Decoding without a cache, for models whose state or positions cannot be padded: every token reads its row again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrl.models.forward import logits_of
from lrl.models.prompt_sharing import lay_out_alone


class Rereading:
    """Answers behind prompts in rows that are padded on the right only.

    Args:
        model: any causal LM.
        prompts: token ids, one list per row.
        device: where the model lives.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.model, self.device = model, device
        self.turn = torch.arange(len(prompts), device=device)
        self.rows = [list(prompt) for prompt in prompts]
        self.logits = self._read()

    def write(self, token: Tensor, writing: Tensor) -> Tensor:
        """Logits ``(answer, vocabulary)`` behind one more token of each answer that is ``writing``."""
        going_on = zip(self.rows, token.tolist(), writing.tolist(), strict=True)
        self.rows = [[*row, last] for row, last, goes_on in going_on if goes_on]
        self.turn = self.turn[writing]
        return self._read()

    def _read(self) -> Tensor:
        lengths = torch.tensor([len(row) for row in self.rows], device=self.device)
        mask = torch.arange(int(lengths.max()), device=self.device)[None] < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long, device=self.device)
        ids[mask] = torch.tensor([token for row in self.rows for token in row], device=self.device)
        next_ids = ids.new_zeros(len(ids), 1)  # what comes next, whatever it is: its column predicts nothing
        layout = lay_out_alone(ids, mask, next_ids, torch.ones_like(next_ids, dtype=torch.bool))
        return logits_of(self.model, layout)[:, 0]

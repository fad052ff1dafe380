"""Turns with equal texts, which a forward pass without dropout needs to see once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_SHARE = 0.5
"""Repeated turns are left out if at most this share of the turns remains; a selection costs time and memory as well."""


class DistinctTurns(NamedTuple):
    """Which turns stand for all others with the same text."""

    first: Tensor
    """The first turn with each text, int64 ``(text,)``."""
    index: Tensor
    """The text of each turn, int64 ``(turn,)``."""


@torch.no_grad()
def distinct_turns(inputs: Mapping[str, Tensor], mask: Tensor) -> DistinctTurns | None:
    """Find turns with equal prompts and equal responses; None if fewer than half of the turns are repeated.

    Args:
        inputs: ``prompt_ids`` and ``prompt_mask`` ``(turn, prompt)``, and ``response_ids`` ``(turn, token)``.
        mask: of the responses, bool ``(turn, token)``.
    """
    turns = len(mask)
    if turns < 2:
        return None
    prompt, response = inputs["prompt_mask"], inputs["response_ids"][:, : mask.shape[1]]
    sizes = torch.stack([prompt.sum(1), mask.sum(1)], dim=1)
    texts = torch.cat([sizes, inputs["prompt_ids"] * prompt, response * mask], dim=1)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (texts.shape[1],), generator=generator).to(texts.device)
    _, index = torch.unique((texts * factors).sum(1), return_inverse=True)
    count = int(index.max()) + 1
    if count > _SHARE * turns:
        return None
    number = torch.arange(turns, device=texts.device)
    first = number.new_full((count,), turns).scatter_reduce(0, index, number, "amin")
    return DistinctTurns(first, index) if torch.equal(texts[first][index], texts) else None  # None: a sum collided

"""Token ids of different length as rectangular tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Pad prompts on the right with 0.

    Args:
        prompts: token ids, one sequence per row.
        device: of the result.

    Returns:
        ``prompt_ids``, int64 ``(row, prompt)``, and ``prompt_mask``, bool ``(row, prompt)``.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(prompts), np.int64, lengths.sum())  # faster than a tensor of lists
    return {"prompt_ids": torch.from_numpy(ids).to(device), "prompt_mask": torch.from_numpy(mask).to(device)}


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids (int64) and mask (bool), each ``(prompt, column)``, of prompts that end in the same column."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return ids, torch.arange(width, device=device)[None] >= width - lengths[:, None]

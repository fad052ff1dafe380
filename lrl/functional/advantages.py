"""From rewards to advantages."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    returns: Tensor, group: Tensor, scale: str = "group_std", leave_one_out: bool = False, eps: float = 1e-4
) -> Tensor:
    """Advantage of each episode over its group: the critic-free baseline of GRPO.

    ``A_i = (R_i - mean(R of its group)) / scale``, arXiv:2402.03300 section 4.1.2. With ``leave_one_out`` the
    baseline is the mean of the *other* members (RLOO, arXiv:2402.14740, eq. 8). A group that agrees gets exactly 0.

    Args:
        returns: float ``(episode,)``.
        group: int64 ``(episode,)``; equal numbers form a group.
        scale: ``group_std`` (GRPO), ``batch_std`` (standard deviation over all episodes), or ``none`` (Dr. GRPO,
            arXiv:2503.20783).
        leave_one_out: baseline without the episode itself; needs groups of at least two.
        eps: added to the standard deviation.

    Returns:
        float ``(episode,)``.

    Raises:
        ValueError: an unknown scale, or leave-one-out in a group of one.
    """
    _, index = torch.unique(group, return_inverse=True)
    count = torch.bincount(index).to(returns.dtype)
    mean = torch.zeros_like(count).index_add(0, index, returns) / count
    centred = returns - mean[index]
    squares = torch.zeros_like(count).index_add(0, index, centred.square())
    if leave_one_out:
        if bool((count < 2).any()):
            raise ValueError("leave_one_out needs group_size >= 2; there is a group of one episode.")
        centred = centred * (count / (count - 1))[index]
    if scale == "none":
        return centred
    if scale == "batch_std":
        std = returns.std(correction=1) if len(returns) > 1 else torch.zeros_like(centred)
    elif scale == "group_std":
        std = (squares / (count - 1).clamp(min=1)).sqrt()[index]
    else:
        raise ValueError(f"advantage_scale is {scale!r}; it must be group_std, batch_std or none.")
    agrees = squares[index] <= (1e-6 * returns.abs().clamp(min=1)).square()
    return torch.where(agrees, torch.zeros_like(centred), centred / (std + eps))

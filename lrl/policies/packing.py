"""Several whole turns in one row, none of which sees another: padding is paid for once per row, not once per turn."""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.policies.layout import Layout, ragged


def pack(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor, max_row_tokens: int
) -> Layout:
    """Lay turns out in rows of at most ``max_row_tokens`` tokens (a longer turn gets a row of its own length).

    The mask is block-diagonal and positions restart with every turn, so the log-probabilities are those of the plain
    pass. Rows are filled first-fit by falling length.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row.
        max_row_tokens: the width that rows are filled to.
    """
    prompts, responses = prompt_mask.sum(1), response_mask.sum(1)
    lengths = prompts + responses
    row, start, number = _first_fit(lengths.tolist(), max_row_tokens)
    device = prompt_ids.device
    row, start, number = (torch.tensor(values, device=device) for values in (row, start, number))
    shape = (int(row.max()) + 1, int((start + lengths).max()))
    input_ids = torch.zeros(shape, dtype=torch.long, device=device)
    position_ids, segments = torch.zeros_like(input_ids), torch.full_like(input_ids, -1)

    turn, column = ragged(prompts)
    target = (row[turn], start[turn] + column)
    input_ids[target], position_ids[target], segments[target] = prompt_ids[turn, column], column, number[turn]
    turn, column = ragged(responses)
    offset = prompts[turn] + column
    target = (row[turn], start[turn] + offset)
    input_ids[target], position_ids[target], segments[target] = response_ids[turn, column], offset, number[turn]

    predicts = start[turn] + offset - 1
    columns, place = torch.unique(predicts, return_inverse=True)
    kept = torch.zeros_like(response_ids)
    kept[turn, column] = place
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        completions_per_row=int(number.max()) + 1,  # more than one: the row needs a mask of its own
        logit_columns=columns,
        row=row,
        kept=kept,
    )


def _first_fit(lengths: list[int], width: int) -> tuple[list[int], list[int], list[int]]:
    """Row, first column and number inside the row (from 1) of each turn."""
    row, start, number = [0] * len(lengths), [0] * len(lengths), [0] * len(lengths)
    used: list[int] = []
    count: list[int] = []
    for turn in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        chosen = next((r for r, filled in enumerate(used) if filled + lengths[turn] <= width), len(used))
        if chosen == len(used):
            used.append(0)
            count.append(0)
        row[turn], start[turn] = chosen, used[chosen]
        used[chosen] += lengths[turn]
        count[chosen] += 1
        number[turn] = count[chosen]
    return row, start, number

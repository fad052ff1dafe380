"""Packing: several turns in one row, none attending to another, so that there is padding per row and not per turn.

The common prefix of all prompts (mostly the system text) is in a row once, for all of its turns::

    pad | prefix | rest of prompt 1 | rest of prompt 2 | last token 1, response 1 | last token 2, response 2
                                                       ^ logits are computed from about here on, in all rows

The mask lets each turn attend to the prefix and to itself, and its positions continue after the prefix, so the
log-probabilities are those of the plain pass. The last token of a response predicts nothing and is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from lrl.models.prompt_sharing import Layout, Places, common_prefix, ragged

_PREFIX, _REST, _RESPONSE = range(3)


def pack(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor, max_row_tokens: int
) -> Layout:
    """Arrange turns in rows of at most ``max_row_tokens`` tokens, or as many as the longest turn has.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``; no prompt is empty.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row.
        max_row_tokens: the width to which rows are filled.
    """
    prompts, responses = prompt_mask.sum(1), response_mask.sum(1).clamp(min=1)
    prefix = common_prefix(prompt_ids, prompts)
    own_row = spread((prompts - prefix + responses - 1).tolist(), max_row_tokens - prefix)
    row = torch.tensor(own_row, device=prompt_ids.device)
    tokens = _tokens(prompt_ids, prompts, response_ids, responses, row, prefix)
    rows, area, turn, ids, positions = tokens[:, torch.argsort(tokens[0] * 3 + tokens[1], stable=True)]

    widths = torch.bincount(rows)
    width = int(widths.max())
    columns = ragged(widths)[1] + (width - widths)[rows]  # rows end together: targets are the same few columns in all
    input_ids = torch.zeros(len(widths), width, dtype=torch.long, device=row.device)
    position_ids, segments = torch.zeros_like(input_ids), torch.full_like(input_ids, -1)
    input_ids[rows, columns], position_ids[rows, columns] = ids, positions
    segments[rows, columns] = torch.where(area == _PREFIX, 0, turn + 1)
    source = torch.full_like(segments, -1)
    source[rows, columns] = turn

    predicts = area == _RESPONSE
    first = int(columns[predicts].min())
    kept = torch.zeros_like(response_ids)
    kept[turn[predicts], (positions - prompts[turn] + 1)[predicts]] = columns[predicts] - first
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        completions_per_row=len(row) + 1,  # more than one: the rows need masks of their own
        logit_columns=torch.arange(first, width, device=row.device),
        row=row,
        kept=kept,
        places=Places(source, position_ids),
    )


def _tokens(
    prompt_ids: Tensor, prompts: Tensor, response_ids: Tensor, responses: Tensor, row: Tensor, prefix: int
) -> Tensor:
    """Return row, area, turn, id and position of every token that is computed, int64 ``(5, computed token)``.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompts: lengths of the prompts, int64 ``(turn,)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        responses: lengths of the responses, int64 ``(turn,)``.
        row: of each turn, int64 ``(turn,)``.
        prefix: length of the common prefix.
    """
    first = torch.unique(row)
    shared, column = ragged(torch.full_like(first, prefix))
    zeros = torch.zeros_like(column)
    parts = [torch.stack([first[shared], zeros + _PREFIX, zeros, prompt_ids[0, column], column])]
    turn, column = ragged(prompts - prefix)
    column = prefix + column
    area = torch.where(column == prompts[turn] - 1, _RESPONSE, _REST)  # its last token predicts the response
    parts.append(torch.stack([row[turn], area, turn, prompt_ids[turn, column], column]))
    turn, column = ragged(responses - 1)
    area = torch.full_like(turn, _RESPONSE)
    parts.append(torch.stack([row[turn], area, turn, response_ids[turn, column], prompts[turn] + column]))
    return torch.cat(parts, dim=1)


def spread(lengths: Sequence[int], width: int) -> list[int]:
    """Return the row of each item: rows are filled about equally, and at most to ``width`` if no item is longer."""
    width = max(width, *lengths, 1)
    num_rows = -(-sum(lengths) // width)
    while True:
        row, filled = [0] * len(lengths), [(0, index) for index in range(num_rows)]
        for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            load, row[item] = filled[0]
            heapq.heapreplace(filled, (load + lengths[item], row[item]))
        if max(filled)[0] <= width:
            return row
        num_rows += 1

"""Prompt sharing: turns with the same prompt share one row of a forward pass, so that the prompt is computed once.

Their completions follow the prompt one after the other::

    [pad pad prompt prompt prompt][completion 1][completion 2 ][completion 3] pad
                                  ^ every row's completions begin in the same column

Each completion attends to the prompt and to itself (a 4-D mask), and its positions restart after the prompt, so that
the log-probabilities are those of the plain pass. One completion per row *is* the plain pass, with its 2-D mask.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = (1, 2, 4, 8, 16, 32)


class Places(NamedTuple):
    """Holds the origin of each column, each int64 ``(row, column)``."""

    turn: Tensor
    """One of the turns whose text it belongs to; -1 for padding."""
    column: Tensor
    """Its place among the tokens of that turn's prompt and response."""


class Lower(NamedTuple):
    """The states that a forward pass starts from, above some layers (:mod:`lrl.lm.frozen_states`)."""

    depth: int
    """Number of layers that are left out."""
    states: Tensor
    """``(row, column, hidden)``: the output of the last of them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows for one forward pass, and the positions of each turn's tokens in them."""

    input_ids: Tensor
    """int64 ``(row, column)``."""
    position_ids: Tensor
    """int64 ``(row, column)``: restarted for each completion."""
    segments: Tensor
    """int64 ``(row, column)``: -1 padding, 0 prompt, k the row's k-th completion."""
    completions_per_row: int
    logit_columns: Tensor
    """int64 ``(kept,)``: the columns whose logits are computed."""
    row: Tensor
    """int64 ``(turn,)``: the row of each turn."""
    kept: Tensor
    """int64 ``(turn, token)``: which kept column predicts each response token."""
    places: Places
    lower: Lower | None = None
    """None starts from the embeddings."""
    tree: Tensor | None = None
    """bool ``(segment, segment)``, or ``(row, segment, segment)``: which segments each of a row's segments attends to,
    besides itself; None is the prompt."""

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Return an int64 mask ``(row, column)`` for the plain pass, else an additive ``(row, 1, column, column)``."""
        if self.completions_per_row == 1:
            return (self.segments >= 0).long()
        query, key = self.segments[:, :, None], self.segments[:, None, :]
        seen = ((key == 0) & (query >= 0)) | (key == query)
        if self.tree is not None:
            tree = self.tree.expand(len(query), -1, -1)
            row = torch.arange(len(query), device=seen.device)[:, None, None]
            seen |= tree[row, query.clamp(min=0), key.clamp(min=0)] & (query >= 0) & (key >= 0)
        columns = torch.arange(self.segments.shape[1], device=seen.device)
        allowed = seen & (columns[None, :] <= columns[:, None])
        return additive_mask(allowed, dtype)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that attention adds to its scores, ``(row, 1, query, key)``.

    Args:
        seen: which columns each query attends to, bool ``(row, query, key)``.
        dtype: dtype of the attention.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    widest = torch.float32 if dtype == torch.float64 else dtype  # eager attention takes its softmax in float32
    return mask.masked_fill_(~seen, torch.finfo(widest).min)[:, None]


def lay_out(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor, share: bool = True
) -> Layout:
    """Arrange turns in rows, with as many completions per row as is cheapest.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row.
        share: False gives every turn a row of its own.
    """
    lengths = prompt_mask.sum(1)
    prompt_width, response_width = int(lengths.max()), max(int(response_mask.sum(1).max()), 1)
    if share:
        keyed = torch.cat([lengths[:, None], prompt_ids * prompt_mask], dim=1)
        _, prompt_of, counts = torch.unique(keyed, dim=0, return_inverse=True, return_counts=True)
    else:
        prompt_of = torch.arange(len(prompt_ids), device=prompt_ids.device)
        counts = torch.ones_like(prompt_of)
    per_row, _ = cheapest(counts, prompt_width, response_width)
    row, slot = assign_rows(prompt_of, counts, per_row)
    return _build(prompt_ids, lengths, response_ids, response_mask.sum(1), row, slot, per_row)


def lay_out_alone(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor, width: int | None = None
) -> Layout:
    """Give every turn a row of its own, padded on the right only.

    No token attends to padding in any causal model, however it handles masks and positions; logits are computed from
    the last token of the shortest prompt on. That of an empty response is its prompt's last column.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row.
        width: number of columns; None takes as many as the longest turn has tokens.
    """
    lengths, sizes = prompt_mask.sum(1), response_mask.sum(1)
    width, first = width or int((lengths + sizes).max()), int(lengths.min()) - 1
    columns = torch.arange(width, device=prompt_ids.device)
    input_ids = torch.zeros(len(lengths), width, dtype=torch.long, device=prompt_ids.device)
    turn, column = ragged(lengths)
    input_ids[turn, column] = prompt_ids[turn, column]
    turn, column = ragged(sizes)
    input_ids[turn, lengths[turn] + column] = response_ids[turn, column]
    kept = (lengths - 1 - first)[:, None].repeat(1, response_ids.shape[1])
    kept[turn, column] += column
    return Layout(
        input_ids=input_ids,
        position_ids=columns.expand_as(input_ids),
        segments=torch.where(columns < (lengths + sizes)[:, None], 0, -1),
        completions_per_row=1,
        logit_columns=torch.arange(first, max(width - 1, int(lengths.max())), device=prompt_ids.device),
        row=torch.arange(len(lengths), device=prompt_ids.device),
        kept=kept,
        places=_places_alone(columns, lengths + sizes),
    )


def _places_alone(columns: Tensor, lengths: Tensor) -> Places:
    """Return where columns ``(column,)`` come from, in rows that hold one turn of ``lengths`` ``(turn,)`` each."""
    turn = torch.arange(len(lengths), device=columns.device)[:, None]
    return Places(torch.where(columns < lengths[:, None], turn, -1), columns.expand(len(lengths), -1))


def cheapest(counts: Tensor, prompt: int, response: int) -> tuple[int, float]:
    """Return the number of completions per row that costs least, and its cost (see :func:`cost_of`).

    Args:
        counts: turns with each distinct prompt, int64 ``(prompt,)``.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
    """

    def cost(per_row: int) -> float:
        rows = int(((counts + per_row - 1) // per_row).sum())
        return cost_of(rows, prompt + min(per_row, int(counts.max())) * response)

    per_row = min(_CANDIDATES, key=cost)
    return per_row, cost(per_row)


def cost_of(rows: int, width: int) -> float:
    """Return the cost of a forward pass in tokens, attention's quadratic part included."""
    return rows * width * (1 + width / 1024)


def assign_rows(prompt_of: Tensor, counts: Tensor, per_row: int) -> tuple[Tensor, Tensor]:
    """Assign turns to rows that hold one prompt each.

    Args:
        prompt_of: which distinct prompt each turn has, int64 ``(turn,)``.
        counts: how many turns have each prompt, int64 ``(prompt,)``.
        per_row: the maximum number of turns in a row.

    Returns:
        The row of each turn and its slot in that row, each int64 ``(turn,)``; rows are in the order of the prompts.
    """
    order = torch.argsort(prompt_of, stable=True)
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(prompt_of)
    rank[order] = torch.arange(len(order), device=order.device) - starts[prompt_of[order]]
    rows_of_prompt = (counts + per_row - 1) // per_row
    first_row = rows_of_prompt.cumsum(0) - rows_of_prompt
    return first_row[prompt_of] + rank // per_row, rank % per_row


def _build(
    prompt_ids: Tensor, lengths: Tensor, response_ids: Tensor, sizes: Tensor, row: Tensor, slot: Tensor, per_row: int
) -> Layout:
    """Build the rows, given the row and the slot of each turn.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        lengths: of the prompts, int64 ``(turn,)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        sizes: lengths of the responses, int64 ``(turn,)``.
        row: int64 ``(turn,)``.
        slot: place in the row, int64 ``(turn,)``.
        per_row: the maximum number of turns in a row.
    """
    device, num_rows = prompt_ids.device, int(row.max()) + 1
    prompt_width = int(lengths.max())
    slot_sizes = torch.zeros(num_rows, per_row, dtype=torch.long, device=device)
    slot_sizes[row, slot] = sizes
    starts = prompt_width + slot_sizes.cumsum(1) - slot_sizes
    width = prompt_width + int(slot_sizes.sum(1).max())
    input_ids = torch.zeros(num_rows, width, dtype=torch.long, device=device)
    position_ids = torch.zeros_like(input_ids)
    segments, source = torch.full_like(input_ids, -1), torch.full_like(input_ids, -1)

    turn, column = ragged(lengths)
    target = (row[turn], prompt_width - lengths[turn] + column)
    source[target] = turn
    input_ids[target], position_ids[target], segments[target] = prompt_ids[turn, column], column, 0
    turn, column = ragged(sizes)
    offset = starts[row[turn], slot[turn]] + column
    target = (row[turn], offset)
    input_ids[target], segments[target] = response_ids[turn, column], slot[turn] + 1
    position_ids[target], source[target] = lengths[turn] + column, turn

    kept = torch.zeros_like(response_ids)
    # The token before the first completion is the prompt's last; before the others, the completion's own.
    kept[turn, column] = torch.where(column == 0, 0, offset - prompt_width)
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        completions_per_row=per_row,
        logit_columns=torch.arange(prompt_width - 1, max(width - 1, prompt_width), device=device),
        row=row,
        kept=kept,
        places=Places(source, position_ids),
    )


def common_prefix(prompt_ids: Tensor, lengths: Tensor) -> int:
    """Return the length of the longest common prefix that leaves every prompt at least one token.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        lengths: int64 ``(turn,)``.
    """
    shortest = int(lengths.min()) - 1
    differs = (prompt_ids[:, :shortest] != prompt_ids[:1, :shortest]).any(0)
    return int(differs.int().argmax()) if bool(differs.any()) else shortest


def ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return item and position, each int64 ``(element,)``, of all elements of items of ``lengths`` ``(item,)``."""
    item = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return item, torch.arange(len(item), device=lengths.device) - starts[item]


# Token ids of different length as rectangular tensors.


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


# Packing: several turns in one row, none attending to another, so that there is padding per row and not per turn.
#
# The common prefix of all prompts (mostly the system text) is in a row once, for all of its turns::
#
#     pad | prefix | rest of prompt 1 | rest of prompt 2 | last token 1, response 1 | last token 2, response 2
#                                                        ^ logits are computed from about here on, in all rows
#
# The mask lets each turn attend to the prefix and to itself, and its positions continue after the prefix, so the
# log-probabilities are those of the plain pass. The last token of a response predicts nothing and is left out.

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

"""Responses to one prompt as a tree: their common beginnings are computed once.

The responses ``up now``, ``up then`` and ``down now`` to one prompt share a row, in which every column but the prompt's
is a prefix of one of them; the last token of a response predicts nothing and is left out::

    [pad prompt][up][down]        up predicts now and then, down predicts now

A prefix attends to the prompt and to its own prefixes (a 4-D mask), so the log-probabilities are those of the plain
pass. Groups whose responses have a common format, or agree, have far fewer prefixes than tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lrl.models.prompt_sharing import Layout, Places, cheapest, cost_of, ragged

_SHARE = 0.75
"""Trees are used if they cost at most this share of rows without them: each tree needs a mask of its own."""


class ResponsePrefixes(NamedTuple):
    """The distinct prefixes of the responses to some prompts, numbered from 0, shorter ones first."""

    prompt: Tensor
    """Which prompt each belongs to, int64 ``(prefix,)``."""
    turn: Tensor
    """One of the turns whose response begins with it, int64 ``(prefix,)``."""
    ids: Tensor
    """The last token of each, int64 ``(prefix,)``."""
    depth: Tensor
    """The length of each, int64 ``(prefix,)``."""
    parent: Tensor
    """Each without its last token, int64 ``(prefix,)``; -1 where that is the prompt alone."""
    before: Tensor
    """The prefix before each response token, int64 ``(turn, token)``; -1 is the prompt alone."""


def find_prefixes(prompt_of: Tensor, response_ids: Tensor, sizes: Tensor) -> ResponsePrefixes:
    """Find the distinct prefixes of responses that predict a token.

    Args:
        prompt_of: the prompt of each turn, int64 ``(turn,)``.
        response_ids: int64 ``(turn, token)``.
        sizes: lengths of the responses, at least one of which has two tokens, int64 ``(turn,)``.
    """
    vocabulary = int(response_ids.max()) + 1
    before = torch.full_like(response_ids, -1)
    here = -1 - prompt_of  # the prompts alone, each with a number of its own
    parts: list[tuple[Tensor, ...]] = []
    count = 0
    for column in range(int(sizes.max()) - 1):
        before[:, column] = here
        turns = (sizes > column + 1).nonzero()[:, 0]
        keys = (here[turns] + len(prompt_of)) * vocabulary + response_ids[turns, column]
        distinct, number = torch.unique(keys, return_inverse=True)
        first = turns.new_zeros(len(distinct)).scatter_(0, number, turns)  # any turn with that prefix
        depth = torch.full_like(first, column + 1)
        parts.append((prompt_of[first], first, response_ids[first, column], depth, here[first]))
        here[turns] = count + number
        count += len(distinct)
    before[torch.arange(len(sizes), device=sizes.device), sizes - 1] = here
    prompt, turn, ids, depth, parent = (torch.cat(part) for part in zip(*parts, strict=True))
    return ResponsePrefixes(prompt, turn, ids, depth, parent.clamp(min=-1), before.clamp(min=-1))


def lay_out_trees(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor
) -> Layout | None:
    """Arrange each distinct prompt in a row, with the prefixes of its responses after it; None where it does not pay.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row; no response is empty.
    """
    sizes = response_mask.sum(1)
    if len(sizes) < 2 or int(sizes.min()) < 1 or int(sizes.max()) < 2:
        return None
    keyed = torch.cat([prompt_mask.sum(1, keepdim=True), prompt_ids * prompt_mask], dim=1)
    unique, prompt_of, turns = torch.unique(keyed, dim=0, return_inverse=True, return_counts=True)
    found = find_prefixes(prompt_of, response_ids, sizes)
    counts = torch.bincount(found.prompt, minlength=len(unique))
    prompt, most = int(unique[:, 0].max()), int(counts.max())
    _, without = cheapest(turns, prompt, int(sizes.max()) - 1)
    if cost_of(len(unique), prompt + most) > _SHARE * without:
        return None
    order = torch.argsort(found.prompt, stable=True)
    place = torch.empty_like(order)
    place[order] = ragged(counts)[1]
    return _build(unique[:, 1:], unique[:, 0], prompt_of, found, place, most)


def _build(
    prompts: Tensor, lengths: Tensor, prompt_of: Tensor, found: ResponsePrefixes, place: Tensor, most: int
) -> Layout:
    """Build the rows, given the place of each prefix after its prompt.

    Args:
        prompts: int64 ``(prompt, token)``, right-padded.
        lengths: of the prompts, int64 ``(prompt,)``.
        prompt_of: the prompt of each turn, int64 ``(turn,)``.
        found: the prefixes.
        place: int64 ``(prefix,)``.
        most: the largest number of prefixes of one prompt.
    """
    rows, width, device = len(lengths), int(lengths.max()), prompts.device
    input_ids = torch.zeros(rows, width + most, dtype=torch.long, device=device)
    position_ids, column_of = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    segments = torch.full_like(input_ids, -1)
    row, column = ragged(lengths)
    target = row, width - lengths[row] + column
    input_ids[target], position_ids[target], column_of[target] = prompts[row, column], column, column
    segments[target] = 0
    target = found.prompt, width + place
    input_ids[target], segments[target] = found.ids, place + 1
    position_ids[target] = lengths[found.prompt] + found.depth - 1
    column_of[target] = position_ids[target]

    seen = torch.zeros(rows, most + 1, most + 1, dtype=torch.bool, device=device)  # the prompt first, then prefixes
    seen[:, :, 0] = True
    for depth in range(1, int(found.depth.max()) + 1):
        some = (found.depth == depth).nonzero()[:, 0]
        of, own = found.prompt[some], place[some] + 1
        above = torch.where(found.parent[some] < 0, 0, place[found.parent[some].clamp(min=0)] + 1)
        seen[of, own] |= seen[of, above]
        seen[of, own, own] = True

    turn = torch.empty_like(lengths).scatter_(0, prompt_of, torch.arange(len(prompt_of), device=device))
    turn_of = torch.where(segments < 0, -1, turn[:, None])
    turn_of[found.prompt, width + place] = found.turn
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        completions_per_row=most + 1,
        logit_columns=torch.arange(width - 1, width + most, device=device),
        row=prompt_of,
        kept=torch.where(found.before < 0, 0, place[found.before.clamp(min=0)] + 1),
        places=Places(turn_of, column_of),
        tree=seen,
    )


def lay_out_distinct(arrange: Callable[[Tensor, Tensor, Tensor, Tensor], Layout], *turns: Tensor) -> Layout:
    """Arrange turns in rows, and those with the same text only once.

    Args:
        arrange: takes ``turns`` and returns their layout.
        turns: as :func:`lay_out_trees` takes them.
    """
    prompt_ids, prompt_mask, response_ids, response_mask = turns
    sizes = torch.stack([prompt_mask.sum(1), response_mask.sum(1)], dim=1)
    responses = response_ids[:, : response_mask.shape[1]] * response_mask
    keyed = torch.cat([sizes, prompt_ids * prompt_mask, responses], dim=1)
    unique, index = torch.unique(keyed, dim=0, return_inverse=True)
    if len(unique) == len(keyed):
        return arrange(*turns)
    number = torch.arange(len(keyed), device=keyed.device)
    first = number.new_full((len(unique),), len(keyed)).scatter_reduce(0, index, number, "amin")
    first, order = first.sort()
    layout = arrange(*(part[first] for part in turns))
    index, turn = torch.argsort(order)[index], layout.places.turn
    places = Places(torch.where(turn < 0, -1, first[turn.clamp(min=0)]), layout.places.column)
    return replace(layout, row=layout.row[index], kept=layout.kept[index], places=places)

"""Responses to one prompt as a tree: what they begin with alike is computed once.

The responses ``up now``, ``up then`` and ``down now`` to one prompt share a row, in which every column but the prompt's
is a prefix of one of them; the last token of a response predicts nothing and is left out::

    [pad prompt][up][down]        up predicts now and then, down predicts now

A prefix attends to the prompt and to its own prefixes (a 4-D mask), so the log-probabilities are those of the plain
pass. Groups whose responses have a common format, or agree, have far fewer prefixes than tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lrl.models.prompt_sharing import Layout, Places, ragged
from lrl.models.turn_texts import Continuation, Turns

_SHARE = 0.75
"""Trees are used if they have at most this share of the tokens: each row needs a mask of its own."""


class Prefixes(NamedTuple):
    """The distinct prefixes of the responses to some prompts, numbered from 0, shorter ones first."""

    prompt: Tensor
    """Which prompt each belongs to, int64 ``(prefix,)``."""
    ids: Tensor
    """The last token of each, int64 ``(prefix,)``."""
    depth: Tensor
    """The length of each, int64 ``(prefix,)``."""
    parent: Tensor
    """Each without its last token, int64 ``(prefix,)``; -1 where that is the prompt alone."""
    before: Tensor
    """The prefix before each response token, int64 ``(turn, token)``; -1 is the prompt alone."""


def find_prefixes(prompt_of: Tensor, response_ids: Tensor, sizes: Tensor) -> Prefixes:
    """Find the distinct prefixes of responses that predict a token.

    Args:
        prompt_of: the prompt of each turn, int64 ``(turn,)``.
        response_ids: int64 ``(turn, token)``.
        sizes: lengths of the responses, int64 ``(turn,)``.
    """
    device, vocabulary = response_ids.device, int(response_ids.max()) + 1
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
        parts.append((prompt_of[first], response_ids[first, column], torch.full_like(first, column + 1), here[first]))
        here = here.clone()
        here[turns] = count + number
        count += len(distinct)
    if sizes.numel():
        before[torch.arange(len(sizes), device=device), sizes - 1] = here
    none = torch.zeros(0, dtype=torch.long, device=device)
    prompt, ids, depth, parent = (torch.cat(part) for part in zip(*parts, strict=True)) if parts else (none,) * 4
    return Prefixes(prompt, ids, depth, parent.clamp(min=-1), before.clamp(min=-1))


def lay_out_trees(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor
) -> tuple[Layout, Turns] | None:
    """Arrange each distinct prompt in a row, with the prefixes of its responses after it; None where it does not pay.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row; no response is empty.

    Returns:
        The layout, and the texts of its rows.
    """
    sizes = response_mask.sum(1)
    if len(sizes) < 2 or int(sizes.min()) < 1:
        return None
    keyed = torch.cat([prompt_mask.sum(1, keepdim=True), prompt_ids * prompt_mask], dim=1)
    unique, prompt_of = torch.unique(keyed, dim=0, return_inverse=True)
    found = find_prefixes(prompt_of, response_ids, sizes)
    if len(found.ids) > _SHARE * int((sizes - 1).sum()) or not len(found.ids):
        return None
    rows, lengths = len(unique), unique[:, 0]
    counts = torch.bincount(found.prompt, minlength=rows)
    order = torch.argsort(found.prompt, stable=True)
    place = torch.empty_like(order)
    place[order] = ragged(counts)[1]
    return _build(unique[:, 1:], lengths, prompt_of, found, place, int(counts.max()))


def _build(
    prompts: Tensor, lengths: Tensor, prompt_of: Tensor, found: Prefixes, place: Tensor, most: int
) -> tuple[Layout, Turns]:
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
    column_of[target] = lengths[found.prompt] + place

    seen = torch.zeros(rows, most + 1, most + 1, dtype=torch.bool, device=device)  # the prompt first, then prefixes
    seen[:, :, 0] = True
    for depth in range(1, int(found.depth.max()) + 1):
        some = (found.depth == depth).nonzero()[:, 0]
        of, own = found.prompt[some], place[some] + 1
        above = torch.where(found.parent[some] < 0, 0, place[found.parent[some].clamp(min=0)] + 1)
        seen[of, own] |= seen[of, above]
        seen[of, own, own] = True

    number = torch.arange(rows, device=device)[:, None]
    layout = Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        completions_per_row=most + 1,
        logit_columns=torch.arange(width - 1, width + most, device=device),
        row=prompt_of,
        kept=torch.where(found.before < 0, 0, place[found.before.clamp(min=0)] + 1),
        places=Places(torch.where(segments < 0, -1, number), column_of),
        tree=seen,
    )
    return layout, _texts(prompts, lengths, found, place, seen)


def _texts(prompts: Tensor, lengths: Tensor, found: Prefixes, place: Tensor, seen: Tensor) -> Turns:
    """Return the prompts as lists, and the prefixes after each, in their places."""
    texts = [row[:size] for row, size in zip(prompts.tolist(), lengths.tolist(), strict=True)]
    after: list[Continuation] = []
    for number in range(len(texts)):
        own = (found.prompt == number).nonzero()[:, 0]
        own = own[torch.argsort(place[own])]
        visible = seen[number, 1 : len(own) + 1, 1 : len(own) + 1].tolist()
        ids, places = tuple(found.ids[own].tolist()), tuple((found.depth[own] - 1).tolist())
        after.append(Continuation(ids, places, tuple(map(tuple, visible))))
    return texts, after

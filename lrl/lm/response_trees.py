"""Responses to one prompt as a tree: their common beginnings are computed once.

The responses ``up now``, ``up then`` and ``down now`` to one prompt share a row, in which every column but the prompt's
is a prefix of one of them; the last token of a response predicts nothing and is left out::

    [pad prompt][up][down]        up predicts now and then, down predicts now

A prefix attends to the prompt and to its own prefixes (a 4-D mask), so the log-probabilities are those of the plain
pass. Groups whose responses have a common format, or agree, have far fewer prefixes than tokens.

What all prompts begin with can be the root of a single tree, in which the rest of each prompt comes first. Of eleven
prompts with the same system text that is half of the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lrl.lm.layouts import Layout, Places, cheapest, common_prefix, cost_of, ragged

_SHARE = 0.75
"""Trees are used if they cost at most this share of rows without them: each tree needs a mask of its own."""
_MIN_PREFIX = 16
"""Prompts with a shorter common prefix are not arranged in a single tree."""
_MAX_COLUMNS = 4096
"""Wider rows are not used: the memory of their masks is quadratic."""


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


class _Trees(NamedTuple):
    """Texts that turns have in common, and what follows them in each turn."""

    roots: Tensor
    """Token ids of the common texts, int64 ``(root, token)``, right-padded."""
    lengths: Tensor
    """Their lengths, int64 ``(root,)``."""
    root_of: Tensor
    """int64 ``(turn,)``."""
    found: ResponsePrefixes
    """Prefixes of what follows."""
    before: Tensor
    """The prefix before each response token, int64 ``(turn, token)``; -1 is the root alone, or padding."""

    @property
    def most(self) -> int:
        """The largest number of prefixes of one root."""
        return int(torch.bincount(self.found.prompt).max())

    @property
    def columns(self) -> int:
        """The number of columns of a row."""
        return int(self.lengths.max()) + self.most

    @property
    def cost(self) -> float:
        """The cost of a forward pass, see :func:`lrl.lm.layouts.cost_of`."""
        return cost_of(len(self.roots), self.columns)


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
        first = turns.new_full((len(distinct),), len(sizes)).scatter_reduce(0, number, turns, "amin")
        depth = torch.full_like(first, column + 1)
        parts.append((prompt_of[first], first, response_ids[first, column], depth, here[first]))
        here[turns] = count + number
        count += len(distinct)
    before[torch.arange(len(sizes), device=sizes.device), sizes - 1] = here
    prompt, turn, ids, depth, parent = (torch.cat(part) for part in zip(*parts, strict=True))
    return ResponsePrefixes(prompt, turn, ids, depth, parent.clamp(min=-1), before.clamp(min=-1))


def lay_out_trees(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor, max_columns: int | None = None
) -> Layout | None:
    """Arrange each distinct prompt in a row, with the prefixes of its responses after it, or all in a single row.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row; no response is empty.
        max_columns: the longest row that the model takes; None is for any.

    Returns:
        The cheaper layout, or None where neither pays.
    """
    lengths, sizes = prompt_mask.sum(1), response_mask.sum(1)
    if len(sizes) < 2 or int(sizes.min()) < 1 or int(sizes.max()) < 2:
        return None
    keyed = torch.cat([lengths[:, None], prompt_ids * prompt_mask], dim=1)
    unique, prompt_of, turns = torch.unique(keyed, dim=0, return_inverse=True, return_counts=True)
    found = find_prefixes(prompt_of, response_ids, sizes)
    trees = _Trees(unique[:, 1:], unique[:, 0], prompt_of, found, found.before)
    most = min(max_columns or _MAX_COLUMNS, _MAX_COLUMNS)
    if len(unique) > 1 and (shared := common_prefix(unique[:, 1:], unique[:, 0])) >= _MIN_PREFIX:
        after = _after(shared, prompt_ids, lengths, response_ids, sizes)
        columns = shared + count_prefixes(after, lengths - shared + sizes)
        if columns <= most and cost_of(1, columns) < trees.cost:
            trees = _single_tree(prompt_ids[:1, :shared], after, lengths - shared, response_ids, sizes)
    _, without = cheapest(turns, int(lengths.max()), int(sizes.max()) - 1)
    return _build(trees) if trees.cost <= _SHARE * without and trees.columns <= most else None


def count_prefixes(ids: Tensor, sizes: Tensor) -> int:
    """Return the number of distinct prefixes of texts, each without its last token.

    Args:
        ids: int64 ``(text, token)``, not negative.
        sizes: lengths of the texts, int64 ``(text,)``.
    """
    inside = torch.arange(ids.shape[1], device=ids.device) < (sizes - 1)[:, None]
    texts = torch.unique(torch.where(inside, ids, -1), dim=0)  # in lexicographic order
    common = ((texts[1:] == texts[:-1]) & (texts[1:] >= 0)).long().cumprod(1)
    return int((texts >= 0).sum() - common.sum())


def _after(shared: int, prompt_ids: Tensor, lengths: Tensor, response_ids: Tensor, sizes: Tensor) -> Tensor:
    """Return the tokens of each turn after those that all prompts begin with, int64 ``(turn, token)``, right-padded.

    Args:
        shared: number of tokens that all prompts begin with.
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        lengths: of the prompts, int64 ``(turn,)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        sizes: of the responses, int64 ``(turn,)``.
    """
    rest = lengths - shared
    after = prompt_ids.new_zeros(len(rest), int((rest + sizes).max()))
    turn, column = ragged(rest)
    after[turn, column] = prompt_ids[turn, shared + column]
    turn, column = ragged(sizes)
    after[turn, rest[turn] + column] = response_ids[turn, column]
    return after


def _single_tree(root: Tensor, after: Tensor, rest: Tensor, response_ids: Tensor, sizes: Tensor) -> _Trees:
    """Return the tree whose root is what all prompts begin with.

    Args:
        root: its token ids, int64 ``(1, token)``.
        after: the tokens of each turn after it, int64 ``(turn, token)``.
        rest: how many of these belong to the prompt, int64 ``(turn,)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        sizes: of the responses, int64 ``(turn,)``.
    """
    root_of = torch.zeros_like(rest)
    found = find_prefixes(root_of, after, rest + sizes)
    turn, column = ragged(sizes)
    before = torch.full_like(response_ids, -1)
    before[turn, column] = found.before[turn, rest[turn] + column]
    return _Trees(root, root_of[:1] + root.shape[1], root_of, found, before)


def _build(trees: _Trees) -> Layout:
    """Build a row for each tree."""
    prompts, lengths, prompt_of, found, before = trees
    counts, most = torch.bincount(found.prompt, minlength=len(lengths)), trees.most
    order = torch.argsort(found.prompt, stable=True)
    place = torch.empty_like(order)  # of each prefix after its root
    place[order] = ragged(counts)[1]
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

    number = torch.arange(len(prompt_of), device=device)
    turn = torch.full_like(lengths, len(prompt_of)).scatter_reduce(0, prompt_of, number, "amin")
    turn_of = torch.where(segments < 0, -1, turn[:, None])
    turn_of[found.prompt, width + place] = found.turn
    predicting = torch.where(before < 0, width - 1, width + place[before.clamp(min=0)])
    logit_columns, kept = torch.unique(predicting, return_inverse=True)
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        completions_per_row=most + 1,
        logit_columns=logit_columns,
        row=prompt_of,
        kept=kept,
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

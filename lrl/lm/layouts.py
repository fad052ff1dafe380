"""Arrange turns in the rows of a forward pass, so that what several turns begin with is computed once.

Each row is a tree of token chains: a *root*, with which all turns of the row begin, and *segments* after it. A token
attends to the earlier tokens of its own segment, to the root, and to the segments that its own one continues. Its
position is its index in its turn, so log-probabilities equal those of a pass over the turn alone.

- :func:`lay_out`: the root is a prompt, and each response is a segment.
- :func:`pack`: the root is the common prefix of all prompts, and the rest of each turn is a segment.
- :func:`lay_out_trees`: the root is a prompt, or the common prefix of all prompts. Each distinct prefix of what follows
  it is a segment of one token. For the responses ``up now``, ``up then`` and ``down now`` a row is ``prompt up down``.
- :func:`lay_out_candidates`: the same for texts that are the same after each prompt, such as the legal actions.

These functions list the tokens after the roots; :func:`_build` arranges them in rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

TEXTS_PER_ROW = (1, 2, 4, 8, 16, 32)
"""Numbers of responses that may share a row."""
_TREE_SHARE = 0.75
"""Trees are used if they cost at most this share of rows without trees, because each tree needs its own mask."""
_MIN_PREFIX = 16
"""Smallest common prefix of prompts for a single tree."""
_MAX_COLUMNS = 4096
"""Largest number of columns of a tree: the memory of its mask is quadratic."""


class Turns(NamedTuple):
    """Prompts with their responses."""

    prompt_ids: Tensor
    """int64 ``(turn, prompt)``, right-padded."""
    prompt_mask: Tensor
    """bool ``(turn, prompt)``; no prompt is empty."""
    response_ids: Tensor
    """int64 ``(turn, token)``, right-padded."""
    response_mask: Tensor
    """bool ``(turn, token)``, a prefix of each row."""

    @property
    def lengths(self) -> Tensor:
        """Lengths of the prompts, int64 ``(turn,)``."""
        return self.prompt_mask.sum(1)

    @property
    def sizes(self) -> Tensor:
        """Lengths of the responses, int64 ``(turn,)``."""
        return self.response_mask.sum(1)

    def ids_after(self, start: int) -> Tensor:
        """Return the tokens of each turn from index ``start`` of its prompt on, int64 ``(turn, token)``."""
        rest, sizes = self.lengths - start, self.sizes
        ids = self.prompt_ids.new_zeros(len(rest), int((rest + sizes).max()))
        turn, index = ragged(rest)
        ids[turn, index] = self.prompt_ids[turn, start + index]
        turn, index = ragged(sizes)
        ids[turn, rest[turn] + index] = self.response_ids[turn, index]
        return ids

    def equal_prompts(self) -> tuple[Tensor, Tensor]:
        """Return the index of each turn's prompt, int64 ``(turn,)``, and the turns per prompt, int64 ``(prompt,)``."""
        keyed = torch.cat([self.lengths[:, None], self.prompt_ids * self.prompt_mask], dim=1)
        _, prompt_of, counts = torch.unique(keyed, dim=0, return_inverse=True, return_counts=True)
        return prompt_of, counts


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
    """int64 ``(row, column)``: the index of each token in its turn."""
    segments: Tensor
    """int64 ``(row, column)``: -1 padding, 0 the root, k the k-th segment of the row."""
    turn: Tensor
    """int64 ``(row, column)``: one of the turns that each token belongs to; -1 for padding."""
    index: Tensor
    """int64 ``(row, column)``: the index of each token in that turn; of a prefix of candidates, that in the trie after
    the length of the prompt."""
    logit_columns: Tensor
    """int64 ``(kept,)``: the columns whose logits are computed."""
    row: Tensor
    """int64 ``(turn,)``: the row of each turn."""
    kept: Tensor
    """int64 ``(turn, token)``: index in ``logit_columns`` of the column that predicts each response token."""
    single: bool
    """Whether every row holds a single turn, so that the usual causal mask is enough."""
    tree: Tensor | None = None
    """bool ``(row or 1, segment, segment)``: which segments each one attends to, besides itself; None is the root."""
    lower: Lower | None = None
    """None starts from the embeddings."""

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Return an int64 mask ``(row, column)`` if rows are single turns, else ``(row, 1, column, column)``."""
        if self.single:
            return (self.segments >= 0).long()
        query, key = self.segments[:, :, None], self.segments[:, None, :]
        seen = ((key == 0) & (query >= 0)) | (key == query)
        if self.tree is not None:
            tree = self.tree.expand(len(query), -1, -1)
            row = torch.arange(len(query), device=seen.device)[:, None, None]
            seen |= tree[row, query.clamp(min=0), key.clamp(min=0)] & (query >= 0) & (key >= 0)
        columns = torch.arange(self.segments.shape[1], device=seen.device)
        return additive_mask(seen & (columns[None, :] <= columns[:, None]), dtype)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that attention adds to its scores, ``(row, 1, query, key)``.

    Args:
        seen: which columns each query attends to, bool ``(row, query, key)``.
        dtype: dtype of the attention.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    widest = torch.float32 if dtype == torch.float64 else dtype  # eager attention takes its softmax in float32
    return mask.masked_fill_(~seen, torch.finfo(widest).min)[:, None]


def _build(
    turns: Turns,
    row: Tensor,
    roots: Tensor,
    after: Tensor,
    before: Tensor,
    *,
    single: bool = False,
    tree: Tensor | None = None,
    align: Literal["root", "left", "right"] = "root",
    predicting_only: bool = False,
) -> Layout:
    """Arrange roots and the tokens that follow them in rows.

    Args:
        turns: the prompts begin with the roots.
        row: the row of each turn, int64 ``(turn,)``.
        roots: the number of tokens of the root of each turn, int64 ``(turn,)``.
        after: row, segment, turn, id and position of each token that follows a root, int64 ``(5, token)``. Those of
            a row are in the order of its columns.
        before: index in ``after`` of the token that predicts each response token, int64 ``(turn, token)``; -1 is the
            last token of the root.
        single: whether every row holds a single turn.
        tree: as in the layout.
        align: whether roots end, rows begin (``left``) or rows end (``right``) in the same column.
        predicting_only: whether to compute logits only at columns that predict a token, instead of a range of columns.
    """
    rows = int(row.max()) + 1
    first = _first(row, rows)
    sizes = roots[first]
    counts = torch.bincount(after[0], minlength=rows)
    # A row begins at the column ``start``; the tokens after its root follow without gaps.
    anchors = {"root": sizes, "left": torch.zeros_like(sizes), "right": sizes + counts}[align]
    start = anchors.max() - anchors
    held, index = ragged(sizes)
    turn = first[held]
    root_column, column = start[held] + index, (start + sizes)[after[0]] + _ranks(after[0], counts)

    grid = after.new_zeros(4, rows, int((start + sizes + counts).max()))
    grid[:2] = -1
    segments, turn_of, input_ids, position_ids = grid
    segments[held, root_column], turn_of[held, root_column] = 0, turn
    input_ids[held, root_column], position_ids[held, root_column] = turns.prompt_ids[turn, index], index
    grid[:, after[0], column] = after[1:]

    # The column that predicts each response token. Padding refers to the end of the root, which is always computed.
    predicting = (start + sizes - 1)[row][:, None].expand_as(before)
    if len(column):
        predicting = torch.where(before < 0, predicting, column[before])
    if predicting_only:
        logit_columns, kept = torch.unique(predicting, return_inverse=True)
    else:  # the last column predicts nothing, except in packed rows
        lowest, highest = int(predicting.min()), max(int(predicting.max()), grid.shape[2] - 2)
        logit_columns, kept = torch.arange(lowest, highest + 1, device=row.device), predicting - lowest
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        turn=turn_of,
        index=position_ids,
        logit_columns=logit_columns,
        row=row,
        kept=kept,
        single=single,
        tree=tree,
    )


# Arrangements in which a segment is the rest of a whole turn.


def lay_out(turns: Turns, share: bool = True, align: Literal["root", "left"] = "root") -> Layout:
    """Arrange turns in rows of one prompt each, with the cheapest number of responses per row.

    Args:
        turns: to arrange.
        share: False gives every turn a row of its own.
        align: ``left`` pads rows only on the right, for models that do not support padding on the left.
    """
    lengths, sizes = turns.lengths, turns.sizes
    prompt_of = torch.arange(len(lengths), device=lengths.device)
    counts = torch.ones_like(prompt_of)
    if share:
        prompt_of, counts = turns.equal_prompts()
    per_row, _ = cheapest(counts, int(lengths.max()), max(int(sizes.max()), 1))
    rank, rows_of_prompt = _ranks(prompt_of, counts), (counts + per_row - 1) // per_row
    row = (rows_of_prompt.cumsum(0) - rows_of_prompt)[prompt_of] + rank // per_row
    after, before = _continued(turns, lengths, sizes, row, rank % per_row + 1)
    return _build(turns, row, lengths, after, before, single=per_row == 1, align=align)


def pack(turns: Turns, max_row_tokens: int) -> Layout:
    """Arrange several turns per row of at most ``max_row_tokens`` tokens, or of the length of the longest turn.

    Responses are at the end of rows, and rows end in the same column, so that few columns need logits. The last token
    of a response is omitted, because it predicts nothing.
    """
    lengths, sizes = turns.lengths, turns.sizes
    prefix = common_prefix(turns.prompt_ids, lengths)
    kept_sizes = sizes.clamp(min=1) - 1
    filled = spread((lengths - prefix + kept_sizes).tolist(), max_row_tokens - prefix)
    row, roots = torch.tensor(filled, device=lengths.device), torch.full_like(lengths, prefix)
    after, before = _continued(turns, roots, kept_sizes, row, torch.arange(1, len(row) + 1, device=row.device))
    return _build(turns, row, roots, after, before, align="right")


def _continued(turns: Turns, roots: Tensor, sizes: Tensor, row: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of turns after their roots, and what predicts the responses; see :func:`_build`.

    Args:
        turns: to arrange.
        roots: the number of tokens of each turn's root, int64 ``(turn,)``.
        sizes: how many tokens of each response are computed, int64 ``(turn,)``.
        row: of each turn, int64 ``(turn,)``.
        segment: of each turn in its row, int64 ``(turn,)``.
    """
    lengths = turns.lengths
    turn, index = ragged(lengths - roots + sizes)
    position = roots[turn] + index
    after_prompt = position - lengths[turn]
    # In a row, prompts come first, then their last tokens, then responses: the columns that predict are at its end.
    order = torch.argsort(after_prompt.clamp(min=-2, max=0), stable=True)
    turn, position, after_prompt = turn[order], position[order], after_prompt[order]
    before = torch.full_like(turns.response_ids, -1)
    number = torch.arange(len(turn), device=turn.device)
    ends = after_prompt == -1
    before[turn[ends]] = number[ends, None]
    predicts = (after_prompt >= 0) & (after_prompt < turns.sizes[turn] - 1)
    before[turn[predicts], after_prompt[predicts] + 1] = number[predicts]
    prompt = turns.prompt_ids[turn, position.clamp(max=turns.prompt_ids.shape[1] - 1)]
    ids = torch.where(after_prompt < 0, prompt, turns.response_ids[turn, after_prompt.clamp(min=0)])
    return torch.stack([row[turn], segment[turn], turn, ids, position]), before


def cheapest(counts: Tensor, prompt: int, response: int) -> tuple[int, float]:
    """Return the number of responses per row that costs least, and its cost (see :func:`cost_of`).

    Args:
        counts: turns with each distinct prompt, int64 ``(prompt,)``.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
    """

    def cost(per_row: int) -> float:
        rows = int(((counts + per_row - 1) // per_row).sum())
        return cost_of(rows, prompt + min(per_row, int(counts.max())) * response)

    per_row = min(TEXTS_PER_ROW, key=cost)
    return per_row, cost(per_row)


def cost_of(rows: int, width: int) -> float:
    """Return the cost of a forward pass in tokens, attention's quadratic part included."""
    return rows * width * (1 + width / 1024)


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


def lay_out_distinct(arrange: Callable[[Turns], Layout], turns: Turns) -> Layout:
    """Arrange turns by a function that takes turns, with equal turns only once."""
    prompt_ids, prompt_mask, response_ids, response_mask = turns
    sizes = torch.stack([turns.lengths, turns.sizes], dim=1)
    responses = response_ids[:, : response_mask.shape[1]] * response_mask
    keyed = torch.cat([sizes, prompt_ids * prompt_mask, responses], dim=1)
    unique, index = torch.unique(keyed, dim=0, return_inverse=True)
    if len(unique) == len(keyed):
        return arrange(turns)
    first, order = _first(index, len(unique)).sort()
    layout = arrange(Turns(*(part[first] for part in turns)))
    index = torch.argsort(order)[index]
    turn = torch.where(layout.turn < 0, -1, first[layout.turn.clamp(min=0)])
    return replace(layout, row=layout.row[index], kept=layout.kept[index], turn=turn)


# Arrangements in which a segment is one token, the last one of a prefix that several texts may have in common.


class Trie(NamedTuple):
    """The distinct proper prefixes of texts that follow roots."""

    root: Tensor
    """Which root each prefix follows, int64 ``(prefix,)``."""
    text: Tensor
    """One of the texts that begin with it, int64 ``(prefix,)``."""
    ids: Tensor
    """The last token of each, int64 ``(prefix,)``."""
    depth: Tensor
    """The length of each, int64 ``(prefix,)``."""
    parent: Tensor
    """Each without its last token, int64 ``(prefix,)``; -1 for the root alone."""
    before: Tensor
    """The prefix before each token of a text, int64 ``(text, token)``; -1 is the root alone, or padding."""


def find_prefixes(root_of: Tensor, ids: Tensor, sizes: Tensor) -> Trie:
    """Find the distinct prefixes of texts; shorter ones come first.

    Args:
        root_of: the root of each text, int64 ``(text,)``.
        ids: int64 ``(text, token)``, not negative.
        sizes: lengths of the texts, none of which is empty, int64 ``(text,)``.
    """
    vocabulary = int(ids.max()) + 1
    before = torch.full_like(ids, -1)
    here = -1 - root_of  # the roots alone, each with a number of its own
    parts: list[tuple[Tensor, ...]] = [(root_of[:0],) * 5]
    count = 0
    for index in range(int(sizes.max()) - 1):
        texts = (sizes > index + 1).nonzero()[:, 0]
        keys = (here[texts] + len(root_of)) * vocabulary + ids[texts, index]
        distinct, number = torch.unique(keys, return_inverse=True)
        first = _first(number, len(distinct), texts)
        parts.append((root_of[first], first, ids[first, index], torch.full_like(first, index + 1), here[first]))
        here[texts] = count + number
        before[:, index + 1] = here
        count += len(distinct)
    before[torch.arange(ids.shape[1], device=ids.device) >= sizes[:, None]] = -1
    root, text, last, depth, parent = (torch.cat(part) for part in zip(*parts, strict=True))
    return Trie(root, text, last, depth, parent.clamp(min=-1), before.clamp(min=-1))


def count_prefixes(ids: Tensor, sizes: Tensor) -> int:
    """Return the number of prefixes that :func:`find_prefixes` would find after a single root."""
    inside = torch.arange(ids.shape[1], device=ids.device) < (sizes - 1)[:, None]
    texts = torch.unique(torch.where(inside, ids, -1), dim=0)  # in lexicographic order
    common = ((texts[1:] == texts[:-1]) & (texts[1:] >= 0)).long().cumprod(1)
    return int((texts >= 0).sum() - common.sum())


class Candidates(NamedTuple):
    """Texts, such as the legal actions, whose log-probabilities are computed after each prompt."""

    ids: Tensor
    """int64 ``(candidate, token)``, right-padded."""
    mask: Tensor
    """bool ``(candidate, token)``."""
    trie: Trie
    """Their distinct prefixes, in the order in which the candidates have them."""
    tree: Tensor
    """Which prefixes each attends to, bool ``(1, segment, segment)``; segment 0 is the prompt."""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> Candidates:
        """Return candidates with the given token ids, at least one each."""
        ids, mask = pad_prompts(tokens, device).values()
        trie = find_prefixes(torch.zeros_like(ids[:, 0]), ids, mask.sum(1))
        order = torch.argsort(trie.text * (ids.shape[1] + 1) + trie.depth)
        number = functional.pad(torch.argsort(order), (1, 0), value=-1)  # new numbers by old number + 1
        root, text, last, depth, parent = (part[order] for part in trie[:5])
        trie = Trie(root, text, last, depth, number[parent + 1], number[trie.before + 1])
        return cls(ids, mask, trie, attended_prefixes(root, depth, trie.parent))


def attended_prefixes(root: Tensor, depth: Tensor, parent: Tensor, roots: int = 1) -> Tensor:
    """Return which segments each attends to, bool ``(root, segment, segment)``; segment 0 is the root.

    Args:
        root: as in a trie.
        depth: as in a trie.
        parent: as in a trie.
        roots: the number of roots, some of which may be followed by no prefix.
    """
    counts = torch.bincount(root, minlength=1)
    own, most = _ranks(root, counts) + 1, int(counts.max()) + 1
    seen = torch.zeros(roots, most, most, dtype=torch.bool, device=root.device)
    seen[:, :, 0] = True
    for length in range(1, int(depth.max()) + 1 if len(depth) else 1):
        some = (depth == length).nonzero()[:, 0]
        above = torch.where(parent[some] < 0, 0, own[parent[some]])
        seen[root[some], own[some]] |= seen[root[some], above]
        seen[root[some], own[some], own[some]] = True
    return seen


def lay_out_trees(turns: Turns, max_columns: int | None = None) -> Layout | None:
    """Arrange turns in trees: a row per distinct prompt, or a single row whose root all prompts begin with.

    Responses with a common format, or equal ones, have far fewer prefixes than tokens.

    Args:
        turns: to arrange.
        max_columns: largest number of columns; None for no limit.

    Returns:
        The cheaper layout; None if both are too expensive, or a response is empty.
    """
    lengths, sizes = turns.lengths, turns.sizes
    if len(sizes) < 2 or int(sizes.min()) < 1 or int(sizes.max()) < 2:
        return None
    (row, counts), roots = turns.equal_prompts(), lengths
    trie = find_prefixes(row, turns.response_ids, sizes)
    columns = int(lengths.max()) + int(torch.bincount(trie.root).max())
    cost, limit = cost_of(len(counts), columns), min(max_columns or _MAX_COLUMNS, _MAX_COLUMNS)
    if len(counts) > 1 and (prefix := common_prefix(turns.prompt_ids, lengths)) >= _MIN_PREFIX:
        texts, rest = turns.ids_after(prefix), lengths - prefix
        columns_of_one = prefix + count_prefixes(texts, rest + sizes)
        if columns_of_one <= limit and cost_of(1, columns_of_one) < cost:
            columns, cost = columns_of_one, cost_of(1, columns_of_one)
            row, roots = torch.zeros_like(lengths), torch.full_like(lengths, prefix)
            trie = find_prefixes(row, texts, rest + sizes)
            turn, index = ragged(sizes)
            before = torch.full_like(turns.response_ids, -1)
            before[turn, index] = trie.before[turn, rest[turn] + index]
            trie = trie._replace(before=before)
    _, without = cheapest(counts, int(lengths.max()), int(sizes.max()) - 1)
    if cost > _TREE_SHARE * without or columns > limit:
        return None
    segment = _ranks(trie.root, torch.bincount(trie.root)) + 1
    after = torch.stack([trie.root, segment, trie.text, trie.ids, roots[trie.text] + trie.depth - 1])
    tree = attended_prefixes(trie.root, trie.depth, trie.parent, int(row.max()) + 1)
    return _build(turns, row, roots, after, trie.before, tree=tree, predicting_only=True)


def lay_out_candidates(prompts: Tensor, mask: Tensor, candidates: Candidates) -> Layout:
    """Arrange each prompt in a row, with the prefixes of the candidates after it: the training pass over candidates.

    The logits ``(prompt, prefix, vocabulary)`` of this layout are those after each prefix, the empty one first.

    Args:
        prompts: int64 ``(prompt, token)``, right-padded.
        mask: bool ``(prompt, token)``.
        candidates: at least one of which has several tokens.
    """
    trie = candidates.trie
    rows, count, lengths = len(prompts), len(trie.ids), mask.sum(1)
    number = torch.arange(rows, device=prompts.device)
    row, segment = number.repeat_interleave(count), torch.arange(1, count + 1, device=prompts.device).repeat(rows)
    position = lengths[row] + trie.depth.repeat(rows) - 1
    after = torch.stack([row, segment, row, trie.ids.repeat(rows), position])
    before = functional.pad(torch.arange(len(row), device=row.device).view(rows, count), (1, 0), value=-1)
    turns = Turns(prompts, mask, prompts[:, :0], mask[:, :0])
    layout = _build(turns, number, lengths, after, before, tree=candidates.tree)
    index = torch.where(layout.segments > 0, lengths[:, None] + layout.segments - 1, layout.position_ids)
    return replace(layout, index=index)


# Sequences of different length.


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


def _ranks(group: Tensor, counts: Tensor) -> Tensor:
    """Return the rank of each item in its group, int64 ``(item,)``, given the size of each group."""
    rank = torch.empty_like(group)
    rank[torch.argsort(group, stable=True)] = ragged(counts)[1]
    return rank


def _first(group: Tensor, count: int, items: Tensor | None = None) -> Tensor:
    """Return the first item of each group, int64 ``(group,)``, given the group of each item.

    Args:
        group: int64 ``(item,)``.
        count: number of groups, none of which is empty.
        items: ascending numbers of the items, int64 ``(item,)``; None numbers them from 0.
    """
    items = torch.arange(len(group), device=group.device) if items is None else items
    return items.new_full((count,), torch.iinfo(torch.int64).max).scatter_reduce(0, group, items, "amin")


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

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
        rest = (self.lengths - start)[:, None]
        index = torch.arange(int((rest[:, 0] + self.sizes).max()), device=rest.device)
        prompt = self.prompt_ids[:, (start + index).clamp(max=self.prompt_ids.shape[1] - 1)]
        response = self.response_ids.gather(1, (index - rest).clamp(0, self.response_ids.shape[1] - 1))
        return torch.where(index < rest, prompt, response)


def equal_prompts(prompt_ids: Tensor, prompt_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Number the distinct prompts, shorter ones first.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.

    Returns:
        The number of each turn's prompt, int64 ``(turn,)``, and the turns per prompt, int64 ``(prompt,)``.
    """
    keyed = torch.cat([prompt_mask.sum(1, keepdim=True), prompt_ids * prompt_mask], dim=1)
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
        after: of each token that follows a root: its row, the number of columns between the root and it, its segment,
            turn, id and position, int64 ``(6, token)``.
        before: the number of columns between the root and the token that predicts each response token, int64
            ``(turn, token)``; -1 is the last token of the root.
        single: whether every row holds a single turn.
        tree: as in the layout.
        align: whether roots end, rows begin (``left``) or rows end (``right``) in the same column.
        predicting_only: whether to compute logits only at columns that predict a token, instead of a range of columns.
    """
    rows = int(row.max()) + 1
    first = _first(row, rows)
    sizes, counts = roots[first], torch.bincount(after[0], minlength=rows)
    ends = sizes + counts
    # A row begins at the column ``start``; the tokens after its root follow without gaps.
    start = torch.zeros_like(sizes)
    if align != "left":
        anchors = sizes if align == "root" else ends
        start, ends = anchors.max() - anchors, anchors.max() + ends - anchors
    width, after_root = int(ends.max()), start + sizes

    index = torch.arange(width, device=row.device) - start[:, None]
    in_root = (index >= 0) & (index < sizes[:, None])
    ids = turns.prompt_ids[first].gather(1, index.clamp(0, turns.prompt_ids.shape[1] - 1))
    grid = torch.stack([in_root.long() - 1, torch.where(in_root, first[:, None], -1), ids * in_root, index * in_root])
    grid[:, after[0], after_root[after[0]] + after[1]] = after[2:]
    segments, turn, input_ids, position_ids = grid

    predicting = after_root[row][:, None] + before
    if predicting_only:
        logit_columns, kept = torch.unique(predicting, return_inverse=True)
    else:  # the last column predicts nothing, except in packed rows
        lowest, highest = (int(column) for column in predicting.aminmax())
        logit_columns = torch.arange(lowest, max(highest, width - 2) + 1, device=row.device)
        kept = predicting - lowest
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        turn=turn,
        index=position_ids,
        logit_columns=logit_columns,
        row=row,
        kept=kept,
        single=single,
        tree=tree,
    )


def lay_out(turns: Turns, share: bool = True, align: Literal["root", "left"] = "root") -> Layout:
    """Arrange turns in rows of one prompt each, with the cheapest number of responses per row.

    Args:
        turns: to arrange.
        share: False gives every turn a row of its own.
        align: ``left`` pads rows only on the right, for models that do not support padding on the left.
    """
    lengths, sizes = turns.lengths, turns.sizes
    row, per_row = torch.arange(len(lengths), device=lengths.device), 1
    slot = starts = torch.zeros_like(row)
    if share:
        prompt_of, counts = equal_prompts(turns.prompt_ids, turns.prompt_mask)
        per_row, _ = cheapest(counts, int(lengths.max()), max(int(sizes.max()), 1))
        rank, rows_of_prompt = _ranks(prompt_of, counts), (counts + per_row - 1) // per_row
        row, slot = (rows_of_prompt.cumsum(0) - rows_of_prompt)[prompt_of] + rank // per_row, rank % per_row
    if per_row > 1:
        in_slots = sizes.new_zeros(int(row.max()) + 1, per_row)
        in_slots[row, slot] = sizes
        starts = (in_slots.cumsum(1) - in_slots)[row, slot]
    token = torch.arange(turns.response_ids.shape[1], device=row.device)
    # The last token of the prompt predicts the first token of a response; padding refers to it as well.
    before = torch.where((token > 0) & (token < sizes[:, None]), starts[:, None] + token - 1, -1)
    turn, index = turns.response_mask.nonzero(as_tuple=True)
    ids, position = turns.response_ids[turn, index], lengths[turn] + index
    after = torch.stack([row[turn], starts[turn] + index, slot[turn] + 1, turn, ids, position])
    return _build(turns, row, lengths, after, before, single=per_row == 1, align=align)


def pack(turns: Turns, max_row_tokens: int) -> Layout:
    """Arrange several turns per row of at most ``max_row_tokens`` tokens, or of the length of the longest turn.

    Responses are at the end of rows, and rows end in the same column, so that few columns need logits. The last token
    of a response is omitted, because it predicts nothing.
    """
    lengths, sizes = turns.lengths, turns.sizes
    prefix = common_prefix(turns.prompt_ids, lengths)
    filled = spread((lengths - prefix + sizes.clamp(min=1) - 1).tolist(), max_row_tokens - prefix)
    row_of = torch.tensor(filled, device=lengths.device)

    turn, index = turns.prompt_mask[:, prefix:].nonzero(as_tuple=True)
    responding, token = turns.response_mask[:, 1:].nonzero(as_tuple=True)
    position = torch.cat([prefix + index, lengths[responding] + token])
    ids = torch.cat([turns.prompt_ids[turn, prefix + index], turns.response_ids[responding, token]])
    turn = torch.cat([turn, responding])
    row, predicted = row_of[turn], position - lengths[turn] + 1  # at least 0 for tokens that predict one of a response
    predicts, counts = predicted >= 0, torch.bincount(row)
    order = torch.argsort(2 * row + predicts, stable=True)
    number = order.scatter(0, order, torch.arange(len(order), device=order.device))
    offset = number - (counts.cumsum(0) - counts)[row]
    before = torch.full_like(turns.response_ids, -1)
    before[turn[predicts], predicted[predicts]] = offset[predicts]
    before = torch.where(before < 0, before[:, :1], before)  # padding refers to the end of the prompt
    after = torch.stack([row, offset, turn + 1, turn, ids, position])
    return _build(turns, row_of, torch.full_like(lengths, prefix), after, before, align="right")


def cheapest(counts: Tensor, prompt: int, response: int) -> tuple[int, float]:
    """Return the number of responses per row that costs least, and its cost (see :func:`cost_of`).

    Args:
        counts: turns with each distinct prompt, int64 ``(prompt,)``.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
    """

    most = int(counts.max())
    per_rows = torch.tensor(TEXTS_PER_ROW, device=counts.device)
    rows = ((counts[:, None] + per_rows - 1) // per_rows).sum(0).tolist()
    costs = [cost_of(n, prompt + min(size, most) * response) for n, size in zip(rows, TEXTS_PER_ROW, strict=True)]
    best = costs.index(min(costs))
    return TEXTS_PER_ROW[best], costs[best]


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
    sizes = torch.stack([turns.lengths, turns.sizes], dim=1)
    responses = turns.response_ids[:, : turns.response_mask.shape[1]] * turns.response_mask
    keyed = torch.cat([sizes, turns.prompt_ids * turns.prompt_mask, responses], dim=1)
    unique, index = torch.unique(keyed, dim=0, return_inverse=True)
    if len(unique) == len(keyed):
        return arrange(turns)
    first, order = _first(index, len(unique)).sort()
    layout = arrange(Turns(*(part[first] for part in turns)))
    index = torch.argsort(order)[index]
    turn = torch.where(layout.turn < 0, -1, first[layout.turn.clamp(min=0)])
    return replace(layout, row=layout.row[index], kept=layout.kept[index], turn=turn)


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
    inside = torch.arange(ids.shape[1], device=ids.device) < (sizes - 1)[:, None]
    keyed = torch.cat([-root_of[:, None], torch.where(inside, ids, -1)], dim=1)
    texts, text_of = torch.unique(keyed, dim=0, return_inverse=True)  # in lexicographic order
    # In this order, a prefix is new at a text unless it is a prefix of the text before.
    new = texts[:, 1:] >= 0
    new[1:] &= (texts[1:] == texts[:-1]).cumprod(1)[:, 1:] == 0
    number = new.t().flatten().cumsum(0).view(ids.shape[1], -1) - 1
    index, row = new.t().nonzero(as_tuple=True)
    parent = torch.where(index == 0, -1, number[index - 1, row])
    prefix = torch.where(inside, number.t()[text_of], -1)
    text = inside.nonzero()[_first(prefix[inside], len(index)), 0]
    before = functional.pad(prefix[:, :-1], (1, 0), value=-1)
    return Trie(-texts[row, 0], text, texts[row, index + 1], index + 1, parent, before)


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
        return cls(ids, mask, trie, attended_prefixes(root, trie.parent))


def attended_prefixes(root: Tensor, parent: Tensor, roots: int = 1) -> Tensor:
    """Return which segments each attends to, bool ``(root, segment, segment)``; segment 0 is the root.

    Args:
        root: as in a trie.
        parent: as in a trie.
        roots: the number of roots, some of which may be followed by no prefix.
    """
    counts = torch.bincount(root, minlength=1)
    seen = torch.eye(int(counts.max()) + 1, dtype=torch.bool, device=root.device).repeat(roots, 1, 1)
    seen[:, :, 0] = True
    segment, above = functional.pad(torch.stack([_ranks(root, counts) + 1, parent + 1]), (1, 0))  # 0 is the root
    chain = [torch.arange(1, len(parent) + 1, device=root.device)]
    while bool(chain[-1].any()):
        chain.append(above[chain[-1]])
    seen[root, segment[1:], segment[torch.stack(chain)]] = True
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
    (row, counts), roots = equal_prompts(turns.prompt_ids, turns.prompt_mask), lengths
    trie = find_prefixes(row, turns.response_ids, sizes)
    columns = int(lengths.max()) + int(torch.bincount(trie.root).max())
    cost, limit = cost_of(len(counts), columns), min(max_columns or _MAX_COLUMNS, _MAX_COLUMNS)
    if len(counts) > 1 and (prefix := common_prefix(turns.prompt_ids, lengths)) >= _MIN_PREFIX:
        rest = lengths - prefix
        whole = find_prefixes(torch.zeros_like(row), turns.ids_after(prefix), rest + sizes)
        columns_of_one = prefix + len(whole.ids)
        if columns_of_one <= limit and cost_of(1, columns_of_one) < cost:
            columns, cost = columns_of_one, cost_of(1, columns_of_one)
            row, roots = torch.zeros_like(lengths), torch.full_like(lengths, prefix)
            index = rest[:, None] + torch.arange(turns.response_ids.shape[1], device=rest.device)
            # Padding refers to the root.
            before = functional.pad(whole.before, (0, turns.response_ids.shape[1]), value=-1).gather(1, index)
            trie = whole._replace(before=before)
    _, without = cheapest(counts, int(lengths.max()), int(sizes.max()) - 1)
    if cost > _TREE_SHARE * without or columns > limit:
        return None
    offset = _ranks(trie.root, torch.bincount(trie.root))
    position = roots[trie.text] + trie.depth - 1
    after = torch.stack([trie.root, offset, offset + 1, trie.text, trie.ids, position])
    before = torch.where(trie.before < 0, -1, offset[trie.before])
    tree = attended_prefixes(trie.root, trie.parent, int(row.max()) + 1)
    return _build(turns, row, roots, after, before, tree=tree, predicting_only=True)


def lay_out_candidates(prompts: Tensor, mask: Tensor, candidates: Candidates) -> Layout:
    """Arrange each prompt in a row, with the prefixes of the candidates after it: the training pass over candidates.

    The logits ``(prompt, prefix, vocabulary)`` of this layout are those after each prefix, the empty one first.

    Args:
        prompts: int64 ``(prompt, token)``, right-padded.
        mask: bool ``(prompt, token)``.
        candidates: at least one of which has several tokens.
    """
    trie, lengths = candidates.trie, mask.sum(1)
    row, segment = torch.arange(len(prompts), device=prompts.device), torch.arange(len(trie.ids), device=prompts.device)
    position = (lengths[:, None] + trie.depth - 1).flatten()
    rows = row.repeat_interleave(len(segment))
    offset, ids = torch.stack([segment, trie.ids]).repeat(1, len(row))
    after = torch.stack([rows, offset, offset + 1, rows, ids, position])
    before = functional.pad(segment, (1, 0), value=-1).expand(len(row), -1)
    turns = Turns(prompts, mask, prompts[:, :0], mask[:, :0])
    layout = _build(turns, row, lengths, after, before, tree=candidates.tree)
    index = torch.where(layout.segments > 0, lengths[:, None] + layout.segments - 1, layout.position_ids)
    return replace(layout, index=index)


def common_prefix(prompt_ids: Tensor, lengths: Tensor) -> int:
    """Return the length of the longest common prefix that leaves every prompt at least one token.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        lengths: int64 ``(turn,)``.
    """
    shortest = int(lengths.min()) - 1
    differs = (prompt_ids[:, :shortest] != prompt_ids[:1, :shortest]).any(0)
    return int(differs.int().argmax()) if bool(differs.any()) else shortest


def _ranks(group: Tensor, counts: Tensor) -> Tensor:
    """Return the rank of each item in its group, int64 ``(item,)``, given the size of each group."""
    order = torch.argsort(group, stable=True)
    rank = torch.empty_like(group)
    rank[order] = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group[order]]
    return rank


def _first(group: Tensor, count: int) -> Tensor:
    """Return the first item of each of ``count`` groups, int64 ``(group,)``, given the group of each item."""
    item = torch.arange(len(group), device=group.device)
    return item.new_full((count,), len(group)).scatter_reduce(0, group, item, "amin")


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

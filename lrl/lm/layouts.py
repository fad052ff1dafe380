"""Arrange turns in the rows of a forward pass, so that what several turns begin with is computed once.

A row is a tree of tokens, whose columns are in depth-first order: the tokens that follow a token on any path are the
columns from it to the end of its subtree. So column ``k`` attends to column ``j`` exactly if ``j <= k <= last[j]``. The
position of a token is its depth in the tree, which is its index in its turn, so log-probabilities equal those of a pass
over the turn alone.

- :func:`lay_out`: each turn has a row of its own.
- :func:`pack`: each turn adds those tokens to a row that the turn before it, in lexicographic order, does not have.
  Equal turns, responses to one prompt, prompts with a common beginning, and the turns of an episode whose prompts
  contain the turns before are computed once. After each prompt there may be the prefixes of several texts, such as the
  legal actions (:class:`Candidates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lrl.lm.block_attention import with_blocks

_MAX_COLUMNS = 4096
"""Largest width that :func:`pack` chooses itself, unless two of the longest turns are wider: the memory of the mask is
quadratic in it."""


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

    def predicting(self) -> Tensor:
        """Return the tokens of each turn except for the last one of its response, which predicts nothing.

        Returns:
            int64 ``(turn, token)``, -1 after the end of a turn.
        """
        count, lengths = self.lengths + self.sizes.clamp(min=1) - 1, self.lengths[:, None]
        index = torch.arange(int(count.max()), device=count.device)
        prompt = functional.pad(self.prompt_ids, (0, max(0, len(index) - self.prompt_ids.shape[1])))
        response = self.response_ids.gather(1, (index - lengths).clamp(0, self.response_ids.shape[1] - 1))
        ids = torch.where(index < lengths, prompt[:, : len(index)], response)
        return torch.where(index < count[:, None], ids, -1)


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
    last: Tensor
    """int64 ``(row, column)``: the last column that attends to each token; -1 for padding."""
    turn: Tensor
    """int64 ``(row, column)``: one of the turns that each token belongs to; -1 for padding."""
    index: Tensor
    """int64 ``(row, column)``: the index of each token in that turn; of a prefix of candidates, that in the trie after
    the length of the prompt."""
    cells: Tensor
    """int64 ``(cell,)``: the tokens after which logits are computed, by ``row * columns + column``, ascending."""
    row: Tensor
    """int64 ``(turn,)``: the row of each turn."""
    kept: Tensor
    """int64 ``(turn, token)``: index in ``cells`` of the token that predicts each response token; with candidates, of
    the last token of each of their prefixes, the empty one first."""
    single: bool
    """Whether no row branches, so that the usual causal mask is enough."""
    lower: Lower | None = None
    """None starts from the embeddings."""

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Return an int64 mask ``(row, column)`` if no row branches, else ``(row, 1, column, column)``."""
        if self.single:
            return (self.last >= 0).long()
        return with_blocks(additive_mask(in_subtree(self.last), dtype), self.last)


def in_subtree(last: Tensor) -> Tensor:
    """Return which tokens each attends to, bool ``(..., token, token)``.

    Args:
        last: the last token of the subtree of each token, int64 ``(..., token)``; -1 for padding.
    """
    column = torch.arange(last.shape[-1], device=last.device)
    return (column <= column[:, None]) & (column[:, None] <= last[..., None, :])


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that attention adds to its scores, ``(row, 1, query, key)``.

    Args:
        seen: which columns each query attends to, bool ``(row, query, key)``.
        dtype: dtype of the attention.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    widest = torch.float32 if dtype == torch.float64 else dtype  # eager attention takes its softmax in float32
    return mask.masked_fill_(~seen, torch.finfo(widest).min)[:, None]


def lay_out(turns: Turns, align: Literal["prompt", "left"] = "prompt") -> Layout:
    """Arrange each turn in a row of its own.

    Args:
        turns: to arrange.
        align: whether prompts end in the same column, so that few columns need logits, or rows begin in the same one
            (``left``), for models that do not support padding on the left.
    """
    lengths, sizes = turns.lengths, turns.sizes
    start = lengths.max() - lengths if align == "prompt" else torch.zeros_like(lengths)
    index = torch.arange(int((start + lengths + sizes).max()), device=lengths.device) - start[:, None]
    in_prompt, inside = index < lengths[:, None], (index >= 0) & (index < (lengths + sizes)[:, None])
    prompt = turns.prompt_ids.gather(1, index.clamp(0, turns.prompt_ids.shape[1] - 1))
    response = turns.response_ids.gather(1, (index - lengths[:, None]).clamp(0, turns.response_ids.shape[1] - 1))
    number = torch.arange(len(lengths), device=lengths.device)
    token = torch.arange(turns.response_ids.shape[1], device=lengths.device)
    # The last token of the prompt predicts the first one of the response; padding refers to it as well.
    predicting = (start + lengths - 1)[:, None] + token * (token < sizes[:, None])
    width = index.shape[1]
    cells, kept = torch.unique(number[:, None] * width + predicting, return_inverse=True)
    return Layout(
        input_ids=torch.where(in_prompt, prompt, response) * inside,
        position_ids=index * inside,
        last=torch.where(inside, width - 1, -1),
        turn=torch.where(inside, number[:, None], -1),
        index=index * inside,
        cells=cells,
        row=number,
        kept=kept,
        single=True,
    )


class Candidates(NamedTuple):
    """Texts, such as the legal actions, whose log-probabilities are computed after each prompt."""

    ids: Tensor
    """int64 ``(candidate, token)``, right-padded."""
    mask: Tensor
    """bool ``(candidate, token)``."""
    before: Tensor
    """The number of the prefix before each token, int64 ``(candidate, token)``; 0 is the empty prefix."""
    prefix_ids: Tensor
    """The last token of each distinct prefix but the empty one, int64 ``(prefix,)``, in lexicographic order."""
    prefix_sizes: Tensor
    """The length of each, int64 ``(prefix,)``."""
    prefix_last: Tensor
    """The last of the prefixes that begin with each, int64 ``(prefix,)``."""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> Candidates:
        """Return candidates with the given token ids, at least one each."""
        ids, mask = pad_prompts(tokens, device).values()
        prefixes = sorted({tuple(text[:size]) for text in tokens for size in range(1, len(text))})
        number = {prefix: place for place, prefix in enumerate(prefixes, 1)} | {(): 0}
        before = torch.zeros_like(ids)
        for place, text in enumerate(tokens):
            before[place, : len(text)] = torch.tensor([number[tuple(text[:size])] for size in range(len(text))])
        last = list(range(len(prefixes)))
        for place in reversed(range(len(prefixes))):
            if parent := number[prefixes[place][:-1]]:
                last[parent - 1] = max(last[parent - 1], last[place])
        about = [[prefix[-1] for prefix in prefixes], [*map(len, prefixes)], last]
        return cls(ids, mask, before, *torch.tensor(about, dtype=torch.long, device=device))


class Continuation(NamedTuple):
    """The tokens after a prompt: a response, or the prefixes of several candidates."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    """Position of each token, where the first token after the prompt has position 0."""
    last: tuple[int, ...]
    """For each token, the index of the last token that attends to it."""

    @classmethod
    def of(cls, ids: tuple[int, ...]) -> Continuation:
        """Return a continuation that is a single text, such as a response."""
        return cls(ids, tuple(range(len(ids))), (len(ids) - 1,) * len(ids))

    @classmethod
    def of_candidates(cls, candidates: Candidates) -> Continuation:
        """Return a continuation that contains the prefixes of all candidates."""
        parts = candidates.prefix_ids, candidates.prefix_sizes - 1, candidates.prefix_last
        return cls(*(tuple(part.tolist()) for part in parts))

    def attended(self, device: torch.device) -> Tensor:
        """Return for each token (row) which tokens (columns) it attends to, bool ``(token, token)``."""
        return in_subtree(torch.tensor(self.last, dtype=torch.long, device=device))


def continuations(turns: Turns) -> list[Continuation]:
    """Return the response of each turn."""
    sizes = turns.response_mask.sum(1).tolist()
    rows = [tuple(row[:size]) for row, size in zip(turns.response_ids.tolist(), sizes, strict=True)]
    return [*map(Continuation.of, rows)]


def pack(turns: Turns, max_row_tokens: int | None = None, candidates: Candidates | None = None) -> Layout:
    """Arrange several turns per row, and compute the tokens that they begin with once per row.

    The last token of a response is omitted, because it predicts nothing.

    Args:
        turns: to arrange.
        max_row_tokens: the width of rows, unless a turn is longer; None chooses the cheapest one.
        candidates: texts whose prefixes follow each prompt, in place of responses.
    """
    device = turns.prompt_ids.device
    if candidates is not None:
        turns = Turns(*turns[:2], turns.prompt_ids[:, :1], torch.zeros_like(turns.prompt_mask[:, :1]))
    ids, lengths = turns.predicting(), turns.lengths
    paths, path_of, shared = sorted_paths(ids)
    turn = torch.full_like(paths[:, 0], len(ids))
    turn.scatter_reduce_(0, path_of, torch.arange(len(ids), device=device), "amin")
    size = (paths >= 0).sum(1)
    extra = 0 if candidates is None else len(candidates.prefix_ids)
    row = torch.tensor(_fill(shared.tolist(), size.tolist(), extra, max_row_tokens), device=device)

    # The columns that path k adds to its row begin at start[k]: its own tokens, then the prefixes of candidates.
    opens = functional.pad(row[1:] != row[:-1], (1, 0), value=1)
    shared = torch.where(opens, 0, shared)
    own = size - shared
    start = (own + extra).cumsum(0) - (own + extra)
    start = start - start[opens][row]
    width = (start + own + extra)[functional.pad(opens[1:], (0, 1), value=1)]
    number, index = torch.arange(len(paths), device=device)[:, None], torch.arange(paths.shape[1], device=device)
    differs = index >= shared[:, None]
    owner = torch.where(differs, number, 0).cummax(0).values  # the path that added each token
    column = (start - shared)[owner] + index
    # The subtree of a token ends before the columns of the next path of the row that differs there, or with the row.
    following = functional.pad(torch.where(differs, number, len(paths))[1:], (0, 0, 0, 1), value=len(paths))
    following = following.flip(0).cummin(0).values.flip(0)
    last = functional.pad(torch.where(opens, width[row - 1], start), (0, 1), value=int(width[-1]))[following] - 1

    path, token = (differs & (paths >= 0)).nonzero(as_tuple=True)
    at = path, token
    longest = turn[following[at] - 1]  # a turn that has the token, and of an episode the last one
    cells = torch.stack([row[path], column[at], paths[at], token, last[at], longest, token])
    token = torch.arange(turns.response_ids.shape[1], device=device)
    token = token * (token < turns.sizes[:, None])  # padding refers to the end of the prompt
    predicting = column[path_of].gather(1, lengths[:, None] - 1 + token)
    if candidates is not None and extra:
        path, prefix = torch.cartesian_prod(number[:, 0], torch.arange(extra, device=device)).unbind(1)
        after, depth = (start + own)[path], size[path] + candidates.prefix_sizes[prefix] - 1
        ids, last = candidates.prefix_ids[prefix], after + candidates.prefix_last[prefix]
        more = torch.stack([row[path], after + prefix, ids, depth, last, turn[path], size[path] + prefix])
        cells, predicting = torch.cat([cells, more], 1), torch.cat([predicting, more[1].view(-1, extra)[path_of]], 1)
    grid = torch.tensor([0, 0, -1, -1, 0], device=device)[:, None, None].repeat(1, len(width), int(width.max()))
    grid[:, cells[0], cells[1]] = cells[2:]
    input_ids, position_ids, last, turn, index = grid
    cells, kept = torch.unique(row[path_of, None] * grid.shape[2] + predicting, return_inverse=True)
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        last=last,
        turn=turn,
        index=index,
        cells=cells,
        row=row[path_of],
        kept=kept,
        single=bool(((last < 0) | (last == width[:, None] - 1)).all()),
    )


def sorted_paths(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort texts, so that those that begin with the same tokens are next to each other.

    Args:
        ids: int64 ``(text, token)``, -1 after the end of a text.

    Returns:
        The distinct texts in lexicographic order, ``(path, token)``; the path of each text, int64 ``(text,)``; and the
        number of tokens that each path shares with the path before it, int64 ``(path,)``.
    """
    paths, path_of = torch.unique(ids, dim=0, return_inverse=True)
    shared = (paths[1:] == paths[:-1]).cumprod(1).sum(1)
    return paths, path_of, functional.pad(shared, (1, 0))


def _fill(shared: Sequence[int], sizes: Sequence[int], extra: int, width: int | None) -> list[int]:
    """Return the row of each path: rows are filled in order.

    Args:
        shared: tokens at the beginning of each path that the path before it has as well.
        sizes: tokens of each path.
        extra: columns after each path.
        width: largest width of a row, unless a path is longer; None chooses the cheapest one.
    """

    longest = max(sizes) + extra

    def fill(width: int) -> tuple[list[int], float]:
        """Return the row of each path for a width of rows, and the cost of this layout."""
        row, filled, widest = list[int](), 0, 0
        for common, size in zip(shared, sizes, strict=True):
            added = filled + size - common + extra
            begins = not row or added > width
            row.append(row[-1] + begins if row else 0)
            filled = size + extra if begins else added
            widest = max(widest, filled)
        return row, cost_of(row[-1] + 1, widest, longest)

    if width is not None:
        return fill(width)[0]
    width, limit = longest, widest_row(longest)
    layouts = [fill(width)]
    while layouts[-1][0][-1] > 0 and width < limit:
        width = min(2 * width, limit)
        layouts.append(fill(width))
    return min(layouts, key=lambda layout: layout[1])[0]


def widest_row(longest: int) -> int:
    """Return the largest width of rows that :func:`pack` chooses for turns of at most ``longest`` tokens."""
    return max(_MAX_COLUMNS, 2 * longest)


def cost_of(rows: int, width: int, longest: int) -> float:
    """Return the cost of a forward pass in tokens, attention included (:mod:`lrl.lm.block_attention`).

    Args:
        rows: their number.
        width: columns of each.
        longest: tokens of the longest turn.
    """
    return rows * width * (1 + min(width, longest + 64) / 1024)


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

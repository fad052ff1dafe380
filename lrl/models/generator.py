"""Token-by-token decoding: what prompts have in common is computed once, finished answers leave.

As in the training pass (:mod:`lrl.models.prompt_sharing`), responses to one prompt share one row of the KV cache, and
each attends to the prompt and to itself. One token of each is computed per step; the random numbers are named by
counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from lrl.functional.random import exponentials
from lrl.models.attention import compute_dtype
from lrl.models.prefill import prefill
from lrl.models.prompt_sharing import additive_mask, assign_rows
from lrl.models.uncached_decoding import Rereading
from lrl.types import SamplingConfig

_LEAVE = 0.75
"""Rows leave the cache when fewer than this share of them is still written to: leaving copies the cache."""
_SMALLEST_BLOCK = 64
"""Token ids that are sampled in one race."""
_CANDIDATES = (1, 2, 4, 8, 16, 32)
_PADDING, _PROMPT, _IDLE = -1, 0, -2


@dataclass(frozen=True, kw_only=True)
class Responses:
    """What was sampled."""

    ids: Tensor
    """int64 ``(row, token)``, right-padded with 0."""
    mask: Tensor
    """bool ``(row, token)``: every sampled token, the one that ended the answer included."""
    logprobs: Tensor
    """``(row, token)`` under the sampled distribution (after temperature, top-k and top-p)."""


def sampling_dtype(logits: Tensor) -> torch.dtype:
    """Log-probabilities are float32, or float64 where the model is."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def sampling_logprobs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities ``(row, vocabulary)`` of the distribution that tokens are drawn from."""
    logits = logits.to(sampling_dtype(logits))
    if sampling.temperature == 0:
        greedy = torch.full_like(logits, -torch.inf)
        return greedy.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def draw_tokens(logprobs: Tensor, bits: Tensor) -> Tensor:
    """Sample one token per row by two exponential races (the Gumbel-max trick): among blocks of ids, then inside one.

    Of exponential clocks with rates ``p`` the first to ring is a sample of ``p``. Rounding moves probabilities with the
    shape of the batch; then a race changes its winner in proportion to their total variation distance. Inverting the
    cumulative distribution moves the boundaries of all rare tokens too, and changed 400 times as many samples of the
    embedded model. Blocks keep the numbers per row at about twice the square root of the vocabulary.

    Args:
        logprobs: ``(row, vocabulary)``; -inf is never sampled.
        bits: int64 ``(row,)``, random.

    Returns:
        int64 ``(row,)``.
    """
    size = logprobs.shape[-1]
    if size <= _SMALLEST_BLOCK:  # one race is enough
        return (logprobs.exp() / exponentials(bits, size)).argmax(-1)
    block = max(_SMALLEST_BLOCK, 1 << (size.bit_length() // 2))
    rates = pad(logprobs.exp(), (0, -size % block)).unflatten(-1, (-1, block))
    of_blocks, of_tokens = exponentials(bits, rates.shape[1] + block).split([rates.shape[1], block], dim=-1)
    chosen = (rates.sum(-1) / of_blocks).argmax(-1)
    inside = rates[torch.arange(len(chosen), device=chosen.device), chosen]
    return chosen * block + (inside / of_tokens).argmax(-1)


def distinct(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The distinct prompts in order of appearance, and which one each row has."""
    seen: dict[tuple[int, ...], int] = {}
    index = [seen.setdefault(tuple(prompt), len(seen)) for prompt in prompts]
    return list(seen), index


def answers_per_row(counts: Tensor, prompt: int, response: int) -> int:
    """How many answers share one row of the cache: the cheapest, by what was measured on a CPU.

    A row costs reading its columns; an answer costs the layers' products, and attending to the row's columns.

    Args:
        counts: answers to each distinct prompt, int64 ``(prompt,)``.
        prompt: tokens of the longest prompt.
        response: tokens of the longest answer.
    """

    def cost(per_row: int) -> float:
        rows = int(((counts + per_row - 1) // per_row).sum())
        columns = prompt + per_row * response / 2
        return rows * (1 + columns / 32) + rows * per_row * (1 + columns / 50)

    return min(_CANDIDATES, key=cost)


class _Board:
    """Who writes where: the rows of the cache, and the answers that are still being written, sorted by row."""

    def __init__(self, prompt_of: Tensor, mask: Tensor, per_row: int) -> None:
        counts = torch.bincount(prompt_of)
        row, slot = assign_rows(prompt_of, counts, per_row)
        self.turn = torch.argsort(row, stable=True)
        self.row, self.slot = row[self.turn], slot[self.turn] + 1
        self.prompt = torch.repeat_interleave(torch.arange(len(counts), device=mask.device), -(-counts // per_row))
        self.lengths = mask.sum(1)[self.prompt]
        self.owner = torch.where(mask, _PROMPT, _PADDING)[self.prompt]
        """int64 ``(row, column)``: padding, prompt, or the slot that wrote the column."""

    def keep(self, writing: Tensor, cache: DynamicCache) -> None:
        """Let the answers leave that are finished, and rows without answers if that pays."""
        self.row, self.slot, self.turn = self.row[writing], self.slot[writing], self.turn[writing]
        stay, row = torch.unique(self.row, return_inverse=True)
        if len(stay) < _LEAVE * len(self.owner):
            cache.batch_select_indices(stay)
            self.row, self.lengths, self.owner = row, self.lengths[stay], self.owner[stay]

    def add(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append a token of each answer: the ids and slots ``(row, place)``, and each answer's place ``(answer,)``."""
        counts = torch.bincount(self.row, minlength=len(self.owner))
        place = torch.arange(len(token), device=token.device) - (counts.cumsum(0) - counts)[self.row]
        ids = torch.zeros(len(self.owner), int(counts.max()), dtype=torch.long, device=token.device)
        slots = torch.full_like(ids, _IDLE)
        ids[self.row, place], slots[self.row, place] = token, self.slot
        self.owner = torch.cat([self.owner, slots], dim=1)
        return ids, slots, place

    def seen(self, slots: Tensor) -> Tensor:
        """Which columns each new token attends to, bool ``(row, place, column)``."""
        owner = self.owner[:, None]
        return (owner == _PROMPT) | (owner == slots[:, :, None])


class _Shared:
    """Answers behind the prompts in a cache; its rows may hold several answers."""

    def __init__(self, model: Any, own_mask: bool, prompts: Sequence[Sequence[int]], steps: int, device: Any) -> None:
        self.model, self.own_mask, self.step = model, own_mask, 0
        unique, index = distinct(prompts)
        logits, mask, self.cache, _ = prefill(model, unique, device, own_mask)
        prompt_of = torch.tensor(index, device=device)
        counts = torch.bincount(prompt_of)
        per_row = answers_per_row(counts, mask.shape[1], steps) if own_mask else 1
        self.board = _Board(prompt_of, mask, per_row)
        if len(self.board.prompt) > len(mask):
            self.cache.batch_select_indices(self.board.prompt)
        if own_mask:
            for layer in self.cache.layers:
                layer.reserve(steps * min(per_row, int(counts.max())))  # pyright: ignore[reportAttributeAccessIssue]
        self.logits = logits[self.board.prompt[self.board.row]]

    @property
    def turn(self) -> Tensor:
        """Which answers are being written, int64 ``(answer,)``."""
        return self.board.turn

    def write(self, token: Tensor, writing: Tensor) -> Tensor:
        """Logits ``(answer, vocabulary)`` behind one more token of each answer that is ``writing``."""
        board = self.board
        board.keep(writing, self.cache)
        ids, slots, place = board.add(token[writing])
        if self.own_mask:
            attention = additive_mask(board.seen(slots), compute_dtype(self.model))
        else:
            attention = (board.owner != _PADDING).long()
        out = self.model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=(board.lengths + self.step)[:, None].expand_as(ids),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.step += 1
        return out.logits[board.row, place]


class Decoder:
    """Decodes with a causal language model that shares its weights with training.

    Args:
        model: called as a Hugging Face causal LM is.
        stop_ids: tokens that end an answer.
        own_mask: hand the model a 4-D mask and share prompts: only where every layer attends fully.
        stops: whether an answer, given as its token ids so far, ends by its text; for tokenizers that write the
            format's end with several tokens. It is asked row by row.
        cached: keep keys and values, behind prompts that are padded on the left; else every token is computed from a
            row that is read again, which is right for any causal model.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: set[int],
        own_mask: bool,
        stops: Callable[[list[int]], bool] | None = None,
        cached: bool = True,
    ) -> None:
        self.model, self.own_mask, self.stops, self.cached = model, own_mask, stops, cached
        self.stop_ids = torch.tensor(sorted(stop_ids))

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Sequence[int]], bits: Tensor, sampling: SamplingConfig, device: torch.device
    ) -> Responses:
        """Sample one response for each prompt; equal prompts are computed once.

        Args:
            prompts: token ids, one list per row.
            bits: int64 ``(row, max_new_tokens)``, random, for each token that may be sampled.
            sampling: the distribution.
            device: where the model lives.
        """
        unique, index = distinct(prompts)
        if sampling.temperature == 0 and len(unique) < len(prompts):  # the same question has the same answer
            answers = self(unique, bits[: len(unique)], sampling, device)
            return Responses(ids=answers.ids[index], mask=answers.mask[index], logprobs=answers.logprobs[index])
        bits, stop = bits.to(device), self.stop_ids.to(device)
        num_rows, steps = len(prompts), sampling.max_new_tokens
        if self.cached:
            writer = _Shared(self.model, self.own_mask, prompts, steps, device)
        else:
            writer = Rereading(self.model, prompts, device)
        logits = writer.logits
        out_ids = torch.zeros(num_rows, steps, dtype=torch.long, device=device)
        out_mask = torch.zeros(num_rows, steps, dtype=torch.bool, device=device)
        out_logprobs = torch.zeros(num_rows, steps, dtype=sampling_dtype(logits), device=device)
        step = 0
        for step in range(steps):
            turn, logprobs = writer.turn, sampling_logprobs(logits, sampling)
            token = draw_tokens(logprobs, bits[turn, step])
            out_ids[turn, step], out_mask[turn, step] = token, True
            out_logprobs[turn, step] = logprobs.gather(-1, token[:, None]).squeeze(-1)
            writing = ~torch.isin(token, stop)
            if self.stops is not None:
                ended = [self.stops(ids) for ids in out_ids[turn, : step + 1].tolist()]
                writing = writing & ~torch.tensor(ended, device=device)
            if step == steps - 1 or not writing.any():
                break
            logits = writer.write(token, writing)
        width = step + 1
        return Responses(ids=out_ids[:, :width], mask=out_mask[:, :width], logprobs=out_logprobs[:, :width])

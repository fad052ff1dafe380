"""The built-in generator: decode token by token with the weights that are trained.

As in the training pass (:mod:`lrl.models.response_trees`), responses to one prompt share rows of the KV cache, and each
attends to the prompt and to its own tokens. Every step computes one token of each distinct unfinished text in a row, so
responses cost little until they differ; finished responses leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from transformers import DynamicCache

from lrl.models.attention import compute_dtype
from lrl.models.generator import Responses
from lrl.models.language_model import LanguageModel
from lrl.models.prefill import distinct_prompts, prefill
from lrl.models.prompt_sharing import additive_mask, assign_rows
from lrl.models.sampling import sample_tokens, sampling_dtype, sampling_logprobs
from lrl.models.uncached_decoding import UncachedDecoding
from lrl.types import SamplingConfig

_COMPACT = 0.75
"""Finished rows are dropped from the cache when the unfinished share is below this: dropping copies the cache."""
_CANDIDATES = (1, 2, 4, 8, 16, 32)


@final
class DecodeLoop:
    """Generates with a language model, ending a response by the end of the turn or by ``stop_text``.

    Args:
        language_model: shares its weights with training; configured before the first call.
        stop_text: the last tag of the response format; None where it has none.
    """

    def __init__(self, language_model: LanguageModel, stop_text: str | None) -> None:
        self.language_model, self.stop_text = language_model, stop_text

    def generate(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: SamplingConfig) -> Responses:
        """Sample one response per prompt; equal prompts are computed once.

        Args:
            prompts: token ids, one sequence per row.
            uniforms: int64 ``(row, max_new_tokens)``, 64 uniformly distributed bits for each token.
            sampling: the distribution to sample from, and the maximum number of tokens.

        Raises:
            ValueError: a prompt and its response could take more tokens than the model has positions.
        """
        model, tokenizer = self.language_model, self.language_model.tokenizer
        model.prepare_decoding(max(len(prompt) for prompt in prompts), sampling.max_new_tokens)
        return decode(
            model.model,
            prompts,
            uniforms,
            sampling,
            stop_ids=tokenizer.stop_ids(self.stop_text),
            stops=tokenizer.stops(self.stop_text),
            share=model.share,
            cached=model.cached,
        )


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    uniforms: Tensor,
    sampling: SamplingConfig,
    *,
    stop_ids: set[int],
    stops: Callable[[list[int]], bool] | None = None,
    share: bool = False,
    cached: bool = True,
) -> Responses:
    """Sample one response per prompt.

    Args:
        model: called as a Hugging Face causal LM is.
        prompts: token ids, one sequence per row.
        uniforms: int64 ``(row, max_new_tokens)``, 64 uniformly distributed bits for each token.
        sampling: the distribution to sample from, and the maximum number of tokens.
        stop_ids: tokens that end a response.
        stops: whether a response, given as its token ids so far, ends by its text; for tokenizers that write the stop
            text with several tokens. Called row by row.
        share: let responses to one prompt share a row, by a 4-D mask: only where every layer attends fully.
        cached: keep a KV cache, for prompts that are padded on the left; else every token is computed from its whole
            row, which is right for any causal model.
    """
    device = next(model.parameters()).device
    unique, index = distinct_prompts(prompts)
    if sampling.temperature == 0 and len(unique) < len(prompts):  # equal prompts have equal greedy responses
        options = {"stop_ids": stop_ids, "stops": stops, "share": share, "cached": cached}
        greedy = decode(model, unique, uniforms[: len(unique)], sampling, **options)
        return Responses(ids=greedy.ids[index], mask=greedy.mask[index], logprobs=greedy.logprobs[index])
    uniforms, stop = uniforms.to(device), torch.tensor(sorted(stop_ids), device=device)
    num_rows, steps = len(prompts), sampling.max_new_tokens
    decoding = _CachedDecoding(model, share, prompts, steps) if cached else UncachedDecoding(model, prompts)
    logits = decoding.logits
    out_ids = torch.zeros(num_rows, steps, dtype=torch.long, device=device)
    out_mask = torch.zeros(num_rows, steps, dtype=torch.bool, device=device)
    out_logprobs = torch.zeros(num_rows, steps, dtype=sampling_dtype(logits), device=device)
    step = 0
    for step in range(steps):
        turn, logprobs = decoding.turn, sampling_logprobs(logits, sampling)
        token = sample_tokens(logprobs, uniforms[turn, step])
        out_ids[turn, step], out_mask[turn, step] = token, True  # the mask covers the stop token as well
        out_logprobs[turn, step] = logprobs.gather(-1, token[:, None]).squeeze(-1)
        unfinished = ~torch.isin(token, stop)
        if stops is not None:
            ended = [stops(ids) for ids in out_ids[turn, : step + 1].tolist()]
            unfinished = unfinished & ~torch.tensor(ended, device=device)
        if step == steps - 1 or not unfinished.any():
            break
        logits = decoding.append(token, unfinished)
    width = step + 1
    return Responses(ids=out_ids[:, :width], mask=out_mask[:, :width], logprobs=out_logprobs[:, :width])


def responses_per_row(counts: Tensor, prompt: int, response: int) -> int:
    """Return how many responses should share one row of the cache: the cheapest, by what was measured on a CPU.

    A row costs reading its columns; a response costs the layers' products, and attending to the row's columns.

    Args:
        counts: responses to each distinct prompt, int64 ``(prompt,)``.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
    """

    def cost(per_row: int) -> float:
        rows = int(((counts + per_row - 1) // per_row).sum())
        columns = prompt + per_row * response / 2
        return rows * (1 + columns / 32) + rows * per_row * (1 + columns / 50)

    return min(_CANDIDATES, key=cost)


@final
class _CacheRows:
    """Bookkeeping of the cache: its rows, the unfinished responses, and the distinct texts that these have so far.

    Responses of a row with the same tokens so far are one text, which is computed once. Texts and responses are sorted
    by row.

    Args:
        prompt_of: which distinct prompt each response has, int64 ``(response,)``.
        mask: bool ``(prompt, column)``: the columns of each prompt that hold a token.
        per_row: responses that share a row.
    """

    def __init__(self, prompt_of: Tensor, mask: Tensor, per_row: int) -> None:
        counts = torch.bincount(prompt_of)
        row, _ = assign_rows(prompt_of, counts, per_row)
        self.turn = torch.argsort(row, stable=True)
        self.row = row[self.turn]
        self.text = self.row
        """The text of each response so far, int64 ``(response,)``; at first that of its row's prompt."""
        self.prompt = torch.repeat_interleave(torch.arange(len(counts), device=mask.device), -(-counts // per_row))
        self.lengths, self.mask = mask.sum(1)[self.prompt], mask[self.prompt]
        self.seen = torch.zeros(len(self.prompt), 0, dtype=torch.bool, device=mask.device)
        """bool ``(text, column)``: the columns after the prompt that each text consists of."""

    def keep(self, unfinished: Tensor, cache: DynamicCache) -> None:
        """Drop finished responses, and rows without responses where copying the cache pays.

        Args:
            unfinished: bool ``(response,)``, of those that were unfinished before.
            cache: keys and values of the rows.
        """
        self.row, self.text, self.turn = self.row[unfinished], self.text[unfinished], self.turn[unfinished]
        stay, row = torch.unique(self.row, return_inverse=True)
        if len(stay) < _COMPACT * len(self.mask):
            cache.batch_select_indices(stay)
            self.row, self.lengths, self.mask = row, self.lengths[stay], self.mask[stay]

    def append(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append one token ``(response,)`` to each response; texts with different next tokens part.

        Returns:
            The ids of the new columns, int64 ``(row, place)``, the columns that each attends to, bool ``(row, place,
            column)``, and the place of each response in its row, int64 ``(response,)``.
        """
        keys = self.text * (int(token.max()) + 1) + token
        parent, (distinct, self.text) = self.text, torch.unique(keys, return_inverse=True)
        texts, before = len(distinct), self.seen.shape[1]
        response = parent.new_zeros(texts).scatter_(0, self.text, torch.arange(len(token), device=token.device))
        row = self.row[response]
        counts = torch.bincount(row, minlength=len(self.mask))
        place = torch.arange(texts, device=token.device) - (counts.cumsum(0) - counts)[row]
        ids = torch.zeros(len(self.mask), int(counts.max()), dtype=torch.long, device=token.device)
        ids[row, place] = token[response]
        self.seen = torch.cat([self.seen[parent[response]], self.seen.new_zeros(texts, ids.shape[1])], dim=1)
        self.seen[torch.arange(texts, device=token.device), before + place] = True
        visible = self.mask[:, None].expand(-1, ids.shape[1], -1)
        visible = torch.cat([visible, self.seen.new_zeros(*ids.shape, self.seen.shape[1])], dim=2)
        visible[row, place, self.mask.shape[1] :] = self.seen
        return ids, visible, place[self.text]

    def attended(self) -> Tensor:
        """Return the columns that hold a token, bool ``(row, column)``, where every row has one response."""
        return torch.cat([self.mask, self.seen.new_ones(len(self.mask), self.seen.shape[1])], dim=1)


@final
class _CachedDecoding:
    """Responses that continue prompts in a KV cache, whose rows may hold several responses.

    Args:
        model: called as a Hugging Face causal LM is.
        share: whether responses to one prompt may share a row.
        prompts: token ids, one sequence per response.
        steps: the maximum number of tokens of a response.
    """

    def __init__(self, model: Any, share: bool, prompts: Sequence[Sequence[int]], steps: int) -> None:
        self.model, self.share, self.step = model, share, 0
        unique, index = distinct_prompts(prompts)
        logits, mask, self.cache, _ = prefill(model, unique, share)
        prompt_of = torch.tensor(index, device=mask.device)
        counts = torch.bincount(prompt_of)
        per_row = responses_per_row(counts, mask.shape[1], steps) if share else 1
        self.rows = _CacheRows(prompt_of, mask, per_row)
        if len(self.rows.prompt) > len(mask):
            self.cache.batch_select_indices(self.rows.prompt)
        if share:
            for layer in self.cache.layers:
                layer.reserve(steps * min(per_row, int(counts.max())))  # pyright: ignore[reportAttributeAccessIssue]
        self.logits = logits[self.rows.prompt[self.rows.row]]
        """``(response, vocabulary)`` of each response's first token."""

    @property
    def turn(self) -> Tensor:
        """Which responses are unfinished, int64 ``(response,)``."""
        return self.rows.turn

    def append(self, token: Tensor, unfinished: Tensor) -> Tensor:
        """Append a token to each unfinished response and return the logits of the next, ``(response, vocabulary)``.

        Args:
            token: int64 ``(response,)``.
            unfinished: bool ``(response,)``; the others leave.
        """
        rows = self.rows
        rows.keep(unfinished, self.cache)
        ids, visible, place = rows.append(token[unfinished])
        attention = additive_mask(visible, compute_dtype(self.model)) if self.share else rows.attended().long()
        out = self.model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=(rows.lengths + self.step)[:, None].expand_as(ids),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.step += 1
        return out.logits[rows.row, place]

"""The built-in generator: decodes token by token with the weights that are trained.

As in the training pass (:mod:`lrl.lm.layouts`), responses to one prompt share rows of the KV cache, and each attends to
the prompt and to its own tokens. Responses to one prompt whose tokens are equal so far have one *text*. Every step
computes one token of each text, so equal beginnings of responses are computed once. Finished responses are removed from
the batch. On a GPU, :mod:`lrl.lm.static_decoding` computes the same with constant shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from lrl.functional.distributions import tempered
from lrl.lm.attention import compute_dtype
from lrl.lm.forward import logits_of, packed_weights, without_gradient
from lrl.lm.frozen_states import LowerLayers
from lrl.lm.layouts import Turns, additive_mask, lay_out, pad_prompts
from lrl.lm.logprobs import sample_tokens, sampling_logprobs
from lrl.lm.model import LanguageModel
from lrl.lm.prefill import KeptPrompts, distinct_prompts, prefill
from lrl.lm.static_decoding import can_record, sample_responses
from lrl.types import SamplingConfig

# The interface between a policy that responds in text and the generator of the tokens.


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Sampled responses, one per prompt."""

    ids: Tensor
    """int64 ``(row, token)``, right-padded with 0."""
    mask: Tensor
    """bool ``(row, token)``: True for every sampled token, including the one that ended the response."""
    logprobs: Tensor
    """Log-probabilities ``(row, token)`` of the sampled tokens in the distribution that they were sampled from, after
    temperature, top-k and top-p; 0 where ``mask`` is False."""


class Generator(Protocol):
    """Samples a response to each prompt, as the built-in decode loop, a server or an inference engine does.

    The generator decides where a response ends: at the end-of-turn token, or after the last tag of the response
    format.
    """

    def generate(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: SamplingConfig) -> Responses:
        """Sample one response per prompt.

        Args:
            prompts: token ids, one sequence per row.
            uniforms: int64 ``(row, max_new_tokens)``, 64 uniformly distributed bits for each token. If a generator uses
                no other random numbers, its response to a prompt does not depend on the rest of the batch.
            sampling: the distribution to sample from, and the maximum number of tokens.
        """
        ...


# Decoding without a KV cache, for models that give wrong results for prompts with padding on the left.


@final
class UncachedDecoding:
    """Decodes without a KV cache: for every token, its whole row is computed again, padded on the right.

    Args:
        model: any causal LM.
        prompts: token ids, one sequence per response.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.turn = torch.arange(len(prompts), device=self.device)
        """Indices of the unfinished responses, int64 ``(response,)``."""
        self.rows = [list(prompt) for prompt in prompts]
        self.logits = self._next_logits()
        """Logits of the first token of each response, ``(response, vocabulary)``."""

    @property
    def text(self) -> Tensor:
        """Index of the row of logits of each unfinished response, int64 ``(response,)``; here, no row is shared."""
        return torch.arange(len(self.rows), device=self.device)

    def append(self, token: Tensor, unfinished: Tensor) -> Tensor:
        """Append a token to each response and return the logits of the next, ``(unfinished response, vocabulary)``.

        Args:
            token: sampled tokens, int64 ``(response,)``.
            unfinished: responses that do not end with this token, bool ``(response,)``; the others are removed.
        """
        responses = zip(self.rows, token.tolist(), unfinished.tolist(), strict=True)
        self.rows = [[*row, last] for row, last, is_unfinished in responses if is_unfinished]
        self.turn = self.turn[unfinished]
        return self._next_logits()

    def _next_logits(self) -> Tensor:
        ids, mask = pad_prompts(self.rows, self.device).values()
        next_ids = ids.new_zeros(len(ids), 1)  # any id: no token is predicted from it
        turns = Turns(ids, mask, next_ids, torch.ones_like(next_ids, dtype=torch.bool))
        return logits_of(self.model, lay_out(turns, align="left"))[:, 0]


TEXTS_PER_ROW = (1, 2, 4, 8, 16, 32)
"""Numbers of texts per row of the cache that :func:`texts_per_row` chooses among."""
_COMPACT = 0.75
"""Finished rows are removed from the cache only when less than this share of the rows is unfinished, because removing
rows copies the cache."""


@final
class DecodeLoop:
    """Samples responses from a language model; a response ends with an end-of-turn token or with ``stop_text``.

    Args:
        language_model: the model that is trained; it must be configured before the first call.
        stop_text: the last tag of the response format; None if it has no tags.
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
            ValueError: If a prompt and its response could have more tokens than the model has positions.
        """
        model, tokenizer = self.language_model, self.language_model.tokenizer
        model.prepare_decoding(max(len(prompt) for prompt in prompts), sampling.max_new_tokens)
        with without_gradient(model), packed_weights(model.model):
            return decode(
                model.model,
                prompts,
                uniforms,
                sampling,
                stop_ids=tokenizer.stop_ids(self.stop_text),
                stops=tokenizer.stops(self.stop_text),
                share=model.share,
                cached=model.cached,
                kept=model.kept,
                static=model.attends_to_all and can_record(model.model),
                lower=model.recording,
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
    kept: KeptPrompts | None = None,
    static: bool = False,
    lower: LowerLayers | None = None,
) -> Responses:
    """Sample one response per prompt.

    Args:
        model: called as a Hugging Face causal LM is.
        prompts: token ids, one sequence per row.
        uniforms: int64 ``(row, max_new_tokens)``, 64 uniformly distributed bits for each token.
        sampling: the distribution to sample from, and the maximum number of tokens.
        stop_ids: tokens that end a response.
        stops: function that returns whether the token ids of a response so far end with the stop text, for tokenizers
            that encode the stop text as several tokens. Called once per response and token.
        share: let responses to one prompt share a row with a 4-D attention mask; correct only if every layer attends to
            all earlier tokens.
        cached: use a KV cache, with prompts padded on the left. False computes the whole row again for every token,
            which is correct for any causal model.
        kept: KV cache of the prompts of the previous call, which is reused for prompts that begin with one of them, if
            ``share`` is True; None computes all prompts in full.
        static: decode with constant shapes; correct only if every layer attends to all earlier tokens.
        lower: records the states below the lowest adapter, except with constant shapes or without a KV cache; None
            records nothing.
    """
    device = next(model.parameters()).device
    unique, index = distinct_prompts(prompts)
    if sampling.temperature == 0 and len(unique) < len(prompts):  # equal prompts have equal greedy responses
        options = {"stop_ids": stop_ids, "stops": stops, "share": share, "cached": cached, "kept": kept, "lower": lower}
        greedy = decode(model, unique, uniforms[: len(unique)], sampling, static=static, **options)
        return Responses(ids=greedy.ids[index], mask=greedy.mask[index], logprobs=greedy.logprobs[index])
    uniforms, stop = uniforms.to(device), torch.tensor(sorted(stop_ids), device=device)
    num_rows, steps, width = len(prompts), sampling.max_new_tokens, 0
    if static:
        filled, of_rows = prefill(model, unique, share, kept), torch.tensor(index, device=device)
        return Responses(**sample_responses(model, filled, of_rows, uniforms, sampling, stop, stops)._asdict())
    if cached:
        decoding = _CachedDecoding(model, share, prompts, steps, kept, lower)
    else:
        decoding, lower = UncachedDecoding(model, prompts), None
    below = list[Tensor]()
    """States below the lowest adapter that each token of the responses is predicted from, ``(response, hidden)``."""
    logits = decoding.logits
    out_ids = torch.zeros(num_rows, steps, dtype=torch.long, device=device)
    out_mask = torch.zeros(num_rows, steps, dtype=torch.bool, device=device)
    out_logprobs = torch.zeros(num_rows, steps, dtype=tempered(logits[:0], 1.0).dtype, device=device)
    for step in range(steps):
        turn, text, logprobs = decoding.turn, decoding.text, sampling_logprobs(logits, sampling)
        token, width = sample_tokens(logprobs, uniforms[turn, step], text), step + 1
        out_ids[turn, step], out_mask[turn, step] = token, True  # the mask covers the stop token as well
        out_logprobs[turn, step] = logprobs[text, token]
        unfinished = ~torch.isin(token, stop)
        if stops is not None:
            ended = [stops(ids) for ids in out_ids[turn, :width].tolist()]
            unfinished = unfinished & ~torch.tensor(ended, device=device)
        if step == steps - 1 or not unfinished.any():
            break
        logits = decoding.append(token, unfinished)
        if lower is not None:
            assert isinstance(decoding, _CachedDecoding)
            states = decoding.states[decoding.text]
            below.append(states.new_zeros(num_rows, states.shape[1]).index_copy(0, decoding.turn, states))
    if lower is not None and below:
        lower.record_responses(prompts, out_ids, out_mask.sum(1), torch.stack(below, 1))
    return Responses(ids=out_ids[:, :width], mask=out_mask[:, :width], logprobs=out_logprobs[:, :width])


def texts_per_row(counts: Tensor, prompt: int, response: int) -> int:
    """Return the cheapest number of texts per row of the cache, by a cost model fitted to measurements on a CPU.

    All responses are assumed to differ. The cost of a row is that of reading its columns from the cache. The cost of
    a text is that of the matrix products of the layers, and of attention to the columns of its row.

    Args:
        counts: number of responses to each distinct prompt, int64 ``(prompt,)``.
        prompt: number of tokens of the longest prompt.
        response: maximum number of tokens of a response.
    """

    def cost(per_row: int) -> float:
        """Return the cost of all rows, relative to that of a row of one text without attention."""
        rows = int(((counts + per_row - 1) // per_row).sum())
        columns = prompt + per_row * response / 2
        return rows * (1 + columns / 32) + rows * per_row * (1 + columns / 50)

    return min(TEXTS_PER_ROW, key=cost)


@final
class _CachedDecoding:
    """Decodes with a KV cache whose rows may contain several responses.

    Responses to one prompt with the same tokens so far have one text, which is computed once. The texts of a prompt
    share a row; when there are more than :attr:`max_texts`, the row is copied and the texts are divided among the
    copies. Texts are sorted by row.

    Args:
        model: called as a Hugging Face causal LM is.
        share: whether responses to one prompt may share a row.
        prompts: token ids, one sequence per response.
        steps: the maximum number of tokens of a response.
        kept: KV cache of the prompts of the previous call, see :func:`decode`.
        lower: records the states below the lowest adapter, see :func:`decode`.
    """

    states: Tensor
    """States below the lowest adapter of the last token of each text, ``(text, hidden)``, if they are recorded."""

    def __init__(
        self,
        model: Any,
        share: bool,
        prompts: Sequence[Sequence[int]],
        steps: int,
        kept: KeptPrompts | None = None,
        lower: LowerLayers | None = None,
    ) -> None:
        self.model, self.share, self.step, self.lower = model, share, 0, lower
        unique, index = distinct_prompts(prompts)
        logits, mask, self.cache, _ = prefill(model, unique, share, kept, lower=lower)
        prompt_of = torch.tensor(index, device=mask.device)
        counts = torch.bincount(prompt_of)
        self.max_texts = texts_per_row(counts, mask.shape[1], steps) if share else 1
        """The maximum number of texts in a row."""
        self.turn = torch.argsort(prompt_of, stable=True)
        """Indices of the unfinished responses, sorted by row, int64 ``(response,)``."""
        prompt = torch.arange(len(mask), device=mask.device) if share else prompt_of[self.turn]  # for each row
        self.row = prompt_of[self.turn] if share else torch.arange(len(self.turn), device=mask.device)
        """Index of the row of each unfinished response, int64 ``(response,)``."""
        self.text = self.row
        """Index of the text of each unfinished response, int64 ``(response,)``."""
        self.lengths, self.mask = mask.sum(1)[prompt], mask[prompt]
        self.seen = torch.zeros(len(prompt), 0, dtype=torch.bool, device=mask.device)
        """Columns after the prompt that contain the tokens of each text, bool ``(text, column)``."""
        self.logits = logits[prompt]
        """Logits of the first token of each text, ``(text, vocabulary)``."""
        if not share:
            self.cache.batch_select_indices(prompt)
            return
        for layer in self.cache.layers:
            layer.reserve(steps * min(self.max_texts, int(counts.max())))  # pyright: ignore[reportAttributeAccessIssue]

    def append(self, token: Tensor, unfinished: Tensor) -> Tensor:
        """Append a token to each response and return the logits of the next, ``(text, vocabulary)``.

        Args:
            token: sampled tokens, int64 ``(response,)``.
            unfinished: responses that do not end with this token, bool ``(response,)``; the others are removed.
        """
        self._keep(unfinished)
        ids, visible, (row, place) = self._add_columns(token[unfinished])
        if self.share:
            attention = additive_mask(visible, compute_dtype(self.model))
        else:  # every row is one response
            attention = torch.cat([self.mask, self.seen.new_ones(len(self.mask), self.seen.shape[1])], dim=1).long()
        with nullcontext([]) if self.lower is None else self.lower.watched() as below:
            out = self.model(
                input_ids=ids,
                attention_mask=attention,
                position_ids=(self.lengths + self.step)[:, None].expand_as(ids),
                past_key_values=self.cache,
                use_cache=True,
            )
        if self.lower is not None:
            self.states = below[0][row, place]
        self.step += 1
        return out.logits[row, place]

    def _keep(self, unfinished: Tensor) -> None:
        """Remove finished responses, and also rows without responses if there are many, see :data:`_COMPACT`.

        Args:
            unfinished: whether each response that was unfinished before still is, bool ``(response,)``.
        """
        self.row, self.text, self.turn = self.row[unfinished], self.text[unfinished], self.turn[unfinished]
        stay, row = torch.unique(self.row, return_inverse=True)
        if len(stay) < _COMPACT * len(self.mask):
            self.row = row
            self._take(stay)

    def _add_columns(self, token: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Append one token ``(response,)`` to each response; responses with different tokens get separate texts.

        Returns:
            The ids of the new columns, int64 ``(row, place)``; the columns that each of them attends to, bool ``(row,
            place, column)``; and the index of each text's row and its place among the texts of that row, each int64
            ``(text,)``.
        """
        keys = self.text * (int(token.max()) + 1) + token
        parent, (distinct, self.text) = self.text, torch.unique(keys, return_inverse=True)
        texts, before = len(distinct), self.seen.shape[1]
        response = parent.new_zeros(texts).scatter_(0, self.text, torch.arange(len(token), device=token.device))
        row, place = self._spread(self.row[response])
        self.row = row[self.text]
        ids = torch.zeros(len(self.mask), int(place.max()) + 1, dtype=torch.long, device=token.device)
        ids[row, place] = token[response]
        self.seen = torch.cat([self.seen[parent[response]], self.seen.new_zeros(texts, ids.shape[1])], dim=1)
        self.seen[torch.arange(texts, device=token.device), before + place] = True
        visible = self.mask[:, None].expand(-1, ids.shape[1], -1)
        visible = torch.cat([visible, self.seen.new_zeros(*ids.shape, self.seen.shape[1])], dim=2)
        visible[row, place, self.mask.shape[1] :] = self.seen
        return ids, visible, (row, place)

    def _spread(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Divide texts among copies of their row if it has more than :attr:`max_texts`.

        Args:
            row: index of the present row of each text, int64 ``(text,)``.

        Returns:
            The index of each text's row and its place among the texts of that row, each int64 ``(text,)``.
        """
        counts = torch.bincount(row, minlength=len(self.mask))
        place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        if int(counts.max()) > self.max_texts:
            copies = (-(-counts // self.max_texts)).clamp(min=1)  # keeps rows without responses
            size = (-(-counts // copies))[row]
            row = (copies.cumsum(0) - copies)[row] + place // size
            place = place % size
            self._take(torch.repeat_interleave(torch.arange(len(copies), device=row.device), copies))
        return row, place

    def _take(self, rows: Tensor) -> None:
        """Replace the rows of the cache by those with the indices ``rows``, int64 ``(row,)``, which may repeat."""
        self.cache.batch_select_indices(rows)
        self.lengths, self.mask = self.lengths[rows], self.mask[rows]

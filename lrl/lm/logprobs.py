"""Log-probabilities: of the distribution that is sampled from, of sampled tokens, and of candidate texts.

Sampling and training both divide logits by the temperature with :func:`lrl.functional.distributions.tempered`. For
small vocabularies, training computes log-probabilities by :class:`lrl.functional.distributions.Categorical`. For large
ones, :func:`token_logprobs` computes the logits of a few tokens at a time from the last hidden states, and again in the
backward pass, so that the memory for logits does not grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from lrl.functional.distributions import tempered
from lrl.functional.random import exponentials
from lrl.lm.attention import bare
from lrl.lm.forward import head_inputs
from lrl.lm.frozen_states import LowerLayers
from lrl.lm.layouts import Candidates, Continuation, additive_mask, in_subtree
from lrl.lm.prefill import KeptPrompts, Prefilled, distinct_prompts, prefill
from lrl.types import SamplingConfig

# Sampling.

_SMALLEST_BLOCK = 64
"""Smallest number of token ids in a block, see :func:`sample_tokens`."""


def sampling_logprobs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return log-probabilities ``(row, vocabulary)`` of the distribution that tokens are sampled from.

    Args:
        logits: ``(row, vocabulary)``.
        sampling: temperature, top-k and top-p.
    """
    if sampling.temperature == 0:
        logits = tempered(logits, 1.0)
        greedy = torch.full_like(logits, -torch.inf)
        return greedy.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = tempered(logits, sampling.temperature)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def sample_tokens(logprobs: Tensor, uniforms: Tensor, row: Tensor | None = None) -> Tensor:
    """Sample tokens by the Gumbel-max trick, first a block of token ids and then a token of the block.

    Among independent exponential variables with rates ``p``, the index of the smallest one has the distribution ``p``.
    Log-probabilities are rounded differently in batches of different shapes. With this method, the probability that
    rounding changes a sample is proportional to the total variation distance that it causes. In inverse transform
    sampling, rounding also shifts the boundaries of all rare tokens in the cumulative sum, which changed 400 times as
    many samples of ``assets/tiny-lm``. Sampling a block first reduces the random numbers per sample to about twice the
    square root of the vocabulary size.

    Args:
        logprobs: ``(row, vocabulary)``; tokens with -inf are never sampled.
        uniforms: int64 ``(sample,)``, 64 uniformly distributed bits each.
        row: index of the row of ``logprobs`` for each sample, int64 ``(sample,)``; None samples once from each row.

    Returns:
        Token ids, int64 ``(sample,)``.
    """
    size = logprobs.shape[-1]
    if size <= _SMALLEST_BLOCK:  # a single block
        rates = logprobs.exp()
        return ((rates if row is None else rates[row]) / exponentials(uniforms, size)).argmax(-1)
    if row is None:
        row = torch.arange(len(logprobs), device=logprobs.device)
    block = max(_SMALLEST_BLOCK, 1 << (size.bit_length() // 2))
    rates = pad(logprobs.exp(), (0, -size % block)).unflatten(-1, (-1, block))
    of_blocks, of_tokens = exponentials(uniforms, rates.shape[1] + block).split([rates.shape[1], block], dim=-1)
    chosen = (rates.sum(-1)[row] / of_blocks).argmax(-1)
    inside = rates[row, chosen]
    return chosen * block + (inside / of_tokens).argmax(-1)


AT_ONCE = 2**25
"""Largest number of logits, tokens times vocabulary, that are computed at once; more are computed in chunks."""
_CHUNK = {"cpu": 2**21}
"""Number of logits per chunk: small compared with :data:`AT_ONCE`, but large enough that reading the weights of the
head for every chunk takes little time."""
_CHUNK_ELSEWHERE = 2**27
"""The same on a GPU, on which starting the kernels of a small chunk takes longer than computing it. In float32 these
logits take 0.5 GiB, and the backward pass three times as much. Not measured."""
_LARGE = 2**13
"""Smallest vocabulary size for which chunks are used."""
_MIN_CHUNK_TOKENS = 8
"""Smallest number of tokens per chunk."""


class _Pick(torch.autograd.Function):
    """Computes log-probabilities and entropies of tokens, and saves only the logits for the backward pass.

    Autograd would also save other tensors of the size of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of ``ids`` and entropies, each ``(token,)``.

        Args:
            ctx: context of autograd, which saves tensors for the backward pass.
            logits: ``(token, vocabulary)``.
            ids: int64 ``(token,)``.
            temperature: divides the logits.
        """
        logprobs = torch.log_softmax(tempered(logits, temperature), dim=-1)
        picked = logprobs.gather(-1, ids[:, None]).squeeze(-1)
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
        ctx.save_for_backward(logits, ids, entropy)
        ctx.temperature = temperature
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient with respect to the logits.

        It is ``(g (d - p) - h p (log p + H)) / temperature``, with g and h the gradients with respect to the
        log-probability and to the entropy H, p the probabilities, and d equal to 1 for the token and 0 elsewhere.
        """
        logits, ids, entropy = ctx.saved_tensors
        of_picked, of_entropy = (grad[:, None] for grad in grads)
        slope = torch.log_softmax(tempered(logits, ctx.temperature), dim=-1)
        probabilities = slope.exp()
        slope.add_(entropy[:, None]).mul_(-of_entropy).sub_(of_picked).mul_(probabilities)
        slope.scatter_add_(-1, ids[:, None], of_picked)
        return slope.div_(ctx.temperature).to(logits.dtype), None, None


def token_logprobs(
    head: Callable[[Tensor], Tensor], states: Tensor, ids: Tensor, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of tokens and the entropies of their distributions, each ``(token,)``.

    Args:
        head: function from states ``(token, hidden)`` to logits ``(token, vocabulary)``.
        states: last hidden states, ``(token, hidden)``.
        ids: int64 ``(token,)``.
        temperature: divides the logits.
        vocabulary: size of the vocabulary.
    """
    if len(ids) == 0:
        none = states.sum(-1).float()
        return none, none

    def chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of some tokens, each ``(token,)``."""
        return _Pick.apply(head(states), ids, temperature)  # pyright: ignore

    size = max(_MIN_CHUNK_TOKENS, _CHUNK.get(states.device.type, _CHUNK_ELSEWHERE) // vocabulary)
    again = partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
    compute = again if torch.is_grad_enabled() else chunk
    parts = [compute(*part) for part in zip(states.split(size), ids.split(size), strict=True)]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def head_logits(model: Any, states: Tensor) -> Tensor:
    """Compute logits ``(..., vocabulary)`` from the inputs of the model's head, ``(..., hidden)``."""
    cap = getattr(bare(model).config, "final_logit_softcapping", None)
    logits = model.get_output_embeddings()(states)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def can_chunk(model: Any) -> bool:
    """Return whether logits can be computed in chunks, and the vocabulary is large enough for that.

    The head must have no dropout, and :func:`head_logits` must compute the same logits as the model.
    """
    head = model.get_output_embeddings()
    if head.weight.shape[0] < _LARGE:
        return False
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in head.modules()):
        return False  # chunks are recomputed in the backward pass, with different random numbers
    ids = torch.arange(1, 5, device=head.weight.device)[None]
    with head_inputs(model) as states:
        wanted = model(input_ids=ids, use_cache=False).logits
    return torch.allclose(head_logits(model, states[0]).float(), wanted.float(), rtol=1e-2, atol=1e-3)


# Candidates: the log-probabilities of several given texts after each prompt.


@torch.no_grad()
def candidate_logprobs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    candidates: Candidates,
    mask_dtype: torch.dtype,
    kept: KeptPrompts | None = None,
    lower: LowerLayers | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the sums of the log-probabilities of each candidate's tokens after each prompt.

    Each distinct prompt is computed once, then each distinct prefix of the candidates once per prompt. Tokens that all
    prompts begin with are computed once for all. For candidates of one token, only the prompts are computed.

    Args:
        model: called as a Hugging Face causal LM is; every layer must attend to all earlier tokens.
        prompts: token ids, one list per row.
        candidates: token ids of the candidate texts.
        mask_dtype: dtype of the attention mask.
        kept: KV cache of the prompts of the previous call, which is reused for prompts that begin with one of them;
            None computes all prompts in full.
        lower: records the states below the lowest adapter; None records nothing.

    Returns:
        The sums ``(row, candidate)``, and the hidden states ``(row, hidden)`` at the last token of each prompt.
    """
    unique, index = distinct_prompts(prompts)
    filled = prefill(model, unique, share=True, kept=kept, lower=lower)
    logits = filled.logits[:, None]
    if len(candidates.prefix_ids):
        with nullcontext([]) if lower is None else lower.watched() as below:
            logits = torch.cat([logits, _prefix_logits(model, filled, candidates, mask_dtype)], dim=1)
        if lower is not None:
            after = Continuation.of_candidates(candidates)
            for prompt, states in zip(unique, below[0], strict=True):
                lower.record_after(prompt, after, states)
    return prefix_sums(logits, candidates)[index], filled.states[index]


def prefix_sums(logits: Tensor, candidates: Candidates) -> Tensor:
    """Return the sums ``(prompt, candidate)`` of the log-probabilities of the candidates' tokens.

    Args:
        logits: logits ``(prompt, prefix, vocabulary)`` of the token after each prefix, the empty prefix first.
        candidates: token ids of the candidate texts.
    """
    logprobs = torch.log_softmax(tempered(logits, 1.0), dim=-1)
    return (logprobs[:, candidates.before, candidates.ids] * candidates.mask).sum(-1)


def _prefix_logits(model: Any, filled: Prefilled, candidates: Candidates, mask_dtype: torch.dtype) -> Tensor:
    """Compute the logits ``(prompt, prefix, vocabulary)`` of the token after each prefix except the empty one."""
    rows, prefixes = len(filled.mask), len(candidates.prefix_ids)
    among = in_subtree(candidates.prefix_last).expand(rows, -1, -1)
    seen = [filled.mask[:, None].expand(-1, prefixes, -1), among]
    return model(
        input_ids=candidates.prefix_ids.expand(rows, -1),
        attention_mask=additive_mask(torch.cat(seen, dim=-1), mask_dtype),
        position_ids=filled.mask.sum(1, keepdim=True) + candidates.prefix_sizes - 1,
        past_key_values=filled.cache,
        use_cache=True,
    ).logits

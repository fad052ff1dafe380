"""Log-probabilities and entropies of sampled tokens, without a tensor of all tokens by the whole vocabulary.

The logits of a few tokens are computed at a time, and once more in the backward pass, so that the loss needs the memory
of a few chunks whatever the number of tokens. Few logits are computed at once, as a model with a small vocabulary has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lrl.models.attention import bare
from lrl.models.prefill import head_inputs
from lrl.models.sampling import sampling_dtype
from lrl.models.skipped_layers import replaced_forward

AT_ONCE = 2**25
"""So many logits are computed at once; more of them in chunks."""
_CHUNK = 2**21
"""Logits of a chunk: a twentieth of what is computed in chunks at least, and enough that the head is not read often."""
_LARGE = 2**13
"""With a smaller vocabulary all logits are computed at once."""
_LEAST = 8
"""Tokens of a chunk at least."""


class _Pick(torch.autograd.Function):
    """Computes log-probabilities and entropies of tokens; the logits are the only tensor of their size that is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of ``ids`` and entropies, each ``(token,)``.

        Args:
            ctx: keeps what the backward pass needs.
            logits: ``(token, vocabulary)``.
            ids: int64 ``(token,)``.
        """
        logprobs = torch.log_softmax(logits.to(sampling_dtype(logits)), dim=-1)
        picked = logprobs.gather(-1, ids[:, None]).squeeze(-1)
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
        ctx.save_for_backward(logits, ids, entropy)
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits: ``g (1 - p) - h p (log p + H)`` for gradients ``g`` and ``h``."""
        logits, ids, entropy = ctx.saved_tensors
        of_picked, of_entropy = (grad[:, None] for grad in grads)
        slope = torch.log_softmax(logits.to(sampling_dtype(logits)), dim=-1)
        probabilities = slope.exp()
        slope.add_(entropy[:, None]).mul_(-of_entropy).sub_(of_picked).mul_(probabilities)
        slope.scatter_add_(-1, ids[:, None], of_picked)
        return slope.to(logits.dtype), None


def token_logprobs(
    head: Callable[[Tensor], Tensor], states: Tensor, ids: Tensor, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of tokens and the entropies of their distributions, each ``(token,)``.

    Args:
        head: from states to logits.
        states: ``(token, hidden)``.
        ids: int64 ``(token,)``.
        temperature: divides the logits.
        vocabulary: its size.
    """
    if len(ids) == 0:
        none = states.sum(-1).float()
        return none, none

    def chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states)
        return _Pick.apply(logits if temperature == 1 else logits / temperature, ids)  # pyright: ignore

    size = max(_LEAST, _CHUNK // vocabulary)
    again = partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=False)
    compute = again if torch.is_grad_enabled() else chunk
    parts = [compute(*part) for part in zip(states.split(size), ids.split(size), strict=True)]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


@contextmanager
def without_logits(model: Any) -> Iterator[list[Tensor]]:
    """Collect what logits are computed from, and leave the logits out, inside a ``with`` block.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped; it gives the first number of each state as logits.
    """
    head = model.get_output_embeddings()
    with head_inputs(model) as states, replaced_forward(head, lambda states: states[..., :1]):
        yield states


def head_logits(model: Any, states: Tensor) -> Tensor:
    """Compute logits ``(..., vocabulary)`` from the states ``(..., hidden)`` that the model's head reads."""
    cap = getattr(bare(model).config, "final_logit_softcapping", None)
    logits = model.get_output_embeddings()(states)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def can_chunk(model: Any) -> bool:
    """Return whether the vocabulary is large and :func:`head_logits` is all that the model does to its last states."""
    head = model.get_output_embeddings()
    if head.weight.shape[0] < _LARGE:
        return False
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in head.modules()):
        return False  # chunks are computed again in the backward pass, with other random numbers
    ids = torch.arange(1, 5, device=head.weight.device)[None]
    with head_inputs(model) as states:
        wanted = model(input_ids=ids, use_cache=False).logits
    return torch.allclose(head_logits(model, states[0]).float(), wanted.float(), rtol=1e-2, atol=1e-3)

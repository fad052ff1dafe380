"""Log-probabilities of a few texts behind each prompt, where no gradient is needed.

What prompts begin with is computed once, each prompt once, and behind it, once each, what candidates begin with: for
``turn left``, ``turn right`` and ``drop`` that is ``turn`` alone, since the last token of a text predicts nothing::

    [common beginning][rest of prompt 1][beginning 1][beginning 2] ...
                      [rest of prompt 2][beginning 1][beginning 2] ...

A beginning sees its prompt, the shorter beginnings of itself, and nothing else. Candidates of one token need no column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lrl.models.prefill import Prefilled, distinct_prompts, prefill
from lrl.models.prompt_sharing import additive_mask
from lrl.models.sampling import sampling_dtype

Normalisation = Literal["sum", "token", "word"]


class _Beginnings:
    """What candidates begin with: 0 is the empty beginning, the others are numbered from 1.

    Attributes:
        ids: the last token of each but the empty one, int64 ``(beginning,)``.
        depths: how many tokens each of them has, int64 ``(beginning,)``.
        seen: which of them each sees, bool ``(beginning, beginning)``.
        before: the number of the beginning before each token of a candidate, int64 ``(candidate, token)``.
    """

    def __init__(self, candidates: Sequence[Sequence[int]], width: int, device: torch.device) -> None:
        number: dict[tuple[int, ...], int] = {(): 0}
        texts = [tuple(candidate) for candidate in candidates]
        before = [[number.setdefault(text[:n], len(number)) for n in range(len(text))] for text in texts]
        self.before = torch.tensor([row + [0] * (width - len(row)) for row in before], device=device)
        beginnings = list(number)[1:]
        self.ids = torch.tensor([text[-1] for text in beginnings], dtype=torch.long, device=device)
        self.depths = torch.tensor([len(text) for text in beginnings], dtype=torch.long, device=device)
        rows = [[text[: len(other)] == other for other in beginnings] for text in beginnings]
        self.seen = torch.tensor(rows, dtype=torch.bool, device=device)


@torch.no_grad()
def candidate_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], ids: Tensor, mask: Tensor, mask_dtype: torch.dtype, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Sums of the log-probabilities of each candidate's tokens behind each prompt, ``(row, candidate)``.

    With the hidden states at the prompts' ends, ``(row, hidden)``.

    Args:
        model: called as a Hugging Face causal LM is; every layer attends fully.
        prompts: token ids, one list per row; equal ones are computed once.
        ids: the candidates' tokens, int64 ``(candidate, token)``, right-padded.
        mask: bool ``(candidate, token)``; no candidate is empty.
        mask_dtype: of the attention's mask.
        groups: prompts of like length are computed together, in this many passes.
    """
    unique, index = distinct_prompts(prompts)
    by_length = sorted(range(len(unique)), key=lambda row: len(unique[row]))
    place = torch.empty(len(unique), dtype=torch.long, device=ids.device)
    place[torch.tensor(by_length, device=ids.device)] = torch.arange(len(unique), device=ids.device)
    parts = [part.tolist() for part in torch.tensor(by_length).tensor_split(groups) if len(part)]
    candidates = [row[:size] for row, size in zip(ids.tolist(), mask.sum(1).tolist(), strict=True)]
    beginnings = _Beginnings(candidates, ids.shape[1], ids.device)
    sums, states = [], []
    for part in parts:
        begun = prefill(model, [unique[row] for row in part], share=True)
        logits = begun.logits[:, None]
        if len(beginnings.ids):
            logits = torch.cat([logits, _further_logits(model, begun, beginnings, mask_dtype)], dim=1)
        logprobs = torch.log_softmax(logits.to(sampling_dtype(logits)), dim=-1)
        sums.append((logprobs[:, beginnings.before, ids] * mask).sum(-1))
        states.append(begun.states)
    row = place[index]
    return torch.cat(sums)[row], torch.cat(states)[row]


def _further_logits(model: Any, begun: Prefilled, beginnings: _Beginnings, mask_dtype: torch.dtype) -> Tensor:
    """Logits ``(prompt, beginning, vocabulary)`` behind each beginning but the empty one."""
    rows, count = len(begun.mask), len(beginnings.ids)
    seen = [begun.mask[:, None].expand(-1, count, -1), beginnings.seen.expand(rows, -1, -1)]
    return model(
        input_ids=beginnings.ids.expand(rows, -1),
        attention_mask=additive_mask(torch.cat(seen, dim=-1), mask_dtype),
        position_ids=begun.mask.sum(1, keepdim=True) + beginnings.depths - 1,
        past_key_values=begun.cache,
        use_cache=True,
    ).logits


def divisors(normalisation: Normalisation, texts: Sequence[str], mask: Tensor) -> Tensor:
    """What the sums of candidates' log-probabilities are divided by, ``(candidate,)``.

    Args:
        normalisation: ``sum`` divides by nothing, ``token`` and ``word`` by how many there are.
        texts: of the candidates.
        mask: of their tokens, bool ``(candidate, token)``.
    """
    if normalisation == "token":
        return mask.sum(1)
    if normalisation == "word":
        return torch.tensor([len(text.split()) for text in texts], device=mask.device)
    return torch.ones(len(mask), device=mask.device)


def check_distinct(texts: Sequence[str], tokens: Sequence[Sequence[int]], name: str) -> None:
    """Every action is some tokens, and no other action's.

    Args:
        texts: of the actions.
        tokens: their ids.
        name: of the language model, for the message.

    Raises:
        ValueError: an action is no token, or two are the same.
    """
    written: dict[tuple[int, ...], str] = {}
    for text, ids in zip(texts, tokens, strict=True):
        if not ids:
            raise ValueError(
                f"language_model.name is {name!r}, which has no token for {text!r}; it must know its words."
            )
        other = written.setdefault(tuple(ids), text)
        if other != text:
            raise ValueError(
                f"language_model.name is {name!r}, which reads {other!r} and {text!r} as the same tokens; "
                "it must know the words of all actions."
            )

"""Log-probabilities of a few texts after each prompt.

Each prompt is computed once, and after it each prefix of the candidates once; where no gradient is needed, the common
prefix of the prompts is computed once as well. For ``turn left``, ``turn right`` and ``drop`` the only prefix is
``turn``, since the last token of a text predicts nothing::

    [common prefix][rest of prompt 1][prefix 1][prefix 2] ...
                   [rest of prompt 2][prefix 1][prefix 2] ...

A prefix attends to its prompt and to shorter prefixes of itself. Candidates of one token need no column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from lrl.lm.layouts import Layout, Places, additive_mask
from lrl.lm.logprobs import sampling_dtype
from lrl.lm.prefill import Prefilled, distinct_prompts, prefill

Normalisation = Literal["sum", "token", "word"]


@final
class Prefixes:
    """The distinct prefixes of the candidates: 0 is the empty prefix, the others are numbered from 1.

    Attributes:
        ids: the last token of each prefix but the empty one, int64 ``(prefix,)``.
        depths: the length of each, int64 ``(prefix,)``.
        parents: the place in ``ids`` of each without its last token, -1 for the empty one, int64 ``(prefix,)``.
        visible: which prefixes each attends to, bool ``(prefix, prefix)``.
        before: the number of the prefix before each token of a candidate, int64 ``(candidate, token)``.
    """

    def __init__(self, candidates: Sequence[Sequence[int]], width: int, device: torch.device) -> None:
        number: dict[tuple[int, int], int] = {}  # of each prefix, by that of its parent and its last token
        depths, before = [0], []
        for candidate in candidates:
            row = [0] * min(len(candidate), 1)
            for token in candidate[:-1]:
                key = row[-1], token
                if key not in number:
                    number[key] = len(depths)
                    depths.append(len(row))
                row.append(number[key])
            before.append(row + [0] * (width - len(row)))
        self.before = torch.tensor(before, device=device)
        self.ids = torch.tensor([token for _, token in number], dtype=torch.long, device=device)
        self.depths = torch.tensor(depths[1:], dtype=torch.long, device=device)
        self.parents = torch.tensor([parent for parent, _ in number], dtype=torch.long, device=device) - 1
        self.visible = visible_prefixes(self.parents, self.depths)


def visible_prefixes(parents: Tensor, depths: Tensor) -> Tensor:
    """Return which prefixes each attends to, itself and those that it begins with, bool ``(prefix, prefix)``.

    Args:
        parents: the place of each without its last token, -1 for the empty one, int64 ``(prefix,)``.
        depths: the length of each, int64 ``(prefix,)``.
    """
    visible = torch.eye(len(parents), dtype=torch.bool, device=parents.device)
    for depth in range(2, max(depths.tolist(), default=0) + 1):
        some = (depths == depth).nonzero()[:, 0]
        visible[some] |= visible[parents[some]]
    return visible


@torch.no_grad()
def candidate_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], ids: Tensor, mask: Tensor, mask_dtype: torch.dtype, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute the sums of the log-probabilities of each candidate's tokens after each prompt.

    Args:
        model: called as a Hugging Face causal LM is; every layer attends fully.
        prompts: token ids, one list per row; equal ones are computed once.
        ids: the candidates' tokens, int64 ``(candidate, token)``, right-padded.
        mask: bool ``(candidate, token)``; no candidate is empty.
        mask_dtype: dtype of the attention mask.
        groups: prompts of similar length are computed together, in this many passes at least.

    Returns:
        The sums ``(row, candidate)``, and the hidden states ``(row, hidden)`` at the prompts' last tokens.
    """
    unique, index = distinct_prompts(prompts)
    by_length = sorted(range(len(unique)), key=lambda row: len(unique[row]))
    place = torch.empty(len(unique), dtype=torch.long, device=ids.device)
    place[torch.tensor(by_length, device=ids.device)] = torch.arange(len(unique), device=ids.device)
    parts = [part.tolist() for part in torch.tensor(by_length).tensor_split(groups) if len(part)]
    candidates = [row[:size] for row, size in zip(ids.tolist(), mask.sum(1).tolist(), strict=True)]
    prefixes = Prefixes(candidates, ids.shape[1], ids.device)
    sums, states = [], []
    for part in parts:
        filled = prefill(model, [unique[row] for row in part], share=True)
        logits = filled.logits[:, None]
        if len(prefixes.ids):
            logits = torch.cat([logits, _prefix_logits(model, filled, prefixes, mask_dtype)], dim=1)
        sums.append(prefix_sums(logits, prefixes, ids, mask))
        states.append(filled.states)
    row = place[index]
    return torch.cat(sums)[row], torch.cat(states)[row]


def prefix_sums(logits: Tensor, prefixes: Prefixes, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the sums ``(prompt, candidate)`` of the log-probabilities of the candidates' tokens.

    Args:
        logits: ``(prompt, prefix, vocabulary)`` after each prefix, the empty one first.
        prefixes: of the candidates.
        ids: the candidates' tokens, int64 ``(candidate, token)``.
        mask: bool ``(candidate, token)``.
    """
    logprobs = torch.log_softmax(logits.to(sampling_dtype(logits)), dim=-1)
    return (logprobs[:, prefixes.before, ids] * mask).sum(-1)


def lay_out_candidates(prompts: Tensor, mask: Tensor, prefixes: Prefixes) -> Layout:
    """Arrange each prompt in a row, with the prefixes of the candidates after it: the training pass over candidates.

    The logits ``(prompt, prefix, vocabulary)`` of this layout are those after each prefix, the empty one first.

    Args:
        prompts: int64 ``(prompt, token)``, right-padded.
        mask: bool ``(prompt, token)``.
        prefixes: of the candidates, at least one of which is not empty.
    """
    rows, width, count = *prompts.shape, len(prefixes.ids)
    lengths, number = mask.sum(1, keepdim=True), torch.arange(rows, device=prompts.device)[:, None]
    column = torch.arange(width, device=prompts.device) - (width - lengths)
    seen, after = column >= 0, torch.arange(count + 1, device=prompts.device)
    column = column.clamp(min=0)
    own = torch.cat([torch.where(seen, 0, -1), after[1:].expand(rows, -1)], dim=1)
    tree = torch.nn.functional.pad(prefixes.visible, (1, 0, 1, 0))
    tree[:, 0] = True
    return Layout(
        input_ids=torch.cat([prompts.gather(1, column) * seen, prefixes.ids.expand(rows, -1)], dim=1),
        position_ids=torch.cat([column, lengths + prefixes.depths - 1], dim=1),
        segments=own,
        completions_per_row=count + 1,
        logit_columns=width - 1 + after,
        row=number[:, 0],
        kept=after.expand(rows, -1),
        places=Places(torch.where(own < 0, -1, number), torch.cat([column, lengths + after[:-1]], dim=1)),
        tree=tree,
    )


def _prefix_logits(model: Any, filled: Prefilled, prefixes: Prefixes, mask_dtype: torch.dtype) -> Tensor:
    """Compute the logits ``(prompt, prefix, vocabulary)`` after each prefix but the empty one."""
    rows, count = len(filled.mask), len(prefixes.ids)
    seen = [filled.mask[:, None].expand(-1, count, -1), prefixes.visible.expand(rows, -1, -1)]
    return model(
        input_ids=prefixes.ids.expand(rows, -1),
        attention_mask=additive_mask(torch.cat(seen, dim=-1), mask_dtype),
        position_ids=filled.mask.sum(1, keepdim=True) + prefixes.depths - 1,
        past_key_values=filled.cache,
        use_cache=True,
    ).logits


def divisors(normalisation: Normalisation, texts: Sequence[str], mask: Tensor) -> Tensor:
    """Return what the sums of the candidates' log-probabilities are divided by, ``(candidate,)``.

    Args:
        normalisation: ``sum`` divides by 1, ``token`` and ``word`` by their number.
        texts: texts of the candidates.
        mask: mask of their tokens, bool ``(candidate, token)``.
    """
    if normalisation == "token":
        return mask.sum(1)
    if normalisation == "word":
        return torch.tensor([len(text.split()) for text in texts], device=mask.device)
    return torch.ones(len(mask), device=mask.device)


def check_distinct(texts: Sequence[str], tokens: Sequence[Sequence[int]], name: str) -> None:
    """Raise if an action has no tokens, or two actions have the same.

    Args:
        texts: texts of the actions.
        tokens: their token ids.
        name: the language model, for the message.

    Raises:
        ValueError: an action has no tokens, or two have the same.
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


# The token ids of turns as plain sequences, which can be looked up.


class Continuation(NamedTuple):
    """The tokens after a prompt: a response, or the prefixes of several candidates."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    """Position of each token, counted from the end of the prompt."""
    parents: tuple[int, ...] | None = None
    """Index of the token before each, -1 for the end of the prompt, where they are prefixes of several texts; None is
    for one text, whose tokens attend to all earlier ones."""


Turns = tuple[Sequence[Sequence[int]], Sequence[Continuation]]
"""The prompts of turns, and what follows them."""


def turns_of(prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor) -> Turns:
    """Return the prompts of turns as lists, and their responses.

    Args:
        prompt_ids: int64 ``(turn, prompt)``, right-padded.
        prompt_mask: bool ``(turn, prompt)``.
        response_ids: int64 ``(turn, token)``, right-padded.
        response_mask: bool ``(turn, token)``, a prefix of each row.
    """
    lengths, sizes = prompt_mask.sum(1).tolist(), response_mask.sum(1).tolist()
    prompts = [row[:length] for row, length in zip(prompt_ids.tolist(), lengths, strict=True)]
    responses = [row[:size] for row, size in zip(response_ids.tolist(), sizes, strict=True)]
    return prompts, [Continuation(tuple(row), tuple(range(len(row)))) for row in responses]


def continued(prompts: Tensor, mask: Tensor, prefixes: Prefixes) -> Turns:
    """Return prompts, and after each the prefixes of some candidates, each of which attends to its own prefixes.

    Args:
        prompts: int64 ``(prompt, token)``, right-padded.
        mask: bool ``(prompt, token)``.
        prefixes: of the candidates.
    """
    texts = [row[:length] for row, length in zip(prompts.tolist(), mask.sum(1).tolist(), strict=True)]
    ids, places = (tuple(part.tolist()) for part in (prefixes.ids, prefixes.depths - 1))
    after = Continuation(ids, places, tuple(prefixes.parents.tolist()))
    return texts, [after] * len(texts)

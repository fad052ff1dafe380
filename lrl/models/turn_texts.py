"""The token ids of turns as plain sequences, which can be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lrl.models.candidate_scoring import Prefixes


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

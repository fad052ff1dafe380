"""Initialise the embeddings of numbers in order, as those of pretrained language models are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_HALF_PERIODS = 6
"""Half periods of the fastest wave over the numbers from 0 to 999; the slowest has one."""


def number_tokens(vocabulary: dict[str, int]) -> dict[int, int]:
    """Map the ids of tokens of one to three digits, with or without a space before them (``Ġ``, ``▁``), to numbers."""
    bare = ((token.lstrip("Ġ▁ "), index) for token, index in vocabulary.items())
    return {index: int(text) for text, index in bare if len(text) <= 3 and text.isascii() and text.isdigit()}


@torch.no_grad()
def order_number_embeddings(model: Any, vocabulary: dict[str, int], seed: int) -> None:
    """Give every token that is a number an input embedding close to those of the next numbers.

    Pretrained models represent numbers in order, along a line and around circles (arXiv:2502.00873); in weights that
    are random, or have seen little text, 490 is as far from 491 as from 7, and RL has to learn a thousand words.
    ``e(n) = sum_k (cos(pi k n / 1000) u_k + sin(pi k n / 1000) v_k) / k``, k from 1 to 6, with random directions u and
    v, scaled to the mean norm of the former embeddings.

    Args:
        model: a causal LM.
        vocabulary: from token to id.
        seed: seed of the directions.

    Raises:
        ValueError: fewer than 100 tokens are numbers: the tokenizer splits numbers into digits.
    """
    found = number_tokens(vocabulary)
    if len(found) < 100:
        raise ValueError(
            f"language_model.ordered_numbers is true, but the vocabulary has {len(found)} numerals of up to three "
            "digits; it must be false for a model that reads digit by digit."
        )
    table: Tensor = model.get_input_embeddings().weight
    index = torch.tensor(list(found), device=table.device)
    number = torch.tensor(list(found.values()), dtype=torch.float64)  # rounds alike in any order of sums
    wave = torch.arange(1, _HALF_PERIODS + 1)
    phase = math.pi * wave * number[:, None] / 1000
    code = torch.cat([phase.cos() / wave, phase.sin() / wave], dim=1)
    directions = torch.randn(code.shape[1], table.shape[1], generator=torch.Generator().manual_seed(seed))
    ordered = code @ directions.double()
    length = table[index].double().norm(dim=1).mean().cpu()
    table[index] = (ordered * length / ordered.norm(dim=1).mean()).to(table)

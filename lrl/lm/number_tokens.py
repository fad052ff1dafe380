"""Give numbers tokens of their own, and initialise their embeddings in order, as those of pretrained models are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrl.lm.config import LanguageModelConfig

# Add tokens to a tokenizer, and rows for them to a model's embeddings.


def add_tokens(model: Any, tokenizer: Any, texts: Sequence[str], seed: int | None = None) -> int:
    """Add a token for every text that is not one token already, so that a tag is one token.

    The embedding of a token starts as the mean of those of the tokens that the text consisted of. The tokens are
    ordinary ones, not special tokens, which a server would leave out of its responses.

    Args:
        model: a causal LM, without adapters.
        tokenizer: a Hugging Face tokenizer, which is changed.
        texts: of the tokens.
        seed: of random weights, whose new rows are random as well; None starts from what the text consisted of.

    Returns:
        How many tokens were added.
    """
    from tokenizers import AddedToken

    pieces = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    added = [text for text in texts if len(pieces[text]) != 1 or pieces[text] == [tokenizer.unk_token_id]]
    if added:
        tokens = [AddedToken(text, normalized=False, special=False) for text in added]
        weights = [[1.0] * len(pieces[text]) for text in added]
        extend_vocabulary(model, tokenizer, tokens, [pieces[text] for text in added], weights, seed)
    return len(added)


@torch.no_grad()
def extend_vocabulary(
    model: Any,
    tokenizer: Any,
    added: Sequence[Any],
    pieces: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    seed: int | None = None,
) -> None:
    """Add tokens, whose embeddings start as weighted means of others.

    Args:
        model: a causal LM, whose embeddings get more rows if they have too few; tied ones stay tied.
        tokenizer: a Hugging Face tokenizer, which is changed.
        added: texts or tokens that are none yet.
        pieces: for each of them the ids of the others.
        weights: for each of them the weights of the others, not normalised.
        seed: of random rows with the mean and standard deviation of the others instead; None takes the means.
    """
    tokenizer.add_tokens(list(added))
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(
            max(len(tokenizer), len(model.get_input_embeddings().weight)), mean_resizing=False
        )
    index = torch.tensor([tokenizer.convert_tokens_to_ids(str(text)) for text in added])
    ids, shares = _padded(pieces, torch.long), _padded(weights, torch.float64)
    shares = shares / shares.sum(1, keepdim=True)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    parts = model.get_input_embeddings(), model.get_output_embeddings()
    for table in {id(part.weight): part.weight for part in parts}.values():  # one where they are tied
        if generator is None:
            start = (table[ids.to(table.device)].double() * shares.to(table.device)[..., None]).sum(1)
        else:
            old = table[: int(index.min())].double().cpu()
            start = old.mean() + old.std() * torch.randn(len(index), table.shape[1], generator=generator).double()
        table[index.to(table.device)] = start.to(table)


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return rows of different lengths as one tensor ``(row, column)``, with zeros at their ends."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


_HALF_PERIODS = 6
"""Half periods of the fastest wave over the numbers from 0 to 999; the slowest has one."""

_PLACES = (4.0, 2.0, 1.0)
"""Weights of the digits' embeddings in that of a number, the first digit first."""


def prepare_vocabulary(model: Any, tokenizer: Any, config: LanguageModelConfig) -> None:
    """Add tokens and order the embeddings of numbers, as configured; see the functions for what they raise.

    Args:
        model: a causal LM, without adapters.
        tokenizer: its Hugging Face tokenizer.
        config: what is asked for.
    """
    seed = config.init_seed if config.random_init else None
    with torch.device("cpu"):  # random rows are the same whatever device Lightning makes the model on
        if config.number_tokens:
            add_number_tokens(model, tokenizer, seed)
        if config.added_tokens:
            add_tokens(model, tokenizer, config.added_tokens, None if seed is None else seed + 1)  # unlike the numbers
        if config.ordered_numbers:
            order_number_embeddings(model, tokenizer.get_vocab(), config.init_seed)


def number_tokens(vocabulary: dict[str, int]) -> dict[int, int]:
    """Map the ids of tokens of one to three digits, with or without a space before them (``Ġ``, ``▁``), to numbers."""
    bare = ((token.lstrip("Ġ▁ "), index) for token, index in vocabulary.items())
    return {index: int(text) for text, index in bare if len(text) <= 3 and text.isascii() and text.isdigit()}


def add_number_tokens(model: Any, tokenizer: Any, seed: int | None = None) -> int:
    """Add a token for every number from 10 to 999 that the tokenizer splits, so that an integer is one token.

    The embedding of a number starts as the mean of its digits' embeddings with weights 4, 2 and 1, so that 502 differs
    from 205 and is close to 503. Weights that are random have no digits to start from and get random numbers.

    Args:
        model: a causal LM.
        tokenizer: a Hugging Face tokenizer, which is changed.
        seed: of random weights with the mean and standard deviation of the others; None starts from the digits.

    Returns:
        How many tokens were added.

    Raises:
        ValueError: a digit is no token.
    """
    vocabulary = tokenizer.get_vocab()
    if missing := [digit for digit in "0123456789" if digit not in vocabulary]:
        raise ValueError(
            f"language_model.number_tokens is true, but {missing[0]!r} is no token of the tokenizer; it must be false."
        )
    added = [str(number) for number in range(10, 1000) if str(number) not in vocabulary]
    if not added:
        return 0
    digits = [[vocabulary[digit] for digit in text] for text in added]
    extend_vocabulary(model, tokenizer, added, digits, [_PLACES[: len(text)] for text in added], seed)
    return len(added)


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
            "digits; number_tokens must be true for a model that reads digit by digit, or ordered_numbers false."
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

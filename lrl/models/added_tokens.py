"""Add tokens to a tokenizer, and rows for them to a model's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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

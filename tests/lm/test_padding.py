"""Tests of padded token ids."""

import torch

from lrl.lm.layouts import pad_prompts
from lrl.lm.prefill import left_pad

CPU = torch.device("cpu")
ROWS = ([5, 6, 7], [], (8,))


def test_prompts_are_padded_on_the_right() -> None:
    padded = pad_prompts(ROWS, CPU)
    assert padded["prompt_ids"].tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    assert padded["prompt_mask"].tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert padded["prompt_ids"].dtype == torch.int64 and padded["prompt_mask"].dtype == torch.bool


def test_prompts_before_a_cache_are_padded_on_the_left() -> None:
    ids, mask = left_pad(ROWS, CPU)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 0], [0, 0, 8]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [False, False, True]]


def test_prompts_without_tokens_have_no_columns() -> None:
    padded = pad_prompts([[], []], CPU)
    assert padded["prompt_ids"].shape == padded["prompt_mask"].shape == (2, 0)

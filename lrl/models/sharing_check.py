"""Start-up check that a causal LM computes the same log-probabilities for turns that share one row."""

from __future__ import annotations

from typing import Any, Literal

import torch

from lrl.models.attention import in_float32, is_exact, is_halved, is_sound
from lrl.models.forward import accepted, logits_of
from lrl.models.prompt_sharing import lay_out

_PROMPT, _RESPONSE = 4, 4

Verdict = Literal["exact", "inexact", "imprecise"]
"""``inexact``: sharing changes the function. ``imprecise``: it is the same function with more rounding."""


@torch.no_grad()
def check_sharing(model: Any, device: torch.device) -> Verdict:
    """Compare the logits of turns that share a row with those of turns in rows of their own, on arbitrary tokens.

    Both passes must agree in float32, whatever the dtype of the weights. With 16-bit weights the 16-bit shared pass
    must also be about as close to float32 as the plain one: 16-bit passes differ from each other by rounding alone.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped, in evaluation mode.
        device: of its weights.
    """
    size = 2 * _RESPONSE + _PROMPT
    ids = _arbitrary(model, size, device)
    seen = torch.ones(2, _PROMPT, dtype=torch.bool, device=device)
    turns = ids[:_PROMPT].repeat(2, 1), seen, ids[_PROMPT:].view(2, _RESPONSE), seen.new_ones(2, _RESPONSE)
    layouts = [lay_out(*turns, share=share) for share in (True, False)]
    with torch.autocast(device.type, enabled=False):
        if not is_halved(model):
            shared, plain = (logits_of(model, layout) for layout in layouts)
            return "exact" if is_exact(shared, plain) else "inexact"
        with in_float32(model):
            shared, exact = (logits_of(model, layout, torch.float32) for layout in layouts)
        if not is_exact(shared, exact):
            return "inexact"
        shared, plain = (logits_of(model, layout) for layout in layouts)
    return "exact" if is_sound(shared, plain, exact) else "imprecise"


def _arbitrary(model: Any, size: int, device: torch.device) -> torch.Tensor:
    """Return arbitrary token ids, int64 ``(size,)``."""
    return (torch.arange(size, device=device) * 7919 + 11) % model.config.get_text_config().vocab_size


@torch.no_grad()
def numbers_positions_from_zero(model: Any, device: torch.device) -> bool:
    """Return whether a model without given positions numbers those of a text 0, 1, ..., as all layouts do.

    RoBERTa and its relatives begin after the number of their padding token.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped, in evaluation mode.
        device: of its weights.
    """
    ids = _arbitrary(model, _PROMPT + _RESPONSE, device)[None]
    positions = torch.arange(ids.shape[1], device=device)[None]
    given = [{"input_ids": ids, "use_cache": False}, {"input_ids": ids, "use_cache": False, "position_ids": positions}]
    with torch.autocast(device.type, enabled=False):
        own, ours = (model(**accepted(model, some)).logits for some in given)
    if not is_halved(model):
        return is_exact(ours, own)
    return bool((ours - own).abs().max() <= 2e-2 * (own - own.mean()).abs().max())

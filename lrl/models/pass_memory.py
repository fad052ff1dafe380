"""The memory of a forward pass, and how turns are divided among passes that stay within a limit.

A collection has as many turns as the user asks for, so nothing that is computed for all of its turns may take memory in
proportion to them. The estimate counts the activations of a decoder layer, those of all layers that a backward pass
needs, and logits; it is meant to be right within a factor of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lrl.models.attention import bare, kernel_of
from lrl.models.frozen_layers import frozen_depth

_LIMIT = 2**30
"""Bytes of a pass; on a GPU a quarter of its memory instead, if that is more."""


class PassMemory(NamedTuple):
    """Limit of the memory of a forward pass, and the memory that its parts need, in bytes."""

    limit: int
    per_token: int
    """For each position that is computed, padding included."""
    per_logit_column: int
    """For each position whose logits are computed."""

    def of(self, prompts: int, prompt: int, responses: int, response: int) -> int:
        """Return the estimate for a number of prompts and of responses, and the tokens of the longest of each.

        Logits are computed at the end of the prompt and at every token of a response.
        """
        tokens = prompts * prompt + responses * response
        return tokens * self.per_token + responses * (response + 1) * self.per_logit_column


def pass_memory(model: Any, width: int, logits: bool, gradient: bool, recomputed: bool) -> PassMemory:
    """Estimate the memory of passes of a causal LM.

    Args:
        model: a Hugging Face causal LM, which peft may have wrapped.
        width: tokens of the longest turn.
        logits: whether the logits of a pass are in memory all at once.
        gradient: whether a backward pass follows.
        recomputed: whether layers compute their activations again in the backward pass.
    """
    config, words = bare(model).config.get_text_config(), bare(model).get_input_embeddings().weight
    hidden, vocabulary = config.hidden_size, bare(model).get_output_embeddings().weight.shape[0]
    names = "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"
    sizes = [size for name in names if (size := getattr(config, name, None))]
    inner = [max(size) if isinstance(size, Sequence) else size for size in sizes]  # Gemma 3n has one for each layer
    experts = getattr(config, "num_experts_per_tok", None) or 1
    layer = 10 * hidden + 4 * max((experts * size for size in inner), default=4 * hidden)
    if kernel_of(model) == "eager":
        layer += 3 * getattr(config, "num_attention_heads", 1) * width
    numbers = layer + 2 * width  # masks, of which some are boolean
    if gradient and any(weight.requires_grad for weight in model.parameters()):
        layers = config.num_hidden_layers - (frozen_depth(model) if hasattr(model, "peft_config") else 0)
        numbers += layers * (hidden if recomputed else layer)
    per_logit_column = (4 * vocabulary if logits else 3 * hidden) * 4  # log-probabilities are float32
    return PassMemory(_limit(words.device), numbers * words.element_size(), per_logit_column)


def _limit(device: torch.device) -> int:
    if device.type != "cuda":
        return _LIMIT
    return max(_LIMIT, torch.cuda.get_device_properties(device).total_memory // 4)


def divide_turns(
    inputs: Mapping[str, Tensor],
    sizes: Tensor,
    memory: PassMemory,
    computed_once: Literal["prompts", "turns", "nothing"],
) -> list[Tensor]:
    """Divide turns among passes that need at most ``memory.limit``, where a single turn does not need more.

    Turns that fit into one pass stay in order. Else passes go from short to long prompts, and equal turns and prompts
    are side by side.

    Args:
        inputs: ``prompt_ids`` and ``prompt_mask`` ``(turn, prompt)``, and maybe ``response_ids`` ``(turn, token)``.
        sizes: tokens that follow the prompt of each turn, int64 ``(turn,)``.
        memory: what passes take.
        computed_once: whether a pass computes equal ``prompts`` once, only whole ``turns``, or ``nothing``.

    Returns:
        Indices of turns, one int64 ``(turn,)`` for each pass; together they name every turn once.
    """
    lengths, everything = inputs["prompt_mask"].sum(1), torch.arange(len(sizes), device=sizes.device)
    if len(sizes) < 2 or memory.of(len(sizes), int(lengths.max()), len(sizes), int(sizes.max())) <= memory.limit:
        return [everything]
    if computed_once == "nothing":
        prompt_of = turn_of = torch.argsort(torch.argsort(lengths + sizes, stable=True))
    else:
        prompt_of, turn_of = _numbered(inputs, lengths, sizes)
        prompt_of = prompt_of if computed_once == "prompts" else turn_of
    order = torch.argsort(turn_of, stable=True)
    starts, rows, last = [0], (0, 0, 0, 0), (-1, -1)
    columns = [part[order].tolist() for part in (prompt_of, turn_of, lengths, sizes)]
    for place, (prompt, turn, length, size) in enumerate(zip(*columns, strict=True)):
        prompts, longest, responses, widest = rows
        prompts, responses = prompts + (prompt != last[0]), responses + (turn != last[1])
        rows, last = (prompts, max(longest, length), responses, max(widest, size)), (prompt, turn)
        if place > starts[-1] and memory.of(*rows) > memory.limit:
            starts.append(place)
            rows = 1, length, 1, size
    return [everything] if len(starts) == 1 else list(order.tensor_split(starts[1:]))


def _numbered(inputs: Mapping[str, Tensor], lengths: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number for each distinct prompt, shorter ones first, and for each distinct turn, int64 ``(turn,)``."""
    keyed = torch.cat([lengths[:, None], inputs["prompt_ids"] * inputs["prompt_mask"]], dim=1)
    _, prompt_of = torch.unique(keyed, dim=0, return_inverse=True)
    parts = [prompt_of[:, None], sizes[:, None]]
    if "response_ids" in inputs:
        ids = inputs["response_ids"]
        parts.append(ids * (torch.arange(ids.shape[1], device=ids.device) < sizes[:, None]))
    return prompt_of, torch.unique(torch.cat(parts, dim=1), dim=0, return_inverse=True)[1]

"""States below the lowest adapter: they do not change in training, so they are computed once per turn and kept.

Layers below the lowest adapter are the same function for the policy, its old log-probabilities, the reference and the
critic. Their output is computed for one text at a time, never in a batch: first each distinct prompt, then each
response after the keys and values of its prompt. So the numbers depend on nothing but the text, and it makes no
difference to any bit of a gradient whether they were kept, dropped or computed again, after a resume, in another
minibatch, or with other padding. The layers above read them from the rows of a forward pass as usual. Of a prompt that
comes back with another response, keys and values are kept as well, in at most half of the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lrl.models.attention import Attention, bare, compute_dtype, is_exact, is_halved, kernel_of
from lrl.models.forward import logits_of
from lrl.models.lora import decoder_layers
from lrl.models.lru_cache import LRUCache
from lrl.models.prompt_sharing import Layout, Lower, additive_mask, lay_out_alone
from lrl.models.skipped_layers import skipped
from lrl.models.turn_texts import Continuation, turns_of

_MIB = 2**20


_Key = tuple[Any, ...]
_KeysAndValues = list[tuple[Tensor, Tensor]]


@final
class LowerLayers:
    """Computes and keeps the states that the lowest layer with an adapter reads.

    Args:
        model: a Hugging Face causal LM with adapters.
        depth: number of layers below the lowest adapter.
        max_bytes: the least recently used states are dropped beyond this.
    """

    def __init__(self, model: Any, depth: int, max_bytes: int) -> None:
        self.depth, self.max_bytes = depth, max_bytes
        self.computed_tokens = 0
        """Tokens that went through the lower layers so far."""
        self.random_in_training = _has_dropout(model, depth)
        """Whether the lower layers apply dropout in training mode, in which their states cannot be kept."""
        self._kept = LRUCache[Tensor](max_bytes)
        self._prompts = LRUCache[_KeysAndValues](max_bytes // 2)
        self._weights: tuple[Any, ...] = ()

    def fill(
        self, model: Any, layout: Layout, prompts: Sequence[Sequence[int]], continuations: Sequence[Continuation]
    ) -> Layout:
        """Return a layout with the states of its columns, so that :func:`lrl.models.forward.logits_of` starts there.

        Args:
            model: whose lower layers are run for what is not kept.
            layout: the position of each turn's tokens.
            prompts: token ids of each turn's prompt.
            continuations: what follows the prompt of each turn.
        """
        places = layout.places
        states, starts = self.states(model, prompts, continuations)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=places.turn.device)
        turn = places.turn.clamp(min=0)
        after = places.column - lengths[turn]
        index = torch.where(after < 0, starts[0][turn] + places.column, starts[1][turn] + after)
        return replace(layout, lower=Lower(self.depth, states[torch.where(places.turn < 0, 0, index)]))

    @torch.no_grad()
    def states(
        self, model: Any, prompts: Sequence[Sequence[int]], continuations: Sequence[Continuation]
    ) -> tuple[Tensor, Tensor]:
        """Compute the states of prompts and of what follows them, or look them up.

        Args:
            model: whose lower layers are run for what is not kept.
            prompts: token ids of each turn's prompt.
            continuations: what follows the prompt of each turn.

        Returns:
            All states ``(token, hidden)``, of which the first is 0; and where those of each turn's prompt and of its
            continuation begin, int64 ``(2, turn)``.
        """
        self._drop_if_weights_changed(model)
        dtype = compute_dtype(model)
        mark = (str(dtype), kernel_of(model))
        wanted: dict[tuple[int, ...], list[Continuation]] = {}
        for prompt, continuation in zip(prompts, continuations, strict=True):
            wanted.setdefault(tuple(prompt), []).append(continuation)
        found: dict[_Key, Tensor] = {}
        for prompt, after in wanted.items():
            keys = [(*mark, prompt), *((*mark, prompt, one) for one in after if one.ids)]
            found |= {key: kept for key in keys if (kept := self._kept.get(key)) is not None}
            if any(key not in found for key in keys):
                self._compute(model, keys, found)
            for key in keys:
                self._kept.put(key, found[key], _size(found[key]))
        self._kept.shrink(self.max_bytes - self._prompts.bytes)
        return _joined(found, prompts, continuations, mark)

    def _compute(self, model: Any, keys: Sequence[_Key], found: dict[_Key, Tensor]) -> None:
        """Compute what is not found yet of a prompt's states, whose key is the first, and its continuations'."""
        own, device = keys[0], bare(model).get_input_embeddings().weight.device
        after = [key for key in dict.fromkeys(keys[1:]) if key not in found]
        length, cache = len(own[-1]), self._prefilled(model, own) if after else None
        if own not in found or (after and cache is None):
            comes_back, cache = own in found, DynamicCache(config=bare(model).config) if after else None
            ids = torch.tensor([own[-1]], device=device)
            states = self._run(model, ids, torch.arange(length, device=device)[None], None, cache)
            found.setdefault(own, states)
            if comes_back and cache is not None:
                kept = [(layer.keys, layer.values) for layer in self._cached(cache)]
                self._prompts.put(own, kept, sum(_size(part) for pair in kept for part in pair))
        for key in after:
            one: Continuation = key[-1]
            mask = None
            if one.visible is not None:
                own_tokens = torch.tensor(one.visible, device=device)
                seen = torch.cat([own_tokens.new_ones(len(own_tokens), length), own_tokens], dim=1)
                mask = additive_mask(seen[None], compute_dtype(model))
            positions = length + torch.tensor([one.places], device=device)
            found[key] = self._run(model, torch.tensor([one.ids], device=device), positions, mask, cache)
            for layer in self._cached(cache):  # back to the prompt
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    def _prefilled(self, model: Any, prompt: _Key) -> DynamicCache | None:
        """Return a KV cache with the lower layers' keys and values of a prompt that came back; None if not kept."""
        kept = self._prompts.get(prompt)
        if kept is None:
            return None
        cache = DynamicCache(config=bare(model).config)
        for number, (keys, values) in enumerate(kept):
            cache.update(keys, values, number)
        return cache

    def _cached(self, cache: Any) -> list[Any]:
        return list(cache.layers[: self.depth])

    def _run(self, model: Any, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Return the states ``(token, hidden)`` of one text, ``ids`` and ``positions`` being ``(1, token)``."""
        self.computed_tokens += ids.shape[1]
        _, layers = decoder_layers(model)
        found: list[Any] = []
        handle = layers[self.depth - 1].register_forward_hook(lambda _, given, out: found.append(out))
        inner = bare(model).base_model
        training = [part for part in inner.modules() if part.training]
        for part in training:
            part.training = False
        try:
            with skipped(layers[self.depth :]):
                inner(
                    input_ids=ids,
                    position_ids=positions,
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=cache is not None,
                )
        finally:
            handle.remove()
            for part in training:
                part.training = True
        return found[0][0].clone()

    def _drop_if_weights_changed(self, model: Any) -> None:
        """Forget everything if a weight below has changed since: by ``init_from``, a checkpoint, another device."""
        weights = tuple((id(part), part.data_ptr(), part._version) for part in lower_parameters(model, self.depth))
        if weights != self._weights:
            self._kept.clear()
            self._prompts.clear()
            self._weights = weights


def _joined(
    found: Mapping[_Key, Tensor],
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Continuation],
    mark: tuple[str, str],
) -> tuple[Tensor, Tensor]:
    """Return all states one after the other, and where those of each turn begin; see :meth:`LowerLayers.states`."""
    some = next(iter(found.values()))
    start, parts, end = {}, [some.new_zeros(1, some.shape[1])], 1
    for key, states in found.items():
        start[key], end = end, end + len(states)
        parts.append(states)
    pairs = [(tuple(prompt), after) for prompt, after in zip(prompts, continuations, strict=True)]
    starts = [[start[(*mark, prompt)] for prompt, _ in pairs], [start.get((*mark, *pair), 0) for pair in pairs]]
    return torch.cat(parts), torch.tensor(starts, device=some.device)


def _size(states: Tensor) -> int:
    return states.numel() * states.element_size()


def lower_parameters(model: Any, depth: int) -> Iterator[nn.Parameter]:
    """Yield the weights that the states depend on: all but those of later layers and of what follows the layers."""
    name, layers = decoder_layers(model)
    words = bare(model).get_input_embeddings()
    yield from words.parameters()
    after = {id(weight) for layer in layers[depth:] for weight in layer.parameters()}
    after |= {id(weight) for weight in words.parameters()}
    parent = bare(model).get_submodule(name.rpartition(".")[0])
    siblings = dict(parent.named_children())
    last = list(siblings).index(name.rpartition(".")[2])
    for part in list(siblings.values())[: last + 1]:
        yield from (weight for weight in part.parameters() if id(weight) not in after)


def _has_dropout(model: Any, depth: int) -> bool:
    """Return whether anything below, or around the layers, applies dropout in training mode."""
    _, layers = decoder_layers(model)
    above = {id(part) for layer in layers[depth:] for part in layer.modules()}
    for part in bare(model).base_model.modules():
        rates = {value for name, value in vars(part).items() if "dropout" in name and isinstance(value, float)}
        rates |= {part.p} if isinstance(part, nn.Dropout) else set()
        if id(part) not in above and any(rate > 0 for rate in rates):
            return True
    return False


def frozen_depth(model: Any) -> int:
    """Return the number of layers below the lowest one that is trained; 0 if what they read is trained as well."""
    depth = min(_trained(model), default=0)
    return 0 if any(weight.requires_grad for weight in lower_parameters(model, depth)) else depth


def _trained(model: Any) -> list[int]:
    """Return the indices of the layers that are trained."""
    _, layers = decoder_layers(model)
    return [index for index, layer in enumerate(layers) if any(part.requires_grad for part in layer.parameters())]


def lower_layers(model: Any, size: int, attention: Attention) -> LowerLayers | None:
    """Return what keeps the states below the lowest adapter; None, with a warning, where they cannot be kept.

    Args:
        model: with adapters, in evaluation mode.
        size: of the memory for states, in MiB.
        attention: the kind of its attention.
    """
    depth = frozen_depth(model)
    if depth == 0:
        reason = "what the first layer reads is trained as well"
    elif attention != "full":
        reason = "not every layer of this model attends to all earlier tokens"
    elif not _can_be_left_out(model, depth):
        reason = "the layers of this architecture cannot be left out of a pass"
    else:
        return LowerLayers(model, depth, size * _MIB)
    if depth or min(_trained(model), default=0):
        message = "the states below lora.last_layers are computed in every pass and not kept: %s."
        logging.getLogger("lrl").warning(message, reason)
    return None


@torch.no_grad()
def _can_be_left_out(model: Any, depth: int) -> bool:
    """Return whether a pass that starts from kept states equals the plain pass, on arbitrary tokens."""
    device = bare(model).get_input_embeddings().weight.device
    ids = (torch.arange(8, device=device)[None] * 7919 + 11) % model.config.get_text_config().vocab_size
    seen = torch.ones_like(ids, dtype=torch.bool)
    layout = lay_out_alone(ids[:, :5], seen[:, :5], ids[:, 5:], seen[:, 5:])
    try:
        plain = logits_of(model, layout)
        turns = turns_of(ids[:, :5], seen[:, :5], ids[:, 5:], seen[:, 5:])
        filled = LowerLayers(model, depth, 0).fill(model, layout, *turns)
        above = logits_of(model, filled)
        if not is_halved(model):
            return is_exact(above, plain)
        return bool((above - plain).abs().max() <= 2e-2 * (plain - plain.mean()).abs().max())
    except (TypeError, IndexError, AttributeError, RuntimeError):  # layers that return or take something else
        return False

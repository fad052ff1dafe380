"""A cache of hidden states below the lowest adapter, which do not change in training.

The layers below the lowest adapter compute the same function for the policy, the reference and the critic. Their output
is computed once per prompt and once per response. Batches have fixed shapes, so that the output depends only on the
text. Gradients are therefore bit-identical whether states are cached or computed again, for example after an eviction
or a resume, or in another minibatch. A forward pass then starts above these layers (:class:`lrl.lm.layouts.Lower`). If
a prompt recurs with another response, its keys and values are cached as well, in at most half of the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from lrl.lm.adapters import decoder_layers
from lrl.lm.attention import Attention, agrees, bare, compute_dtype, is_halved, kernel_of, max_positions
from lrl.lm.fixed_batches import LRUCache, Shape, fixed_batches, place_matters
from lrl.lm.forward import (
    arbitrary_ids,
    frozen_depth,
    has_dropout,
    logits_of,
    lower_parameters,
    packed_weights,
    skipped,
    trained_layers,
    without_gradient,
)
from lrl.lm.layouts import Candidates, Layout, Lower, Turns, additive_mask, in_subtree, lay_out

PIECE = 64
"""Number of tokens of a piece of a prompt, for prompts with history."""

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer: ``(head, token, size)`` for a text, ``(row, head, column, size)`` for a batch."""
_BATCH_COLUMNS = 32
"""Maximum number of tokens of a batch on a CPU. A pass of SmolLM2 has a fixed cost of 22 tokens, less than what larger
batches compute for padding and unused rows."""
_AT_ONCE = 2**13
"""Largest number of prompt tokens whose keys and values are in memory at the same time."""


class Continuation(NamedTuple):
    """The tokens after a prompt: a response, or the prefixes of several candidates."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    """Position of each token, where the first token after the prompt has position 0."""
    last: tuple[int, ...]
    """For each token, the index of the last token that attends to it."""

    @classmethod
    def of(cls, ids: tuple[int, ...]) -> Continuation:
        """Return a continuation that is a single text, such as a response."""
        return cls(ids, tuple(range(len(ids))), (len(ids) - 1,) * len(ids))

    @classmethod
    def of_candidates(cls, candidates: Candidates) -> Continuation:
        """Return a continuation that contains the prefixes of all candidates."""
        parts = candidates.prefix_ids, candidates.prefix_sizes - 1, candidates.prefix_last
        return cls(*(tuple(part.tolist()) for part in parts))

    def attended(self, device: torch.device) -> Tensor:
        """Return for each token (row) which tokens (columns) it attends to, bool ``(token, token)``."""
        return in_subtree(torch.tensor(self.last, dtype=torch.long, device=device))


def continuations(turns: Turns) -> list[Continuation]:
    """Return the response of each turn."""
    sizes = turns.response_mask.sum(1).tolist()
    rows = [tuple(row[:size]) for row, size in zip(turns.response_ids.tolist(), sizes, strict=True)]
    return [*map(Continuation.of, rows)]


class _Key(NamedTuple):
    """Key of the cache of states."""

    mark: tuple[str, str]
    """Data type and attention kernel of the computation."""
    prompt: tuple[int, ...]
    """Token ids of the prompt, or of its beginning up to the end of a piece."""
    after: Continuation | None = None
    """The continuation whose states are stored; None for those of the prompt, or of its last piece."""


@final
class LowerLayers:
    """Computes and caches the hidden states that the lowest layer with an adapter reads, without dropout.

    Args:
        model: a Hugging Face causal LM with adapters.
        depth: number of layers below the lowest adapter.
        max_bytes: maximum size of the cache in bytes.
    """

    def __init__(self, model: Any, depth: int, max_bytes: int) -> None:
        self.model, self.depth, self.max_bytes = model, depth, max_bytes
        self.block: int | None = None
        """Number of tokens of a piece. Prompts are computed and cached by piece, so that prompts that continue other
        prompts reuse their pieces; None computes each prompt as a whole."""
        self.max_positions = max_positions(model)
        self.computed_tokens = 0
        """Number of tokens that have been computed, for tests and benchmarks."""
        self.random_in_training = has_dropout(model, depth)
        """Whether the lower layers apply dropout in training mode, in which states then cannot be cached."""
        self._kept = LRUCache[Tensor](max_bytes)
        self._prompts = LRUCache[KeysAndValues](max_bytes // 2)
        self._weights: tuple[Any, ...] = ()
        self._place_matters: dict[tuple[Any, ...], bool] = {}
        """Results of :meth:`place_matters`, by data type, attention kernel and shape."""

    @property
    def _mark(self) -> tuple[str, str]:
        return str(compute_dtype(self.model)), kernel_of(self.model)

    @property
    def _words(self) -> Tensor:
        return bare(self.model).get_input_embeddings().weight

    def fill(self, layout: Layout, turns: Turns, candidates: Candidates | None = None) -> Layout:
        """Return a layout with the hidden states of its columns, from which :func:`lrl.lm.forward.logits_of` starts.

        Args:
            layout: the position of each turn's tokens.
            turns: the turns.
            candidates: candidates that follow each prompt instead of a response; None if there are responses.
        """
        used, turn = torch.unique(torch.where(layout.turn < 0, layout.turn.max(), layout.turn), return_inverse=True)
        turns = Turns(*(part[used] for part in turns))
        if candidates is None and self.block is not None:
            texts = [tuple(token for token in row if token >= 0) for row in turns.predicting().tolist()]
            after = [Continuation.of(())] * len(texts)
        else:
            sizes = turns.lengths.tolist()
            texts = [tuple(row[:size]) for row, size in zip(turns.prompt_ids.tolist(), sizes, strict=True)]
            of_candidates = None if candidates is None else Continuation.of_candidates(candidates)
            after = continuations(turns) if of_candidates is None else [of_candidates] * len(texts)
        states, pieces, rest = self.states(texts, after)
        lengths, block = torch.tensor([*map(len, texts)], device=turn.device), self._block(texts)
        beyond = layout.index - lengths[turn]
        inside = torch.where(beyond < 0, layout.index, 0)
        index = torch.where(beyond < 0, pieces[turn, inside // block] + inside % block, rest[turn] + beyond)
        return replace(layout, lower=Lower(self.depth, states[torch.where(layout.turn < 0, 0, index)]))

    def _block(self, prompts: Sequence[tuple[int, ...]]) -> int:
        return self.block or max(map(len, prompts))

    @torch.no_grad()
    def states(
        self, prompts: Sequence[tuple[int, ...]], after: Sequence[Continuation]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of prompts and continuations, from the cache or computed.

        Args:
            prompts: token ids of the prompt of each turn.
            after: continuation of the prompt of each turn.

        Returns:
            All states, ``(token, hidden)``, where the first one is 0 and stands for padding; for each piece of each
            prompt, the index of its first state, int64 ``(turn, piece)``; and the index of the first state of each
            continuation, int64 ``(turn,)``.
        """
        self._drop_if_weights_changed()
        block, keys, found = self._block(prompts), list[list[_Key]](), dict[_Key, Tensor]()
        following = [_Key(self._mark, *turn) if turn[1].ids else None for turn in zip(prompts, after, strict=True)]
        missing: dict[tuple[int, ...], dict[_Key, None]] = {}
        pieces_of = {prompt: self._pieces(prompt, block) for prompt in dict.fromkeys(prompts)}
        for prompt, then in zip(prompts, following, strict=True):
            keys.append([*pieces_of[prompt], *([then] if then else [])])
            for key in keys[-1]:
                if key not in found and (states := self._kept.get(key)) is not None:
                    found[key] = states
            if any(key not in found for key in keys[-1]):
                missing.setdefault(prompt, {}).update({then: None} if then else {})
        for part in _divided(missing):
            self._compute({prompt: [*missing[prompt]] for prompt in part}, block, found)
        for key, states in found.items():
            self._kept.put(key, states, states.nbytes)
        self._kept.shrink(self.max_bytes - self._prompts.bytes)
        ends = list(accumulate((len(states) for states in found.values()), initial=1))
        start = dict(zip(found, ends, strict=False))
        most = max(map(len, pieces_of.values()))
        pieces = [[start[key] for key in pieces_of[prompt]] for prompt in prompts]
        pieces = [[*row, *[0] * (most - len(row))] for row in pieces]
        rest = [start[then] if then else 0 for then in following]
        some = next(iter(found.values()))
        joined = torch.cat([some.new_zeros(1, some.shape[1]), *found.values()])
        return joined, torch.tensor(pieces, device=some.device), torch.tensor(rest, device=some.device)

    def _pieces(self, prompt: tuple[int, ...], block: int) -> list[_Key]:
        """Return the keys of the pieces of a prompt; a key contains all tokens up to the end of the piece."""
        return [_Key(self._mark, prompt[: start + block]) for start in range(0, len(prompt), block)]

    def read(self, ids: Tensor) -> tuple[Tensor, KeysAndValues]:
        """Return the states ``(row, column, hidden)`` of texts, and their keys and values.

        Args:
            ids: token ids, int64 ``(row, column)``, padded on the right.
        """
        cache: Any = DynamicCache(
            config=bare(self.model).config
        )  # also if it is not needed, so that the same kernels run
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        states = self._run(ids, positions, None, cache)
        return states, [(layer.keys, layer.values) for layer in cache.layers[: self.depth]]

    def read_after(
        self, past: Sequence[tuple[Tensor, Tensor]], ids: Tensor, positions: Tensor, seen: Tensor
    ) -> tuple[Tensor, KeysAndValues]:
        """Return the states ``(row, column, hidden)`` of texts that follow other tokens, and their keys and values.

        Args:
            past: keys and values of the tokens before the texts, padded on the right.
            ids: token ids of the texts, int64 ``(row, column)``, padded on the right.
            positions: position of each token, int64 ``(row, column)``.
            seen: which earlier and own columns each token attends to, bool ``(row, column, past + column)``.
        """
        cache = DynamicCache(config=bare(self.model).config)
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        states = self._run(ids, positions, additive_mask(seen, compute_dtype(self.model)), cache)
        layers: list[Any] = cache.layers[: self.depth]
        return states, [(layer.keys[:, :, -ids.shape[1] :], layer.values[:, :, -ids.shape[1] :]) for layer in layers]

    def place_matters(self, shape: Shape) -> bool:
        """Return whether the row of a text in a batch of this shape changes its states in any bit."""
        rows, width, before = shape
        (vocabulary, _), device = self._words.shape, self._words.device
        ids = arbitrary_ids(rows, width, vocabulary, device)
        if not before:
            return place_matters(lambda ids: self.read(ids)[0], ids)
        limit = before + width if self.max_positions is None else self.max_positions
        _, past = self.read(arbitrary_ids(rows, min(before, limit), vocabulary, device))
        past = [tuple(functional.pad(part, (0, 0, 0, before - part.shape[2])) for part in pair) for pair in past]
        positions = torch.arange(before, before + width, device=device).clamp(max=limit - 1).expand_as(ids)
        seen = torch.ones(rows, width, before + width, dtype=torch.bool, device=device).tril(before)

        def states(ids: Tensor, *parts: Tensor) -> Tensor:
            """Return the states after a prompt whose keys and values alternate in ``parts``, one pair per layer."""
            return self.read_after(list(zip(parts[::2], parts[1::2], strict=True)), ids, positions, seen)[0]

        return place_matters(states, ids, *(part for pair in past for part in pair))

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        _, layers = decoder_layers(self.model)
        found: list[Any] = []
        handle = layers[self.depth - 1].register_forward_hook(lambda _, given, out: found.append(out))
        inner = bare(self.model).base_model
        try:
            with without_gradient(inner), packed_weights(layers[: self.depth]), skipped(layers[self.depth :]):
                inner(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
        finally:
            handle.remove()
        return found[0]

    def _compute(self, missing: dict[tuple[int, ...], list[_Key]], block: int, found: dict[_Key, Tensor]) -> None:
        """Compute the missing states of prompts, piece by piece, and of their continuations.

        Args:
            missing: prompts with missing states, each with the keys of its continuations.
            block: number of tokens of a piece.
            found: states by key, to which the computed states are added.
        """
        past: dict[tuple[int, ...], KeysAndValues] = {}
        longest = max(map(len, missing))
        for start in range(0, longest, block):
            parts = dict.fromkeys(prompt[: start + block] for prompt in missing if len(prompt) > start)
            continued = {prompt[: start + block] for prompt in missing if len(prompt) > start + block}
            continued |= {prompt for prompt, after in missing.items() if any(key not in found for key in after)}
            new = list[tuple[int, ...]]()
            for part in parts:
                own = self._prompts.get(_Key(self._mark, part))
                if own is not None:
                    past[part] = own
                if _Key(self._mark, part) not in found or (part in continued and own is None):
                    new.append(part)
            befores = [self._past(past, part[:start], block) for part in new]
            texts = [Continuation.of(part[start:]) for part in new]
            read = self._read_texts(texts, befores, [start] * len(new), [part in continued for part in new])
            for part, (states, own) in zip(new, read, strict=True):
                key = _Key(self._mark, part)
                if part in continued and part not in past:
                    past[part] = own
                    if key in found:  # the prompt occurs again, with another response
                        self._prompts.put(key, own, sum(k.nbytes + v.nbytes for k, v in own))
                found.setdefault(key, states)
        after = {key: None for keys in missing.values() for key in keys if key not in found}
        befores = [self._past(past, key.prompt, block) for key in after]
        rests: list[Any] = [key.after for key in after]
        read = self._read_texts(rests, befores, [len(key.prompt) for key in after], [False] * len(after))
        found |= {key: states for key, (states, _) in zip(after, read, strict=True)}

    @staticmethod
    def _past(past: dict[tuple[int, ...], KeysAndValues], prompt: tuple[int, ...], block: int) -> KeysAndValues:
        """Return the keys and values of a prompt, joined from those of its pieces; empty for an empty prompt."""
        pieces = [past[prompt[: start + block]] for start in range(0, len(prompt), block)]
        if len(pieces) < 2:
            return pieces[0] if pieces else []
        layers = [[*zip(*layer, strict=True)] for layer in zip(*pieces, strict=True)]
        return [(torch.cat(keys, dim=1), torch.cat(values, dim=1)) for keys, values in layers]

    def _read_texts(
        self,
        texts: Sequence[Continuation],
        past: Sequence[KeysAndValues],
        lengths: Sequence[int],
        continued: Sequence[bool],
    ) -> list[tuple[Tensor, KeysAndValues]]:
        """Return the states ``(token, hidden)`` of texts, and the keys and values of those that are continued.

        Args:
            texts: texts that may follow other tokens.
            past: keys and values of the tokens before each text; empty if there are none.
            lengths: number of tokens before each text.
            continued: for each text, whether its keys and values are needed.
        """
        sizes, device = [len(text.ids) for text in texts], self._words.device
        attended = cache(partial(Continuation.attended, device=device))
        found: dict[int, tuple[Tensor, KeysAndValues]] = {}
        shapes = {"limit": self._limit(lengths), "columns": _BATCH_COLUMNS}
        for batch in fixed_batches(sizes, device, self._are_alone, pasts=lengths, **shapes):
            rows, (_, width, before) = batch.members, batch.shape
            ids = batch.rectangle([text.ids for text in texts], device)
            if not before:
                states, layers = self.read(ids)
            else:
                pairs = []
                for layer in zip(*(past[n] for n in rows), strict=True):
                    columns = [
                        [functional.pad(part, (0, 0, 0, before - part.shape[1])) for part in pair] for pair in layer
                    ]
                    pairs.append(tuple(torch.stack(part) for part in zip(*columns, strict=True)))
                seen = torch.zeros(len(rows), width, before + width, dtype=torch.bool, device=device)
                for row, n in enumerate(rows):
                    seen[row, :, : lengths[n]] = True
                    seen[row, : sizes[n], before : before + sizes[n]] = attended(texts[n])
                starts = torch.tensor([lengths[n] for n in rows], device=device)[:, None]
                positions = starts + batch.rectangle([text.positions for text in texts], device)
                states, layers = self.read_after(pairs, ids, positions, seen)
            self.computed_tokens += sum(sizes[n] for n in batch.texts)
            for row, n in enumerate(batch.texts):
                pairs = layers if continued[n] else []
                own = [(k[row, :, : sizes[n]].clone(), v[row, :, : sizes[n]].clone()) for k, v in pairs]
                found[n] = states[row, : sizes[n]].clone(), own
        return [found[n] for n in range(len(texts))]

    def _limit(self, lengths: Sequence[int]) -> int | None:
        """Return the maximum width of a padded text; None if there are tokens before the texts."""
        return self.max_positions if not any(lengths) else None

    def _are_alone(self, shape: Shape) -> bool:
        """Return :meth:`place_matters` for a shape, computed once: texts of such a shape are computed alone."""
        key = (*self._mark, shape)
        if key not in self._place_matters:
            self._place_matters[key] = self.place_matters(shape)
        return self._place_matters[key]

    def _drop_if_weights_changed(self) -> None:
        """Clear the cache if weights of the lower layers were replaced, for example by a checkpoint."""
        weights = tuple((id(part), part.data_ptr(), part._version) for part in lower_parameters(self.model, self.depth))
        if weights != self._weights:
            self.forget()
            self._weights = weights

    def forget(self) -> None:
        """Clear the cache."""
        self._kept.clear()
        self._prompts.clear()
        self._place_matters.clear()


def _divided(prompts: Iterable[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Divide prompts among groups that are computed together, sorted so that common pieces are in the same group."""
    part, tokens = list[tuple[int, ...]](), 0
    for prompt in sorted(prompts):
        if part and tokens + len(prompt) > _AT_ONCE:
            yield part
            part, tokens = [], 0
        pairs = zip(part[-1] if part else (), prompt, strict=False)
        part, tokens = [*part, prompt], tokens + len(prompt) - sum(accumulate((a == b for a, b in pairs), min))
    if part:
        yield part


def lower_layers(model: Any, size: int, attention: Attention) -> LowerLayers | None:
    """Return the cache of states below the lowest adapter; None, with a warning, if they cannot be cached.

    Args:
        model: a Hugging Face causal LM with adapters, in evaluation mode.
        size: maximum size of the cache in MiB.
        attention: kind of attention of the model.
    """
    depth = frozen_depth(model)
    if depth == 0:
        reason = "what the first layer reads is trained as well"
    elif attention != "full":
        reason = "not every layer of this model attends to all earlier tokens"
    elif kernel_of(model) not in ("sdpa", "eager"):
        reason = f"attention is {kernel_of(model)}, which takes no mask of single tokens; sdpa and eager do"
    elif not _can_be_left_out(model, depth):
        reason = "the layers of this architecture cannot be left out of a pass"
    else:
        return LowerLayers(model, depth, size * 2**20)
    if depth or min(trained_layers(model), default=0):
        message = "the states below lora.last_layers are computed in every pass and not kept: %s."
        logging.getLogger("lrl").warning(message, reason)
    return None


@torch.no_grad()
def _can_be_left_out(model: Any, depth: int) -> bool:
    """Return whether a forward pass that starts above the lower layers gives the same logits as a complete one."""
    device = bare(model).get_input_embeddings().weight.device
    ids = arbitrary_ids(1, 8, model.config.get_text_config().vocab_size, device)
    seen = torch.ones_like(ids, dtype=torch.bool)
    turns = Turns(ids[:, :5], seen[:, :5], ids[:, 5:], seen[:, 5:])
    layout = lay_out(turns, align="left")
    try:
        plain = logits_of(model, layout)
        filled = LowerLayers(model, depth, 0).fill(layout, turns)
        return agrees(logits_of(model, filled), plain, is_halved(model))
    except (
        TypeError,
        IndexError,
        AttributeError,
        RuntimeError,
    ):  # the layers have other inputs or outputs than expected
        return False

"""A cache of hidden states below the lowest adapter, which do not change in training.

The layers below the lowest adapter compute the same function for the policy, the reference and the critic. What they
compute while a collection is played is recorded and used in its update. Everything else is computed once per prompt and
once per response, in batches of fixed shapes, so that the output depends only on the text. Gradients are therefore
bit-identical whether these states are cached or computed again, for example after an eviction or a resume, or in
another minibatch. Recorded states depend on the batch as well; they are dropped with the next collection, and stored
in checkpoints that are written within a collection. A forward pass then starts above these layers
(:class:`lrl.lm.layouts.Lower`). If a prompt recurs with another response, its keys and values are cached as well, in at
most half of the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from lrl.lm.adapters import decoder_layers
from lrl.lm.attention import Attention, agrees, bare, compute_dtype, is_halved, kernel_of, max_positions
from lrl.lm.fixed_batches import LRUCache, Shape, divided, fixed_batches, place_matters
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
from lrl.lm.layouts import Candidates, Continuation, Layout, Lower, Turns, additive_mask, continuations, lay_out

_PIECE = 64
"""Largest number of tokens of a piece of a prompt, for prompts with history."""

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer: ``(head, token, size)`` for a text, ``(row, head, column, size)`` for a batch."""
_BATCH_COLUMNS = 32
"""Maximum number of tokens of a batch on a CPU. A pass of SmolLM2 has a fixed cost of 22 tokens, less than what larger
batches compute for padding and unused rows."""


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
        self.ends: Collection[int] | None = None
        """Tokens that end a message. Prompts are computed and cached by piece, and a piece ends before such a token or
        after :data:`_PIECE` tokens. Prompts that continue other prompts reuse their pieces. None computes each prompt
        as a whole."""
        self.max_positions = max_positions(model)
        self.computed_tokens = 0
        """Number of tokens that have been computed, for tests and benchmarks."""
        self.random_in_training = has_dropout(model, depth)
        """Whether the lower layers apply dropout in training mode, in which states then cannot be cached."""
        self._kept = LRUCache[Tensor](max_bytes)
        self._recorded: dict[_Key, Tensor] = {}
        """States that were computed while the current collection was played."""
        self._recorded_bytes = 0
        self._recorded_of: Hashable = None
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
        if candidates is None and self.ends is not None:
            texts = [tuple(token for token in row if token >= 0) for row in turns.predicting().tolist()]
            after = [Continuation.of(())] * len(texts)
        else:
            sizes = turns.lengths.tolist()
            texts = [tuple(row[:size]) for row, size in zip(turns.prompt_ids.tolist(), sizes, strict=True)]
            of_candidates = None if candidates is None else Continuation.of_candidates(candidates)
            after = continuations(turns) if of_candidates is None else [of_candidates] * len(texts)
        states, place, rest = self.states(texts, after)
        beyond = layout.index - torch.tensor([*map(len, texts)], device=turn.device)[turn]
        index = torch.where(beyond < 0, place[turn, torch.where(beyond < 0, layout.index, 0)], rest[turn] + beyond)
        return replace(layout, lower=Lower(self.depth, states[torch.where(layout.turn < 0, 0, index)]))

    def _cuts(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the number of tokens up to the end of each piece of a prompt, in ascending order."""
        if self.ends is None:
            return [len(prompt)]
        cuts = [0]
        for place, token in enumerate(prompt):
            if place - cuts[-1] == _PIECE or (token in self.ends and place > cuts[-1]):
                cuts.append(place)
        return [*cuts[1:], len(prompt)]

    @torch.no_grad()
    def states(
        self, prompts: Sequence[tuple[int, ...]], after: Sequence[Continuation]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of prompts and continuations, from the cache or computed.

        Args:
            prompts: token ids of the prompt of each turn.
            after: continuation of the prompt of each turn.

        Returns:
            All states, ``(token, hidden)``, where the first one is 0 and stands for padding; the index of the state of
            each token of each prompt, int64 ``(turn, prompt)``; and the index of the first state of each continuation,
            int64 ``(turn,)``.
        """
        self._drop_if_weights_changed()
        keys, found = list[list[_Key]](), dict[_Key, Tensor]()
        following = [_Key(self._mark, *turn) if turn[1].ids else None for turn in zip(prompts, after, strict=True)]
        missing: dict[tuple[int, ...], dict[_Key, None]] = {}
        pieces_of = {prompt: self._pieces(prompt) for prompt in dict.fromkeys(prompts)}
        for prompt, then in zip(prompts, following, strict=True):
            keys.append([*pieces_of[prompt], *([then] if then else [])])
            for key in keys[-1]:
                if key in found:
                    continue
                states = self._recorded[key] if key in self._recorded else self._kept.get(key)
                if states is not None:
                    found[key] = states
            if any(key not in found for key in keys[-1]):
                missing.setdefault(prompt, {}).update({then: None} if then else {})
        for part in divided(missing):
            self._compute({prompt: [*missing[prompt]] for prompt in part}, found)
        for key, states in found.items():
            if key not in self._recorded:
                self._kept.put(key, states, states.nbytes)
        room = self.max_bytes - self._recorded_bytes
        self._prompts.shrink(min(room, self.max_bytes // 2))
        self._kept.shrink(room - self._prompts.bytes)
        ends = list(accumulate((len(states) for states in found.values()), initial=1))
        start = dict(zip(found, ends, strict=False))
        places = {
            prompt: torch.cat([torch.arange(start[key], start[key] + len(found[key])) for key in pieces])
            for prompt, pieces in pieces_of.items()
        }
        place = pad_sequence([places[prompt] for prompt in prompts], batch_first=True)
        rest = [start[then] if then else 0 for then in following]
        some = next(iter(found.values()))
        joined = torch.cat([some.new_zeros(1, some.shape[1]), *found.values()])
        return joined, place.to(some.device), torch.tensor(rest, device=some.device)

    def begin_recording(self, collection: Hashable) -> None:
        """Drop the recorded states, unless they belong to this collection."""
        if collection != self._recorded_of:
            self.load_recorded([])
            self._recorded_of = collection

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Collect the states ``(row, column, hidden)`` of each forward pass inside a ``with`` block."""
        found: list[Tensor] = []
        layer = decoder_layers(self.model)[1][self.depth - 1]

        def keep(_: Any, given: Any, out: Any) -> None:
            """Store the output of the layer."""
            found.append(out)

        handle = layer.register_forward_hook(keep)
        try:
            yield found
        finally:
            handle.remove()

    def record(self, prompt: Sequence[int], states: Tensor) -> None:
        """Store the states of the last tokens of a prompt, which were computed while it was played.

        Args:
            prompt: token ids of the prompt, or of a prompt with its response.
            states: ``(token, hidden)``. States of earlier tokens must have been recorded before.
        """
        self._drop_if_weights_changed()
        prompt = tuple(prompt)
        start, first = len(prompt) - len(states), 0
        for end in self._cuts(prompt):
            if end > start:
                own = states[max(first - start, 0) : end - start]
                if first < start:  # the piece began in the prompt that this one continues
                    head = self._recorded.get(_Key(self._mark, prompt[:start]))
                    own = None if head is None else torch.cat([head, own])
                if own is not None:
                    self._put(_Key(self._mark, prompt[:end]), own)
            first = end

    def record_after(self, prompt: Sequence[int], after: Continuation, states: Tensor) -> None:
        """Store the states of a continuation, which were computed while it was played.

        Args:
            prompt: token ids of the prompt.
            after: the tokens after it.
            states: ``(token, hidden)``. The last ones may be missing if nothing is predicted from them.
        """
        if after.ids:
            padding = (0, 0, 0, len(after.ids) - len(states))
            self._put(_Key(self._mark, tuple(prompt), after), functional.pad(states, padding))

    def record_responses(self, prompts: Sequence[Sequence[int]], ids: Tensor, sizes: Tensor, states: Tensor) -> None:
        """Store the states of responses, which were computed while they were sampled.

        Args:
            prompts: token ids of the prompt of each response.
            ids: token ids of the responses, int64 ``(response, token)``.
            sizes: number of tokens of each response, int64 ``(response,)``.
            states: ``(response, token, hidden)`` of all tokens except the last one, from which nothing is predicted.
        """
        for prompt, row, size, of_row in zip(prompts, ids.tolist(), sizes.tolist(), states, strict=True):
            if self.ends is None:
                self.record_after(prompt, Continuation.of(tuple(row[:size])), of_row[: size - 1])
            else:
                self.record([*prompt, *row[: size - 1]], of_row[: size - 1])

    def _put(self, key: _Key, states: Tensor) -> None:
        """Store recorded states if they are new and there is room."""
        if key not in self._recorded and self._recorded_bytes + states.nbytes <= self.max_bytes:
            self._recorded[key] = states.clone()  # a view would keep the states of the whole batch
            self._recorded_bytes += states.nbytes

    def recorded(self) -> list[tuple[Any, ...]]:
        """Return the recorded states for a checkpoint, each as data type, kernel, prompt, continuation and states."""
        return [(*key.mark, key.prompt, key.after and tuple(key.after), part) for key, part in self._recorded.items()]

    def load_recorded(self, recorded: Sequence[tuple[Any, ...]]) -> None:
        """Replace the recorded states by the result of :meth:`recorded`."""
        self._recorded, self._recorded_bytes = {}, 0
        for dtype, kernel, prompt, after, states in recorded:
            self._put(_Key((dtype, kernel), prompt, after and Continuation(*after)), states)

    def _pieces(self, prompt: tuple[int, ...]) -> list[_Key]:
        """Return the keys of the pieces of a prompt; a key contains all tokens up to the end of the piece."""
        return [_Key(self._mark, prompt[:end]) for end in self._cuts(prompt)]

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
        inner = bare(self.model).base_model
        frozen, above = layers[: self.depth], layers[self.depth :]
        with self.watched() as found, without_gradient(inner), packed_weights(frozen), skipped(above):
            inner(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
        return found[0]

    def _compute(self, missing: dict[tuple[int, ...], list[_Key]], found: dict[_Key, Tensor]) -> None:
        """Compute the missing states of prompts, piece by piece, and of their continuations.

        Args:
            missing: prompts with missing states, each with the keys of its continuations.
            found: states by key, to which the computed states are added.
        """
        past: dict[tuple[int, ...], KeysAndValues] = {}
        cuts = {prompt: self._cuts(prompt) for prompt in missing}
        before: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        """The pieces before each piece, and the pieces of each prompt; a piece contains all tokens up to its end."""
        continued = {prompt for prompt, after in missing.items() if any(key not in found for key in after)}
        for prompt, ends in cuts.items():
            pieces = [prompt[:end] for end in ends]
            before |= {piece: pieces[:number] for number, piece in enumerate(pieces)}
            continued.update(pieces[:-1])
        for number in range(max(map(len, cuts.values()))):
            parts = dict.fromkeys(prompt[: ends[number]] for prompt, ends in cuts.items() if len(ends) > number)
            new = list[tuple[int, ...]]()
            for part in parts:
                own = self._prompts.get(_Key(self._mark, part))
                if own is not None:
                    past[part] = own
                if _Key(self._mark, part) not in found or (part in continued and own is None):
                    new.append(part)
            starts = [len(before[part][-1]) if before[part] else 0 for part in new]
            texts = [Continuation.of(part[start:]) for part, start in zip(new, starts, strict=True)]
            befores = [_joined([past[piece] for piece in before[part]]) for part in new]
            read = self._read_texts(texts, befores, starts, [part in continued for part in new])
            for part, (states, own) in zip(new, read, strict=True):
                key = _Key(self._mark, part)
                if part in continued and part not in past:
                    past[part] = own
                    if key in found:  # the prompt occurs again, with another response
                        self._prompts.put(key, own, sum(k.nbytes + v.nbytes for k, v in own))
                found.setdefault(key, states)
        after = {key: None for keys in missing.values() for key in keys if key not in found}
        befores = [_joined([past[piece] for piece in (*before[key.prompt], key.prompt)]) for key in after]
        rests: list[Any] = [key.after for key in after]
        read = self._read_texts(rests, befores, [len(key.prompt) for key in after], [False] * len(after))
        found |= {key: states for key, (states, _) in zip(after, read, strict=True)}

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
            if self._weights:  # the first call must not drop what a checkpoint has recorded
                self.forget()
            self._weights = weights

    def forget(self) -> None:
        """Clear the cache."""
        self._kept.clear()
        self._prompts.clear()
        self.load_recorded([])
        self._place_matters.clear()


def _joined(pieces: Sequence[KeysAndValues]) -> KeysAndValues:
    """Return the keys and values of a text, joined from those of its pieces; empty if there are none."""
    if len(pieces) < 2:
        return pieces[0] if pieces else []
    layers = [[*zip(*layer, strict=True)] for layer in zip(*pieces, strict=True)]
    return [(torch.cat(keys, dim=1), torch.cat(values, dim=1)) for keys, values in layers]


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
    except (TypeError, IndexError, AttributeError, RuntimeError):  # its layers have other inputs or outputs
        return False

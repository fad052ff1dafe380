"""A Hugging Face causal LM with tokenizer, LoRA, quantisation and reference."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from lrl.lm.adapters import add_critic_adapter, attach_lora, freeze_second_adapter, use_adapter
from lrl.lm.attention import attention_of, context_length, is_halved, kernel_of, max_positions, rope_limit, set_kernel
from lrl.lm.config import LanguageModelConfig
from lrl.lm.files import check_available
from lrl.lm.forward import (
    accepted,
    at_tokens,
    check_sharing,
    divide_turns,
    head_inputs,
    logits_of,
    numbers_positions_from_zero,
    pass_memory,
    started_above,
    without_gradient,
)
from lrl.lm.frozen_states import Continuation, LowerLayers, continuations, lower_layers
from lrl.lm.layouts import Candidates, Layout, Turns, lay_out, lay_out_candidates, lay_out_distinct, lay_out_trees, pack
from lrl.lm.loading import fingerprint, load_base, prepare_vocabulary, recompute_activations, recomputed
from lrl.lm.logprobs import AT_ONCE, can_chunk, head_logits, token_logprobs, without_logits
from lrl.lm.tokenizer import ChatTokenizer


class LanguageModel(nn.Module):
    """The model that actor, critic and reference share; loaded by :meth:`configure`.

    Args:
        config: which causal LM, and how it is loaded.

    Attributes:
        share: whether turns may share a row; set by :meth:`configure`.
        cached: whether prompts may be padded on the left before a KV cache; set by :meth:`configure`.
        lower: caches the states below the lowest adapter; None if they cannot be cached.
        copied_reference: the reference if it is a copy of the whole model, else empty.
        chunks: whether many logits are computed in chunks, outside of the model; set by :meth:`configure`.
    """

    model: Any
    """The Hugging Face model, which peft may have wrapped; None before :meth:`configure`."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = None
        self._tokenizer: ChatTokenizer | None = None
        self.fingerprint = ""
        self.copied_reference: list[Any] = []
        self.has_critic_adapter = False
        self._warned_of_kernel = False
        self.lower: LowerLayers | None = None
        self.chunks = False

    def configure(self) -> None:
        """Load tokenizer and weights, and attach adapters; a second call does nothing.

        Raises:
            ValueError: If the model is not available, or cannot be used as configured.
        """
        if self.model is not None:
            return
        check_available(self.config.name)
        self._tokenizer = ChatTokenizer.from_pretrained(
            self.config.name, self.config.chat_template, self.config.trust_remote_code
        )
        model = load_base(self.config)
        prepare_vocabulary(model, self.tokenizer.tokenizer, self.config)
        if self.config.added_tokens:
            self._tokenizer = self.tokenizer.with_added_tokens()
        self.fingerprint = fingerprint(model)
        self.kernel, self.max_positions = kernel_of(model), max_positions(model)
        self.context_length = context_length(model.config)
        self.model = model if self.config.lora is None else attach_lora(model, self.config)
        if self.config.gradient_checkpointing:
            recompute_activations(self.model)
        self.model.train(self.training)
        with without_gradient(self.model):
            self.share, self.cached = self._check_attention()
            self.chunks = can_chunk(self.model)
            lora, size = self.config.lora, self.config.state_cache_mb
            if lora and lora.last_layers is not None and size is not None:
                self.lower = lower_layers(self.model, size, attention_of(self.model))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and convert the copied reference with the model, so that equal weights give equal results."""
        for model in self.copied_reference:
            model._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, available after :meth:`configure`."""
        assert self._tokenizer is not None, "configure() comes first"
        return self._tokenizer

    def _check_attention(self) -> tuple[bool, bool]:
        """Return whether turns may share rows, and whether prompts may be padded on the left before a KV cache.

        Raises:
            ValueError: If the model does not number positions from zero.
        """
        self._set_kernel(self.model)
        if not numbers_positions_from_zero(self.model, self.device):
            raise ValueError(
                f"language_model.name is {self.config.name!r}, a {self.model.config.model_type}, which does not number "
                "the positions of a text 0, 1, ...; it must be a model that does, or its numbers would be wrong."
            )
        attention = attention_of(self.model)
        if attention != "full" or self.kernel not in ("sdpa", "eager"):
            return False, attention != "other"
        verdict = check_sharing(self.model, self.device)
        if verdict != "exact" and self.config.share_prompts:
            reason = "computes other logits with it" if verdict == "inexact" else "rounds more with it"
            logging.getLogger("lrl").warning("share_prompts is switched off: this model %s.", reason)
        return verdict == "exact" and self.config.share_prompts, verdict != "inexact"

    def _set_kernel(self, model: Any) -> None:
        """Choose the attention kernel, see :func:`lrl.lm.attention.set_kernel`; warn once if it is inexact."""
        if set_kernel(model, self.config.attention, self.kernel) and not self._warned_of_kernel:
            self._warned_of_kernel = True
            logging.getLogger("lrl").warning(
                "language_model.attention is sdpa, which in 16 bits on a CPU rounds differently while sampling than in "
                "training; it should be auto or eager."
            )

    @property
    def recomputes(self) -> bool:
        """Return whether the log-probabilities of sampled tokens are recomputed by the pass that training uses."""
        wanted = self.config.recompute_logprobs
        return is_halved(self.model) if wanted is None else wanted

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has logits for."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def in_chunks(self, mask: Tensor) -> bool:
        """Return whether the logits at ``mask``, bool ``(turn, token)``, are too many to be computed at once."""
        return self.chunks and int(mask.sum()) * self.vocabulary > AT_ONCE

    def token_logprobs(self, states: Tensor, ids: Tensor, temperature: float, model: Any = None) -> tuple[Tensor, ...]:
        """Compute log-probabilities and entropies, each ``(token,)``, in chunks, optionally by another model."""
        return token_logprobs(partial(head_logits, model or self.model), states, ids, temperature, self.vocabulary)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    def lay_out(self, inputs: Mapping[str, Tensor], response_mask: Tensor, pack_tokens: int | None = None) -> Layout:
        """Arrange turns in rows for one forward pass, see :mod:`lrl.lm.layouts`.

        They are packed by ``pack_tokens``, else share prompts or the common beginnings of responses where that pays, if
        the model's attention allows it. Except in training mode, which may have dropout, equal turns are arranged once.

        Args:
            inputs: ``prompt_ids`` and ``prompt_mask`` ``(turn, prompt)``, and ``response_ids`` ``(turn, token)``.
            response_mask: bool ``(turn, token)``.
            pack_tokens: the width of a packed row.

        Raises:
            ValueError: If a turn has more tokens than the model has positions.
        """
        turns = Turns(inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], response_mask)
        self._check_positions(int((turns.prompt_mask.sum(1) + response_mask.sum(1)).max()))
        arrange = partial(lay_out, share=self.share) if self.cached else partial(lay_out, share=False, align="left")
        trees = None
        if self.cached and self.share and pack_tokens is not None:
            arrange = partial(pack, max_row_tokens=pack_tokens)
        elif self.cached and self.share and not self.training:
            trees = lay_out_trees(turns, max_columns=self.max_positions)
        layout = trees or (arrange(turns) if self.training else lay_out_distinct(arrange, turns))
        return self._with_lower_states(layout, *turns[:2], lambda: continuations(turns))

    def lay_out_candidates(self, prompts: Tensor, mask: Tensor, candidates: Candidates) -> Layout:
        """Arrange prompts with the prefixes of candidates, see :func:`lrl.lm.layouts.lay_out_candidates`."""
        self._check_positions(int(mask.sum(1).max() + candidates.trie.depth.max()))
        layout, after = lay_out_candidates(prompts, mask, candidates), Continuation.of_trie
        return self._with_lower_states(layout, prompts, mask, lambda: [after(candidates.trie)] * len(prompts))

    def _with_lower_states(
        self, layout: Layout, prompts: Tensor, mask: Tensor, after: Callable[[], list[Continuation]]
    ) -> Layout:
        """Return a layout with the states below the lowest adapter, if these are kept.

        Args:
            layout: the position of each turn's tokens.
            prompts: of the turns, int64 ``(turn, prompt)``.
            mask: bool ``(turn, prompt)``.
            after: returns what follows the prompts.
        """
        if self.lower is None or (self.model.training and self.lower.random_in_training):
            return layout
        self._set_kernel(self.model)
        return self.lower.fill(layout, prompts, mask, after())

    def _check_positions(self, tokens: int, or_sampled: str = "") -> None:
        limit = self.max_positions
        if limit is not None and tokens > limit:
            has = f"has {limit} positions"
            if rope_limit(self.model.config) == limit:
                has = f"embeds all positions differently in texts of more than {limit} tokens (dynamic or long RoPE)"
            raise ValueError(
                f"language_model.name is {self.config.name!r}, which {has}, and a turn has {tokens} tokens"
                f"{or_sampled}; max_prompt_tokens or max_new_tokens must be smaller."
            )

    def passes(
        self,
        inputs: Mapping[str, Tensor],
        sizes: Tensor,
        *,
        gradient: bool = False,
        logits: bool = True,
        computed_once: Literal["prompts", "nothing"] = "prompts",
    ) -> list[Tensor]:
        """Divide turns among forward passes of bounded memory, see :mod:`lrl.lm.forward`.

        Args:
            inputs: ``prompt_ids`` and ``prompt_mask`` ``(turn, prompt)``, and maybe ``response_ids`` ``(turn, token)``.
            sizes: tokens that follow the prompt of each turn, int64 ``(turn,)``.
            gradient: whether a backward pass follows.
            logits: whether the logits of a pass are in memory all at once.
            computed_once: ``prompts`` where a pass computes equal prompts once if the model allows it.

        Returns:
            Indices of turns, one int64 ``(turn,)`` for each pass; together they name every turn once.
        """
        if len(sizes) < 2:
            return [torch.arange(len(sizes), device=sizes.device)]
        self._set_kernel(self.model)  # eager attention needs more memory
        width = int((inputs["prompt_mask"].sum(1) + sizes).max())
        memory = pass_memory(self.model, width, logits, gradient, self.config.gradient_checkpointing)
        if self.has_critic_adapter:  # two passes
            memory = memory._replace(limit=memory.limit // 2)
        alone = computed_once == "prompts" and not (self.share and self.cached)
        return divide_turns(inputs, sizes, memory, "turns" if alone else computed_once)

    def logits(self, layout: Layout, model: Any = None) -> Tensor:
        """Compute logits ``(turn, token, vocabulary)`` that predict response tokens, optionally by another model."""
        model = self.model if model is None else model
        self._set_kernel(model)
        with recomputed(model, self.config.gradient_checkpointing):
            return logits_of(model, layout)

    def logits_and_states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Compute :meth:`logits`, and the hidden states ``(turn, token, hidden)`` that the critic reads.

        These are the inputs of the language model's head, unless the critic has its own adapter.
        """
        with head_inputs(self.model) as states:
            logits = self.logits(layout)
        return logits, self.critic_states(layout) if self.has_critic_adapter else at_tokens(states[0], layout)

    def token_states(self, layout: Layout, model: Any = None) -> Tensor:
        """Compute the hidden states ``(turn, token, hidden)`` that logits are computed from, but no logits."""
        model = self.model if model is None else model
        with without_logits(model) as states:
            self.logits(layout, model)
        return at_tokens(states[0], layout)

    def critic_states(self, layout: Layout) -> Tensor:
        """Compute hidden states ``(turn, token, hidden)`` with the critic's adapter."""
        use_adapter(self.model, "critic")
        try:
            return self.token_states(layout)
        finally:
            use_adapter(self.model, "default")

    def states(self, ids: Tensor, mask: Tensor, model: Any = None) -> Tensor:
        """Compute the last hidden states ``(row, column, hidden)`` of texts; padding on the right has no effect.

        Args:
            ids: int64 ``(row, column)``, right-padded.
            mask: bool ``(row, column)``.
            model: another model than the one that is trained.
        """
        model = self.model if model is None else model
        self._check_positions(ids.shape[1])
        self._set_kernel(model)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        given = {"input_ids": ids, "attention_mask": None, "position_ids": positions, "use_cache": False}
        lower = None
        if self.lower is not None:
            turns = Turns(ids, mask, ids[:, :1], torch.zeros_like(mask[:, :1]))  # without responses
            layout = lay_out(turns, share=False, align="left")
            lower = self._with_lower_states(layout, ids, mask, lambda: continuations(turns)).lower
            if lower is not None:  # rows are as wide as the longest text, ids may be wider
                missing = ids.shape[1] - lower.states.shape[1]
                lower = lower._replace(states=functional.pad(lower.states, (0, 0, 0, missing)))
        again = recomputed(model, self.config.gradient_checkpointing)
        with head_inputs(model, last_only=True) as states, again, started_above(model, lower):
            model(**accepted(model, given))
        return states[0]

    def add_critic_adapter(self) -> None:
        """Add an adapter for the critic with the shape of the actor's; a second call does nothing.

        Raises:
            ValueError: If the actor has no adapter, or gradient checkpointing is on.
        """
        add_critic_adapter(self.model, self.config)
        self.has_critic_adapter = True

    def critic_parameters(self) -> list[nn.Parameter]:
        """Return the weights of the critic's adapter; empty if it has none."""
        if not self.has_critic_adapter:
            return []
        return [weight for name, weight in self.model.named_parameters() if "critic" in name.split(".")]

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states, available after :meth:`configure`."""
        return int(self.model.get_output_embeddings().weight.shape[-1])

    def prepare_decoding(self, prompt_tokens: int, new_tokens: int) -> None:
        """Check that the model has enough positions, and choose its attention kernel; called before each decoding.

        Raises:
            ValueError: If the longest prompt and the tokens to be sampled exceed the positions of the model.
        """
        self._check_positions(prompt_tokens + new_tokens, f", {new_tokens} of them to be sampled")
        self._set_kernel(self.model)

    def build_reference(self, warm_started: bool) -> None:
        """Keep the current weights as the reference.

        An adapter that was initialised to zero needs no copy: the reference is the model without it. A warm-started
        adapter is copied to a second, frozen adapter. Without adapters the whole model is copied.

        Args:
            warm_started: whether the weights came from another run.
        """
        if self.config.lora is None:
            self.copied_reference = [copy.deepcopy(self.model).requires_grad_(False).eval()]
        elif warm_started:
            freeze_second_adapter(self.model)

    def reference_logits(self, layout: Layout) -> Tensor:
        """Compute the reference's logits ``(turn, token, vocabulary)``, as :meth:`logits`; no gradient."""
        with self.reference() as model:
            return self.logits(layout, model)

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """Provide the reference model inside a ``with`` block, without gradient or dropout."""
        with without_gradient(self):
            if self.copied_reference:
                yield self.copied_reference[0]
            elif "reference" in self.model.peft_config:
                use_adapter(self.model, "reference")
                try:
                    yield self.model
                finally:
                    use_adapter(self.model, "default")
            else:
                with self.model.disable_adapter():
                    yield self.model

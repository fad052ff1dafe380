"""A Hugging Face causal LM with its tokenizer, LoRA adapters, quantisation and reference model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from lrl.codecs.codec import TextCodec
from lrl.functional.distributions import Categorical
from lrl.lm.adapters import add_critic_adapter, attach_lora, freeze_second_adapter, use_adapter
from lrl.lm.attention import attention_of, context_length, is_halved, kernel_of, max_positions, rope_limit, set_kernel
from lrl.lm.config import LanguageModelConfig
from lrl.lm.files import check_available
from lrl.lm.forward import (
    accepted,
    check_sharing,
    divide_turns,
    head_inputs,
    numbers_positions_from_zero,
    pass_memory,
    run_layout,
    started_above,
    without_gradient,
)
from lrl.lm.frozen_states import LowerLayers, lower_layers
from lrl.lm.layouts import Candidates, Layout, Turns, lay_out, pack
from lrl.lm.loading import fingerprint, load_base, prepare_vocabulary, recompute_activations, recomputed
from lrl.lm.logprobs import AT_ONCE, can_chunk, head_logits, token_logprobs
from lrl.lm.prefill import KeptPrompts
from lrl.lm.tokenizer import ChatTokenizer
from lrl.prompts import PromptTemplate
from lrl.types import RandomKeys


class LanguageModel(nn.Module):
    """The causal LM whose weights the actor, the critic and the reference share; loaded by :meth:`configure`.

    Args:
        config: which causal LM, and how it is loaded.

    Attributes:
        share: whether several turns may share a row; set by :meth:`configure`.
        cached: whether decoding may use a KV cache, with prompts padded on the left; set by :meth:`configure`.
        attends_to_all: whether every layer attends to all earlier tokens, and takes a mask of any form; set by
            :meth:`configure`.
        lower: cache of the hidden states below the lowest adapter; None if they cannot be cached.
        copied_reference: the reference model if it is a copy of the whole model, else empty.
        kept: KV cache of the prompts of the previous call; None if none is kept.
        recording: records the states below the lowest adapter while a collection is played; None otherwise.
        chunks: whether logits can be computed in chunks from hidden states, see :meth:`in_chunks`; set by
            :meth:`configure`.
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
        self._warned_of_kernel = self._warned_of_cache = False
        self.lower: LowerLayers | None = None
        self.chunks = self.attends_to_all = False
        self.kept: KeptPrompts | None = None
        self.recording: LowerLayers | None = None

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
        """Move and convert the copied reference together with the model, so that equal weights give equal results."""
        for model in self.copied_reference:
            model._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, available after :meth:`configure`."""
        assert self._tokenizer is not None, "configure() comes first"
        return self._tokenizer

    def _check_attention(self) -> tuple[bool, bool]:
        """Return whether turns may share rows, and whether decoding may use a KV cache with prompts padded on the left.

        Raises:
            ValueError: If the model does not number the positions of a text from zero.
        """
        self._set_kernel(self.model)
        if not numbers_positions_from_zero(self.model, self.device):
            raise ValueError(
                f"language_model.name is {self.config.name!r}, a {self.model.config.model_type}, which does not number "
                "the positions of a text 0, 1, ...; it must be a model that does, or log-probabilities are wrong."
            )
        attention = attention_of(self.model)
        if attention != "full" or self.kernel not in ("sdpa", "eager"):
            return False, attention != "other"
        verdict = check_sharing(self.model, self.device)
        self.attends_to_all = verdict != "inexact"
        if verdict != "exact" and self.config.share_prompts:
            reason = "computes other logits" if verdict == "inexact" else "has larger rounding errors"
            logging.getLogger("lrl").warning("share_prompts is switched off: with it, this model %s.", reason)
        return verdict == "exact" and self.config.share_prompts, verdict != "inexact"

    def _set_kernel(self, model: Any) -> None:
        """Choose the attention kernel, see :func:`lrl.lm.attention.set_kernel`; warn once if its rounding varies."""
        if set_kernel(model, self.config.attention, self.kernel) and not self._warned_of_kernel:
            self._warned_of_kernel = True
            logging.getLogger("lrl").warning(
                "language_model.attention is sdpa, which in 16 bits on a CPU rounds differently while sampling than in "
                "training; it should be auto or eager."
            )

    @property
    def recomputes(self) -> bool:
        """Return whether log-probabilities of sampled tokens are recomputed by a forward pass like that of training."""
        wanted = self.config.recompute_logprobs
        return is_halved(self.model) if wanted is None else wanted

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has logits for."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def in_chunks(self, mask: Tensor) -> bool:
        """Return whether the logits of the tokens in ``mask``, bool ``(turn, token)``, are to be computed in chunks."""
        return self.chunks and int(mask.sum()) * self.vocabulary > AT_ONCE

    def token_logprobs(self, states: Tensor, ids: Tensor, temperature: float, model: Any = None) -> tuple[Tensor, ...]:
        """Compute log-probabilities and entropies, each ``(token,)``, in chunks.

        Args:
            states: last hidden states, ``(token, hidden)``.
            ids: int64 ``(token,)``.
            temperature: divides the logits.
            model: the model whose head is used; None uses the trained model.
        """
        return token_logprobs(partial(head_logits, model or self.model), states, ids, temperature, self.vocabulary)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    def lay_out(
        self,
        inputs: Mapping[str, Tensor],
        response_mask: Tensor,
        pack_tokens: int | None = None,
        candidates: Candidates | None = None,
    ) -> Layout:
        """Arrange turns in rows for one forward pass, see :mod:`lrl.lm.layouts`.

        Tokens that several turns have in common at their beginning are computed once, if the model's attention allows
        it; with dropout, these turns then have the same dropout masks for these tokens.

        Args:
            inputs: ``prompt_ids`` and ``prompt_mask`` ``(turn, prompt)``, and ``response_ids`` ``(turn, token)``.
            response_mask: which entries of ``response_ids`` are tokens of the response, bool ``(turn, token)``.
            pack_tokens: the width in tokens of rows that contain several turns; None chooses the cheapest width.
            candidates: texts whose prefixes follow each prompt instead of a response; requires :attr:`share`.

        Raises:
            ValueError: If a turn has more tokens than the model has positions.
        """
        turns = Turns(inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], response_mask)
        sizes = turns.sizes if candidates is None else candidates.mask.sum(1).max() - 1
        self._check_positions(int((turns.lengths + sizes).max()))
        if not (self.cached and self.share):
            layout = lay_out(turns, align="prompt" if self.cached else "left")
        else:
            layout = pack(turns, pack_tokens, candidates)
        if (lower := self._lower_layers()) is None:
            return layout
        return lower.fill(layout, turns, candidates)

    def _lower_layers(self) -> LowerLayers | None:
        """Return the cache of hidden states below the lowest adapter; None if there is none or dropout changes them."""
        if self.lower is None or (self.model.training and self.lower.random_in_training):
            return None
        self._set_kernel(self.model)
        return self.lower

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
        shared: bool = True,
    ) -> list[Tensor]:
        """Divide turns among forward passes of bounded memory, see :mod:`lrl.lm.forward`.

        Args:
            inputs: ``prompt_ids`` and ``prompt_mask`` ``(turn, prompt)``, and optionally ``response_ids`` ``(turn,
                token)``.
            sizes: number of tokens that follow the prompt of each turn, int64 ``(turn,)``.
            gradient: whether a backward pass follows.
            logits: whether the logits of a whole pass are in memory at the same time.
            shared: whether a pass computes equal beginnings of turns once, if the model allows it.

        Returns:
            One tensor per pass with the indices of its turns, int64 ``(turn,)``; every turn is in exactly one pass.
        """
        if len(sizes) < 2:
            return [torch.arange(len(sizes), device=sizes.device)]
        self._set_kernel(self.model)  # eager attention needs more memory
        width = int((inputs["prompt_mask"].sum(1) + sizes).max())
        memory = pass_memory(self.model, width, logits, gradient, self.config.gradient_checkpointing)
        if self.has_critic_adapter:  # it needs a second pass
            memory = memory._replace(limit=memory.limit // 2)
        return divide_turns(inputs, sizes, memory, shared and self.share and self.cached)

    def logits(self, layout: Layout, model: Any = None) -> Tensor:
        """Compute the logits ``(turn, token, vocabulary)`` that predict response tokens.

        Args:
            layout: rows of the forward pass, from :meth:`lay_out`.
            model: the model that computes them; None uses the trained model.
        """
        return self._run(layout, model)[0]

    def logits_and_states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Compute :meth:`logits`, and the hidden states ``(turn, token, hidden)`` that the critic reads.

        These are the inputs of the language model's head, unless the critic has its own adapter.
        """
        logits, states = self._run(layout)
        return logits, self.critic_states(layout) if self.has_critic_adapter else states

    def distribution(self, layout: Layout, temperature: float, model: Any = None) -> tuple[Categorical, Tensor]:
        """Compute the distributions of the response tokens, and the hidden states ``(turn, token, hidden)``.

        Turns with equal tokens so far have one distribution of the next token in common, which is normalised once.

        Args:
            layout: rows of the forward pass, from :meth:`lay_out`.
            temperature: divides the logits.
            model: the model that computes the logits; None uses the trained model.
        """
        logits, states = self._run(layout, model, of_cells=True)
        return Categorical(logits, temperature, layout.kept), states

    def token_states(self, layout: Layout, model: Any = None) -> Tensor:
        """Compute the hidden states ``(turn, token, hidden)`` that logits are computed from, but no logits."""
        return self._run(layout, model, logits=False)[1]

    def _run(
        self, layout: Layout, model: Any = None, logits: bool = True, of_cells: bool = False
    ) -> tuple[Tensor, Tensor]:
        model = self.model if model is None else model
        self._set_kernel(model)
        with recomputed(model, self.config.gradient_checkpointing):
            return run_layout(model, layout, logits=logits, of_cells=of_cells)

    def critic_states(self, layout: Layout) -> Tensor:
        """Compute hidden states ``(turn, token, hidden)`` with the critic's adapter."""
        use_adapter(self.model, "critic")
        try:
            return self.token_states(layout)
        finally:
            use_adapter(self.model, "default")

    def states(self, ids: Tensor, mask: Tensor, model: Any = None) -> Tensor:
        """Compute the last hidden states ``(row, column, hidden)`` of texts, which may be padded on the right.

        Args:
            ids: int64 ``(row, column)``, right-padded.
            mask: False for padding, bool ``(row, column)``.
            model: the model that computes the states; None uses the trained model.

        Raises:
            ValueError: If ``ids`` has more columns than the model has positions.
        """
        model = self.model if model is None else model
        self._check_positions(ids.shape[1])
        self._set_kernel(model)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        given = {"input_ids": ids, "attention_mask": None, "position_ids": positions, "use_cache": False}
        start = None
        if (lower := self._lower_layers()) is not None:
            turns = Turns(ids, mask, ids[:, :1], torch.zeros_like(mask[:, :1]))  # no responses
            start = lower.fill(lay_out(turns, align="left"), turns).lower
            assert start is not None
            missing = ids.shape[1] - start.states.shape[1]  # rows are as wide as the longest text, ids may be wider
            start = start._replace(states=functional.pad(start.states, (0, 0, 0, missing)))
        again = recomputed(model, self.config.gradient_checkpointing)
        with head_inputs(model, last_only=True) as states, again, started_above(model, start):
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
        """Return the weights of the critic's adapter; empty if the critic has no adapter."""
        if not self.has_critic_adapter:
            return []
        return [weight for name, weight in self.model.named_parameters() if "critic" in name.split(".")]

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states, available after :meth:`configure`."""
        return int(self.model.get_output_embeddings().weight.shape[-1])

    def prepare_history(self, prompt: PromptTemplate, codec: TextCodec | None) -> None:
        """Choose how hidden states below the lowest adapter are cached, depending on whether prompts have a history.

        Successive prompts with history have tokens in common, so their states are cached in pieces of several tokens.
        Logs a warning if the tokens that the prompts of an episode have in common are computed again at every turn.

        Args:
            prompt: how an observation and a history become a prompt.
            codec: codec of the environment; None does not check whether each prompt continues the previous one.
        """
        if self.lower is not None:
            self.lower.ends = self.tokenizer.stop_ids() if prompt.history else None
        if not prompt.history or not self.config.share_prompts:
            return
        config, fault = self.config, ""
        if attention_of(self.model) != "full":
            fault = (
                f"language_model.name is {config.name!r}, a {self.model.config.model_type}, whose layers do not all "
                "attend to all earlier tokens"
            )
        elif self.kernel not in ("sdpa", "eager"):
            fault = f"language_model.attention is {self.kernel}, which takes no mask of single tokens"
        elif codec is not None and not self.tokenizer.extends_prompts(prompt, codec):
            fault = (
                f"language_model.chat_template is {config.chat_template!r}, which encodes a past turn with other "
                "tokens than the prompt of that turn"
            )
        if fault:
            logging.getLogger("lrl").warning(
                "prompt.history is %s, but %s: the past turns in a prompt are computed again at every turn.",
                prompt.history,
                fault,
            )

    def keep_prompts(self, keys: RandomKeys | None) -> None:
        """Keep the KV cache of prompts from one call to the next within a collection or an evaluation.

        Logs a warning, once, if the cache of the previous call was larger than ``prompt_cache_mb``.

        Args:
            keys: keys of the random numbers of the call, which identify the collection or evaluation; None discards the
                cache.
        """
        if self.kept is not None and self.kept.excess_bytes and not self._warned_of_cache:
            self._warned_of_cache = True
            logging.getLogger("lrl").warning(
                "language_model.prompt_cache_mb is %s, but the KV cache of the prompts of a turn has %.0f MiB: the "
                "past turns in a prompt are computed again at every turn.",
                self.config.prompt_cache_mb,
                self.kept.excess_bytes / 2**20,
            )
        if keys is None or not (self.share and self.cached and self.config.prompt_cache_mb):
            self.kept = None
            return
        self.kept = self.kept or KeptPrompts(self.config.prompt_cache_mb * 2**20)
        self.kept.begin((keys.seed, keys.purpose, keys.collection), self.model)

    def record_states(self, keys: RandomKeys) -> None:
        """Record states below the lowest adapter in the next call, if it belongs to a collection of the training.

        Args:
            keys: keys of the random numbers of the call.
        """
        self.recording = self.lower if keys.purpose == "rollout" else None
        if self.recording is not None:
            self.recording.begin_recording((keys.seed, keys.collection))

    def prepare_decoding(self, prompt_tokens: int, new_tokens: int) -> None:
        """Check that the model has enough positions, and choose its attention kernel; called before each decoding.

        Args:
            prompt_tokens: number of tokens of the longest prompt.
            new_tokens: maximum number of tokens to sample.

        Raises:
            ValueError: If the longest prompt and the tokens to be sampled are more than the model has positions.
        """
        self._check_positions(prompt_tokens + new_tokens, f", {new_tokens} of them to be sampled")
        self._set_kernel(self.model)

    def build_reference(self, warm_started: bool) -> None:
        """Make the current weights the reference.

        A new adapter needs no copy, because it does not change any output: the reference is the model without it. A
        warm-started adapter is copied to a second, frozen adapter. Without adapters, the whole model is copied.

        Args:
            warm_started: whether the weights were loaded from another run.
        """
        if self.config.lora is None:
            self.copied_reference = [copy.deepcopy(self.model).requires_grad_(False).eval()]
        elif warm_started:
            freeze_second_adapter(self.model)

    def reference_logits(self, layout: Layout) -> Tensor:
        """Compute :meth:`logits` of the reference model, ``(turn, token, vocabulary)``, without gradient."""
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


def lower_layers_of(module: nn.Module) -> list[LowerLayers]:
    """Return the caches of states below the lowest adapter of all language models in a module."""
    models = [part for part in module.modules() if isinstance(part, LanguageModel)]
    return [model.lower for model in models if model.lower is not None]

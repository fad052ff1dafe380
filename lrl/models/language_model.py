"""A Hugging Face causal LM with tokenizer, LoRA, quantisation, reference and decode loop."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lrl.functional.distributed import shard
from lrl.models.attention import attention_of, compute_dtype, is_halved, kernel_of, max_positions, use_kernel
from lrl.models.candidate_scoring import candidate_logprobs
from lrl.models.forward import accepted, at_tokens, logits_of
from lrl.models.generator import Decoder, Responses
from lrl.models.loading import (
    add_critic_adapter,
    attach_lora,
    check_available,
    fingerprint,
    freeze_second_adapter,
    load_base,
    recompute_activations,
    recomputed,
    use_adapter,
)
from lrl.models.model_config import LanguageModelConfig, LoRAConfig
from lrl.models.number_embeddings import order_numerals
from lrl.models.packing import pack
from lrl.models.prefill import head_inputs
from lrl.models.prompt_sharing import Layout, lay_out, lay_out_alone
from lrl.models.sharing_check import check_sharing
from lrl.models.tokenizer import ChatTokenizer
from lrl.types import SamplingConfig

__all__ = ["LanguageModel", "LanguageModelConfig", "LoRAConfig"]


class LanguageModel(nn.Module):
    """The trunk that actor, critic and reference share. Built lazily by :meth:`configure`."""

    model: Any

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = None
        self.tokenizer: ChatTokenizer | None = None
        self.fingerprint = ""
        self._reference: list[Any] = []
        self.has_critic_adapter = False
        self._told_of_kernel = False

    def configure(self) -> None:
        """Load tokenizer and weights, attach adapters; a second call does nothing."""
        if self.model is not None:
            return
        check_available(self.config.name)
        self.tokenizer = ChatTokenizer.from_pretrained(
            self.config.name, self.config.chat_template, self.config.trust_remote_code
        )
        model = load_base(self.config)
        if self.config.ordered_numbers:
            order_numerals(model, self.tokenizer.tokenizer.get_vocab(), self.config.init_seed)
        self.fingerprint = fingerprint(model)
        self.kernel, self.max_positions = kernel_of(model), max_positions(model)
        self.model = model if self.config.lora is None else attach_lora(model, self.config)
        if self.config.gradient_checkpointing:
            recompute_activations(self.model)
        self.model.eval()
        self.share, self.cached = self._what_attention_allows()
        self.model.train(self.training)

    def _what_attention_allows(self) -> tuple[bool, bool]:
        """Whether turns may share rows, and whether prompts may be padded on the left before a cache."""
        self._settle_kernel(self.model)
        attention = attention_of(self.model)
        if attention != "full" or self.kernel not in ("sdpa", "eager"):
            return False, attention != "other"
        verdict = check_sharing(self.model, self.device)
        if verdict != "exact" and self.config.share_prompts:
            reason = "gives other logits with it" if verdict == "inexact" else "rounds more with it"
            logging.getLogger("lrl").warning("share_prompts is switched off: this model %s.", reason)
        return verdict == "exact" and self.config.share_prompts, verdict != "inexact"

    def _settle_kernel(self, model: Any) -> None:
        """Compute attention so that sampled and teacher-forced log-probabilities agree.

        In 16 bits on a CPU the kernels of SDPA round by the shape of the batch and its mask, and eager attention does
        not; weights and autocast may have become 16 bits since the model was loaded.
        """
        halved_on_cpu = self.device.type == "cpu" and is_halved(model)
        if self.config.attention == "auto":
            use_kernel(model, "eager" if halved_on_cpu else self.kernel)
        elif self.config.attention == "sdpa" and halved_on_cpu and not self._told_of_kernel:
            self._told_of_kernel = True
            logging.getLogger("lrl").warning(
                "language_model.attention is sdpa, which in 16 bits on a CPU rounds differently while sampling than in "
                "training; it should be auto or eager."
            )

    @property
    def recomputes(self) -> bool:
        """Whether log-probabilities of what was sampled are computed again, by the pass that training uses."""
        wanted = self.config.recompute_logprobs
        return is_halved(self.model) if wanted is None else wanted

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def lay_out(self, inputs: Mapping[str, Tensor], response_mask: Tensor, pack_tokens: int | None = None) -> Layout:
        """Rows for turns with ``prompt_ids``, ``prompt_mask`` and ``response_ids``.

        Packed where ``pack_tokens`` is given and the model's attention allows it (:mod:`lrl.models.packing`), else
        with equal prompts shared where that pays (:mod:`lrl.models.prompt_sharing`).

        Raises:
            ValueError: a turn has more tokens than the model has positions.
        """
        turns = inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], response_mask
        if self.max_positions is not None:
            self._check_positions(int((inputs["prompt_mask"].sum(1) + response_mask.sum(1)).max()))
        if not self.cached:
            return lay_out_alone(*turns)
        if pack_tokens is not None and self.share:
            return pack(*turns, pack_tokens)
        return lay_out(*turns, self.share)

    def _check_positions(self, tokens: int, or_sampled: str = "") -> None:
        if self.max_positions is not None and tokens > self.max_positions:
            raise ValueError(
                f"language_model.name is {self.config.name!r}, which knows {self.max_positions} positions, and a turn "
                f"has {tokens} tokens{or_sampled}; max_prompt_tokens or max_new_tokens must be smaller."
            )

    def logits(self, layout: Layout, model: Any = None) -> Tensor:
        """Logits ``(turn, token, vocabulary)`` that predict each response token."""
        model = self.model if model is None else model
        self._settle_kernel(model)
        with recomputed(model, self.config.gradient_checkpointing):
            return logits_of(model, layout)

    def logits_and_states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """:meth:`logits`, and the hidden states ``(turn, token, hidden)`` that they are made from.

        With an adapter for the critic the states are those of a second pass, in which it speaks.
        """
        with head_inputs(self.model) as states:
            logits = self.logits(layout)
        if self.has_critic_adapter:
            use_adapter(self.model, "critic")
            try:
                with head_inputs(self.model) as states:
                    self.logits(layout)
            finally:
                use_adapter(self.model, "default")
        return logits, at_tokens(states[0], layout)

    def states(self, ids: Tensor, mask: Tensor, model: Any = None) -> Tensor:
        """Last hidden states ``(row, column, hidden)`` of texts, none of which is to be continued.

        Args:
            ids: int64 ``(row, column)``, right-padded.
            mask: bool ``(row, column)``.
            model: another than the one that is trained.
        """
        model = self.model if model is None else model
        self._check_positions(ids.shape[1])
        self._settle_kernel(model)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        padding = None if bool(mask.all()) else mask.long()
        given = {"input_ids": ids, "attention_mask": padding, "position_ids": positions, "use_cache": False}
        with head_inputs(model, last_only=True) as states, recomputed(model, self.config.gradient_checkpointing):
            model(**accepted(model, given))
        return states[0]

    def add_critic_adapter(self) -> None:
        """Let the critic read the trunk through an adapter of its own; a second call does nothing.

        Raises:
            ValueError: there is no LoRA whose shape it could have, or layers are computed again in the backward pass,
                which would then see the actor's adapter.
        """
        if self.config.lora is None:
            raise ValueError("value_head.adapter is true and language_model.lora null; set lora, or adapter false.")
        if self.config.gradient_checkpointing:
            raise ValueError(
                "value_head.adapter and language_model.gradient_checkpointing are both true; one of them must be false."
            )
        add_critic_adapter(self.model, self.config.init_seed + 1)
        self.has_critic_adapter = True

    def critic_parameters(self) -> list[nn.Parameter]:
        """Weights of the critic's adapter; none where it has none."""
        if not self.has_critic_adapter:
            return []
        return [weight for name, weight in self.model.named_parameters() if "critic" in name.split(".")]

    @property
    def hidden_size(self) -> int:
        """Of the states; there after :meth:`configure`."""
        return int(self.model.get_output_embeddings().weight.shape[-1])

    def generate(
        self, prompts: Sequence[Sequence[int]], bits: Tensor, sampling: SamplingConfig, stop_text: str | None
    ) -> Responses:
        """Sample one response per prompt, ended by the end of the turn or by ``stop_text``.

        See :class:`lrl.models.generator.Decoder`.
        """
        assert self.tokenizer is not None
        longest = max(len(prompt) for prompt in prompts)
        self._check_positions(longest + sampling.max_new_tokens, f", {sampling.max_new_tokens} of them to be sampled")
        self._settle_kernel(self.model)
        stops = self.tokenizer.stops(stop_text)
        decoder = Decoder(self.model, self.tokenizer.stop_ids(stop_text), self.share, stops, self.cached)
        return decoder(prompts, bits, sampling, self.device)

    def candidate_logprobs(
        self, prompts: Sequence[Sequence[int]], ids: Tensor, mask: Tensor, groups: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``(row, candidate)`` of texts behind prompts, no gradient; only where ``share`` is true.

        With the hidden states ``(row, hidden)`` at the prompts' ends.

        See :func:`lrl.models.candidate_scoring.candidate_logprobs`.
        """
        self._check_positions(max(len(prompt) for prompt in prompts) + ids.shape[1])
        self._settle_kernel(self.model)
        return candidate_logprobs(self.model, prompts, ids, mask, compute_dtype(self.model), groups)

    # -- the reference -------------------------------------------------------------------------------------------

    def build_reference(self, warm_started: bool) -> None:
        """Keep the policy as it is now.

        An adapter that started at zero needs nothing: it is switched off. A warm-started one is kept as a second,
        frozen adapter. Without adapters the whole model is copied.
        """
        if self.config.lora is None:
            self._reference = [copy.deepcopy(self.model).requires_grad_(False).eval()]
        elif warm_started:
            freeze_second_adapter(self.model)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the weights over the ranks of ``mesh`` (FSDP2); a copied reference as well.

        Raises:
            ValueError: the weights are quantised, whose 4-bit blocks cannot be cut, or actor and critic take turns with
                adapters, of which a block's gradients would be gathered once.
        """
        if self.has_critic_adapter:
            raise ValueError(
                "value_head.adapter is true, which FSDP2 cannot shard; it must be false, or the strategy ddp."
            )
        if self.config.quantization is not None:
            raise ValueError(
                f"language_model.quantization is {self.config.quantization!r}, which FSDP2 cannot shard; "
                "it must be null, or trainer.strategy ddp."
            )
        for model in (self.model, *self._reference):
            shard(model, mesh)

    def reference_logits(self, layout: Layout) -> Tensor:
        """Logits of the reference, as :meth:`logits`; no gradient."""
        with self.reference() as model:
            return self.logits(layout, model)

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """The model that the reference's logits come from, while it does; no gradient."""
        with torch.no_grad():
            if self._reference:
                yield self._reference[0].to(self.device)
            elif "reference" in self.model.peft_config:
                use_adapter(self.model, "reference")
                yield self.model
                use_adapter(self.model, "default")
            else:
                with self.model.disable_adapter():
                    yield self.model

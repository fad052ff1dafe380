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

from lrl.functional.sharding import shard
from lrl.policies.candidates import candidate_logprobs
from lrl.policies.chat import ChatTokenizer
from lrl.policies.decoding import Decoder, Responses
from lrl.policies.layout import Layout, lay_out
from lrl.policies.loading import (
    add_critic_adapter,
    attach_lora,
    attends_fully,
    check_available,
    fingerprint,
    freeze_second_adapter,
    load_base,
    recompute_activations,
    recomputed,
    use_adapter,
)
from lrl.policies.model_config import DTYPES, LanguageModelConfig, LoRAConfig
from lrl.policies.numerals import order_numerals
from lrl.policies.packing import pack
from lrl.policies.prefill import head_inputs
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
        self.own_mask = attends_fully(model)
        self.model = model if self.config.lora is None else attach_lora(model, self.config)
        if self.config.gradient_checkpointing:
            recompute_activations(self.model)
        self.share = self.config.share_prompts and self.own_mask and self._sharing_is_exact()
        self.model.train(self.training)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def lay_out(
        self,
        inputs: Mapping[str, Tensor],
        response_mask: Tensor,
        share: bool | None = None,
        pack_tokens: int | None = None,
    ) -> Layout:
        """Rows for turns with ``prompt_ids``, ``prompt_mask`` and ``response_ids``.

        Packed where ``pack_tokens`` is given and the model's attention allows it (:mod:`lrl.policies.packing`), else
        with equal prompts shared where that pays (:mod:`lrl.policies.layout`).
        """
        turns = inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], response_mask
        if pack_tokens is not None and self.share:
            return pack(*turns, pack_tokens)
        return lay_out(*turns, self.share if share is None else share)

    def logits(self, layout: Layout, model: Any = None) -> Tensor:
        """Logits ``(turn, token, vocabulary)`` that predict each response token."""
        model = self.model if model is None else model
        with recomputed(model, self.config.gradient_checkpointing):
            out = model(
                input_ids=layout.input_ids,
                attention_mask=layout.attention_mask(self._mask_dtype()),
                position_ids=layout.position_ids,
                logits_to_keep=layout.logit_columns,
                use_cache=False,
            )
        return out.logits[layout.row[:, None], layout.kept]

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
        return logits, states[0][layout.row[:, None], layout.kept]

    def states(self, ids: Tensor, mask: Tensor, model: Any = None) -> Tensor:
        """Last hidden states ``(row, column, hidden)`` of texts, none of which is to be continued.

        Args:
            ids: int64 ``(row, column)``, right-padded.
            mask: bool ``(row, column)``.
            model: another than the one that is trained.
        """
        model = self.model if model is None else model
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        padding = None if bool(mask.all()) else mask.long()
        with head_inputs(model, last_only=True) as states, recomputed(model, self.config.gradient_checkpointing):
            model(input_ids=ids, attention_mask=padding, position_ids=positions, use_cache=False)
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

        See :class:`lrl.policies.decoding.Decoder`.
        """
        assert self.tokenizer is not None
        stops = self.tokenizer.stops(stop_text)
        decoder = Decoder(self.model, self.tokenizer.stop_ids(stop_text), self.own_mask, stops)
        return decoder(prompts, bits, sampling, self.device)

    def candidate_logprobs(
        self, prompts: Sequence[Sequence[int]], ids: Tensor, mask: Tensor, groups: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``(row, candidate)`` of texts behind prompts, no gradient; only where ``share`` is true.

        With the hidden states ``(row, hidden)`` at the prompts' ends.

        See :func:`lrl.policies.candidates.candidate_logprobs`.
        """
        return candidate_logprobs(self.model, prompts, ids, mask, self._mask_dtype(), groups)

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

    # -- self-check ----------------------------------------------------------------------------------------------

    def _mask_dtype(self) -> torch.dtype:
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type)
        return DTYPES[self.config.dtype]

    @torch.no_grad()
    def _sharing_is_exact(self) -> bool:
        """Compare the shared layout with the plain pass on a few made-up turns."""
        ids = torch.arange(24, device=self.device) % self.model.config.vocab_size
        inputs = {
            "prompt_ids": ids[:6].repeat(4, 1),
            "prompt_mask": torch.ones(4, 6, dtype=torch.bool, device=self.device),
            "response_ids": ids.view(4, 6),
        }
        mask = torch.ones(4, 6, dtype=torch.bool, device=self.device)
        was_training = self.model.training
        self.model.eval()
        shared = self.logits(self.lay_out(inputs, mask, share=True)).float()
        plain = self.logits(self.lay_out(inputs, mask, share=False)).float()
        self.model.train(was_training)
        tolerance = 1e-3 if self.config.dtype in ("float32", "float64") else 0.1 * float(plain.abs().max())
        exact = bool((shared - plain).abs().max() <= tolerance)
        if not exact:
            logging.getLogger("lrl").warning("share_prompts is switched off: this model gives other logits with it.")
        return exact

"""A Hugging Face causal LM with tokenizer, LoRA, quantisation, reference and decode loop."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lrl.functional.sharding import shard
from lrl.policies.chat import ChatTokenizer
from lrl.policies.decoding import Decoder, Responses
from lrl.policies.layout import Layout, lay_out
from lrl.types import SamplingConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685)."""

    r: int = 16
    """Rank."""
    alpha: int = 32
    """The update is scaled by alpha / r."""
    dropout: float = 0.0
    """Dropout on the adapter's input; off while RL acts and evaluates."""
    target_modules: Sequence[str] | str = "all-linear"
    """Names of layers that get an adapter, or ``all-linear``."""
    modules_to_save: Sequence[str] | None = None
    """Names of layers that are trained whole beside the adapters."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Which causal LM, and how it is loaded."""

    name: str = "assets/tiny-lm"
    """Hub name or local folder."""
    dtype: str = "float32"
    """``float32``, ``bfloat16``, ``float16`` or ``float64``."""
    attention: str = "sdpa"
    """``sdpa``, ``eager`` or ``flash_attention_2``."""
    lora: LoRAConfig | None = None
    """Train adapters only; null trains all weights."""
    quantization: str | None = None
    """``nf4`` loads the base in 4 bit through bitsandbytes."""
    random_init: bool = False
    """Take only the architecture from ``name`` and draw the weights from ``init_seed``."""
    init_seed: int = 0
    """Seed of ``random_init`` and of new adapters."""
    chat_template: str = "auto"
    """``auto``, ``plain``, ``chatml`` or a file."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    share_prompts: bool = True
    """Compute equal prompts once in the training pass, where it is exact and pays."""
    gradient_checkpointing: bool = False
    """Trade compute for activation memory."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's own configuration, with ``random_init`` only."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"language_model.dtype is {self.dtype!r}; it must be one of {', '.join(_DTYPES)}.")
        if self.quantization not in (None, "nf4"):
            raise ValueError(f"language_model.quantization is {self.quantization!r}; it must be nf4 or null.")
        if self.quantization and self.lora is None:
            raise ValueError("language_model.quantization is nf4 but lora is null; a 4-bit base is trained by LoRA only.")
        if self.config_overrides and not self.random_init:
            raise ValueError("language_model.config_overrides is set; it needs random_init: true.")


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

    def configure(self) -> None:
        """Load tokenizer and weights, attach adapters; a second call does nothing."""
        if self.model is not None:
            return
        self.tokenizer = ChatTokenizer.from_pretrained(
            self.config.name, self.config.chat_template, self.config.trust_remote_code
        )
        model = load_base(self.config)
        self.fingerprint = fingerprint(model)
        self.own_mask = attends_fully(model)
        self.model = model if self.config.lora is None else attach_lora(model, self.config)
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.share = self.config.share_prompts and self.own_mask and self._sharing_is_exact()
        self.model.train(self.training)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def lay_out(self, inputs: Mapping[str, Tensor], response_mask: Tensor, share: bool | None = None) -> Layout:
        """Rows for turns with ``prompt_ids``, ``prompt_mask`` and ``response_ids``; see :mod:`lrl.policies.layout`."""
        share = self.share if share is None else share
        return lay_out(inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], response_mask, share)

    def logits(self, layout: Layout, model: Any = None) -> Tensor:
        """Logits ``(turn, token, vocabulary)`` that predict each response token."""
        model = self.model if model is None else model
        out = model(
            input_ids=layout.input_ids,
            attention_mask=layout.attention_mask(self._mask_dtype()),
            position_ids=layout.position_ids,
            logits_to_keep=layout.logit_columns,
            use_cache=False,
        )
        return out.logits[layout.row[:, None], layout.kept]

    def generate(
        self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: SamplingConfig, stop_text: str | None
    ) -> Responses:
        """Sample one response per prompt, ended by the end of the turn or by ``stop_text``.

        See :class:`lrl.policies.decoding.Decoder`.
        """
        assert self.tokenizer is not None
        stops = self.tokenizer.stops(stop_text)
        decoder = Decoder(self.model, self.tokenizer.stop_ids(stop_text), self.own_mask, stops)
        return decoder(prompts, uniforms, sampling, self.device)

    # -- the reference -------------------------------------------------------------------------------------------

    def build_reference(self, warm_started: bool) -> None:
        """Keep the policy as it is now.

        An adapter that started at zero needs nothing: it is switched off. A warm-started one is kept as a second,
        frozen adapter. Without adapters the whole model is copied.
        """
        if self.config.lora is None:
            self._reference = [copy.deepcopy(self.model).requires_grad_(False).eval()]
        elif warm_started:
            _freeze_second_adapter(self.model)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the weights over the ranks of ``mesh`` (FSDP2); a copied reference as well.

        Raises:
            ValueError: the weights are quantised; their 4-bit blocks cannot be cut.
        """
        if self.config.quantization is not None:
            raise ValueError(
                f"language_model.quantization is {self.config.quantization!r}, which FSDP2 cannot shard; "
                "it must be null, or trainer.strategy ddp."
            )
        for model in (self.model, *self._reference):
            shard(model, mesh)

    def reference_logits(self, layout: Layout) -> Tensor:
        """Logits of the reference, as :meth:`logits`; no gradient."""
        with torch.no_grad():
            if self._reference:
                self._reference[0].to(self.device)
                return self.logits(layout, self._reference[0])
            if "reference" in self.model.peft_config:
                self.model.set_adapter("reference")
                logits = self.logits(layout)
                self.model.set_adapter("default")
                _train_only_default(self.model)
                return logits
            with self.model.disable_adapter():
                return self.logits(layout)

    # -- self-check ----------------------------------------------------------------------------------------------

    def _mask_dtype(self) -> torch.dtype:
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type)
        return _DTYPES[self.config.dtype]

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


def load_base(config: LanguageModelConfig) -> Any:
    """The bare causal LM.

    Raises:
        ValueError: there is no such model, in words that say what was looked for.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    dtype, remote = _DTYPES[config.dtype], config.trust_remote_code
    options = {"dtype": dtype, "attn_implementation": config.attention, "trust_remote_code": remote}
    try:
        if not config.random_init:
            return AutoModelForCausalLM.from_pretrained(
                config.name, use_safetensors=True, quantization_config=_quantization(config), **options
            ).eval()
        architecture = AutoConfig.from_pretrained(config.name, trust_remote_code=remote, **config.config_overrides)
    except (OSError, ValueError) as error:
        raise ValueError(missing_model_message(config.name, error)) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.init_seed)
        return AutoModelForCausalLM.from_config(architecture, **options).eval()


def missing_model_message(name: str, error: Exception) -> str:
    """One sentence on why ``name`` could not be loaded."""
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    kind = "folder" if Path(name).is_dir() else "local folder of that name, and the hub did not give it either"
    if kind == "folder":
        return f"language_model.name is {name!r}, a folder that holds no causal LM in safetensors ({reason})."
    return f"language_model.name is {name!r}; there is no {kind}, check the spelling and the network ({reason})."


def _quantization(config: LanguageModelConfig) -> Any:
    if config.quantization is None:
        return None
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advises optional kernels on import
    from transformers import BitsAndBytesConfig

    dtype = _DTYPES[config.dtype]
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=dtype
    )


def attach_lora(model: Any, config: LanguageModelConfig) -> Any:
    """Wrap ``model`` with trainable adapters; the base is frozen.

    Raises:
        ValueError: ``target_modules`` match nothing; the message lists the names that exist.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import peft

    lora = config.lora
    assert lora is not None
    names = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if "Linear" in type(m).__name__
                    or "Conv1D" in type(m).__name__})
    wanted = [lora.target_modules] if isinstance(lora.target_modules, str) else list(lora.target_modules)
    saved = list(lora.modules_to_save or [])
    every = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    for name in [*wanted, *saved]:
        if name != "all-linear" and name not in every:
            key = "modules_to_save" if name in saved else "target_modules"
            raise ValueError(f"lora.{key} names {name!r}, which no layer is called; there are {', '.join(names)}.")
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    touches = {"embed_tokens", "lm_head", "wte"} & {*wanted, *saved}
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules=wanted[0] if wanted == ["all-linear"] else wanted, modules_to_save=saved or None,
        ensure_weight_tying=tied and bool(touches),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.init_seed)
        return peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)


def _train_only_default(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if ".reference." in name:
            parameter.requires_grad_(False)


def _freeze_second_adapter(model: Any) -> None:
    """Copy adapter ``default`` to a frozen adapter ``reference``."""
    if "reference" not in model.peft_config:
        model.add_adapter("reference", copy.deepcopy(model.peft_config["default"]))
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in state.items():
            if ".reference." in name:
                parameter.copy_(state[name.replace(".reference.", ".default.")])
    model.set_adapter("default")
    _train_only_default(model)


def attends_fully(model: Any) -> bool:
    """Whether every layer sees all earlier tokens, and attention takes a 4-D mask."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        return False
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        return False
    return model.config._attn_implementation in ("sdpa", "eager")


def fingerprint(model: nn.Module) -> str:
    """A short name of the base weights: 16 hex digits over names, shapes and the first values of each tensor."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        head = parameter.detach().flatten()[:8].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + head)
    return digest.hexdigest()[:16]

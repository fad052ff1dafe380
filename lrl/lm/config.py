"""Configuration of a causal LM: which one, and how it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lrl.lm.files import is_gguf
from lrl.ranges import HalfOpenUnitInterval, NonNegativeInt, PositiveInt, Seed, check_fields

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685)."""

    r: PositiveInt = 16
    """Rank."""
    alpha: PositiveInt = 32
    """The update is scaled by alpha / r."""
    dropout: HalfOpenUnitInterval = 0.0
    """Dropout on the adapter's input, only in training steps of SFT: RL samples and evaluates without dropout."""
    target_modules: Sequence[str] | str = "all-linear"
    """Names of layers that get an adapter, or ``all-linear``."""
    modules_to_save: Sequence[str] | None = None
    """Names of layers that are trained in full besides the adapters."""
    last_layers: PositiveInt | None = None
    """Adapt only this many decoder layers, counted from the last one; null adapts all. The hidden states below the
    lowest adapter are computed once per turn and cached, see ``language_model.state_cache_mb``."""

    def __post_init__(self) -> None:
        check_fields(self, "lora")
        if not self.target_modules or "" in list(self.target_modules):
            raise ValueError(f"lora.target_modules is {self.target_modules!r}; it must name layers, or be all-linear.")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Configuration of a causal LM: which one, and how it is loaded."""

    name: str = "assets/tiny-lm"
    """Hub name, local folder or GGUF file. ``smollm2-135m`` is the model that ``lrl fetch smollm2`` downloads, or the
    one on the hub if it was not downloaded."""
    dtype: str = "float32"
    """``float32``, ``bfloat16``, ``float16`` or ``float64``."""
    attention: str = "auto"
    """``sdpa``, ``eager`` or ``flash_attention_2``; ``auto`` is ``eager`` in 16 bits on a CPU and for models that
    support nothing else, otherwise ``sdpa``."""
    lora: LoRAConfig | None = None
    """Train adapters only; null trains all weights."""
    quantization: str | None = None
    """``nf4`` loads the base in 4 bits with bitsandbytes; null loads it in ``dtype``."""
    random_init: bool = False
    """Take only the architecture from ``name`` and initialise the weights from ``init_seed``."""
    init_seed: Seed = 0
    """Seed of the random weights of ``random_init``, ``ordered_numbers`` and new adapters."""
    first_layers: PositiveInt | None = None
    """Keep only the first decoder layers, this many; null keeps all. Passes are cheaper, for policies and reward models
    that read hidden states."""
    number_tokens: bool = False
    """Add a token for every number from 10 to 999 that the tokenizer splits into digits."""
    added_tokens: Sequence[str] = ()
    """Texts that become one token each, such as ``["<action>", "</action>"]``. With ``lora``, ``modules_to_save`` must
    name the embeddings, so that the embeddings of the new tokens are trained."""
    ordered_numbers: bool = False
    """Initialise the embeddings of numbers of up to three digits so that neighbouring numbers have similar embeddings,
    as in pretrained models; for models with random weights or little pretraining, such as ``assets/tiny-lm``."""
    chat_template: str = "auto"
    """``auto`` (the tokenizer's own, or ``plain`` if it has none), ``plain``, ``content``, ``chatml`` or the path of a
    Jinja file."""
    trust_remote_code: bool = False
    """Run code from the model's repository."""
    share_prompts: bool = True
    """Let responses to equal prompts share a row of a batch where this is faster, in sampling and training, if a check
    at the start finds that it changes logits only by rounding."""
    recompute_logprobs: bool | None = None
    """Recompute the log-probabilities of sampled tokens by a forward pass like that of training, so that the
    probability ratio of the first update is 1 despite rounding; null recomputes only in 16 bits."""
    state_cache_mb: NonNegativeInt | None = 512
    """Size in MiB of the cache for hidden states below the lowest adapter (``lora.last_layers``), which do not change
    in training; the least recently used states are evicted. null disables the cache: every pass computes all layers."""
    prompt_cache_mb: NonNegativeInt = 1024
    """Largest size in MiB of the KV cache of prompts that is kept for the next turn if ``prompt.history`` is set. If
    the next prompt begins with the tokens of the current one, only its other tokens are computed. A cache that would be
    larger is not kept, so the next turn computes its whole prompts."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, more computation."""
    liger_kernels: bool = False
    """Compute rotary embeddings, norms and gated MLP layers with Liger's fused kernels in training, on a GPU
    (``lrl[liger]``)."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"language_model.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        check_fields(self, "language_model")
        if self.quantization not in (None, "nf4"):
            raise ValueError(f"language_model.quantization is {self.quantization!r}; it must be nf4 or null.")
        if self.quantization and self.lora is None:
            raise ValueError("language_model.quantization is nf4 and lora null; weights in 4 bits need lora.")
        if self.quantization and is_gguf(self.name):
            raise ValueError(
                f"language_model.quantization is nf4 and language_model.name {self.name!r}, a GGUF file, whose weights "
                "are 16 or 32 bits wide once loaded; unset quantization."
            )
        for key in ("random_init", "ordered_numbers", "number_tokens"):
            if self.quantization and getattr(self, key):
                raise ValueError(f"language_model.quantization is nf4 and {key} true; unset one of them.")
        if "" in self.added_tokens or len(set(self.added_tokens)) < len(self.added_tokens):
            raise ValueError(f"language_model.added_tokens is {list(self.added_tokens)}; it must be different texts.")

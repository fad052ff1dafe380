"""Models with random weights in the shapes of published models."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from lrl.lm.files import SMOLLM2, cached, written_whole

TOKENIZER = Path(__file__).parents[2] / "assets/tiny-lm"
"""Folder with the tokenizer of all models; its ids are below the sizes of their vocabularies."""


def _shape(
    kind: type[LlamaConfig | Qwen2Config], hidden: int, layers: int, heads: tuple[int, int], inner: int, vocabulary: int
) -> PretrainedConfig:
    """Return the configuration of a model whose input and output embeddings are tied.

    Args:
        kind: class of the configuration.
        hidden: size of the hidden states.
        layers: number of layers.
        heads: number of heads of queries, and of keys and values.
        inner: size of the hidden layers of the gated MLPs.
        vocabulary: number of tokens.
    """
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }
    tokens = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}
    rope = {"rope_theta": 500000.0, "rope_type": "default"}
    settings: dict[str, Any] = sizes | tokens | {"tie_word_embeddings": True, "rope_parameters": rope}
    return kind(**settings)


SHAPES = {
    "smollm2-135m": _shape(LlamaConfig, 576, 30, (9, 3), 1536, 49152),
    "qwen2.5-0.5b": _shape(Qwen2Config, 896, 24, (14, 2), 4864, 151936),
    "llama-3.2-1b": _shape(LlamaConfig, 2048, 16, (32, 8), 8192, 128256),
    "llama-3.2-3b": _shape(LlamaConfig, 3072, 28, (24, 8), 8192, 128256),
    "tiny": _shape(LlamaConfig, 16, 2, (2, 1), 32, 2000),
}
PUBLISHED = tuple(name for name in SHAPES if name != "tiny")


def folder(name: str, device: str) -> str:
    """Return the folder of a model, which is written at the first call on a machine."""
    fetched = cached(SMOLLM2) if name == SMOLLM2.name else None
    if fetched is not None:
        return str(fetched)
    place = Path(tempfile.gettempdir(), "lrl-benchmark-models", name)
    if not place.exists():
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16)
        with written_whole(place) as draft:
            model.save_pretrained(draft)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
                shutil.copy(TOKENIZER / file, draft)
    return str(place)

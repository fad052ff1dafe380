"""Tests of the attention settings of a configuration."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lrl.lm.attention import attention_of, max_positions

SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def built(kind, changes):
    sizes = SMALL | changes
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize(
    ("kind", "changes", "attention"),
    [
        ("llama", {}, "full"),
        ("gpt2", {}, "full"),
        ("mixtral", {"num_local_experts": 2}, "full"),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4}, "full"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "window"),
        ("mistral", {"sliding_window": None}, "full"),
        ("mistral", {"sliding_window": 4}, "window"),
        ("gemma3_text", {"head_dim": 8}, "window"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "full"),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, "window"),
        ("falcon", {"alibi": False}, "full"),
        ("falcon", {"alibi": True}, "other"),
        ("bloom", {}, "other"),
        ("llama4_text", {"attention_chunk_size": 4, "num_local_experts": 2, "head_dim": 8}, "other"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "other"),
        ("mamba", {"state_size": 4}, "other"),
        ("llama", {"window_size": 4}, "other"),
        ("llama", {"attention": {"alibi": True}}, "other"),
    ],
)
def test_windows_and_positions_are_read_from_the_configuration(kind, changes, attention):
    assert attention_of(built(kind, changes)) == attention


@pytest.mark.parametrize(
    ("kind", "changes", "limit"),
    [
        ("llama", {"max_position_embeddings": 64}, None),
        ("gpt2", {"n_positions": 64}, 64),
        ("gpt_neo", {"max_position_embeddings": 64, "attention_types": [[["global"], 2]]}, 64),
        ("opt", {"max_position_embeddings": 64, "ffn_dim": 32, "word_embed_proj_dim": 16}, 64),
        ("gptj", {"n_positions": 64, "rotary_dim": 4}, 64),
        ("llama", {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}, 64),
        ("phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}, 32),
    ],
)
def test_positions_that_run_out_are_counted(kind, changes, limit):
    assert max_positions(built(kind, changes)) == limit

"""A GGUF file of a random Llama, and a wheel that holds it."""

from __future__ import annotations

import zipfile
from pathlib import Path

HIDDEN, HEADS, KV_HEADS, LAYERS, POSITIONS = 32, 2, 1, 2, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_llama():
    """Return a random Llama whose output embeddings are its input embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens()),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def tokens() -> list[str]:
    """Return special tokens, all bytes as byte-level BPE spells them, and one pair."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIALS, *bytes_to_unicode().values(), "le"]


def write_gguf(path: Path, quantisation: str = "F32", architecture: str = "llama") -> Path:
    """Write :func:`tiny_llama` with a byte-level tokenizer and ChatML."""
    import gguf

    from lrl.lm.chat_template import CHATML

    model = tiny_llama()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens())
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens()])
    writer.add_token_merges(["l e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    kind = gguf.GGMLQuantizationType[quantisation]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, parameter in model.named_parameters():
        weights = parameter.detach().numpy()
        for layer, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if layer in name:  # llama.cpp interleaves the two halves of rotary dimensions
                weights = weights.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weights.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        if weights.ndim == 2 and quantisation != "F32":
            writer.add_tensor(gguf_name, gguf.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, file: Path) -> Path:
    """Write a wheel ``tiny_weights`` 1.0 that holds ``file``."""
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    about = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, f"tiny_weights/{file.name}")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel

"""Small random models of many architectures, turns to put through them, and the plain passes to compare with."""

from pathlib import Path

import torch
from tiny_runs import WORDS, save_tiny_model

from lrl.functional.masking import selected_logprobs
from lrl.models.decode_loop import DecodeLoop
from lrl.models.language_model import LanguageModel, LanguageModelConfig, LoRAConfig
from lrl.types import SamplingConfig

WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.05}
WINDOW = {"sliding_window": 4, "num_hidden_layers": 2}
LOCAL = {"num_layers": 2, "num_heads": 2}
LINEAR = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
LINEAR |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
ALIBI = {"num_kv_heads": 2, "alibi": True, "new_decoder_architecture": False}
OTHERS = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 2}),
    "falcon": ("falcon", ALIBI),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "jamba": ("jamba", {"attn_layer_period": 2, "num_experts": 2, "mamba_d_state": 4, "attn_layer_offset": 1}),
    "qwen3_next": (
        "qwen3_next",
        LINEAR
        | EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 8},
    ),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4}),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 16}),
}
"""Models whose state or positions cannot be padded."""
FOLDERS = OTHERS | {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "short": ("gpt2", {"n_positions": 12}),
    "mistral": ("mistral", WINDOW),
    "gemma2": ("gemma2", WINDOW),
    "gemma3": ("gemma3_text", WINDOW),
    "qwen3": ("qwen3", {}),
    "gpt_neo": ("gpt_neo", LOCAL | {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "wide": ("llama", WIDE),
    "wide_tied": ("llama", WIDE | {"tie_word_embeddings": True}),
}
LORA = LoRAConfig(r=2, alpha=4)


def folder_of(root, name):
    """The folder of one architecture, made when it is asked for."""
    if not Path(root, name).exists():
        kind, changes = FOLDERS[name]
        save_tiny_model(Path(root, name), kind, **changes)
    return str(Path(root, name))


def load(name, **settings):
    model = LanguageModel(LanguageModelConfig(name=name, **settings))
    model.configure()
    return model.eval()


def turns(rows=6, prompt=9, response=5, seed=0):
    """Right-padded turns over two prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompt_of, sizes = torch.arange(rows) % 2, torch.arange(rows) % response + 1
    prompts = torch.randint(4, len(WORDS), (2, prompt), generator=generator)[prompt_of]
    prompt_mask = torch.arange(prompt)[None] < torch.tensor([prompt, prompt - 3])[prompt_of][:, None]
    mask = torch.arange(response)[None] < sizes[:, None]
    responses = torch.randint(4, len(WORDS), (rows, response), generator=generator)
    return {"prompt_ids": prompts * prompt_mask, "prompt_mask": prompt_mask, "response_ids": responses * mask}, mask


def logprobs(model, logits=None):
    inputs, mask = turns()
    chosen = (logits or model.logits)(model.lay_out(inputs, mask))
    return selected_logprobs(chosen, inputs["response_ids"]) * mask


def plain_logprobs(hugging_face):
    """Each turn alone, without padding, mask or positions."""
    inputs, mask = turns()
    rows = []
    for prompt, seen, response, counts in zip(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], mask
    ):
        prompt, response = prompt[seen], response[counts]
        logits = hugging_face(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.nn.functional.pad(selected_logprobs(logits, response), (0, mask.shape[1] - len(response))))
    return torch.stack(rows)


@torch.no_grad()
def sampled_logprobs(model):
    """Log-probabilities of a few sampled answers: each turn alone in the plain model, and as recorded."""
    inputs, _ = turns()
    prompts = [ids[seen].tolist() for ids, seen in zip(inputs["prompt_ids"], inputs["prompt_mask"])]
    bits = torch.randint(-(2**62), 2**62, (6, 6), generator=torch.Generator().manual_seed(0))
    out, alone = DecodeLoop(model, None).generate(prompts, bits, SamplingConfig(max_new_tokens=6)), []
    for prompt, ids, mask in zip(prompts, out.ids, out.mask, strict=True):
        row = torch.tensor(prompt + ids[mask].tolist())[None]
        alone.append(selected_logprobs(model.model(row, use_cache=False).logits[0, len(prompt) - 1 : -1], ids[mask]))
    return torch.cat(alone), out.logprobs[out.mask]


def trainable(model):
    """Weights that are trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

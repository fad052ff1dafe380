"""Small random models of many architectures, turns to put through them, and the plain passes to compare with."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tiny_runs import WORDS, batch_of, sampled_values, save_tiny_model

from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.functional.distributions import Categorical
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.decoding import DecodeLoop
from lrl.lm.heads import ValueHeadConfig
from lrl.lm.model import LanguageModel
from lrl.policies.head import HeadPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import PastTurn, RandomKeys, SamplingConfig

WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.05}
WINDOW = {"sliding_window": 4, "num_hidden_layers": 2}
LOCAL = {"num_layers": 2, "num_heads": 2}
LINEAR = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
LINEAR |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
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
KINDS = ["full_attention", "sliding_attention"]
ONE_EXPERT = {"num_local_experts": 2, "num_experts_per_tok": 1}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}
MPT = {"d_model": 16, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 512}
CHUNKED = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
GEMMA3N = {"sliding_window": 4, "layer_types": KINDS, "intermediate_size": [16, 32], "num_kv_shared_layers": 0}
GEMMA3N |= {"vocab_size_per_layer_input": len(WORDS), "hidden_size_per_layer_input": 8, "laurel_rank": 4}
GEMMA3N |= {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0]}
NAMED = """gemma phi phi3 gpt_neox olmo2 cohere stablelm granite glm smollm3 nemotron biogpt persimmon helium
bitnet arcee diffllama seed_oss ernie4_5 rwkv hunyuan_v1_dense"""
MORE = {
    "mpt": ("mpt", MPT),
    "mamba": ("mamba", {"state_size": 4, "expand": 2}),
    "mamba2": ("mamba2", {"state_size": 4, "expand": 2, "num_heads": 4, "n_groups": 1, "chunk_size": 4}),
    "llama4": ("llama4_text", CHUNKED | {"num_local_experts": 2, "intermediate_size_mlp": 32}),
    "minimax": ("minimax", ONE_EXPERT | {"layer_types": ["linear_attention", "full_attention"], "block_size": 4}),
    "openai-gpt": ("openai-gpt", GPT),
    "falcon_rope": ("falcon", ALIBI | {"alibi": False}),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "ctrl": ("ctrl", GPT | {"dff": 32}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "olmoe": ("olmoe", EXPERTS),
    "mixtral": ("mixtral", ONE_EXPERT),
    "phimoe": ("phimoe", ONE_EXPERT),
    "jetmoe": ("jetmoe", ONE_EXPERT | {"kv_channels": 8}),
    "opt": ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "xglm": ("xglm", {"d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "gpt_oss": ("gpt_oss", ONE_EXPERT | {"sliding_window": 4, "layer_types": KINDS}),
    "exaone4": ("exaone4", {"sliding_window": 4, "layer_types": KINDS}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "cohere2": ("cohere2", {"sliding_window": 4, "layer_types": KINDS}),
    **{name: (name, {}) for name in NAMED.split()},
}
"""Further models, for the sweep that ``make test`` leaves out."""
FOLDERS = (
    OTHERS
    | MORE
    | {
        "llama": ("llama", {}),
        "tied": ("llama", {"tie_word_embeddings": True}),
        "gpt2": ("gpt2", {}),
        "short": ("gpt2", {"n_positions": 12}),
        "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12}),
        "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 12}),
        "longrope_64": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
        "mistral": ("mistral", WINDOW),
        "gemma2": ("gemma2", WINDOW),
        "gemma3": ("gemma3_text", WINDOW),
        "qwen3": ("qwen3", {}),
        "gpt_neo": ("gpt_neo", LOCAL | {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
        "wide": ("llama", WIDE),
        "wide_tied": ("llama", WIDE | {"tie_word_embeddings": True}),
    }
)
LORA = LoRAConfig(r=2, alpha=4)


def folder_of(root, name):
    """Return the folder of an architecture, which is created at its first use."""
    if not Path(root, name).exists():
        kind, changes = FOLDERS[name]
        save_tiny_model(Path(root, name), kind, **changes)
    return str(Path(root, name))


def load(name, **settings):
    model = LanguageModel(LanguageModelConfig(name=name, **settings))
    model.configure()
    return model.eval()


def turns(rows=6, prompt=9, response=5, seed=0):
    """Return right-padded turns over two prompts of different lengths."""
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
    return Categorical(chosen).logprobs(inputs["response_ids"]) * mask


def plain_logprobs(hugging_face):
    """Return log-probabilities of single turns, without padding, mask and positions."""
    inputs, mask = turns()
    rows = []
    for prompt, seen, response, counts in zip(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["response_ids"], mask
    ):
        prompt, response = prompt[seen], response[counts]
        logits = hugging_face(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.nn.functional.pad(Categorical(logits).logprobs(response), (0, mask.shape[1] - len(response))))
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
        alone.append(Categorical(model.model(row, use_cache=False).logits[0, len(prompt) - 1 : -1]).logprobs(ids[mask]))
    return torch.cat(alone), out.logprobs[out.mask]


def trainable(model):
    """Return the trainable weights by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


# -- every path of every policy, compared with passes over one row ----------------------------------------------------


class Sentences(FrozenLakeCodec):
    """Codec with actions of one to three tokens; one is a prefix of another."""

    _actions = ("LEFT", "LEFT RIGHT", "UP UP DOWN", "DOWN UP")
    _index = {text.lower(): index for index, text in enumerate(_actions)}


MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
SEEN = [render_map(state, MAP) for state in (0, 1, 0, 4, 0, 9)]
MEMORY = [(), (PastTurn("0", "UP"),), (), (PastTurn("0 1 2 3 0 1", "LEFT"),), (PastTurn("0 1", "UP"),), ()]
"""Histories that give the prompts four different lengths; two prompts are equal."""
TEXTS = ["0 1", "2 0 1 3 UP", "2", "0 1", "S F H G S F H G", "UP DOWN"]
PATHS = {
    "one_token": ({}, {"share_prompts": False}, {"pack_tokens": 60}),
    "sentences": ({}, {"share_prompts": False}, {"pack_tokens": 60}),
    "text": ({}, {"share_prompts": False}, {"pack_tokens": 60}, {"recompute_logprobs": True}),
    "head": ({},),
}
"""By kind of policy, the settings that lay its passes out in different ways."""


def policy_of(kind, folder, dtype="float32", lora=None, **settings):
    """Return a configured policy with a critic and a reference."""
    own = {name: settings.pop(name) for name in ("share_prompts", "recompute_logprobs") if name in settings}
    model = LanguageModelConfig(name=folder, dtype=dtype, lora=lora, **own)
    prompt = PromptTemplate(response_format="direct", system="", history=1)
    if kind == "head":
        policy = HeadPolicy(model, critic=None, init_seed=0, **settings)
        policy.connect_spaces(gym.spaces.Text(99), gym.spaces.Discrete(4))
    elif kind == "text":
        head = ValueHeadConfig(init_seed=0)
        policy = TextPolicy(model, prompt, SamplingConfig(max_new_tokens=4), value_head=head, **settings)
    else:
        policy = ScoringPolicy(model, prompt, value_head=ValueHeadConfig(init_seed=0), **settings)
    policy.connect(Sentences() if kind == "sentences" else FrozenLakeCodec())
    policy.configure()
    policy.build_reference(warm_started=False)
    return policy


def acted(kind, policy, rows=6):
    """Return decisions of a policy in a few states."""
    seen, memory = (TEXTS, [()] * 6) if kind == "head" else (SEEN, MEMORY)
    zeros = np.zeros(rows, dtype=np.int64)
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(rows), turn=zeros)
    return policy.act(seen[:rows], memory[:rows], keys, policy.sampling)


def alone(model, ids):
    """Logits ``(token, vocabulary)`` and last states ``(token, hidden)`` of one text, by the Hugging Face model."""
    states, head = [], model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    handle.remove()
    return logits, states[0][0]


@torch.no_grad()
def plain_results(kind, policy, decisions):
    """Expected evaluation of decisions, by passes over one row: distributions and values, turn by turn."""
    policy.eval()
    model, inputs, results = policy.language_model.model, decisions.inputs, []
    if kind == "head":
        for ids, seen in zip(inputs["text_ids"], inputs["text_mask"], strict=True):
            states = alone(model, ids[seen].tolist())[1]
            results.append((torch.log_softmax(policy.layers(states[-1]), -1)[None], torch.zeros(1)))
        return results
    for row, (ids, seen) in enumerate(zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)):
        prompt, mask = ids[seen].tolist(), decisions.response_mask[row]
        if kind == "text":
            response = inputs["response_ids"][row][: len(mask)][mask].tolist()
            logits, states = alone(model, prompt + response[:-1])
            logprobs = torch.log_softmax(logits[len(prompt) - 1 :], -1)
        else:
            scores, states = [], alone(model, prompt)[1]
            for text in policy.action_texts:
                answer = policy.language_model.tokenizer.encode_text(text)
                logits = torch.log_softmax(alone(model, prompt + answer)[0], -1)[len(prompt) - 1 : -1]
                scores.append(logits[torch.arange(len(answer)), answer].sum())
            logprobs = torch.log_softmax(torch.stack(scores), -1)[None]
        states = states[len(prompt) - 1 :]
        results.append((logprobs, policy.value_head(states[None], torch.ones(1, len(states), dtype=torch.bool))[0]))
    return results


def differences(kind, policy):
    """By path, the largest difference from plain passes over one row."""
    policy.train()
    decisions, far = acted(kind, policy), {}
    batch, mask = batch_of(decisions), decisions.response_mask
    plain = plain_results(kind, policy, decisions)
    chosen = decisions.inputs.get("response_ids", decisions.inputs.get("action"))
    want = torch.zeros(mask.shape)
    entropy, values = want.clone(), want.clone()
    for row, (logprobs, value) in enumerate(plain):
        ids = chosen[row].reshape(-1)[: len(logprobs)]
        want[row, : len(ids)] = logprobs[torch.arange(len(ids)), ids]
        entropy[row, : len(ids)], values[row, : len(ids)] = -(logprobs.exp() * logprobs).sum(-1), value

    def compare(path, got, wanted):
        far[path] = float(((got.detach() - wanted) * mask).abs().max())

    compare("act", decisions.logprobs, want)
    evaluation = policy.train().evaluate(batch)
    compare("evaluate", evaluation.logprobs, want)
    compare("entropy", evaluation.entropy, entropy)
    compare("reference", policy.train().reference_logprobs(batch), want)
    if policy.has_critic:
        compare("values", evaluation.values, values)
        compare("critic_view", sampled_values(policy.train(), batch), values)
        first = policy.train().state_values(SEEN, MEMORY)
        far["state_values"] = float((first - values[:, 0]).abs().max())
        if decisions.values is not None:
            compare("values while acting", decisions.values, values)
    return far

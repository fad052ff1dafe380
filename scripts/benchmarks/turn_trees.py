"""PPO updates on episodes with history: loss, gradients and memory of shared tokens against one row per turn.

Random models of ten architectures play one collection, and both sides train on the same turns. In float32 the gradients
must agree; in bfloat16 the mean distance of each side to the float32 gradient is reported.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from benchmarks.timing import PeakBytes
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lrl.algorithms.ppo import AdaptiveKLConfig, PPOValueHeadModule
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.types import Rollout, SamplingConfig

ARCHITECTURES = ("llama", "gpt2", "qwen3", "gemma", "phi3", "olmo2", "cohere", "granite", "glm", "opt")
SETTINGS: dict[str, dict[str, Any]] = {
    "all weights, reference": {},
    "LoRA, gradient checkpointing, rows of 400 tokens": {
        "lora": LoRAConfig(r=4, alpha=8),
        "gradient_checkpointing": True,
        "pack_tokens": 400,
    },
    "LoRA above frozen layers": {"lora": LoRAConfig(r=4, alpha=8, last_layers=1)},
}
"""By description, settings of the language model and of the policy."""


class Update(NamedTuple):
    """The result of one update on a collection."""

    loss: Tensor
    scale: Tensor
    """Mean absolute loss of a token; the loss itself is near 0 because advantages are normalised."""
    gradient: Tensor
    """Of all trained weights, ``(weight,)``."""
    tokens: int
    """Number of positions of the forward passes, padding included."""
    memory: int
    """Largest number of bytes that were allocated at the same time."""


def environment() -> GymnasiumEnvs:
    """Return an environment whose episodes have several turns."""
    return GymnasiumEnvs("FrozenLake-v1", {"is_slippery": True}, max_episode_steps=6)


def module_of(kind: str, folder: str, env: EnvFactory, **settings: Any) -> PPOValueHeadModule:
    """Return PPO with reference and critic, whose adapters and value head are not at their initial values.

    Args:
        kind: ``writing`` or ``choosing``.
        folder: of the language model.
        env: the environment.
        settings: of the language model, and ``pack_tokens``.
    """
    pack_tokens = settings.pop("pack_tokens", None)
    model = LanguageModelConfig(name=folder, **settings)
    prompt = PromptTemplate(response_format="direct", system="", history="all")
    head = ValueHeadConfig(hidden_sizes=(8,), init_seed=0)
    if kind == "writing":
        policy = TextPolicy(model, prompt, SamplingConfig(max_new_tokens=4), 4096, pack_tokens, head)
    else:
        policy = ScoringPolicy(model, prompt, max_prompt_tokens=4096, pack_tokens=pack_tokens, value_head=head)
    policy.connect(env.codec)
    module = PPOValueHeadModule(policy, kl=AdaptiveKLConfig(coef=0.1, target=None), ent_coef=0.01)
    module.configure_model()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora" in name or "value_head" in name:
                weight.add_(0.1 * torch.ones_like(weight).cumsum(-1).sin())
    return module


def play(module: PPOValueHeadModule, env: EnvFactory, episodes: int = 3, seed: int = 0) -> Rollout:
    """Play whole episodes."""
    envs = env.make(episodes, module.policy.response_format)
    plan = CollectionPlan(seed=seed, collection=0, num_groups=episodes, group_size=1)
    rollout = EpisodeCollector(module.policy, envs).collect(plan)
    module.policy.end_episodes()
    envs.close()
    if module.policy.defers_logprobs:
        rollout = module.policy.complete(rollout, [torch.arange(rollout.num_turns)])
    return rollout


def update(module: PPOValueHeadModule, rollout: Rollout, shared: bool) -> Update:
    """Compute the loss and the gradients of a minibatch that has all turns, reference and values included.

    Args:
        module: whose gradients are empty, before and afterwards.
        rollout: played with the same weights.
        shared: False computes one row per turn, and all layers in each pass.
    """
    assert module.policy.trunk is not None
    model, tokens = module.policy.trunk.language_model, [0]
    before = model.share, model.lower

    def count(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        tokens[0] += (args[0] if args else given["input_ids"]).numel()

    if not shared:
        model.share, model.lower = False, None
    handle, peak = model.model.register_forward_pre_hook(count, with_kwargs=True), PeakBytes()
    try:
        with peak:
            batch = module.prepare(rollout)
            loss = module.step(batch)
            assert loss is not None
            loss.backward()
        with torch.no_grad():
            scale = module.loss(batch, module.policy.evaluate(batch)).loss[batch.response_mask].abs().mean()
    finally:
        model.share, model.lower = before
        handle.remove()
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    parts = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in trained]
    gradient = torch.cat([part.flatten().float() for part in parts])
    module.zero_grad()
    module.flush()
    return Update(loss.detach().float(), scale.float(), gradient, tokens[0], peak.most)


def distances(module: PPOValueHeadModule, rollout: Rollout) -> dict[str, float]:
    """Return how far the two updates are from each other, and their ratios of computed tokens and of memory."""
    ours, plain = (update(module, rollout, shared) for shared in (True, False))
    far = (ours.gradient - plain.gradient).abs().max() / plain.gradient.abs().max()
    loss = (ours.loss - plain.loss).abs() / plain.scale
    ratios = {"tokens": ours.tokens / plain.tokens, "memory": ours.memory / plain.memory}
    return {"gradient": float(far), "loss": float(loss)} | ratios


def distances_to_float32(halved: PPOValueHeadModule, rollout: Rollout) -> tuple[float, float]:
    """Return the distances of a 16-bit update to the float32 gradient, with and without sharing.

    Args:
        halved: a module with 16-bit weights.
        rollout: played with these weights.
    """
    wide = copy.deepcopy(halved).float()
    exact = update(wide, rollout, shared=False).gradient
    ours, plain = ((update(halved, rollout, shared).gradient - exact).norm() for shared in (True, False))
    return float(ours / exact.norm()), float(plain / exact.norm())


def save_random_model(kind: str, folder: Path, seed: int) -> str:
    """Save a random model of four layers with the tokenizer of the embedded model, and return its folder."""
    tokenizer = AutoTokenizer.from_pretrained("assets/tiny-lm")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 2048}
    elif kind == "opt":
        sizes |= {"ffn_dim": 128, "word_embed_proj_dim": 64}
    common = {"vocab_size": len(tokenizer), "initializer_range": 0.1, "bos_token_id": None}
    common |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py turn_trees``."""
    parser.add_argument("--seeds", type=int, default=3, help="random models per architecture in bfloat16")
    parser.add_argument("--architectures", nargs="*", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--keep", action="store_true", help="keep the other architectures in the file of --json")


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare the gradients of each architecture."""
    env, exact, halved = environment(), list[dict[str, Any]](), list[dict[str, Any]]()
    if options.keep:
        before = json.loads(options.json.read_text())
        exact, halved = (
            [row for row in before[name] if row["architecture"] not in options.architectures]
            for name in ("float32", "bfloat16")
        )
    for architecture in options.architectures:
        for kind in ("writing", "choosing"):
            ratios = list[tuple[float, float]]()
            for seed in range(options.seeds):
                with tempfile.TemporaryDirectory() as root:
                    folder = save_random_model(architecture, Path(root), seed)
                    for name, settings in SETTINGS.items() if seed == 0 else ():
                        module = module_of(kind, folder, env, **settings)
                        row = {"architecture": architecture, "kind": kind, "settings": name}
                        exact.append(row | distances(module, play(module, env)))
                        print(exact[-1], flush=True)
                    module = module_of(kind, folder, env, dtype="bfloat16").bfloat16()
                    ratios.append(distances_to_float32(module, play(module, env, seed=seed)))
            ours, plain = (fmean(part) for part in zip(*ratios, strict=True))
            halved.append({"architecture": architecture, "kind": kind, "shared": ours, "alone": plain})
            print(halved[-1], flush=True)
        yield {
            "title": "Gradients of shared tokens against one row per turn",
            "largest_gradient_distance": max(row["gradient"] for row in exact),
            "largest_loss_distance": max(row["loss"] for row in exact),
            "largest_memory_ratio": max(row["memory"] for row in exact),
            "bfloat16_shared": fmean(row["shared"] for row in halved),
            "bfloat16_alone": fmean(row["alone"] for row in halved),
            "float32": exact,
            "bfloat16": halved,
        }

"""PPO on episodes whose prompts contain past turns: shared tokens and a kept KV cache against one row per turn.

Both sides play and train on the same prompts with the same model, seeds and random numbers. A third column measures
one row per turn with a window that drops its oldest turn at every turn, whose prompts are shorter. Equal losses are
checked after each pair.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from benchmarks.timing import compare, compared

import lrl
from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.run_data import ValidationConfig
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig

KINDS = ("writing", "choosing")
"""How a policy acts: it writes its action, or chooses among the legal actions."""


class Clock(L.Callback):
    """Measures the seconds of a collection and its update.

    Args:
        flat: whether frozen layers compute each prompt as a whole for the update, without the states of the prompts
            that it continues and without those that were computed while playing.
    """

    def __init__(self, flat: bool) -> None:
        self.started = self.seconds = 0.0
        self.flat = flat

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Start before the collection."""
        model = pl_module.policy.language_model
        if self.flat and model.lower is not None:
            model.lower.ends = None
            model.record_states = lambda keys: None
        self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop after the update."""
        self.seconds = time.perf_counter() - self.started


class Sides:
    """Runs of the same training with different ways to compute it."""

    def __init__(self, options: argparse.Namespace, kind: str) -> None:
        self.options, self.kind = options, kind
        self.losses: dict[str, float] = {}
        self.ratio_errors: dict[str, float] = {}
        """Largest distance of a ratio from 1 in the first minibatch, before any update."""
        self.tokens = 0.0

    def run(self, side: str) -> float:
        """Return turns per second of one collection with its update: ``shared``, ``alone`` or ``sliding``."""
        options = self.options
        window = {"history": options.history, "history_block": 1 if side == "sliding" else options.history_block}
        if side == "sliding":
            window["history"] = options.history - options.history_block + 1
        prompt = PromptTemplate(response_format="direct", system="", **window)
        lora = LoRAConfig(r=16, alpha=32, last_layers=options.last_layers) if options.last_layers else None
        # Without share_prompts, a choosing policy has one row per legal action. With pack_tokens 1 it has one row per
        # turn, because rows are widened to the length of a turn.
        sharing: dict[str, Any] = {} if side == "shared" else {"prompt_cache_mb": 0}
        if side != "shared" and self.kind == "writing":
            sharing["share_prompts"] = False
        model = LanguageModelConfig(
            name=options.model, chat_template=options.chat_template, dtype=options.dtype, lora=lora, **sharing
        )
        head = ValueHeadConfig(hidden_sizes=(64,), detach=True, init_seed=0)
        common: dict[str, Any] = {"max_prompt_tokens": 4096, "value_head": head}
        if self.kind == "writing":
            policy = TextPolicy(model, prompt, SamplingConfig(max_new_tokens=options.max_new_tokens), **common)
        else:
            policy = ScoringPolicy(model, prompt, pack_tokens=None if side == "shared" else 1, **common)
        env = GymnasiumEnvs(options.env_id, max_episode_steps=options.steps)
        data = RolloutDataModule(
            env,
            num_envs=options.num_envs,
            num_steps=options.steps,
            num_epochs=2,
            num_minibatches=2,
            validation=ValidationConfig(episodes=1),
        )
        clock = Clock(flat=side != "shared")
        trainer = lrl.train(
            PPOValueHeadModule(policy),
            data,
            max_epochs=1,
            callbacks=[clock],
            accelerator="cpu",
            precision="bf16-true" if options.dtype == "bfloat16" else "32-true",
            limit_val_batches=0,
        )
        self.losses[side] = float(trainer.callback_metrics["train/loss"])
        self.ratio_errors[side] = float(trainer.callback_metrics["train/ratio_error"])
        assert data.rollout is not None
        if side == "alone":
            self.tokens = float(data.rollout.inputs["prompt_mask"].sum() / data.rollout.active.sum())
        return options.num_envs * options.steps / clock.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py turns``."""
    parser.add_argument("--model", default="assets/reader-lm")
    parser.add_argument("--chat_template", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--last_layers", type=int, default=None, help="layers with adapters; default: all weights")
    parser.add_argument("--env_id", default="lrl/BabyAI-GoToLocal-v0")
    parser.add_argument("--num_envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32, help="turns per environment")
    parser.add_argument("--history", type=int, default=15, help="largest number of past turns in a prompt")
    parser.add_argument("--history_block", type=int, default=11, help="past turns that leave the prompt together")
    parser.add_argument("--max_new_tokens", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="how the policy acts")
    parser.add_argument("--repeats", type=int, default=5)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare writing and choosing."""
    rows = []
    for kind in options.kinds:
        sides = Sides(options, kind)
        row = compare(
            "", "turns", partial(sides.run, "shared"), partial(sides.run, "alone"), options.repeats, warm=True
        )
        if options.dtype == "float32":  # in 16 bits, the two sides sample different tokens
            assert math.isclose(sides.losses["shared"], sides.losses["alone"], rel_tol=1e-3, abs_tol=1e-5), sides.losses
        sliding = sides.run("sliding")
        name = f"{Path(options.model).name}, {kind}, prompts of {sides.tokens:.0f} tokens"
        row |= {"name": name, "losses": sides.losses, "sliding": sliding}
        row["ratio_errors"] = sides.ratio_errors
        row["ratio_to_sliding"] = statistics.median(row["ours"]) / sliding
        rows.append(row)
        yield compared("PPO with history against one row per turn", 3.0, rows, dtype=options.dtype)

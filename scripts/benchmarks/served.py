"""GRPO on FrozenLake with the responses of a real vLLM server, as docs/served.md starts it.

Every collection is played by the server with the current weights. Printed are the difference between the
log-probabilities of the server and of the trainer, the seconds that the server needs to receive the weights, and the
success rate. ``--builtin`` measures the same run with the built-in decoding loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch

import lrl
from lrl.algorithms.grpo import GRPOModule, KLConfig
from lrl.chat.generator import ServedGenerator
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.run_data import ValidationConfig
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.envs.prompt_env import PromptEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.rewards.expert_q import OptimalActionReward
from lrl.training.optimizer import OptimizerConfig
from lrl.types import SamplingConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py served``."""
    parser.add_argument("--url", default="http://localhost:8000", help="address of the server")
    parser.add_argument("--folder", default="/tmp/lrl-weights", help="folder that the server can read")
    parser.add_argument("--model", default="assets/tiny-lm", help="the model that the server was started with")
    parser.add_argument("--dtype", default="float32", help="data type of trainer and server")
    parser.add_argument("--lora_r", type=int, default=8, help="rank of the adapters; 0 trains and sends all weights")
    parser.add_argument("--collections", type=int, default=20)
    parser.add_argument("--builtin", action="store_true", help="sample with the built-in decoding loop instead")
    parser.add_argument("--accelerator", default="auto", help="Lightning's accelerator of the trainer")


class Difference(L.Callback):
    """Measures, after each collection, the difference between recorded and recomputed log-probabilities.

    Attributes:
        figures: mean and maximum in nats, seconds and success rate of each collection.
    """

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []
        self._started = time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compare the log-probabilities of the collection with those of the trainer, whose weights are the same."""
        rollout = trainer.datamodule.rollout  # pyright: ignore[reportAttributeAccessIssue]
        sampled = rollout.logprobs if rollout.behaviour_logprobs is None else rollout.behaviour_logprobs
        turns, mask = rollout.turns(), rollout.flatten(rollout.response_mask)
        own = pl_module.policy.in_passes(turns, lambda part: pl_module.policy.evaluate(part).logprobs)
        error = (own - rollout.flatten(sampled)).abs()[mask]
        figures = {"mean": float(error.mean()), "maximum": float(error.max())}
        figures["return"] = float(rollout.episode_returns.mean())
        figures["seconds"], self._started = time.perf_counter() - self._started, time.perf_counter()
        self.figures.append(figures)
        number = len(self.figures)
        print(
            f"collection {number:3d}  difference {figures['mean']:.1e} (at most {figures['maximum']:.1e}) nats, "
            f"return {figures['return']:.3f}, {figures['seconds']:.2f} s",
            flush=True,
        )


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train, and yield the report."""
    generator = None if options.builtin else ServedGenerator(options.url, options.folder)
    loads = list[float]()
    if generator is not None:
        publish = generator._publish

        def timed() -> None:
            start = time.perf_counter()
            publish()
            loads.append(time.perf_counter() - start)

        generator._publish = timed
    lora = LoRAConfig(r=options.lora_r, alpha=2 * options.lora_r) if options.lora_r else None
    policy = TextPolicy(
        LanguageModelConfig(name=options.model, dtype=options.dtype, lora=lora),
        PromptTemplate(response_format="think_answer"),
        SamplingConfig(max_new_tokens=32),
        generator=generator,
    )
    learning_rate = 2e-3 if options.lora_r else 4e-4
    module = GRPOModule(policy, OptimizerConfig(lr=learning_rate), clip_range_high=1.0, kl=KLConfig(coef=0.2))
    data = RolloutDataModule(
        PromptEnvs(ExpertQRows(), [OptimalActionReward()]),
        num_groups=11,
        group_size=16,
        num_epochs=4,
        num_minibatches=4,
        validation=ValidationConfig(env=GymnasiumEnvs("FrozenLake-v1")),
    )
    difference = Difference()
    torch.manual_seed(0)
    settings = {"max_epochs": options.collections, "limit_val_batches": 0, "accelerator": options.accelerator}
    lrl.train(module, data, callbacks=[difference], devices=1, gradient_clip_val=1.0, **settings)
    mean = sum(figures["mean"] for figures in difference.figures) / len(difference.figures)
    report = {"collections": difference.figures, "seconds_per_load": loads, "mean_difference": mean}
    report["largest_difference"] = max(figures["maximum"] for figures in difference.figures)
    print(f"difference {mean:.1e} nats on average, {report['largest_difference']:.1e} at most")
    if loads:
        print(f"{len(loads)} synchronisations of {sum(loads) / len(loads):.2f} s")
    yield report

"""A whole PPO run of a small network on CartPole against Stable-Baselines3, settings equal.

lrl runs the documented command with ``configs/cartpole/ppo_mlp.yaml``, including its parsing, logging and checkpoints;
Stable-Baselines3 runs ``PPO("MlpPolicy").learn`` without a logger. Networks, environments, discounts, epochs,
minibatches, schedule, clipping and the number of environment steps are the same, and the last returns are kept. Only
Adam's epsilon differs, which is 1e-5 in Stable-Baselines3.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.timing import Comparison, WholeRuns, alternate, compared

CONFIG = "configs/cartpole/ppo_mlp.yaml"


class Both(WholeRuns):
    """Runs of lrl and of Stable-Baselines3."""

    def theirs(self) -> float:
        """Return env steps per second of Stable-Baselines3."""
        from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

        started = time.perf_counter()
        envs = make_vec_env("CartPole-v1", n_envs=self.data["num_envs"], seed=self.seed["theirs"])
        lr = self.model["optimizer"]["lr"]
        sizes = list(self.model["policy"]["init_args"]["hidden_sizes"])
        model = PPO(
            "MlpPolicy",
            envs,
            learning_rate=lambda left: left * lr,
            n_steps=self.data["num_steps"],
            batch_size=self.data["num_envs"] * self.data["num_steps"] // self.data["num_minibatches"],
            n_epochs=self.data["num_epochs"],
            gamma=self.model["credit"]["gamma"],
            gae_lambda=self.model["credit"]["gae_lambda"],
            clip_range=self.model["clip_range"],
            vf_coef=self.model["vf_coef"] / 2,  # Stable-Baselines3 does not halve the square
            ent_coef=0.0,
            max_grad_norm=self.trainer["gradient_clip_val"],
            policy_kwargs={"net_arch": sizes, "activation_fn": torch.nn.ReLU},
            seed=self.seed["theirs"],
            device="cpu",
        )
        model.learn(self.steps)
        rate = self.steps / (time.perf_counter() - started)
        self.seed["theirs"] += 1
        buffer: Any = model.ep_info_buffer
        self.returns["theirs"].append(float(buffer[-1]["r"]))
        return rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py ppo_mlp``."""
    parser.add_argument("--env_steps", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=4)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare whole runs."""
    both = Both(CONFIG, options.env_steps, "rollout/return")
    ours, theirs = alternate(both.ours, both.theirs, options.repeats)
    notes = {"last_returns": both.returns, "wall_clock_ratio": sum(1 / r for r in ours) / sum(1 / r for r in theirs)}
    print(json.dumps(notes))
    comparison = Comparison(
        name=f"CartPole, {both.steps} env steps", unit="env steps", ours=ours, theirs=theirs, notes=notes
    )
    yield compared("PPO on a network against SB3", 1 / 1.2, [comparison], settings=both.model)

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
from benchmarks.timing import WholeRuns, compare, compared, compared_rates


class Both(WholeRuns):
    """Runs of lrl and of Stable-Baselines3."""

    def train(self, seed: int) -> float:
        """Train with Stable-Baselines3, and return the last episode's return."""
        from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

        lr = self.model["optimizer"]["lr"]
        model = PPO(
            "MlpPolicy",
            make_vec_env("CartPole-v1", n_envs=self.data["num_envs"], seed=seed),
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
            policy_kwargs={
                "net_arch": list(self.model["policy"]["init_args"]["hidden_sizes"]),
                "activation_fn": torch.nn.ReLU,
            },
            seed=seed,
            device="cpu",
        )
        started = time.perf_counter()
        model.learn(self.steps)
        self.trained("theirs", started)
        buffer: Any = model.ep_info_buffer
        return float(buffer[-1]["r"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py ppo_mlp``."""
    parser.add_argument("--env_steps", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=4)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare whole runs, and training alone: ``Trainer.fit`` and ``PPO.learn``."""
    both = Both("configs/cartpole/ppo_mlp.yaml", options.env_steps, "rollout/return")
    row = compare(f"CartPole, {both.steps} env steps", "env steps", both.ours, both.theirs, options.repeats)
    ours, theirs = (both.training_rates[side][1:] for side in ("ours", "theirs"))  # the first is a warm-up
    training = compared_rates("training alone", "env steps", (ours, theirs))
    times = (sum(1 / rate for rate in row[side]) for side in ("ours", "theirs"))
    notes = {"last_returns": both.returns, "wall_clock_ratio": next(times) / next(times)}
    print(json.dumps(notes))
    yield compared("PPO on a network against SB3", 1.0, [row | notes, training], settings=both.model)
